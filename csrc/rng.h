// rng: ChaCha20 words, a pure function of (key, step, block). RFC 8439's round function with the original
// layout of the last four state words: a 64-bit block counter, then a 64-bit nonce = the step.
// One 64-byte block serves 8 coordinates. A vector holds one state word of several blocks; the block
// numbers are arbitrary, so blocks whose coordinates are all dropped are never made.
#pragma once
#include "simd.h"

namespace dprs {
namespace DPRS_ISA {

constexpr int kBlocks = 2 * kLanes;   // blocks at a time: 32-bit lanes in a native register
#if defined(__AVX512F__)
// Of these, side by side in the 32 registers: one set alone waits for its own results. 550,570 normals take 0.86 ms in the
// place of 1.04 on a Zen 5 core.
constexpr int kSets = 2;
#else
constexpr int kSets = 1;
#endif

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

// 64-bit words from their halves. Registers of 256 and 512 bits interleave within 128, so lanes get out of order:
// words[i / kLanes][i % kLanes] comes from lane lane_of_word(i) of the halves.
constexpr int lane_of_word(int i) { return i % kLanes / 2 * 4 + i / kLanes * 2 + i % 2; }
DPRS_INLINE void join_halves(u32v lo, u32v hi, u64v words[2]) {
#if defined(__AVX512F__)
  words[0] = bitcast<u64v>(_mm512_unpacklo_epi32(bitcast<__m512i>(lo), bitcast<__m512i>(hi)));
  words[1] = bitcast<u64v>(_mm512_unpackhi_epi32(bitcast<__m512i>(lo), bitcast<__m512i>(hi)));
#elif defined(__AVX2__)
  words[0] = bitcast<u64v>(_mm256_unpacklo_epi32(bitcast<__m256i>(lo), bitcast<__m256i>(hi)));
  words[1] = bitcast<u64v>(_mm256_unpackhi_epi32(bitcast<__m256i>(lo), bitcast<__m256i>(hi)));
#elif defined(__x86_64__)
  words[0] = bitcast<u64v>(_mm_unpacklo_epi32(bitcast<__m128i>(lo), bitcast<__m128i>(hi)));
  words[1] = bitcast<u64v>(_mm_unpackhi_epi32(bitcast<__m128i>(lo), bitcast<__m128i>(hi)));
#elif defined(__aarch64__)
  words[0] = bitcast<u64v>(vzip1q_u32(bitcast<uint32x4_t>(lo), bitcast<uint32x4_t>(hi)));
  words[1] = bitcast<u64v>(vzip2q_u32(bitcast<uint32x4_t>(lo), bitcast<uint32x4_t>(hi)));
#else
  for (int i = 0; i < 2 * kLanes; ++i)
    words[i / kLanes][i % kLanes] = lo[lane_of_word(i)] | static_cast<uint64_t>(hi[lane_of_word(i)]) << 32;
#endif
}

// The lane that block i of a list has, among the kBlocks that are made together: join_halves puts them in order again.
struct LanesOfWords {
  uint8_t of[kBlocks] = {};

  constexpr LanesOfWords() {
    for (int i = 0; i < kBlocks; ++i) of[i] = static_cast<uint8_t>(lane_of_word(i));
  }
};
constexpr LanesOfWords kLaneOfWord;
DPRS_INLINE int lane_of_block(int i) { return i / kBlocks * kBlocks + kLaneOfWord.of[i % kBlocks]; }

// Numbers of blocks, in halves, as the cipher reads them.
template <int Most> struct Blocks {
  static_assert(Most % kBlocks == 0, "whole vectors");
  uint32_t low[Most] = {}, high[Most] = {};

  DPRS_INLINE void set(int i, uint64_t block) {
    const int lane = lane_of_block(i);
    low[lane] = static_cast<uint32_t>(block);
    high[lane] = static_cast<uint32_t>(block >> 32);
  }
};

// The state that all blocks of a step share: constants, key and step are spread over the lanes once.
class ChaCha20 {
  u32v first[16] = {};

 public:
  ChaCha20(const uint32_t* key, uint64_t step) {
    const uint32_t constants[4] = {0x61707865, 0x3320646e, 0x79622d32, 0x6b206574};   // "expand 32-byte k"
    for (int i = 0; i < 4; ++i) first[i] = u32v{} + constants[i];
    for (int i = 0; i < 8; ++i) first[4 + i] = u32v{} + key[i];
    first[14] = u32v{} + static_cast<uint32_t>(step);
    first[15] = u32v{} + static_cast<uint32_t>(step >> 32);
  }
  // words[s][i] = word i of each of kBlocks blocks, whose numbers come as low and high halves; Sets times as many.
  template <int Sets>
  DPRS_INLINE void operator()(const uint32_t* low_counter, const uint32_t* high_counter, u32v (&words)[Sets][16]) const {
    u32v x[Sets][16];
    DPRS_UNROLL for (int s = 0; s < Sets; ++s) {
      DPRS_UNROLL for (int i = 0; i < 16; ++i) x[s][i] = first[i];
      x[s][12] = load<u32v>(low_counter + s * kBlocks);
      x[s][13] = load<u32v>(high_counter + s * kBlocks);
    }
    for (int round = 0; round < 20; round += 2) {
      DPRS_UNROLL for (int i = 0; i < 4; ++i)
        DPRS_UNROLL for (int s = 0; s < Sets; ++s) quarter_round(x[s][i], x[s][4 + i], x[s][8 + i], x[s][12 + i]);
      DPRS_UNROLL for (int i = 0; i < 4; ++i)
        DPRS_UNROLL for (int s = 0; s < Sets; ++s)
          quarter_round(x[s][i], x[s][4 + (i + 1) % 4], x[s][8 + (i + 2) % 4], x[s][12 + (i + 3) % 4]);
    }
    DPRS_UNROLL for (int s = 0; s < Sets; ++s) {
      DPRS_UNROLL for (int i = 0; i < 16; ++i) words[s][i] = x[s][i] + first[i];
      words[s][12] = x[s][12] + load<u32v>(low_counter + s * kBlocks);
      words[s][13] = x[s][13] + load<u32v>(high_counter + s * kBlocks);
    }
  }
};

}  // namespace DPRS_ISA
}  // namespace dprs
