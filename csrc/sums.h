// sums: S_j += sum_i f_i keep_j g_ij for a few rows of a tile, in row order.
//
// With a unit h (a power of two) a contribution is an integer, k = rint(fl(F g)) with F = f / h and the
// product in fp32 (float64 for fp64 gradients), and sums of integers are exact: any order, any split into
// micro-batches, any number of threads or ranks gives the same bits, and adding a sample moves S by that
// sample's contribution and by nothing else.
// Where |k| <= 2^29 is known (plan.py says so by `small`), four rows are summed in int32: half the work.
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
template <class T> DPRS_INLINE Pair scaled(const T* p, float f) { return widen(load_f32(p) * f); }
DPRS_INLINE Pair scaled(const double* p, double f) {
  const Pair x = load_pair<false>(p, Lanes{});
  return {x.lo * f, x.hi * f};
}

// Factors as the arithmetic takes them: fp32 for contributions in fp32, else float64.
template <class T, Sum How> struct FactorOf { typedef float type; };
template <> struct FactorOf<double, Sum::integer> { typedef double type; };
template <class T> struct FactorOf<T, Sum::real> { typedef double type; };

// One vector of columns: rows[r][0, kStep) times f[r], added to acc[0, kStep).
template <class T, Sum How, int Count, class Factor>
DPRS_INLINE void add_columns(const T* const* rows, int64_t at, const Factor* f, void* acc) {
  if constexpr (How == Sum::small) {
    i32v k = {};
    for (int r = 0; r < Count; ++r) k += round_to_int(load_f32(rows[r] + at) * f[r]);
    int64_t* a = static_cast<int64_t*>(acc);
    store(a, load<i64v>(a) + widen(low<i32h>(k)));
    store(a + kLanes, load<i64v>(a + kLanes) + widen(high<i32h>(k)));
  } else if constexpr (How == Sum::integer) {
    uint64_t* a = static_cast<uint64_t*>(acc);
    u64v lo = load<u64v>(a), hi = load<u64v>(a + kLanes);
    for (int r = 0; r < Count; ++r) {
      const Pair t = scaled(rows[r] + at, f[r]);
      lo += round_to_int(t.lo);
      hi += round_to_int(t.hi);
    }
    store(a, lo);
    store(a + kLanes, hi);
  } else {
    double* a = static_cast<double*>(acc);
    f64v lo = load<f64v>(a), hi = load<f64v>(a + kLanes);
    for (int r = 0; r < Count; ++r) {
      const Pair x = load_pair<false>(rows[r] + at, Lanes{});
      lo = madd<T>(splat(f[r]), x.lo, lo);
      hi = madd<T>(splat(f[r]), x.hi, hi);
    }
    store(a, lo);
    store(a + kLanes, hi);
  }
}

// factors: one a row, `step` apart, not written lately: a load that spans two recent stores waits until all stores before
// them are done. acc: 8 bytes a value, a multiple of kWord of them.
template <class T, Sum How, int Count>
inline void add_rows(const T* const* rows, const double* factors, int64_t step, int64_t length, char* acc) {
  struct {
    typename FactorOf<T, How>::type f[Count];
  } own;
  for (int r = 0; r < Count; ++r) own.f[r] = static_cast<typename FactorOf<T, How>::type>(factors[r * step]);
  // Captured by value: the compiler then knows that storing sums leaves the factors alone.
  fold_words<Count>(rows, nullptr, 0, length, 0, [own, acc](int, const T* const* p, int64_t at, int64_t c, uint32_t) {
    for (int v = 0; v < kVectors; ++v)
      add_columns<T, How, Count>(p, at + v * kStep, own.f, acc + 8 * (c + v * kStep));
    return 0;
  });
}

}  // namespace DPRS_ISA
}  // namespace dprs
