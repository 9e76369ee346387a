// sums: S_j += sum_i f_i keep_j g_ij for a few rows of a tile, in row order.
//
// With a unit h (a power of two) a contribution is an integer, k = rint(fl(F g)) with F = f / h and the
// product in fp32 (float64 for fp64 gradients), and sums of integers are exact: any order, any split into
// micro-batches, any number of threads or ranks gives the same bits, and adding a sample moves S by that
// sample's contribution and by nothing else.
// Where |k| <= 2^29 is known (plan.py says so by `small`), four rows are summed in int32: half the work. There the
// mask selects once, from the sum of the four: a fifth less work than from each. A dropped coordinate may hold
// anything: NaN, Inf and what is too large become some integer, which may wrap (vector arithmetic neither traps nor
// takes longer), and the select makes 0 of it, as if zeros had been added; lanes do not see each other.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace dprs {
namespace DPRS_ISA {

constexpr int kRows = 4;   // rows per pass over the accumulator; 4 * 2^29 (1 - 2^-20) fits an int32

enum class Sum { small, integer, real };   // int32 in registers; int64; float64 (no unit)

// rint(t) as int64 for |t| < 2^51: with 1.5 2^52 added, the integer is in the low bits.
DPRS_INLINE u64v round_to_int(f64v t) { return bitcast<u64v>(t + 6755399441055744.0) - 0x4338000000000000ull; }

// fl(F g) as float64 values: rounded to fp32 first, unless the gradients are fp64.
template <bool HasKeep, class T> DPRS_INLINE Pair scaled(const T* p, Lanes m, float f) {
  return widen(load_kept<HasKeep>(p, m) * f);
}
template <bool HasKeep> DPRS_INLINE Pair scaled(const double* p, Lanes m, double f) {
  const Pair x = load_pair<HasKeep>(p, m);
  return {x.lo * f, x.hi * f};
}

// Factors as the arithmetic takes them: fp32 for contributions in fp32, else float64.
template <class T, Sum How> struct FactorOf { typedef float type; };
template <> struct FactorOf<double, Sum::integer> { typedef double type; };
template <class T> struct FactorOf<T, Sum::real> { typedef double type; };

// One vector of columns: rows[r][0, kStep) times f[r], added to acc[0, kStep).
template <class T, bool HasKeep, Sum How, int Rows, class Factor>
DPRS_INLINE void add_columns(const T* const* rows, int64_t at, const Factor* f, Lanes m, void* acc) {
  if constexpr (How == Sum::small) {
    u32v bits = {};   // unsigned: what is dropped may overflow
    for (int r = 0; r < Rows; ++r) bits += bitcast<u32v>(round_to_int(load_f32(rows[r] + at) * f[r]));
    const i32v k = bitcast<i32v>(HasKeep ? select(m, bits) : bits);
    int64_t* a = static_cast<int64_t*>(acc);
    store(a, load<i64v>(a) + widen(low<i32h>(k)));
    store(a + kLanes, load<i64v>(a + kLanes) + widen(high<i32h>(k)));
  } else if constexpr (How == Sum::integer) {
    uint64_t* a = static_cast<uint64_t*>(acc);
    u64v lo = load<u64v>(a), hi = load<u64v>(a + kLanes);
    for (int r = 0; r < Rows; ++r) {
      const Pair t = scaled<HasKeep>(rows[r] + at, m, f[r]);
      lo += round_to_int(t.lo);
      hi += round_to_int(t.hi);
    }
    store(a, lo);
    store(a + kLanes, hi);
  } else {
    double* a = static_cast<double*>(acc);
    f64v lo = load<f64v>(a), hi = load<f64v>(a + kLanes);
    for (int r = 0; r < Rows; ++r) {
      const Pair x = load_pair<HasKeep>(rows[r] + at, m);
      lo = madd<T>(splat(f[r]), x.lo, lo);
      hi = madd<T>(splat(f[r]), x.hi, hi);
    }
    store(a, lo);
    store(a + kLanes, hi);
  }
}

// acc: 8 bytes a coordinate, padded to 32 coordinates like the keep bits.
template <class T, bool HasKeep, Sum How, int Rows, int Count>
inline void add_rows(const T* const* rows, const Ahead<T, Count>& ahead, const double* factors, const uint32_t* keep,
                     uint32_t blocks, int64_t length, char* acc) {
  struct {
    typename FactorOf<T, How>::type f[Rows];
  } own;
  for (int r = 0; r < Rows; ++r) own.f[r] = static_cast<typename FactorOf<T, How>::type>(factors[r]);
  for (int64_t begin = 0, end; begin < length; begin = end) {   // runs of blocks; mostly one run, the tile
    end = length;
    if (HasKeep) {
      while (begin < length && !(blocks >> begin / kBlock & 1)) begin += kBlock;
      for (end = begin; end < length && blocks >> end / kBlock & 1;) end += kBlock;
      end = least(end, length);
    }
    // Captured by value: the compiler then knows that storing sums leaves the factors alone.
    for_words<Rows>(rows, ahead, HasKeep ? keep : nullptr, begin, end,
                    [own, acc](const T* const* p, int64_t at, int64_t c, uint32_t word) {
      for (int v = 0; v < kVectors; ++v)
        add_columns<T, HasKeep, How, Rows>(p, at + v * kStep, own.f, keep_mask(word, v), acc + 8 * (c + v * kStep));
    });
  }
}

}  // namespace DPRS_ISA
}  // namespace dprs
