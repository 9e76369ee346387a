// What the C interface (dispatch.cpp) and the per-instruction-set kernels (isa_*.cpp) share.
//
// Everything here is plain data. The isa_*.cpp files must not instantiate standard templates or define
// functions outside their own namespace: the linker keeps one copy of such a function, and if that is the
// AVX-512 one an older CPU stops with an illegal instruction. tests/test_native.py looks for it.
#pragma once
#include "dprs.h"

namespace dprs {

constexpr int kTile = 1024;   // 4 KB of fp32: a page of each row, 8 KB of accumulator, both in L1

constexpr int kBlock = 256;   // of a tile: what norms.h adds up in fp32, and the least that is left out

// How much of a tile is kept: nothing to do, masked, or the plain loop.
enum class Kept : uint8_t { none, some, all };

// The unit of work: at most kTile consecutive coordinates of one parameter, so one dtype, one clipping
// segment and one run of keep bits.
struct Tile {
  int64_t param;
  int64_t start;    // first coordinate, within the parameter
  int64_t padded;   // the same in the padded layout; a multiple of 32
  int64_t length;
  Kept kept;
  uint8_t blocks;   // bit b: block b has a kept coordinate. Whole rows drop together: other blocks are never touched
  bool scattered;   // its kept coordinates are not one run of what is held
  int64_t shift;    // from a coordinate to its place in what is held, unless scattered
  int64_t count;    // kept coordinates
  int64_t sum;      // where its sums begin: those of kept coordinates, one after another, a multiple of 32 in all
  int64_t slot;     // where its packed values begin, in bytes; -1: sums read the gradients again
  const char* first;   // its values in sample 0, where they lie one after another; null: gathered or made (rows.h)
  int64_t step;        // from there to the same in the next sample, in bytes
};
static constexpr int64_t width_of(int64_t dtype) {   // bytes of a value
  return dtype == DPRS_F64 ? 8 : dtype == DPRS_F32 ? 4 : 2;
}
static constexpr int64_t padded(int64_t count) { return (count + 31) / 32 * 32; }
// Values from one packed row to the next: a tile's kept values, zeros to a multiple of 32, and what the last vector that
// was stored, or the last zeros, may take beyond.
static constexpr int64_t packed_row(const Tile& tile) { return padded(tile.count) + 32; }

// What one thread does: some tiles of some samples.
struct Part {
  int64_t first_tile, last_tile;   // [first, last)
  int64_t first_sample, samples;
  char* acc;          // sums of kept coordinates (Tile::sum), int64 or float64; those of all threads, or its own
  char* packed;       // kept values of a group, a slot [group][packed_row] for each tile that has one
  double* partial;    // [2][tiles][group] squared norms: two groups are in flight
  double* factors;    // [group][segments]
  bool fresh;         // acc is not cleared: the thread does that, too
};

struct Work {
  const Tile* tiles;
  int64_t count;
  const Part* parts;   // one a thread
  int64_t threads;
};

// All workers meet here. OpenMP's own barrier spins for milliseconds; where another program holds a CPU, the
// waiting thread then keeps the late one from running, and a step takes ten times as long.
struct alignas(64) Barrier {
  int64_t arrived = 0;
  alignas(64) int64_t generation = 0;
};

struct Accumulate {
  dprs_grads grads;
  dprs_clip clip;
  dprs_order order;
  const uint32_t* keep;
  bool integers;       // sums are int64 multiples of the unit h, else float64
  bool small;          // a contribution is at most 2^29 units
  double per_unit;     // 1/h, or 1 without a unit
  double* norms;       // null or [N, segments]
  Barrier* barrier;
  bool released;       // a release follows, and joins the threads' sums
};

struct Conv {
  dprs_conv shape;
  const float* x;
  const float* e;
  float* out;
  int64_t row_stride;
  bool accumulate;
  int64_t threads;
};

struct Kernels {
  const char* name;
  void (*accumulate)(const Accumulate&, const Work&);
  void (*release)(const dprs_release&, const uint32_t* keep, const Work&);
  void (*normals)(const uint32_t* key, uint64_t step, uint64_t block, int64_t blocks, double* z);
  void (*normals_from_words)(const uint32_t* words, int64_t blocks, double* z);
  void (*words)(const uint32_t* key, uint64_t step, uint64_t block, int64_t blocks, uint32_t* words);
  bool (*conv_weight_grads)(const Conv&);
  uint64_t (*read_once)(const void* const* data, const int64_t* bytes, int64_t count, int64_t places, int64_t threads);
};

extern const Kernels kBaseline;   // SSE2 on x86-64, NEON on AArch64
extern const Kernels kAvx2;
extern const Kernels kAvx512;

}  // namespace dprs
