// pack: kept values of a tile one after another, and back. A row of 1024 at r = 0.5 becomes 512 values, in its order, the
// same on every instruction set.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace dprs {
namespace DPRS_ISA {

#if defined(__AVX2__) && !defined(__AVX512F__)
// For each set of 8 lanes their numbers, ascending, then zeros: an argument of permutevar8x32. And where a lane's value is
// found among those of the set, for the way back.
struct Orders {
  uint8_t of[256][8] = {}, back[256][8] = {};

  constexpr Orders() {
    for (int bits = 0; bits < 256; ++bits)
      for (int lane = 0, count = 0; lane < 8; ++lane) {
        back[bits][lane] = static_cast<uint8_t>(count);
        if (bits >> lane & 1) of[bits][count++] = static_cast<uint8_t>(lane);
      }
  }
};
constexpr Orders kOrders;
constexpr uint8_t kTwice[16] = {0x00, 0x03, 0x0c, 0x0f, 0x30, 0x33, 0x3c, 0x3f,   // each bit twice: 4 lanes of 64 bits
                                0xc0, 0xc3, 0xcc, 0xcf, 0xf0, 0xf3, 0xfc, 0xff};
DPRS_INLINE __m256i order(const uint8_t* numbers) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(numbers)));
}
#endif

// How many of at most 8 bits are set; AVX-512 and AVX2 have an instruction for it, and for 16.
DPRS_INLINE int count_bits(uint32_t bits) {
#if defined(__AVX2__)
  return __builtin_popcount(bits);
#else
  bits -= bits >> 1 & 0x55;
  bits = (bits & 0x33) + (bits >> 2 & 0x33);
  return static_cast<int>((bits + (bits >> 4)) & 0xf);
#endif
}

// Lanes whose bit is set go to to[0], to[1], ...; a whole register is written, of which the rest is anything. bits: one for
// each lane, and no others.
DPRS_INLINE void pack(float* to, f32v x, uint32_t bits) {
#if defined(__AVX512F__)
  _mm512_storeu_ps(to, _mm512_maskz_compress_ps(static_cast<__mmask16>(bits), bitcast<__m512>(x)));
#elif defined(__AVX2__)
  _mm256_storeu_ps(to, _mm256_permutevar8x32_ps(bitcast<__m256>(x), order(kOrders.of[bits])));
#else
  for (int pair = 0; pair < kLanes; ++pair, bits >>= 2) {   // 64 bits hold two; of these the first may have to go
    store(to, bitcast<u64v>(x)[pair] >> (~bits << 5 & 32));
    to += (bits & 1) + (bits >> 1 & 1);
  }
#endif
}
DPRS_INLINE void pack(double* to, f64v x, uint32_t bits) {
#if defined(__AVX512F__)
  _mm512_storeu_pd(to, _mm512_maskz_compress_pd(static_cast<__mmask8>(bits), x));
#elif defined(__AVX2__)
  store(to, _mm256_permutevar8x32_epi32(bitcast<__m256i>(x), order(kOrders.of[kTwice[bits]])));
#else
  for (int l = 0; l < kLanes; ++l) {
    *to = x[l];
    to += bits >> l & 1;
  }
#endif
}

// The way back, of 64 bits: lanes whose bit is set are x[0], x[1], ..., in their order, zero the others.
DPRS_INLINE u64v unpack(u64v x, uint32_t bits) {
#if defined(__AVX512F__)
  return bitcast<u64v>(_mm512_maskz_expand_epi64(static_cast<__mmask8>(bits), bitcast<__m512i>(x)));
#elif defined(__AVX2__)
  const __m256i places = order(kOrders.back[kTwice[bits]]);
  return bitcast<u64v>(_mm256_permutevar8x32_epi32(bitcast<__m256i>(x), places)) & keep_mask_wide(bits, 0);
#else
  u64v out = {};
  for (int l = 0, n = 0; l < kLanes; ++l) {
    out[l] = bits >> l & 1 ? x[n] : 0;
    n += bits >> l & 1;
  }
  return out;
#endif
}

// Zeros in to[0, kWord).
template <class T> DPRS_INLINE void clear_word(T* to) {
  for (int i = 0; i < kWord; i += static_cast<int>(sizeof(f64v) / sizeof(T))) store(to + i, f64v{});
}

// Asks memory for vector v of a word, once a cache line, into a core's first cache, the second one, or the first as what will
// be read once, so that it displaces less of what is read again: prefetcht0, prefetcht1, prefetchnta.
enum class Into { first, second, once };
template <Into Where = Into::first, class T> DPRS_INLINE void ask(const T* word, int v) {
  const int at = v * kStep * static_cast<int>(sizeof(T));
  if (at % 64 == 0)
    __builtin_prefetch(reinterpret_cast<const char*>(word) + at, 0, Where == Into::first ? 3 : Where == Into::second ? 2 : 0);
}

// Kept values of some rows, as norms.h packs them beside their squares: to[r]. Side by side, since a core reads four places sooner
// than one: of 11M coordinates, 16 samples, sums took 23 ms row by row and take 14.5 (Zen 5, memory at 80 GB/s; at 50 24 and 18).
template <int Count, class T, class P>
inline void pack_rows(const T* const* rows, const uint32_t* keep, uint32_t blocks, int64_t length, int64_t ahead, P* const* to) {
  int64_t count = 0;   // of each
  for (int64_t begin = 0; begin < length; begin += kBlock) {
    if (!(blocks >> begin / kBlock & 1)) continue;
    count = fold_words<Count>(rows, keep, begin, least(begin + kBlock, length), count,
                              [=](int64_t n, const T* const* p, int64_t from, int64_t, uint32_t word) {
      for (int v = 0; v < kVectors; ++v) {
        for (int r = 0; r < Count; ++r) ask(reinterpret_cast<const T*>(reinterpret_cast<const char*>(p[r] + from) + ahead), v);
        if constexpr (sizeof(P) == 8) {
          for (int l = v * kStep; l < (v + 1) * kStep; l += kLanes) {
            const uint32_t bits = some_bits(word, l, kLanes);
            for (int r = 0; r < Count; ++r) pack(to[r] + n, load<f64v>(p[r] + from + l), bits);
            n += count_bits(bits);
          }
        } else {
          const uint32_t bits = some_bits(word, v * kStep, kStep);
          for (int r = 0; r < Count; ++r) pack(to[r] + n, load_f32(p[r] + from + v * kStep), bits);
          n += count_bits(bits);
        }
      }
      return n;
    });
  }
  for (int r = 0; r < Count; ++r) clear_word(to[r] + count);
}

}  // namespace DPRS_ISA
}  // namespace dprs
