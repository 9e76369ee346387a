// norms: n_i^2 = sum_j keep_j g_ij^2 for a few rows of a tile at once (they share the loads of the mask).
//
// fp32, bf16, fp16: squares of y = s g, in blocks of 256 values: 16 lanes of 16 additions, one more to join
// them, then float64. Nothing is added more than 17 times in fp32, so the relative error of n is at most
// (18/2) 2^-24 < 2^-20, the margin of the factor, whatever the values are. (Converting every value to
// float64 would take three times as long.)
// s is a power of two, 2^-36 over the bound that n is compared with: squares overflow only where n exceeds
// 2^97 bounds (such a sample counts as not finite), and what underflows is below 2^-27 bounds: D < 2^33
// coordinates of that size together change n by less than the rest of the margin.
// Multiplications and additions are separate, so that all instruction sets give the same bits.
#pragma once
#include "kernels.h"
#include "pack.h"

namespace dprs {
namespace DPRS_ISA {

constexpr int kNormRows = 4;   // rows at once: they share the mask
constexpr int kNormLanes = 16;

// The sum of 8 lanes by a tree of fixed shape, lane i with lane i + half: the same on every instruction set.
DPRS_INLINE double join_all(f64v (&lanes)[8 / kLanes]) {
  double x[8];
  std::memcpy(x, lanes, sizeof x);
  return ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]));
}

// What is kept for sums: as they are in fp32 and fp64, 16 bits widened.
template <class T> struct PackedOf { typedef float type; };
template <> struct PackedOf<double> { typedef double type; };
template <class T, int Rows> struct Packed {
  typename PackedOf<T>::type* rows[Rows];
};

// out[r] = s^2 times the sum of squares of row r; Pack: its kept values go to `to`, and zeros behind them. Four rows at
// once: one core follows these at 27 GB/s, one row at 19.
template <bool HasKeep, bool Pack, int Rows, class T>
inline void square_norms(const T* const* rows, const uint32_t* keep, uint32_t blocks, int64_t length, double scale,
                         double* out, const Packed<T, Rows> to) {
  constexpr int kSums = kNormLanes / kStep;
  struct Sums {
    f32v of[Rows][kSums];
    int64_t at;
  };
  const f32v s = f32v{} + static_cast<float>(scale);
  f64v total[Rows][8 / kLanes] = {};   // 8 lanes of float64 a row
  int64_t at = 0;
  for (int64_t begin = 0; begin < length; begin += kBlock) {
    if (HasKeep && !(blocks >> begin / kBlock & 1)) continue;   // would add zeros
    const auto squares = [s, to](Sums acc, const T* const* p, int64_t from, int64_t, uint32_t word) {
      DPRS_UNROLL for (int v = 0; v < kVectors; ++v) {
        const Lanes m = keep_mask(word, v);
        int count = 0;
        DPRS_UNROLL for (int r = 0; r < Rows; ++r) {
          ask_ahead(p[r] + from, v);
          const f32v x = load_kept<HasKeep>(p[r] + from + v * kStep, m);
          const f32v y = x * s;
          acc.of[r][v % kSums] += y * y;
          if (Pack) count = pack(to.rows[r] + acc.at, x, word >> v * kStep);
        }
        acc.at += count;
      }
      return acc;
    };
    const int64_t end = least(begin + kBlock, length);
    const Sums block = fold_words<Rows>(rows, HasKeep ? keep : nullptr, begin, end, Sums{{}, at}, squares);
    const auto& acc = block.of;
    at = block.at;
    for (int r = 0; r < Rows; ++r) {   // 16 lanes to 8 in fp32, then float64
      if constexpr (kSums == 1) {      // AVX-512: one register holds the 16
        total[r][0] += widen(low<f32h>(acc[r][0]) + high<f32h>(acc[r][0]));
      } else {
        for (int v = 0; v < kSums / 2; ++v) {
          const Pair eight = widen(acc[r][v] + acc[r][v + kSums / 2]);
          total[r][2 * v] += eight.lo;
          total[r][2 * v + 1] += eight.hi;
        }
      }
    }
  }
  for (int r = 0; r < Rows; ++r) {
    out[r] = join_all(total[r]);
    if (Pack) clear_word(to.rows[r] + at);
  }
}

// fp64: squares in float64.
template <bool HasKeep, bool Pack, int Rows>
inline void square_norms(const double* const* rows, const uint32_t* keep, uint32_t blocks, int64_t length, double scale,
                         double* out, const Packed<double, Rows> to) {
  constexpr int kSums = 8 / kLanes;
  struct Sums {
    f64v of[Rows][kSums];
    int64_t at;
  } total = {};
  for (int64_t begin = 0; begin < length; begin += kBlock) {
    if (HasKeep && !(blocks >> begin / kBlock & 1)) continue;
    total = fold_words<Rows>(rows, HasKeep ? keep : nullptr, begin, least(begin + kBlock, length), total,
                             [scale, to](Sums acc, const double* const* p, int64_t from, int64_t, uint32_t word) {
      DPRS_UNROLL for (int v = 0; v < kVectors; ++v) {
        const uint32_t bits = word >> v * kStep;
        int first = 0, second = 0;
        DPRS_UNROLL for (int r = 0; r < Rows; ++r) {
          ask_ahead(p[r] + from, v);
          const Pair y = load_pair<HasKeep>(p[r] + from + v * kStep, keep_mask(word, v));
          acc.of[r][2 * v % kSums] += (y.lo * scale) * (y.lo * scale);
          acc.of[r][(2 * v + 1) % kSums] += (y.hi * scale) * (y.hi * scale);
          if (Pack) {
            first = pack(to.rows[r] + acc.at, y.lo, bits);
            second = pack(to.rows[r] + acc.at + first, y.hi, bits >> kLanes);
          }
        }
        acc.at += first + second;
      }
      return acc;
    });
  }
  for (int r = 0; r < Rows; ++r) {
    out[r] = join_all(total.of[r]);
    if (Pack) clear_word(to.rows[r] + total.at);
  }
}

}  // namespace DPRS_ISA
}  // namespace dprs
