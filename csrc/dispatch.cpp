// The C interface: run-time choice of the instruction set, and what does not depend on it.
#include <atomic>
#include <cstdlib>
#include <cstring>
#if defined(__linux__)
#include <sys/mman.h>
#endif

#include "mask.h"
#include "order.h"

namespace dprs {
namespace {

constexpr int64_t kAbi = 11;
constexpr int64_t kLevels = 3;

const Kernels* table(int64_t level) {
#if defined(__x86_64__)
  if (level == 2) return &kAvx512;
  if (level == 1) return &kAvx2;
#endif
  return level == 0 ? &kBaseline : nullptr;
}

bool usable(int64_t level) {
#if defined(__x86_64__)
  __builtin_cpu_init();   // checks that the operating system saves the registers, too
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                    __builtin_cpu_supports("f16c");
  if (level == 2)
    return avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl");
  if (level == 1) return avx2;
#endif
  return level == 0;
}

int64_t highest() {
  int64_t best = 0;
  for (int64_t level = 0; level < kLevels; ++level)
    if (usable(level)) best = level;
  return best;
}

std::atomic<int64_t>& level() {
  static std::atomic<int64_t> value{highest()};
  return value;
}

const Kernels& kernels() { return *table(level().load(std::memory_order_relaxed)); }

// Memory for one call, not cleared, that starts on a page; in pages of 2 MB, where there is that much and the system has them.
// Blocks of up to kKept bytes stay with the process for the next call: with new pages in each, DP-CNN/S's pass took 2.75 ms in
// the place of 2.5, and DP-CNN's up to 14.6 in the place of 9.3 (a program that leaves malloc as it is).
class Scratch {
  static constexpr int64_t kKept = 32 << 20, kPage = 4096, kLarge = 2 << 20;
  static std::atomic<char*> spare;   // its first page holds its size; no lock, which a forked child could find taken
  char* block;

  static int64_t size_of(const char* held) {
    int64_t bytes = 0;
    if (held) std::memcpy(&bytes, held, sizeof bytes);
    return bytes;
  }
  static char* take(int64_t wanted) {
    const int64_t page = wanted < (1 << 20) ? kPage : kLarge, bytes = (wanted + page - 1) / page * page;
    char* made = static_cast<char*>(std::aligned_alloc(page, bytes));
#if defined(MADV_HUGEPAGE)
    if (made && page > kPage) madvise(made, bytes, MADV_HUGEPAGE);   // a wish: whether it is heard changes no result
#endif
    if (made) std::memcpy(made, &bytes, sizeof bytes);
    return made;
  }

