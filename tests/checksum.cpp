// Prints a hash of what every kernel returns on fixed inputs, for each usable instruction set. Built natively and
// for AArch64 by test_native.py: all lines of all machines must be equal.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <vector>

#include "dprs.h"

static uint64_t state = 1;
static uint64_t next() { return state = state * 6364136223846793005ull + 1442695040888963407ull, state >> 11; }
static double uniform() { return static_cast<double>(next()) / 9007199254740992.0 - 0.5; }

static uint64_t hash(const void* data, size_t bytes, uint64_t h) {
  for (size_t i = 0; i < bytes; ++i) h = (h ^ static_cast<const unsigned char*>(data)[i]) * 1099511628211ull;
  return h;
}

static const dprs_order kSomeTiles = {DPRS_TILES, 4, 4, 1024, 0, 1}, kFourSamples = {DPRS_SAMPLES, 4, 4, 1024, 0, 1},
                        kRowByRow = {DPRS_SAMPLES, 4, 1, 4096, 8192, 1}, kTwoRows = {DPRS_TILES, 2, 2, 4096, 6144, 2},
                        kTwice = {DPRS_TWICE, 4, 4, 1024, 0, 1};
static const dprs_order* const kOrders[] = {nullptr, &kSomeTiles, &kFourSamples, &kRowByRow, &kTwoRows, &kTwice};   // 0: chosen

static uint64_t one(int64_t dtype, bool masked, double unit, int64_t small, double gamma, int64_t threads,
                    const dprs_order* order) {
  const std::vector<int64_t> sizes = {1500, 7, 96};
  const int64_t n = 11, padded = 1504 + 32 + 96, width = dtype == 1 ? 8 : dtype == 0 ? 4 : 2;
  state = 42;
  std::vector<std::vector<unsigned char>> data;
  std::vector<const void*> at;
  for (int64_t s : sizes) {
    data.emplace_back(n * s * width);
    for (int64_t i = 0; i < n * s; ++i) {
      const double x = uniform() * 0.2;
      const float f = static_cast<float>(x);
      uint32_t bits;
      std::memcpy(&bits, &f, 4);
      const uint16_t half = dtype == 2 ? bits >> 16 : static_cast<uint16_t>(next() & 0xbfff);   // fp16: |x| < 2
      const void* from = dtype == 1 ? static_cast<const void*>(&x) : dtype == 0 ? static_cast<const void*>(&f) : &half;
      std::memcpy(data.back().data() + i * width, from, width);
    }
    at.push_back(data.back().data());
  }
  std::vector<int64_t> dtypes(3, dtype), zeros(3 * DPRS_MAX_DIMS, 0), segment(3, 0);
  std::vector<uint32_t> keep(padded / 32);
  for (auto& word : keep) word = static_cast<uint32_t>(next());
  keep[46] &= (1u << 28) - 1, keep[47] &= (1u << 7) - 1;   // ends of 1500 and of 7
  const double bound = 1 - std::ldexp(1.0, -20), scale = std::ldexp(1.0, -36);
  const std::vector<const void*> right(3, nullptr);    // nothing is an outer product,
  const std::vector<const int64_t*> held(3, nullptr);  // and every row is there
  const dprs_grads grads = {3, n, sizes.data(), at.data(), dtypes.data(), sizes.data(), zeros.data(), zeros.data(),
                            zeros.data(), right.data(), held.data(), zeros.data()};
  const dprs_clip clip = {1, segment.data(), &bound, &scale, std::ldexp(1.0, 61), gamma, 1.0};
  std::vector<int64_t> acc(dprs_sums(sizes.data(), 3, masked ? keep.data() : nullptr), 0);
  std::vector<double> norms(n);
  dprs_accumulate(&grads, masked ? keep.data() : nullptr, &clip, unit, small, acc.data(), acc.size(),
                  norms.data(), order, threads);
  uint64_t h = hash(norms.data(), 8 * n, hash(acc.data(), 8 * acc.size(), 14695981039346656037ull));
  std::vector<std::vector<unsigned char>> outs;
  std::vector<void*> to;
  for (int64_t s : sizes) outs.emplace_back(s * width), to.push_back(outs.back().data());
  const uint32_t key[8] = {1, 2, 3, 4, 5, 6, 7, 8};
  dprs_release r = {3, sizes.data(), to.data(), dtypes.data(), unit, std::ldexp(1.0, -20), 1.25, 16, key, 99};
  dprs_release_noised(&r, masked ? keep.data() : nullptr, acc.data(), acc.size(), threads);
  for (auto& out : outs) h = hash(out.data(), out.size(), h);
  std::vector<double> again(n);
  const auto before = outs;
  for (auto& out : outs) std::fill(out.begin(), out.end(), 0xff);
  dprs_step(&grads, masked ? keep.data() : nullptr, &clip, small, again.data(), &r, order, threads);
  return outs == before && again == norms ? h : 0;   // 0: one call is not what the two are
}

int main() {
  for (int64_t level = 0; level < 3; ++level) {
    if (dprs_set_level(level) < 0) continue;
    std::printf("level %s\n", dprs_level_name(level));
    for (int64_t dtype = 0; dtype < 4; ++dtype)
      for (int masked = 0; masked < 2; ++masked)
        for (int how = 0; how < 4; ++how)
          for (const dprs_order* order : kOrders)
            std::printf("dtype %d masked %d how %d: %016llx\n", static_cast<int>(dtype), masked, how,
                        static_cast<unsigned long long>(
                            one(dtype, masked, how == 0 ? 0 : std::ldexp(1.0, how == 3 ? -40 : -29), how == 1,
                                how == 2 ? 0.01 : -1.0, 1 + how, order)));
  }
}
