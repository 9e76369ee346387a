// rng: ChaCha20 words, a pure function of (key, step, block). RFC 8439's round function with the original
// layout of the last four state words: a 64-bit block counter, then a 64-bit nonce = the step.
// One 64-byte block serves 8 coordinates. A vector holds one state word of several blocks; the block
// numbers are arbitrary, so blocks whose coordinates are all dropped are never made.
#pragma once
#include "simd.h"

namespace dprs {
namespace DPRS_ISA {

constexpr int kBlocks = 2 * kLanes;   // blocks at a time: 32-bit lanes in a native register

template <int Bits> DPRS_INLINE u32v rotate(u32v x) { return (x << Bits) | (x >> (32 - Bits)); }
#if defined(__AVX2__) && !defined(__AVX512F__)   // AVX-512 has a rotate, and compilers find it
// One byte shuffle instead of two shifts and an or.
template <> DPRS_INLINE u32v rotate<16>(u32v x) {
  const __m256i order = _mm256_setr_epi8(2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13,
                                         2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
  return bitcast<u32v>(_mm256_shuffle_epi8(bitcast<__m256i>(x), order));
}
template <> DPRS_INLINE u32v rotate<8>(u32v x) {
  const __m256i order = _mm256_setr_epi8(3, 0, 1, 2, 7, 4, 5, 6, 11, 8, 9, 10, 15, 12, 13, 14,
                                         3, 0, 1, 2, 7, 4, 5, 6, 11, 8, 9, 10, 15, 12, 13, 14);
  return bitcast<u32v>(_mm256_shuffle_epi8(bitcast<__m256i>(x), order));
}
#endif

DPRS_INLINE void quarter_round(u32v& a, u32v& b, u32v& c, u32v& d) {
  a += b; d = rotate<16>(d ^ a);
  c += d; b = rotate<12>(b ^ c);
  a += b; d = rotate<8>(d ^ a);
  c += d; b = rotate<7>(b ^ c);
}

// words[i] = word i of each of the kBlocks blocks.
inline void chacha20(const uint32_t* key, uint64_t step, const uint64_t blocks[kBlocks], u32v words[16]) {
  u32v in[16] = {};
  const uint32_t constants[4] = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574};   // "expand 32-byte k"
  for (int i = 0; i < 4; ++i) in[i] = u32v{} + constants[i];
  for (int i = 0; i < 8; ++i) in[4 + i] = u32v{} + key[i];
  for (int b = 0; b < kBlocks; ++b) {
    in[12][b] = static_cast<uint32_t>(blocks[b]);
    in[13][b] = static_cast<uint32_t>(blocks[b] >> 32);
  }
  in[14] = u32v{} + static_cast<uint32_t>(step);
  in[15] = u32v{} + static_cast<uint32_t>(step >> 32);
  u32v x[16];
  for (int i = 0; i < 16; ++i) x[i] = in[i];
  for (int round = 0; round < 20; round += 2) {
    quarter_round(x[0], x[4], x[8], x[12]);
    quarter_round(x[1], x[5], x[9], x[13]);
    quarter_round(x[2], x[6], x[10], x[14]);
    quarter_round(x[3], x[7], x[11], x[15]);
    quarter_round(x[0], x[5], x[10], x[15]);
    quarter_round(x[1], x[6], x[11], x[12]);
    quarter_round(x[2], x[7], x[8], x[13]);
    quarter_round(x[3], x[4], x[9], x[14]);
  }
  for (int i = 0; i < 16; ++i) words[i] = x[i] + in[i];
}

}  // namespace DPRS_ISA
}  // namespace dprs
