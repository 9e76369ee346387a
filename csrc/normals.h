// normals: standard normals from ChaCha20 words by Box-Muller in float64.
//
// A block's 128-bit lane p gives the pair of coordinates (2p, 2p+1): low 64-bit word w, high word v,
//   u = (w+1) 2^-64,  r = sqrt(-2 ln u) <= 9.42,  (z_2p, z_2p+1) = r (cos, sin)(2 pi v 2^-64).
// Log, sine and cosine are Taylor series on reduced ranges, good to a few units in the last place of
// float64; the grid that z is rounded to (2^-20 of the standard deviation) is 2^32 times coarser.
#pragma once
#include "kernels.h"
#include "rng.h"

namespace dprs {
namespace DPRS_ISA {

constexpr int kBatch = 64;   // blocks transformed together: their pairs take 10 KB
constexpr int kPairs = 4 * kBatch;
constexpr int kTogether = kSets * kBlocks;   // blocks whose words are made together
static_assert(kBatch % kTogether == 0 && kTile / 8 % kTogether == 0, "whole sets");

// Box-Muller for a batch of pairs, in stages. Each stage is a short loop whose turns do not wait for each other: 1.7 ns
// a normal, where the same operations pair by pair, a chain of 100 cycles, took 2.5.
class Pairs {
  alignas(64) uint64_t v[kPairs];                                  // angles
  alignas(64) double a[kPairs], b[kPairs], c[kPairs], d[kPairs];   // what a stage leaves for the next

 public:
  // Pairs [at, at + kLanes) have these words.
  DPRS_INLINE void put(int at, u64v radius, u64v angle) {
    store(v + at, angle);
    store(a + at, to_f64(radius) + 1.0);
  }

  // a = sqrt(-2 ln u), the radius, for u = a 2^-64; (c, b) = (cos, sin) of x, where the angle 2 pi v 2^-64 is q quarter
  // turns plus x in [-pi/4, pi/4]: v = q 2^62 + rest with |rest| <= 2^61, exact integer arithmetic.
  //   m 2^e = a with m in [sqrt(1/2), sqrt(2)), s = (m-1)/(m+1):
  //   ln m = 2 atanh s = 2 s (1 + s^2/3 + s^4/5 + ...), |s| < 0.1716, so 11 terms reach 2^-56.
  // One unit of a CPU divides and takes roots, 16 and 24 cycles for 8 values on an Intel core, while the others are free: so the
  // cosine goes beside the division, and logarithm and sine beside the root.
  void radii_and_turns(int count) {
    for (int i = 0; i < count; i += kLanes) {
      const u64v bits = load<u64v>(a + i);
      const u64v root_half = u64v{} + 0x3fe6a09e667f3bcdull;
      const u64v shifted = bits - root_half + (1023ull << 52);      // biased so that >> is a floor
      const u64v exponent = shifted >> 52;                          // e + 1023
      const f64v m = bitcast<f64v>(bits - ((exponent - 1023) << 52));
      store(a + i, bitcast<f64v>(exponent | 0x4330000000000000ull) - (4503599627370496.0 + 1023 + 64));
      store(d + i, (m - 1.0) / (m + 1.0));
      const u64v angle = load<u64v>(v + i);
      const f64v x = to_f64(bitcast<i64v>(angle - (quarters(angle) << 62))) *
                     (1.5707963267948966 / 4611686018427387904.0);   // pi/2 2^-62
      store(b + i, x);
      const f64v y = x * x;
      const f64v y2 = y * y, y4 = y2 * y2;
      // Estrin's order, here and below: half the latency of Horner's at the same number of operations.
      const f64v tail = ((1.0 / 24 + y * (-1.0 / 720)) + y2 * (1.0 / 40320 + y * (-1.0 / 3628800))) +
                        y4 * ((1.0 / 479001600 + y * (-1.0 / 87178291200.0)) + y2 * (1.0 / 20922789888000.0));
      store(c + i, 1.0 + (y2 * tail - 0.5 * y));
    }
    for (int i = 0; i < count; i += kLanes) {
      const f64v e = load<f64v>(a + i), s = load<f64v>(d + i);
      const f64v z = s * s;
      const f64v z2 = z * z, z4 = z2 * z2;
      const f64v p = ((1.0 / 3 + z * (1.0 / 5)) + z2 * (1.0 / 7 + z * (1.0 / 9))) +
                     z4 * (((1.0 / 11 + z * (1.0 / 13)) + z2 * (1.0 / 15 + z * (1.0 / 17))) +
                           z4 * (1.0 / 19 + z * (1.0 / 21)));
      const f64v log_m = s + s * (z * p);                           // half of ln m
      store(a + i, sqrt(-2.0 * (e * 0.6931471805599453 + 2.0 * log_m)));
      const f64v x = load<f64v>(b + i);
      const f64v y = x * x;
      const f64v y2 = y * y, y4 = y2 * y2;
      const f64v tail = ((-1.0 / 6 + y * (1.0 / 120)) + y2 * (-1.0 / 5040 + y * (1.0 / 362880))) +
                        y4 * ((-1.0 / 39916800 + y * (1.0 / 6227020800.0)) +
                              y2 * (-1.0 / 1307674368000.0 + y * (1.0 / 355687428096000.0)));
      store(b + i, x + x * (y * tail));
    }
  }

