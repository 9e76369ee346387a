// The C interface of the CPU kernels: what dprs_kernels/native.py calls through ctypes.
// Nothing of torch or Python is included, so one library serves every version of both.
#pragma once
#include <cstdint>

extern "C" {

// One micro-batch of per-sample gradients, a list of P tensors [N, *shape], each where it lies.
struct dprs_grads {
  int64_t params;             // P
  int64_t samples;            // N
  const int64_t* sizes;       // [P] coordinates of a parameter
  const void* const* data;    // [P] first value of sample 0
  const int64_t* dtypes;      // [P] dprs_dtype
  const int64_t* row_strides; // [P] elements from one sample to the next
  const int64_t* dims;        // [P] 0: a sample's values are contiguous; else entries used below
  const int64_t* shapes;      // [P][DPRS_MAX_DIMS]
  const int64_t* strides;     // [P][DPRS_MAX_DIMS], in elements
  const void* const* right;   // [P] null, or the right factor a of outer products e a^T that are never stored (fp32 and
                              // fp64): data is e, shapes[p][0] the length of a, strides[p][0] from one a to the next
  const int64_t* const* held; // [P] null, or for each row of the parameter which row of data it is, -1 where it is not
                              // there: data holds kept rows only, one after another. Every kept coordinate is there
  const int64_t* row_sizes;   // [P] coordinates of a row, where held is given
};

enum dprs_dtype { DPRS_F32 = 0, DPRS_F64 = 1, DPRS_BF16 = 2, DPRS_F16 = 3 };
enum { DPRS_MAX_DIMS = 16 };
enum dprs_failure { DPRS_NO_MEMORY = -1, DPRS_OTHER_KEEP = -2, DPRS_NO_NOISE = -3 };

// Clipping of one logical step. Segment = what shares a norm: everything (flat) or a parameter.
struct dprs_clip {
  int64_t segments;
  const int64_t* segment_of;   // [P]
  const double* bounds;        // [segments] C' (inf: no clipping)
  const double* scales;        // [segments] s of norms.h, powers of two
  double limit;                // s n at or above it: not finite, the sample contributes nothing
  double gamma;                // < 0: min(1, C'/n); else automatic clipping C'/(n + gamma)
  double scale;                // the micro-batch's n under a mean loss, else 1
};

// The way through samples and coordinates (accumulate.h). Results do not depend on it.
enum dprs_split {
  DPRS_TILES = 0,     // each thread has some of the coordinates of all samples; threads meet after each group
  DPRS_SAMPLES = 1,   // each thread has all coordinates of some samples, and sums of its own; taken for DPRS_TILES if unit = 0
  DPRS_TWICE = 2,     // as DPRS_TILES, and gradients are read twice, never packed
};
struct dprs_order {
  int64_t split;      // dprs_split
  int64_t group;      // samples whose norms are taken before they are summed
  int64_t at_once;    // of which as many are read at the same time: 1, 2 or 4
  int64_t ahead;      // bytes of a row that memory is asked for in advance,
  int64_t early;      // and a first time, at least as far; 0: only once (ask.h)
  int64_t cache;      // that they are asked into: 1 or 2, a core's first or second
};

// Values that the sums of a step take, 8 bytes each: those of kept coordinates, in order, each run of 1024 coordinates of a
// parameter with zeros to a multiple of 32, and 32 more at the end. Both verbs below take that number, `sums`, and return
// DPRS_OTHER_KEEP, having written nothing, if `keep` asks for another: it is not the mask that `acc` was made for.
int64_t dprs_sums(const int64_t* sizes, int64_t params, const uint32_t* keep);

// acc[j] += sum_i contribution(f_i g_ij) over the N samples, in sample order, for kept coordinates j (dprs_sums).
//   unit > 0: acc is int64 and a contribution is rint(f g / unit): sums are exact.
//   small:    contributions of at most 2^29 units: faster, the same bits.
//   unit = 0: acc is float64 and a contribution is f g.
// keep: bit-packed, parameters padded to 32 coordinates by zeros, or null (all kept).
// norms: null or [N, segments]. order: null = choose.
// Returns 0, or DPRS_NO_MEMORY if there is none for a group's packed values and each thread's sums (nothing was added then).
int64_t dprs_accumulate(const dprs_grads* grads, const uint32_t* keep, const dprs_clip* clip, double unit,
                        int64_t small, void* acc, int64_t sums, double* norms, const dprs_order* order,
                        int64_t threads);

// A CPU's make, as far as orders go by it (order.h).
enum dprs_make { DPRS_ANY_MAKE = 0, DPRS_ZEN5 = 1, DPRS_ZEN4 = 2 };
// What is chosen for samples that have as many bytes (RowBytes of tiles.h) for sums to read: for tests.
dprs_order dprs_choose_order(int64_t packed, int64_t made, int64_t again, int64_t whole, int64_t sums, int64_t samples,
                             int64_t threads, int64_t exact, int64_t make);

struct dprs_release {
  int64_t params;
  const int64_t* sizes;        // [P]
  void* const* out;            // [P] contiguous, written whole; dropped coordinates become +0
  const int64_t* dtypes;       // [P] dprs_dtype of out
  double unit;                 // as above; 0: acc is float64
  double grid;                 // g, a power of two; 0: no noise and no snapping
  double noise_std;            // sigma C
  double divisor;              // expected batch size
  const uint32_t* key;         // [8]: the caller's own, never a copy
  uint64_t step;
};
// out = (rint(S/g) + keep rint(noise_std z / g)) g / divisor
// Returns 0, DPRS_OTHER_KEEP, or DPRS_NO_NOISE if noise_std / g is not in (0, 2^27], where noise is an int32: nothing was written.
int64_t dprs_release_noised(const dprs_release* r, const uint32_t* keep, const void* acc, int64_t sums,
                            int64_t threads);

// All of a step whose logical batch is one micro-batch: accumulate, into sums of its own, and release. The same bits as those
// two, with less to write and to read again. The unit is that of `r`.
// Returns 0, DPRS_NO_MEMORY or DPRS_NO_NOISE (nothing was written then).
int64_t dprs_step(const dprs_grads* grads, const uint32_t* keep, const dprs_clip* clip, int64_t small, double* norms,
                  const dprs_release* r, const dprs_order* order, int64_t threads);

// z[j] for the padded coordinates [8*block, 8*(block+blocks)), and the words that made them.
void dprs_normals(const uint32_t key[8], uint64_t step, uint64_t block, int64_t blocks, double* z);
void dprs_normals_from_words(const uint32_t* words, int64_t blocks, double* z);
void dprs_words(const uint32_t key[8], uint64_t step, uint64_t block, int64_t blocks, uint32_t* words);

// Keep bits with exactly `dropped` zeros among the sum of sizes; returns tau (see mask.h).
uint64_t dprs_draw_mask(const uint64_t key[4], const int64_t* sizes, int64_t params, int64_t dropped,
                        uint32_t* bits, int64_t threads);

// A Conv2d on n samples, sizes as (vertical, horizontal); Conv1d: vertical sizes 1, stride 1, padding 0, dilation 1.
struct dprs_conv {
  int64_t samples;
  int64_t groups;
  int64_t channels[2];         // (in, out)
  int64_t inputs[2];           // (H, W)
  int64_t outputs[2];          // (Ho, Wo)
  int64_t kernel[2];
  int64_t stride[2];
  int64_t padding[2];          // zeros on either side
  int64_t dilation[2];
};
// Weight gradients of each sample (see conv.h) from x [n, Cin, H, W] and e = dloss/doutput [n, Cout, Ho, Wo], both fp32
// and contiguous: [Cout, Cin/groups, kh, kw] at out + i row_stride (in floats), added to what is there if `add`.
// Subnormal numbers count as zero. Returns 0, or DPRS_NO_MEMORY if there is none for scratch (out is then undefined).
int64_t dprs_conv_weight_grads(const dprs_conv* conv, const float* x, const float* e, float* out, int64_t row_stride,
                               int64_t add, int64_t threads);

// Reads every buffer once, each thread at 1, 2, 4 or 8 places at the same time: the limit that benchmarks compare with.
uint64_t dprs_read_once(const void* const* data, const int64_t* bytes, int64_t count, int64_t places, int64_t threads);

int64_t dprs_abi(void);                      // bumped whenever a struct or signature changes
int64_t dprs_levels(void);                   // bit 0 baseline, 1 AVX2, 2 AVX-512: usable on this CPU
const char* dprs_level_name(int64_t level);
int64_t dprs_level(void);                    // the one in use: the highest
int64_t dprs_set_level(int64_t level);       // for tests; returns the previous level, -1 if not usable
int64_t dprs_has_openmp(void);
}
