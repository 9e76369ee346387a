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

// Rows that lie `step` bytes apart. Two numbers: with an address for each of four rows, and for each of the four that they
// are packed to, x86 runs out of registers.
template <class T> struct Rows {
  char* first;
  int64_t step;

  DPRS_INLINE T* operator[](int r) const { return reinterpret_cast<T*>(first + r * step); }
  DPRS_INLINE Rows from(int64_t at) const { return {first + at * static_cast<int64_t>(sizeof(T)), step}; }
};

// The last odd values of some rows, [begin, end), and zeros to a word: a row may end at the end of its allocation. (fold_words
// has the same for sums, beside its loop: sums through Rows and this took up to 7 % longer on Zen 5.)
template <int Count, class T> class Tails {
  T values[Count][kWord];

 public:
  __attribute__((noinline)) Tails(Rows<const T> from, int64_t begin, int64_t end) {
    for (int r = 0; r < Count; ++r) {
      std::memset(values[r], 0, sizeof values[r]);
      std::memcpy(values[r], from[r] + begin, sizeof(T) * (end - begin));
    }
  }
  Rows<const T> rows() const { return {const_cast<char*>(reinterpret_cast<const char*>(values)), sizeof values[0]}; }
};

// Of a block of some rows: 16 lanes of sums of squares each.
template <int Count> struct Squares {
  f32v of[Count][kNormLanes / kStep];
};

// The squares of a word's columns, and where packing goes on.
template <bool HasKeep, bool Pack, int Count, class T, class P>
DPRS_INLINE Rows<P> add_squares(Squares<Count>& sums, Rows<const T> rows, uint32_t word, f32v s, int64_t ahead,
                                Rows<P> to) {
  DPRS_UNROLL for (int v = 0; v < kVectors; ++v) {
    const uint32_t bits = some_bits(word, v * kStep, kStep);
    const int64_t count = in_register(count_bits(bits));
    const uint32_t held = in_register(bits);
    const Lanes m = keep_mask(held, 0);
    DPRS_UNROLL for (int r = 0; r < Count; ++r) {
      ask_ahead(rows[r], v, ahead);
      const f32v x = load_kept<HasKeep>(rows[r] + v * kStep, m);
      const f32v y = x * s;
      sums.of[r][v % (kNormLanes / kStep)] += y * y;
      if (Pack) pack(to[r], x, held);
    }
    if (Pack) to = to.from(count);
  }
  return to;
}

// out[r] = s^2 times the sum of squares of row r; Pack: its kept values go to `to`, and zeros behind them.
template <bool HasKeep, bool Pack, int Count, class T, class P>
DPRS_INLINE void square_norms(Rows<const T> rows, const uint32_t* keep, uint32_t blocks, int64_t length, double scale,
                              int64_t ahead, double* out, Rows<P> to) {
  constexpr int kSums = kNormLanes / kStep;
  const f32v s = f32v{} + static_cast<float>(scale);
  f64v total[Count][8 / kLanes] = {};   // 8 lanes of float64 a row
  for (int64_t begin = 0; begin < length; begin += kBlock) {
    if (HasKeep && !(blocks >> begin / kBlock & 1)) continue;   // would add zeros
    Squares<Count> sums = {};
    const int64_t end = least(begin + kBlock, length), whole = end / kWord * kWord;
    for (int64_t c = begin; c < whole; c += kWord)
      to = add_squares<HasKeep, Pack>(sums, rows.from(c), HasKeep ? keep[c / kWord] : ~0u, s, ahead, to);
    if (whole < end) {
      const Tails<Count, T> last(rows, whole, end);
      to = add_squares<HasKeep, Pack>(sums, last.rows(), HasKeep ? keep[whole / kWord] : ~0u, s, ahead, to);
    }
    DPRS_UNROLL for (int r = 0; r < Count; ++r) {   // 16 lanes to 8 in fp32, then float64
      if constexpr (kSums == 1) {                   // AVX-512: one register holds the 16
        total[r][0] += widen(low<f32h>(sums.of[r][0]) + high<f32h>(sums.of[r][0]));
      } else {
        DPRS_UNROLL for (int v = 0; v < kSums / 2; ++v) {
          const Pair eight = widen(sums.of[r][v] + sums.of[r][v + kSums / 2]);
          total[r][2 * v] += eight.lo;
          total[r][2 * v + 1] += eight.hi;
        }
      }
    }
  }
  DPRS_UNROLL for (int r = 0; r < Count; ++r) {
    out[r] = join_all(total[r]);
    if (Pack) clear_word(to[r]);
  }
}

// fp64: squares in float64.
template <bool HasKeep, bool Pack, int Count>
DPRS_INLINE void square_norms(Rows<const double> rows, const uint32_t* keep, uint32_t blocks, int64_t length, double scale,
                              int64_t ahead, double* out, Rows<double> to) {
  constexpr int kSums = 8 / kLanes;
  f64v total[Count][kSums] = {};
  const auto add = [&](Rows<const double> p, uint32_t word) {
    DPRS_UNROLL for (int v = 0; v < kVectors; ++v) {
      const uint32_t lo = some_bits(word, v * kStep, kLanes), hi = some_bits(word, v * kStep + kLanes, kLanes);
      const int first = count_bits(lo), second = count_bits(hi);
      DPRS_UNROLL for (int r = 0; r < Count; ++r) {
        ask_ahead(p[r], v, ahead);
        const Pair y = load_pair<HasKeep>(p[r] + v * kStep, keep_mask(word, v));
        total[r][2 * v % kSums] += (y.lo * scale) * (y.lo * scale);
        total[r][(2 * v + 1) % kSums] += (y.hi * scale) * (y.hi * scale);
        if (Pack) {
          pack(to[r], y.lo, lo);
          pack(to[r] + first, y.hi, hi);
        }
      }
      if (Pack) to = to.from(first + second);
    }
  };
  for (int64_t begin = 0; begin < length; begin += kBlock) {
    if (HasKeep && !(blocks >> begin / kBlock & 1)) continue;
    const int64_t end = least(begin + kBlock, length), whole = end / kWord * kWord;
    for (int64_t c = begin; c < whole; c += kWord) add(rows.from(c), HasKeep ? keep[c / kWord] : ~0u);
    if (whole < end) add(Tails<Count, double>(rows, whole, end).rows(), HasKeep ? keep[whole / kWord] : ~0u);
  }
  DPRS_UNROLL for (int r = 0; r < Count; ++r) {
    out[r] = join_all(total[r]);
    if (Pack) clear_word(to[r]);
  }
}

}  // namespace DPRS_ISA
}  // namespace dprs
