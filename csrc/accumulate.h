// accumulate: norms -> factors -> sums of one micro-batch, reading masked gradients once.
//
// Samples go in groups. Norms read a group from memory and leave its kept values, packed, in slots that stay in cache; when
// the factors are known, sums take them from there. Both go tile by tile and in turn, so that memory is read all the time:
//   each tile: sums of group k-1 (from its slot), norms of group k (from memory, into that slot) | barrier | factors of k
// Each thread owns a share of the tiles, hence of the coordinates: no per-thread accumulators, one barrier a group, and a
// result that does not depend on the number of threads, the group size or the split into micro-batches.
// Where all of a tile is kept and lies in place there is nothing to pack: sums read the gradients again. So they do, in
// long streams, where slots would be larger than any cache (`stream`).
//
// Reads of its gradients that accumulate takes, half of the coordinates dropped, on two Xeon cores (Ice Lake; 1.25 MB of own
// and 48 MB of shared cache, 26 GB/s), interleaved, one read of them before each:
//                                                                              DP-CNN    DP-CNN/S
//   as above                                                                   1.5       1.3 to 1.4
//   norms alone | with packing                                                 1.05|1.45 1.2|1.3
//   groups of 8 in the place of 4                                              1.8       1.4 to 1.5
//   read again from the shared cache, nothing packed (any order)               2.5       1.6
//   the same, the next group asked for during sums, rows read as not to be kept (which paid on two EPYC cores: 1.3 to 1.5
//   of a read by one stream a thread)                                          3.3
// What is left is the way of 2.2 MB of slots a core to the shared cache and back. prefetchnta in norms doubles the time here.
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

