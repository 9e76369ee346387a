// accumulate: norms -> factors -> sums of one micro-batch, reading each gradient once from memory.
//
// Samples go in groups small enough that a group is still in cache when its sums follow its norms:
//   norms of group k (from memory) | barrier | factors, sums of group k (from cache) | norms of group k+1 ...
// Each thread owns a share of the tiles, hence of the coordinates: no per-thread accumulators, one barrier
// a group, and a result that does not depend on the number of threads, the group size or the split into
// micro-batches. A group larger than the cache is summed backwards: its end is what the cache still holds.
#pragma once
#include <sched.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "norms.h"
#include "rows.h"
#include "sums.h"

namespace dprs {
namespace DPRS_ISA {

// F = f scale / h with f = 1 if n <= C' else C'/n, or C'/(n + gamma). Truncated to a 24-bit significand: a
// clipped norm never exceeds C', F is an fp32 number, and f g is exact in float64 for fp32 gradients.
inline double factor(double norm, double bound, const Accumulate& a) {
  const double f = a.clip.gamma >= 0 ? bound / (norm + a.clip.gamma) : norm <= bound ? 1.0 : bound / norm;
  return bitcast<double>(bitcast<uint64_t>(f * a.clip.scale * a.per_unit) & ~((1ull << 29) - 1));
}

struct RowRange {
  int64_t begin, end;
};
struct Scratch {   // one thread's
  alignas(64) double rows[kRows][kTile] = {};   // gathered rows of any dtype
  double* factors;                              // [group][segments]
  RowRange rows_of_group;                       // those in hand
};
alignas(64) const double kZeros[kTile] = {};

inline int64_t first_of(const Accumulate& a, int64_t k) { return k * a.group; }
inline int64_t count_of(const Accumulate& a, int64_t k) { return least(a.group, a.grads.samples - k * a.group); }

// Calls f(first row, number of rows) for some of a group's rows, a few at a time, the rest one by one.
template <int AtOnce, class F> DPRS_INLINE void for_rows(RowRange rows, F f) {
  int64_t i = rows.begin;
  for (; i + AtOnce <= rows.end; i += AtOnce) f(i, Constant<AtOnce>());
  for (; i < rows.end; ++i) f(i, Constant<1>());
}

// What memory is asked for, besides what hardware sees coming, goes by the cache that holds a group:
//   own     (DP-CNN/S, 104 KB a row.) Norms wait for memory, sums do not. Hardware stops at the end of a page, and a
//           tile of fp32 is as long as one: norms ask for the first lines of the tile that comes next (`begin_next`).
//           16 bits have twice the work a byte: as shared.
//   shared  (DP-CNN, 2.2 MB a row.) During sums memory has nothing to do: they ask for all of the next group
//           (`rows_ahead`), whose norms then find most of it in the shared cache. That has room only if the rows that
//           sums read do not come back to it: they are read as not to be kept (fold_words, kLast).
//   none    Nothing.
// Reads of its gradients that accumulate takes, on two EPYC cores with AVX-512, where memory gives 37 | 50 GB/s
// (interleaved, best of 24 to 90, one read of them before each: what ran before leaves more or less in the caches):
//   DP-CNN    1.31 | 1.53   rows kept after sums: 1.55 | 1.63; and no next group asked for: 1.63 at 50
//   DP-CNN/S  1.44 | 1.53   nothing asked for: 1.48 | 1.63; the next group, half by norms, half by sums: 1.41 | 1.68
//   DP-CNN/S in bf16, the whole step: 2.3   by `begin_next`: 2.6; half by norms, half by sums: 2.3
// A core drops requests that its queue has no room for, and rows with holes are slower than rows that are not there: a
// part of the next group, for example a quarter of each row, was slower than all of it and than none. So were sums of a
// group and norms of the next in turn, by 1 to 48 tiles or in one inner loop.
template <class T> bool sums_ask(const Accumulate& a) {
  return a.cache == Cache::shared || (a.cache == Cache::own && sizeof(T) < 4);
}

constexpr int kFirst = 256;   // bytes of a tile's row; 64 to 512 are as good

template <class T, int Rows>
DPRS_INLINE void begin_next(const Accumulate& a, const Work& work, int64_t t, const T* const* rows) {
  const Tile& tile = work.tiles[t];
  if (t + 1 == work.count || work.tiles[t + 1].param != tile.param || !in_place(a.grads, tile)) return;
  for (size_t at = 0; at < kFirst / sizeof(T); at += 64 / sizeof(T))
    for (int r = 0; r < Rows; ++r) __builtin_prefetch(rows[r] + kTile + at, 0, 2);
}

// Of this tile, the same rows of group k + 1; where there are none, those at hand.
template <int Rows, class T>
Ahead<T, Rows> rows_ahead(const Accumulate& a, const Tile& tile, int64_t k, int64_t i, const T* const* rows) {
  const int64_t first = first_of(a, k + 1) + i;
  const bool wanted = in_place(a.grads, tile) && first + Rows <= a.grads.samples;
  Ahead<T, Rows> ahead;
  for (int r = 0; r < Rows; ++r) ahead.rows[r] = wanted ? row_of<T>(a.grads, tile, first + r, nullptr) : rows[r];
  return ahead;
}

template <class T, bool HasKeep, Sum How>
void sums_of_tile(const Accumulate& a, Scratch& own, const Tile& tile, int64_t k) {
  const uint32_t* keep = HasKeep ? a.keep + tile.padded / kWord : nullptr;
  const double* factors = own.factors + a.clip.segment_of[tile.param];
  for_rows<kRows>(own.rows_of_group, [&](int64_t i, auto rows_at_once) {
    constexpr int Rows = decltype(rows_at_once)::value;
    const T* rows[Rows];
    double f[Rows];
    for (int r = 0; r < Rows; ++r) {
      f[r] = factors[(i + r) * a.clip.segments];
      const T* row = row_of<T>(a.grads, tile, first_of(a, k) + i + r, reinterpret_cast<T*>(own.rows[r]));
      // Factor 0 may mean NaN or Inf in the row: read zeros instead (a select, the work is the same).
      rows[r] = f[r] != 0 ? row : reinterpret_cast<const T*>(kZeros);
    }
    const auto add = [&](const auto& next) {
      add_rows<T, HasKeep, How, Rows>(rows, next, f, keep, tile.blocks, tile.length, a.acc + 8 * tile.padded);
    };
    if (sums_ask<T>(a)) add(rows_ahead<Rows>(a, tile, k, i, rows));
    else add(Ahead<T, 0>());
  });
}

template <class T, bool HasKeep>
void sums_of_tile(const Accumulate& a, Scratch& own, const Tile& tile, int64_t k) {
  if (!a.integers) sums_of_tile<T, HasKeep, Sum::real>(a, own, tile, k);
  else if (a.small && sizeof(T) < 8) sums_of_tile<T, HasKeep, sizeof(T) < 8 ? Sum::small : Sum::integer>(a, own, tile, k);
  else sums_of_tile<T, HasKeep, Sum::integer>(a, own, tile, k);
}

template <class T, bool HasKeep>
void norms_of_tile(const Accumulate& a, Scratch& own, const Work& work, int64_t t, int64_t k) {
  const Tile& tile = work.tiles[t];
  const uint32_t* keep = HasKeep ? a.keep + tile.padded / kWord : nullptr;
  const double scale = a.clip.scales[a.clip.segment_of[tile.param]];
  for_rows<kNormRows>(own.rows_of_group, [&](int64_t i, auto rows_at_once) {
    constexpr int Rows = decltype(rows_at_once)::value;
    const T* rows[Rows];
    for (int r = 0; r < Rows; ++r)
      rows[r] = row_of<T>(a.grads, tile, first_of(a, k) + i + r, reinterpret_cast<T*>(own.rows[r]));
    if (a.cache == Cache::own && !sums_ask<T>(a)) begin_next<T, Rows>(a, work, t, rows);
    double* out = a.partial[k & 1] + t * a.group + i;
    square_norms<HasKeep, Rows>(rows, keep, tile.blocks, tile.length, scale, out);
  });
}

template <class T>
void visit_tile(const Accumulate& a, Scratch& own, const Work& work, int64_t t, int64_t k, bool sums) {
  const Tile& tile = work.tiles[t];
  if (tile.kept == Kept::none) {   // public: the mask never depends on data
    for (int64_t i = 0; i < a.group && !sums; ++i) a.partial[k & 1][t * a.group + i] = 0;
  } else if (tile.kept == Kept::some) {
    if (sums) sums_of_tile<T, true>(a, own, tile, k);
    else norms_of_tile<T, true>(a, own, work, t, k);
  } else {
    if (sums) sums_of_tile<T, false>(a, own, tile, k);
    else norms_of_tile<T, false>(a, own, work, t, k);
  }
}

inline void visit_tile(const Accumulate& a, Scratch& own, const Work& work, int64_t t, int64_t k, bool sums) {
  switch (a.grads.dtypes[work.tiles[t].param]) {
    case DPRS_F32: visit_tile<float>(a, own, work, t, k, sums); break;
    case DPRS_F64: visit_tile<double>(a, own, work, t, k, sums); break;
    case DPRS_BF16: visit_tile<bf16>(a, own, work, t, k, sums); break;
    default: visit_tile<fp16>(a, own, work, t, k, sums); break;
  }
}

constexpr int64_t kStream = 16;   // tiles: 64 KB of fp32, and 128 KB of sums, which a core's own cache holds

// A group that a cache holds: tile by tile. One that none holds comes from memory twice, and memory likes long streams:
// norms take four rows from end to end, sums four rows of kStream tiles, then the next rows of these. 11M coordinates
// take 2.1 reads of their gradients in the place of 2.75 (16 samples, interleaved, two EPYC cores; 2.0 is the floor).
inline void visit_tiles(const Accumulate& a, Scratch& own, const Work& work, int64_t share, int64_t k,
                        bool sums) {
  const int64_t begin = work.first[share], end = work.first[share + 1], count = count_of(a, k);
  const bool held = a.cache != Cache::none;
  const int64_t chunk = sums && !held ? kStream : end - begin, rows = held ? count : kRows;
  for (int64_t c = 0; c < end - begin; c += chunk) {
    const int64_t some = least(chunk, end - begin - c);
    const int64_t first = sums && !held ? end - c - some : begin + c;
    for (int64_t i = 0; i < count; i += rows) {
      own.rows_of_group = {i, least(i + rows, count)};
      for (int64_t t = first; t < first + some; ++t) visit_tile(a, own, work, t, k, sums);
    }
  }
}

// Every thread computes all factors of a group itself, in the same order: cheaper than a second barrier.
inline void factors_of_group(const Accumulate& a, Scratch& own, const Work& work, int64_t k, double* norms) {
  const int64_t segments = a.clip.segments, count = count_of(a, k);
  for (int64_t i = 0; i < count * segments; ++i) own.factors[i] = 0;
  for (int64_t t = 0; t < work.count; ++t) {
    const int64_t segment = a.clip.segment_of[work.tiles[t].param];
    const double* part = a.partial[k & 1] + t * a.group;
    for (int64_t i = 0; i < count; ++i) own.factors[i * segments + segment] += part[i];
  }
  for (int64_t i = 0; i < count; ++i) {
    double* f = own.factors + i * segments;
    bool finite = true;   // of all segments: a sample with a NaN in one layer contributes nothing at all
    for (int64_t g = 0; g < segments; ++g) {
      const double scaled = __builtin_sqrt(f[g]);
      const bool in_range = scaled < a.clip.limit;   // false for NaN, too
      finite &= in_range;
      f[g] = in_range ? scaled / a.clip.scales[g] * a.clip.scale : __builtin_inf();
      if (norms) norms[(first_of(a, k) + i) * segments + g] = f[g];
    }
    for (int64_t g = 0; g < segments; ++g) f[g] = finite ? factor(f[g], a.clip.bounds[g], a) : 0.0;
  }
}

// Returns when all workers have called it. Spins for some microseconds, then gives its CPU away.
inline void meet(Barrier& b, int64_t workers) {
  const int64_t now = __atomic_load_n(&b.generation, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&b.arrived, 1, __ATOMIC_ACQ_REL) == workers) {
    __atomic_store_n(&b.arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&b.generation, now + 1, __ATOMIC_RELEASE);
    return;
  }
  for (int spins = 0; __atomic_load_n(&b.generation, __ATOMIC_ACQUIRE) == now; ++spins) {
    if (spins < 2000) spin_pause();
    else sched_yield();
  }
}

inline void accumulate(const Accumulate& a, const Work& work) {
  const int64_t groups = (a.grads.samples + a.group - 1) / a.group;
#pragma omp parallel num_threads(work.threads)
  {
#ifdef _OPENMP
    const int64_t workers = omp_get_num_threads(), me = omp_get_thread_num();
#else
    const int64_t workers = 1, me = 0;
#endif
    const FlushSubnormals flush;
    Scratch own;
    own.factors = a.factors + me * a.stride;
    for (int64_t k = 0; k < groups; ++k) {
      // With fewer threads than asked for, each takes several shares.
      for (int64_t share = me; share < work.threads; share += workers) visit_tiles(a, own, work, share, k, false);
      meet(*a.barrier, workers);
      // No barrier after the sums: the norms of group k+1 go to the other half of `partial`.
      factors_of_group(a, own, work, k, me == 0 ? a.norms : nullptr);
      for (int64_t share = me; share < work.threads; share += workers) visit_tiles(a, own, work, share, k, true);
    }
  }
}

}  // namespace DPRS_ISA
}  // namespace dprs