 public:
  explicit Scratch(int64_t wanted) {
    wanted += kPage;
    block = wanted <= kKept ? spare.exchange(nullptr) : nullptr;
    if (block && size_of(block) >= wanted) return;
    std::free(block);
    block = take(wanted);
  }
  ~Scratch() { std::free(size_of(block) <= kKept ? spare.exchange(block) : block); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  char* data() const { return block ? block + kPage : nullptr; }
};
std::atomic<char*> Scratch::spare{nullptr};

// A conversion to int32 that fails gives a number like any other, the same for all: no noise that anybody would miss.
bool noise_fits(const dprs_release& r) {   // false for NaN
  return r.grid == 0 || (r.noise_std > 0 && r.noise_std <= r.grid * (1 << 27));
}

// The arguments of accumulate and step.
struct Job {
  dprs_grads grads;
  const uint32_t* keep;
  dprs_clip clip;
  double unit;
  bool small;
  double* norms;
  const dprs_order* order;
  int64_t threads;
};

// acc, of `sums` values, += the sums of a micro-batch; or, with r and without acc, sums in memory of its own, released.
int64_t visit(const Job& job, char* acc, int64_t sums, const dprs_release* r) {
  if (r && !noise_fits(*r)) return DPRS_NO_NOISE;
  const dprs_grads& grads = job.grads;
  const int64_t n = grads.samples, threads = job.threads;
  std::vector<Tile> tiles = make_tiles(grads.sizes, grads.params);
  const int64_t needed = note_kept(tiles, job.keep), count = static_cast<int64_t>(tiles.size());
  if (acc && needed != sums) return DPRS_OTHER_KEEP;
  if (acc && n == 0) return 0;
  if (n > 0) {   // else there may be no data
    note_held(tiles, grads);
    note_places(tiles, grads);
  }
  const bool exact = job.unit > 0;
  dprs_order way = job.order ? *job.order
                             : choose_order({row_bytes(tiles, grads), needed, n, threads, exact}, make_of_cpu());
  if (way.split == DPRS_SAMPLES && !exact) way.split = DPRS_TILES;   // float64 sums go by the order of samples
  const bool own = way.split == DPRS_SAMPLES;
  const int64_t slots = way.split == DPRS_TWICE ? 0 : place_slots(tiles, grads, way.group);
  // What a thread writes starts on a page of its own: two threads that write to lines side by side wait for each other.
  const auto pages = [](int64_t bytes) { return (bytes + 4095) / 4096 * 4096; };
  const int64_t copies = own ? threads : 1, factors = pages(8 * way.group * job.clip.segments);
  const int64_t packed = pages(slots), partial = pages(16 * count * way.group), sum = pages(8 * needed);
  const Scratch memory(copies * (packed + partial) + (acc ? copies - 1 : copies) * sum + threads * factors);
  if (!memory.data()) return DPRS_NO_MEMORY;
  const std::vector<int64_t> first = share_tiles(tiles, threads);
  std::vector<Part> parts(threads);
  char* next = memory.data();
  const auto take = [&next](int64_t bytes) { return next += bytes, next - bytes; };
  for (int64_t w = 0; w < threads; ++w) {
    const int64_t begin = own ? n * w / threads : 0;
    const bool shared = w > 0 && !own;   // with the first one
    const bool given = acc && (w == 0 || !own);
    char* const to = given ? acc : shared ? parts[0].acc : take(sum);
    char* const slot = shared ? parts[0].packed : take(packed);
    double* const squares = shared ? parts[0].partial : reinterpret_cast<double*>(take(partial));
    parts[w] = {own ? 0 : first[w], own ? count : first[w + 1], begin, own ? n * (w + 1) / threads - begin : n,
                to, slot, squares, reinterpret_cast<double*>(take(factors)), !given};
  }
  Barrier barrier;
  const Work work = {tiles.data(), count, parts.data(), threads};
  kernels().accumulate({grads, job.clip, way, job.keep, exact, job.small, exact ? 1 / job.unit : 1.0, job.norms,
                        &barrier, r != nullptr}, work);
  if (r) kernels().release(*r, job.keep, work);
  return 0;
}

}  // namespace
}  // namespace dprs

using dprs::kernels;

extern "C" {

int64_t dprs_accumulate(const dprs_grads* grads, const uint32_t* keep, const dprs_clip* clip, double unit,
                        int64_t small, void* acc, int64_t sums, double* norms, const dprs_order* order,
                        int64_t threads) {
  return dprs::visit({*grads, keep, *clip, unit, small != 0, norms, order, threads}, static_cast<char*>(acc), sums,
                     nullptr);
}
int64_t dprs_step(const dprs_grads* grads, const uint32_t* keep, const dprs_clip* clip, int64_t small, double* norms,
                  const dprs_release* r, const dprs_order* order, int64_t threads) {
  return dprs::visit({*grads, keep, *clip, r->unit, small != 0, norms, order, threads}, nullptr, 0, r);
}
dprs_order dprs_choose_order(int64_t packed, int64_t made, int64_t again, int64_t whole, int64_t sums, int64_t samples,
                             int64_t threads, int64_t exact, int64_t make) {
  return dprs::choose_order({{packed, made, again, whole}, sums, samples, threads, exact != 0}, static_cast<dprs_make>(make));
}
int64_t dprs_sums(const int64_t* sizes, int64_t params, const uint32_t* keep) {
  std::vector<dprs::Tile> tiles = dprs::make_tiles(sizes, params);
  return dprs::note_kept(tiles, keep);
}
int64_t dprs_release_noised(const dprs_release* r, const uint32_t* keep, const void* acc, int64_t sums,
                            int64_t threads) {
  std::vector<dprs::Tile> tiles = dprs::make_tiles(r->sizes, r->params);
  if (!dprs::noise_fits(*r)) return DPRS_NO_NOISE;
  if (dprs::note_kept(tiles, keep) != sums) return DPRS_OTHER_KEEP;
  const dprs::Part all = {0, static_cast<int64_t>(tiles.size()), 0, 0, const_cast<char*>(static_cast<const char*>(acc)),
                          nullptr, nullptr, nullptr, false};
  const std::vector<dprs::Part> parts(threads, all);
  kernels().release(*r, keep, {tiles.data(), all.last_tile, parts.data(), threads});
  return 0;
}
void dprs_normals(const uint32_t key[8], uint64_t step, uint64_t block, int64_t blocks, double* z) {
  kernels().normals(key, step, block, blocks, z);
}
void dprs_normals_from_words(const uint32_t* words, int64_t blocks, double* z) {
  kernels().normals_from_words(words, blocks, z);
}
void dprs_words(const uint32_t key[8], uint64_t step, uint64_t block, int64_t blocks, uint32_t* words) {
  kernels().words(key, step, block, blocks, words);
}
uint64_t dprs_draw_mask(const uint64_t key[4], const int64_t* sizes, int64_t params, int64_t dropped,
                        uint32_t* bits, int64_t threads) {
  return dprs::draw_mask(key, sizes, params, dropped, bits, threads);
}
int64_t dprs_conv_weight_grads(const dprs_conv* conv, const float* x, const float* e, float* out, int64_t row_stride,
                               int64_t add, int64_t threads) {
  return kernels().conv_weight_grads({*conv, x, e, out, row_stride, add != 0, threads}) ? 0 : DPRS_NO_MEMORY;
}

uint64_t dprs_read_once(const void* const* data, const int64_t* bytes, int64_t count, int64_t places, int64_t threads) {
  return kernels().read_once(data, bytes, count, places, threads);
}

int64_t dprs_abi(void) { return dprs::kAbi; }
int64_t dprs_levels(void) {
  int64_t bits = 0;
  for (int64_t l = 0; l < dprs::kLevels; ++l) bits |= static_cast<int64_t>(dprs::usable(l)) << l;
  return bits;
}
const char* dprs_level_name(int64_t level) {
  const dprs::Kernels* t = dprs::table(level);
  return t ? t->name : "";
}
int64_t dprs_level(void) { return dprs::level().load(); }
int64_t dprs_set_level(int64_t level) {
  if (!dprs::table(level) || !dprs::usable(level)) return -1;
  return dprs::level().exchange(level);
}
int64_t dprs_has_openmp(void) {
#ifdef _OPENMP
  return 1;
#else
  return 0;
#endif
}
}