struct RowRange {   // of a group
  int64_t begin, end;
};
struct Scratch {   // one thread's
  alignas(64) double rows[kRows][kTile] = {};             // gathered rows of any dtype
  alignas(64) double packed[kRows][kTile + kWord];        // their kept values, where there are no slots
  double* factors;                                        // [group][segments]
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

// Row i of the group that a tile's slot holds.
template <class T> DPRS_INLINE typename PackedOf<T>::type* packed_of(const Accumulate& a, const Tile& tile, int64_t i) {
  return reinterpret_cast<typename PackedOf<T>::type*>(a.packed + tile.slot) + i * packed_row(tile);
}

// row(i, r): the values of row i of the group, `length` of them, the r-th of those at hand.
template <class T, Sum How, class Row>
DPRS_INLINE void sums_of_rows(const Accumulate& a, const Scratch& own, const Tile& tile, RowRange some, int64_t length,
                              Row row) {
  const double* factors = own.factors + a.clip.segment_of[tile.param];
  for_rows<kRows>(some, [&](int64_t i, auto rows_at_once) {
    constexpr int Rows = decltype(rows_at_once)::value;
    const T* rows[Rows];
    double f[Rows];
    for (int r = 0; r < Rows; ++r) {
      f[r] = factors[(i + r) * a.clip.segments];
      const T* values = row(i + r, r);
      // Factor 0 may mean NaN or Inf in the row: add zeros instead (a select: the same instructions; a row that is not
      // packed is then not read a second time).
      rows[r] = f[r] != 0 ? values : reinterpret_cast<const T*>(kZeros);
    }
    add_rows<T, How, Rows>(rows, f, length, a.acc + 8 * tile.sum);
  });
}

template <class T, class Row>
void sums_of_rows(const Accumulate& a, const Scratch& own, const Tile& tile, RowRange some, int64_t length, Row row) {
  constexpr Sum kSmall = sizeof(T) < 8 ? Sum::small : Sum::integer;
  if (!a.integers) sums_of_rows<T, Sum::real>(a, own, tile, some, length, row);
  else if (a.small) sums_of_rows<T, kSmall>(a, own, tile, some, length, row);
  else sums_of_rows<T, Sum::integer>(a, own, tile, some, length, row);
}

template <class T>
void sums_of_tile(const Accumulate& a, Scratch& own, const Tile& tile, int64_t k, RowRange some) {
  typedef typename PackedOf<T>::type P;
  const auto gathered = [&](int64_t i, int r) {
    return row_of<T>(a.grads, tile, first_of(a, k) + i, reinterpret_cast<T*>(own.rows[r]));
  };
  if (tile.kept == Kept::none) return;
  if (tile.slot >= 0) {
    const auto from_slot = [&](int64_t i, int) { return packed_of<T>(a, tile, i); };
    sums_of_rows<P>(a, own, tile, some, padded(tile.count), from_slot);
  } else if (tile.kept == Kept::all) {
    sums_of_rows<T>(a, own, tile, some, tile.length, gathered);
  } else {
    const auto anew = [&](int64_t i, int r) {
      P* to = reinterpret_cast<P*>(own.packed[r]);
      pack_row(gathered(i, r), a.keep + tile.padded / kWord, tile.blocks, tile.length, to);
      return to;
    };
    sums_of_rows<P>(a, own, tile, some, padded(tile.count), anew);
  }
}

template <class T, bool HasKeep, bool Pack>
void norms_of_tile(const Accumulate& a, Scratch& own, const Work& work, int64_t t, int64_t k, RowRange some) {
  const Tile& tile = work.tiles[t];
  const uint32_t* keep = HasKeep ? a.keep + tile.padded / kWord : nullptr;
  const double scale = a.clip.scales[a.clip.segment_of[tile.param]];
  for_rows<kNormRows>(some, [&](int64_t i, auto rows_at_once) {
    constexpr int Rows = decltype(rows_at_once)::value;
    const T* rows[Rows];
    Packed<T, Rows> to;
    for (int r = 0; r < Rows; ++r) {
      rows[r] = row_of<T>(a.grads, tile, first_of(a, k) + i + r, reinterpret_cast<T*>(own.rows[r]));
      to.rows[r] = Pack ? packed_of<T>(a, tile, i + r) : nullptr;
    }
    double* out = a.partial[k & 1] + t * a.group + i;
    square_norms<HasKeep, Pack, Rows>(rows, keep, tile.blocks, tile.length, scale, out, to);
  });
}

template <class T>
void norms_of_tile(const Accumulate& a, Scratch& own, const Work& work, int64_t t, int64_t k, RowRange some) {
  const Tile& tile = work.tiles[t];
  if (tile.kept == Kept::none) {   // public: the mask never depends on data
    for (int64_t i = some.begin; i < some.end; ++i) a.partial[k & 1][t * a.group + i] = 0;
  } else if (tile.kept == Kept::some) {
    if (tile.slot >= 0) norms_of_tile<T, true, true>(a, own, work, t, k, some);
    else norms_of_tile<T, true, false>(a, own, work, t, k, some);
  } else {
    if (tile.slot >= 0) norms_of_tile<T, false, true>(a, own, work, t, k, some);
    else norms_of_tile<T, false, false>(a, own, work, t, k, some);
  }
}

enum Stage { kNorms, kSums };

template <Stage Which>
inline void visit_tile(const Accumulate& a, Scratch& own, const Work& work, int64_t t, int64_t k, RowRange some) {
  const auto visit = [&](auto value) {
    typedef decltype(value) T;
    if constexpr (Which == kNorms) norms_of_tile<T>(a, own, work, t, k, some);
    else sums_of_tile<T>(a, own, work.tiles[t], k, some);
  };
  switch (a.grads.dtypes[work.tiles[t].param]) {
    case DPRS_F32: visit(float()); break;
    case DPRS_F64: visit(double()); break;
    case DPRS_BF16: visit(bf16()); break;
    default: visit(fp16()); break;
  }
}

// A group that comes from memory twice: four rows from end to end of some tiles, then the next four. Memory likes long
// streams; the last tiles first, for the sums: the cache may still hold them.
template <Stage Which>
inline void stream(const Accumulate& a, Scratch& own, const Work& work, int64_t share, int64_t k) {
  constexpr int64_t kChunk = 16;   // tiles of which sums, 128 KB of them, stay in a core's own cache
  const int64_t begin = work.first[share], all = work.first[share + 1] - begin, count = count_of(a, k);
  const int64_t chunk = Which == kSums ? kChunk : all > 0 ? all : 1;
  for (int64_t c = (all + chunk - 1) / chunk - 1; c >= 0; --c)
    for (int64_t i = 0; i < count; i += kRows)
      for (int64_t t = c * chunk; t < least(all, (c + 1) * chunk); ++t)
        visit_tile<Which>(a, own, work, begin + t, k, {i, least(i + kRows, count)});
}

// Sums of group k - 1 and norms of group k, as far as there are such groups.
inline void visit_share(const Accumulate& a, Scratch& own, const Work& work, int64_t share, int64_t k) {
  const bool sums = k > 0, norms = first_of(a, k) < a.grads.samples;
  if (a.twice) {
    if (sums) stream<kSums>(a, own, work, share, k - 1);
    if (norms) stream<kNorms>(a, own, work, share, k);
    return;
  }
  for (int64_t t = work.first[share]; t < work.first[share + 1]; ++t) {
    if (sums) visit_tile<kSums>(a, own, work, t, k - 1, {0, count_of(a, k - 1)});
    if (norms) visit_tile<kNorms>(a, own, work, t, k, {0, count_of(a, k)});
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
    for (int64_t k = 0; k <= groups; ++k) {
      // With fewer threads than asked for, each takes several shares.
      for (int64_t share = me; share < work.threads; share += workers) visit_share(a, own, work, share, k);
      if (k == groups) break;
      meet(*a.barrier, workers);
      // No barrier behind the factors: the norms of group k + 1 go to the other half of `partial`.
      factors_of_group(a, own, work, k, me == 0 ? a.norms : nullptr);
    }
  }
}

}  // namespace DPRS_ISA
}  // namespace dprs
