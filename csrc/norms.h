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
#include "ask.h"
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

// Of a block of some rows: 16 lanes of sums of squares each.
template <int Count> struct Squares {
  f32v of[Count][kNormLanes / kStep];
};

// The squares of a word's columns, and where packing goes on.
template <bool HasKeep, bool Pack, int Count, class T, Ask How, class P>
DPRS_INLINE Rows<P> add_squares(Squares<Count>& sums, Rows<const T> rows, uint32_t word, f32v s, Asked<T, How> asked,
                                Rows<P> to) {
  DPRS_UNROLL for (int v = 0; v < kVectors; ++v) {
    const uint32_t bits = some_bits(word, v * kStep, kStep);
    const int64_t count = in_register(count_bits(bits));
    const uint32_t held = in_register(bits);
    const Lanes m = keep_mask(held, 0);
    DPRS_UNROLL for (int r = 0; r < Count; ++r) {
      asked.line(r, v);
      const f32v x = load_kept<HasKeep>(rows[r] + v * kStep, m);
      const f32v y = x * s;
      sums.of[r][v % (kNormLanes / kStep)] += y * y;
      if (Pack) pack(to[r], x, held);
    }
    if (Pack) to = to.from(count);
  }
  return to;
}

// A row's 8 lanes of float64, the blocks' squares so far.
template <int Count> struct Totals {
  f64v of[Count][8 / kLanes];
};

// total += the squares of a block: 16 lanes to 8 in fp32, then float64.
template <int Count> DPRS_INLINE void join_block(Totals<Count>& total, const Squares<Count>& sums) {
  constexpr int kSums = kNormLanes / kStep;
  DPRS_UNROLL for (int r = 0; r < Count; ++r) {
    if constexpr (kSums == 1) {   // AVX-512: one register holds the 16
      total.of[r][0] += widen(low<f32h>(sums.of[r][0]) + high<f32h>(sums.of[r][0]));
    } else {
      DPRS_UNROLL for (int v = 0; v < kSums / 2; ++v) {
        const Pair eight = widen(sums.of[r][v] + sums.of[r][v + kSums / 2]);
        total.of[r][2 * v] += eight.lo;
        total.of[r][2 * v + 1] += eight.hi;
      }
    }
  }
}

// fp32, bf16, fp16: the squares of columns [begin, end) of one block, and where packing goes on.
template <bool HasKeep, bool Pack, int Count, class T, Ask How, class P>
DPRS_INLINE Rows<P> add_block(Totals<Count>& total, Rows<const T> rows, const uint32_t* keep, int64_t begin, int64_t end,
                              double scale, Asked<T, How> asked, Rows<P> to) {
  const f32v s = f32v{} + static_cast<float>(scale);
  Squares<Count> sums = {};
  for (int64_t c = begin; c < end; c += kWord)
    to = add_squares<HasKeep, Pack>(sums, rows.from(c), HasKeep ? keep[c / kWord] : ~0u, s, asked.from(c), to);
  join_block(total, sums);
  return to;
}

// fp64: squares in float64.
template <bool HasKeep, bool Pack, int Count, Ask How>
DPRS_INLINE Rows<double> add_block(Totals<Count>& total, Rows<const double> rows, const uint32_t* keep, int64_t begin,
                                   int64_t end, double scale, Asked<double, How> asked, Rows<double> to) {
  constexpr int kSums = 8 / kLanes;
  for (int64_t c = begin; c < end; c += kWord) {
    const uint32_t word = HasKeep ? keep[c / kWord] : ~0u;
    const Rows<const double> p = rows.from(c);
    const Asked<double, How> next = asked.from(c);
    DPRS_UNROLL for (int v = 0; v < kVectors; ++v) {
      const uint32_t lo = some_bits(word, v * kStep, kLanes), hi = some_bits(word, v * kStep + kLanes, kLanes);
      const int first = count_bits(lo), second = count_bits(hi);
      DPRS_UNROLL for (int r = 0; r < Count; ++r) {
        next.line(r, v);
        const Pair y = load_pair<HasKeep>(p[r] + v * kStep, keep_mask(word, v));
        total.of[r][2 * v % kSums] += (y.lo * scale) * (y.lo * scale);
        total.of[r][(2 * v + 1) % kSums] += (y.hi * scale) * (y.hi * scale);
        if (Pack) {
          pack(to[r], y.lo, lo);
          pack(to[r] + first, y.hi, hi);
        }
      }
      if (Pack) to = to.from(first + second);
    }
  }
  return to;
}

// The last block of a parameter, columns [begin, end), which may be short: a copy, padded by zeros to words, is added. Not
// inline, so that the loop over whole blocks has all registers.
template <bool HasKeep, bool Pack, int Count, class T, class P>
__attribute__((noinline)) Rows<P> add_rest(Totals<Count>& total, Rows<const T> rows, const uint32_t* keep, int64_t begin,
                                           int64_t end, double scale, Rows<P> to) {
  T values[Count][kBlock];   // a row may end at the end of its allocation
  for (int r = 0; r < Count; ++r) {
    std::memset(values[r] + (end - begin), 0, sizeof(T) * (padded(end - begin) - (end - begin)));
    std::memcpy(values[r], rows[r] + begin, sizeof(T) * (end - begin));
  }
  const Rows<const T> copy = {reinterpret_cast<char*>(values), sizeof values[0]};
  const uint32_t* words = HasKeep ? keep + begin / kWord : nullptr;
  return add_block<HasKeep, Pack>(total, copy, words, 0, padded(end - begin), scale, Asked<T, Ask::twice>{copy, copy}, to);
}

// out[r] = s^2 times the sum of squares of row r; Pack: its kept values go to `to`, and zeros behind them. beside(): called
// after each whole block that has a kept value.
template <bool HasKeep, bool Pack, int Count, class T, Ask How, class P, class Beside>
DPRS_INLINE void square_norms(Rows<const T> rows, const uint32_t* keep, uint32_t blocks, int64_t length, double scale,
                              const Asks<T, How>& asks, double* out, Rows<P> to, Beside beside) {
  Totals<Count> total = {};
  const auto is_kept = [blocks](int64_t begin) { return !HasKeep || blocks >> begin / kBlock & 1; };   // else adds zeros
  int64_t begin = 0;
  for (; begin + kBlock <= length; begin += kBlock)
    if (is_kept(begin)) {
      to = add_block<HasKeep, Pack>(total, rows, keep, begin, begin + kBlock, scale, asks.at(begin), to);
      beside();
    }
  if (begin < length && is_kept(begin)) {
    Totals<Count> all = total;   // a copy: in the loop above they stay in registers
    to = add_rest<HasKeep, Pack>(all, rows, keep, begin, length, scale, to);
    total = all;
  }
  DPRS_UNROLL for (int r = 0; r < Count; ++r) {
    out[r] = join_all(total.of[r]);
    if (Pack) clear_word(to[r]);
  }
}

}  // namespace DPRS_ISA
}  // namespace dprs