  // The pairs r (cos, sin) of the angles: put(i, cosines, sines) for kLanes pairs from i on.
  template <class Put> DPRS_INLINE void each(int count, Put put) const {
    for (int i = 0; i < count; i += kLanes) {
      const u64v q = quarters(load<u64v>(v + i));
      const u64v odd = bitcast<u64v>((q & 1) != 0);
      const u64v sine = load<u64v>(b + i), cosine = load<u64v>(c + i);
      const f64v r = load<f64v>(a + i);
      put(i, r * bitcast<f64v>(((cosine & ~odd) | (sine & odd)) ^ ((q ^ (q >> 1)) << 63)),
          r * bitcast<f64v>(((sine & ~odd) | (cosine & odd)) ^ ((q >> 1) << 63)));
    }
  }

 private:
  static DPRS_INLINE u64v quarters(u64v angle) { return (angle + (1ull << 61)) >> 62; }
};

// to[8 l, 8 l + 2) = (x[l], y[l]): pairs that lie 8 apart.
DPRS_INLINE void store_pairs(double* to, f64v x, f64v y) {
#if defined(__AVX512F__)
  const __m512d even = _mm512_unpacklo_pd(x, y), odd = _mm512_unpackhi_pd(x, y);
  _mm_storeu_pd(to, _mm512_castpd512_pd128(even));
  _mm_storeu_pd(to + 8, _mm512_castpd512_pd128(odd));
  _mm_storeu_pd(to + 16, _mm512_extractf64x2_pd(even, 1));
  _mm_storeu_pd(to + 24, _mm512_extractf64x2_pd(odd, 1));
  _mm_storeu_pd(to + 32, _mm512_extractf64x2_pd(even, 2));
  _mm_storeu_pd(to + 40, _mm512_extractf64x2_pd(odd, 2));
  _mm_storeu_pd(to + 48, _mm512_extractf64x2_pd(even, 3));
  _mm_storeu_pd(to + 56, _mm512_extractf64x2_pd(odd, 3));
#elif defined(__AVX2__)
  const __m256d even = _mm256_unpacklo_pd(x, y), odd = _mm256_unpackhi_pd(x, y);
  _mm_storeu_pd(to, _mm256_castpd256_pd128(even));
  _mm_storeu_pd(to + 8, _mm256_castpd256_pd128(odd));
  _mm_storeu_pd(to + 16, _mm256_extractf128_pd(even, 1));
  _mm_storeu_pd(to + 24, _mm256_extractf128_pd(odd, 1));
#else
  for (int l = 0; l < kLanes; ++l) {
    to[8 * l] = x[l];
    to[8 * l + 1] = y[l];
  }
#endif
}

// The normals of the listed blocks, z[8 * place in the list + coordinate]; z has room for a multiple of kTogether blocks.
// words_of(first, words): the words of kTogether blocks, of which the list's end may cut off some.
template <class Words> inline void normals_of_blocks(int64_t blocks, double* z, Words words_of) {
  Pairs pairs;
  for (int64_t done = 0; done < blocks; done += kBatch, z += 8 * kBatch) {
    int count = 0;   // of pairs: [group of kBlocks blocks][pair in a block][block]
    for (int64_t b = done; b < least(done + kBatch, blocks); b += kTogether) {
      u32v words[kSets][16];
      words_of(b, words);
      for (int set = 0; set < kSets; ++set)
        for (int pair = 0; pair < 4; ++pair) {
          const u32v* w = words[set] + 4 * pair;
          u64v radius[2], angle[2];
          join_halves(w[0], w[1], radius);
          join_halves(w[2], w[3], angle);
          for (int half = 0; half < 2; ++half, count += kLanes) pairs.put(count, radius[half], angle[half]);
        }
    }
    pairs.radii_and_turns(count);
    pairs.each(count, [&](int i, f64v cosine, f64v sine) {
      const int block = i / (4 * kBlocks) * kBlocks + i % kBlocks, pair = i / kBlocks % 4;
      store_pairs(z + 8 * block + 2 * pair, cosine, sine);
    });
  }
}

// Consecutive blocks, from a key or from chosen words: for tests.
inline void normals(const uint32_t* key, uint64_t step, uint64_t first, int64_t blocks, double* out) {
  const ChaCha20 cipher(key, step);
  for (int64_t done = 0; done < blocks; done += kBatch) {
    alignas(64) double z[8 * kBatch];
    const int64_t some = least(kBatch, blocks - done);
    normals_of_blocks(some, z, [&](int64_t b, u32v (&words)[kSets][16]) {
      Blocks<kTogether> wanted;
      for (int i = 0; i < kTogether; ++i) wanted.set(i, first + done + b + i);
      cipher(wanted.low, wanted.high, words);
    });
    std::memcpy(out + 8 * done, z, 64 * some);
  }
}
inline void normals_from_words(const uint32_t* given, int64_t blocks, double* out) {
  for (int64_t b = 0; b < blocks; ++b) {
    alignas(64) double z[8 * kTogether];
    normals_of_blocks(1, z, [&](int64_t, u32v (&words)[kSets][16]) {
      for (auto& set : words)
        for (int i = 0; i < 16; ++i) set[i] = u32v{} + given[16 * b + i];
    });
    std::memcpy(out + 8 * b, z, 64);
  }
}
inline void words(const uint32_t* key, uint64_t step, uint64_t first, int64_t blocks, uint32_t* out) {
  const ChaCha20 cipher(key, step);
  for (int64_t done = 0; done < blocks; done += kTogether) {
    Blocks<kTogether> wanted;
    for (int b = 0; b < kTogether; ++b) wanted.set(b, first + done + b);
    u32v made[kSets][16];
    cipher(wanted.low, wanted.high, made);
    for (int64_t b = 0; b < least(kTogether, blocks - done); ++b)
      for (int i = 0; i < 16; ++i)
        out[16 * (done + b) + i] = made[b / kBlocks][i][lane_of_block(static_cast<int>(b % kBlocks))];
  }
}

}  // namespace DPRS_ISA
}  // namespace dprs
