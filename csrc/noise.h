// noise: standard normals from ChaCha20 words by Box-Muller in float64, and the noised release.
//
// A block's 128-bit lane p gives the pair of coordinates (2p, 2p+1): low 64-bit word w, high word v,
//   u = (w+1) 2^-64,  r = sqrt(-2 ln u) <= 9.42,  (z_2p, z_2p+1) = r (cos, sin)(2 pi v 2^-64).
// Log, sine and cosine are Taylor series on reduced ranges, good to a few units in the last place of
// float64; the grid that z is rounded to (2^-20 of the standard deviation) is 2^32 times coarser.
#pragma once
#include "accumulate.h"
#include "rng.h"

namespace dprs {
namespace DPRS_ISA {

// -2 ln u for u = (w+1) 2^-64.   m 2^e = w+1 with m in [sqrt(1/2), sqrt(2)), s = (m-1)/(m+1):
// ln m = 2 atanh s = 2 s (1 + s^2/3 + s^4/5 + ...), |s| < 0.1716, so 11 terms reach 2^-56.
DPRS_INLINE f64v minus_two_log(f64v w_plus_1) {
  const u64v bits = bitcast<u64v>(w_plus_1);
  const u64v root_half = u64v{} + 0x3fe6a09e667f3bcdull;
  const u64v shifted = bits - root_half + (1023ull << 52);      // biased so that >> is a floor
  const u64v exponent = shifted >> 52;                          // e + 1023
  const f64v m = bitcast<f64v>(bits - ((exponent - 1023) << 52));
  const f64v e = bitcast<f64v>(exponent | 0x4330000000000000ull) - (4503599627370496.0 + 1023 + 64);
  const f64v s = (m - 1.0) / (m + 1.0);
  const f64v z = s * s;
  // Estrin's order, here and below: half the latency of Horner's at the same number of operations.
  const f64v z2 = z * z, z4 = z2 * z2;
  const f64v p = ((1.0 / 3 + z * (1.0 / 5)) + z2 * (1.0 / 7 + z * (1.0 / 9))) +
                 z4 * (((1.0 / 11 + z * (1.0 / 13)) + z2 * (1.0 / 15 + z * (1.0 / 17))) +
                       z4 * (1.0 / 19 + z * (1.0 / 21)));
  const f64v log_m = s + s * (z * p);                           // half of ln m
  return -2.0 * (e * 0.6931471805599453 + 2.0 * log_m);
}

// (cos, sin) of 2 pi v 2^-64: v = q 2^62 + rest with |rest| <= 2^61, so the angle is q quarter turns plus
// x in [-pi/4, pi/4]; the reduction is exact integer arithmetic.
DPRS_INLINE void cos_sin(u64v v, f64v* cosine, f64v* sine) {
  const u64v q = (v + (1ull << 61)) >> 62;
  const f64v x = to_f64(bitcast<i64v>(v - (q << 62))) * (1.5707963267948966 / 4611686018427387904.0);   // pi/2 2^-62
  const f64v y = x * x;
  const f64v y2 = y * y, y4 = y2 * y2;
  const f64v s_tail = ((-1.0 / 6 + y * (1.0 / 120)) + y2 * (-1.0 / 5040 + y * (1.0 / 362880))) +
                      y4 * ((-1.0 / 39916800 + y * (1.0 / 6227020800.0)) +
                            y2 * (-1.0 / 1307674368000.0 + y * (1.0 / 355687428096000.0)));
  const f64v c_tail = ((1.0 / 24 + y * (-1.0 / 720)) + y2 * (1.0 / 40320 + y * (-1.0 / 3628800))) +
                      y4 * ((1.0 / 479001600 + y * (-1.0 / 87178291200.0)) + y2 * (1.0 / 20922789888000.0));
  const f64v s = x + x * (y * s_tail);
  const f64v c = 1.0 + (y2 * c_tail - 0.5 * y);
  const u64v odd = bitcast<u64v>((q & 1) != 0);
  const u64v sb = bitcast<u64v>(s), cb = bitcast<u64v>(c);
  *cosine = bitcast<f64v>(((cb & ~odd) | (sb & odd)) ^ ((q ^ (q >> 1)) << 63));
  *sine = bitcast<f64v>(((sb & ~odd) | (cb & odd)) ^ ((q >> 1) << 63));
}

// kBlocks blocks of words -> z[coordinate in block][block].
inline void normals_of_words(const u32v words[16], double z[8][kBlocks]) {
  for (int pair = 0; pair < 4; ++pair)
    for (int half = 0; half < 2; ++half) {
      u64v w[2];
      for (int i = 0; i < 2; ++i) {   // 64-bit words of kLanes blocks, low half first
        const u32h lo = load<u32h>(reinterpret_cast<const uint32_t*>(words + 4 * pair + 2 * i) + half * kLanes);
        const u32h hi = load<u32h>(reinterpret_cast<const uint32_t*>(words + 4 * pair + 2 * i + 1) + half * kLanes);
        w[i] = widen(lo) | (widen(hi) << 32);
      }
      const f64v r = sqrt(minus_two_log(to_f64(w[0]) + 1.0));
      f64v c, s;
      cos_sin(w[1], &c, &s);
      store(z[2 * pair] + half * kLanes, r * c);
      store(z[2 * pair + 1] + half * kLanes, r * s);
    }
}

// The normals of the listed blocks, z[8 * place_b + coordinate], kBlocks at a time.
template <class Words>
inline void normals_of_blocks(const uint64_t* blocks, const int* places, int count, double* out, Words words_of) {
  for (int done = 0; done < count; done += kBlocks) {
    const int some = static_cast<int>(least(kBlocks, count - done));
    uint64_t wanted[kBlocks];
    for (int b = 0; b < kBlocks; ++b) wanted[b] = blocks[done + least(b, some - 1)];
    u32v words[16];
    words_of(wanted, words);
    double z[8][kBlocks];
    normals_of_words(words, z);
    for (int b = 0; b < some; ++b)
      for (int c = 0; c < 8; ++c) out[8 * places[done + b] + c] = z[c][b];
  }
}

DPRS_INLINE void store_as(float* p, f64v x) { store(p, narrow(x)); }
DPRS_INLINE void store_as(double* p, f64v x) { store(p, x); }

// 16-bit results go through fp32, as torch's casts do; half to even each time.
inline uint16_t to_bf16(float x) {
  const uint32_t bits = bitcast<uint32_t>(x);
  if (x != x) return 0x7fc0;
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
inline uint16_t to_fp16(float x) {
  const uint32_t bits = bitcast<uint32_t>(x), sign = bits >> 16 & 0x8000, a = bits & 0x7fffffff;
  if (a > 0x7f800000) return 0x7e00;
  if (a >= 0x477ff000) return static_cast<uint16_t>(sign | 0x7c00);   // 65520, halfway to 2^16, and above
  if (a < 0x38800000)   // below 2^-14: 0.5 has the last bit 2^-24 of a subnormal, so adding it rounds
    return static_cast<uint16_t>(sign | (bitcast<uint32_t>(bitcast<float>(a) + 0.5f) - 0x3f000000));
  return static_cast<uint16_t>(sign | ((a - (112u << 23) + 0xfff + (a >> 13 & 1)) >> 13));
}
DPRS_INLINE void store_as(bf16* p, f64v x) {
  const f32h y = narrow(x);
  for (int i = 0; i < kLanes; ++i) p[i].bits = to_bf16(y[i]);
}
DPRS_INLINE void store_as(fp16* p, f64v x) {
  const f32h y = narrow(x);
  for (int i = 0; i < kLanes; ++i) p[i].bits = to_fp16(y[i]);
}

// The normals of a tile's coordinates; what is dropped is left as it is.
inline void normals_of_tile(const dprs_release& r, const uint32_t* keep, const Tile& tile, double* z) {
  uint64_t blocks[kTile / 8];
  int places[kTile / 8], count = 0;
  for (int b = 0; b < (tile.length + 7) / 8; ++b) {
    const uint32_t bits = keep ? keep[b / 4] >> (8 * (b % 4)) & 0xff : 0xff;
    if (bits == 0) continue;   // nothing kept: public, so skipping tells nobody anything
    blocks[count] = tile.padded / 8 + b;
    places[count++] = b;
  }
  normals_of_blocks(blocks, places, count, z,
                    [&](const uint64_t* wanted, u32v* words) { chacha20(r.key, r.step, wanted, words); });
}

// One tile: out = (rint(S/g) + rint(std z/g)) (g/divisor) where kept, +0 elsewhere.
template <class T>
void release_tile(const dprs_release& r, const uint32_t* bits, const char* acc, const Tile& tile) {
  alignas(64) double z[kTile];
  const uint32_t* keep = bits ? bits + tile.padded / kWord : nullptr;
  if (r.grid != 0) normals_of_tile(r, keep, tile, z);
  const double per_grid = r.grid != 0 ? 1 / r.grid : 0;   // exact: g is a power of two
  const auto value = [&](int64_t c, f64v kept) {
    const char* at = acc + 8 * (tile.padded + c);
    f64v x = r.unit != 0 ? to_f64(load<i64v>(at)) * r.unit : load<f64v>(at);
    if (r.grid != 0)
      x = (rint_even(x * per_grid) + rint_even(load<f64v>(z + c) * (r.noise_std * per_grid))) * (r.grid / r.divisor);
    else x = x / r.divisor;
    return bitcast<f64v>(bitcast<u64v>(x + 0.0) & bitcast<u64v>(kept));   // + 0.0: no -0
  };
  T* out = static_cast<T*>(r.out[tile.param]) + tile.start;
  T last[kWord];
  for (int64_t c = 0; c < tile.length; c += kWord) {
    const bool whole = c + kWord <= tile.length;
    T* to = whole ? out + c : last;
    for (int v = 0; v < kVectors; ++v) {
      const u32v m = keep_mask(keep ? keep[c / kWord] : ~0u, v);
      store_as(to + v * kStep, value(c + v * kStep, bitcast<f64v>(widen(low<i32h>(m)))));
      store_as(to + v * kStep + kLanes, value(c + v * kStep + kLanes, bitcast<f64v>(widen(high<i32h>(m)))));
    }
    if (!whole) std::memcpy(out + c, last, sizeof(T) * (tile.length - c));
  }
}

inline void release(const dprs_release& r, const uint32_t* keep, const char* acc, const Work& work) {
#pragma omp parallel for num_threads(work.threads) schedule(static)
  for (int64_t t = 0; t < work.count; ++t) {
    switch (r.dtypes[work.tiles[t].param]) {
      case DPRS_F32: release_tile<float>(r, keep, acc, work.tiles[t]); break;
      case DPRS_F64: release_tile<double>(r, keep, acc, work.tiles[t]); break;
      case DPRS_BF16: release_tile<bf16>(r, keep, acc, work.tiles[t]); break;
      default: release_tile<fp16>(r, keep, acc, work.tiles[t]); break;
    }
  }
}

// For tests: consecutive blocks, from a key or from chosen words.
inline void normals(const uint32_t* key, uint64_t step, uint64_t first, int64_t blocks, double* out) {
  for (int64_t b = 0; b < blocks; ++b) {
    const uint64_t block = first + b;
    const int place = 0;
    normals_of_blocks(&block, &place, 1, out + 8 * b,
                      [&](const uint64_t* wanted, u32v* words) { chacha20(key, step, wanted, words); });
  }
}
inline void normals_from_words(const uint32_t* given, int64_t blocks, double* out) {
  for (int64_t b = 0; b < blocks; ++b) {
    const uint64_t block = 0;
    const int place = 0;
    normals_of_blocks(&block, &place, 1, out + 8 * b, [&](const uint64_t*, u32v* words) {
      for (int i = 0; i < 16; ++i) words[i] = u32v{} + given[16 * b + i];
    });
  }
}
inline void words(const uint32_t* key, uint64_t step, uint64_t first, int64_t blocks, uint32_t* out) {
  for (int64_t b = 0; b < blocks; ++b) {
    uint64_t wanted[kBlocks];
    for (uint64_t& w : wanted) w = first + b;
    u32v made[16];
    chacha20(key, step, wanted, made);
    for (int i = 0; i < 16; ++i) out[16 * b + i] = made[i][0];
  }
}

}  // namespace DPRS_ISA
}  // namespace dprs
