// Lanes: the same source for every instruction set.
//
// A vector is V::lanes float64 wide in the widest native register of the translation unit: 2 lanes
// (baseline x86-64, NEON), 4 (AVX2) or 8 (AVX-512). GCC/Clang vector extensions give + - * / & | ^ << >>
// and comparisons lane by lane, so results depend on the lane *order* that the kernels fix, never on the
// register width: all instruction sets return the same bits (tests/test_native.py).
// Built with -ffp-contract=off; the only fused multiply-add is `madd_exact`, whose product is exact.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace dprs {
namespace DPRS_ISA {

#if defined(__AVX512F__)
constexpr int kLanes = 8;
#elif defined(__AVX2__)
constexpr int kLanes = 4;
#else
constexpr int kLanes = 2;
#endif

typedef double f64v __attribute__((vector_size(8 * kLanes)));
typedef uint64_t u64v __attribute__((vector_size(8 * kLanes)));
typedef int64_t i64v __attribute__((vector_size(8 * kLanes)));
typedef float f32v __attribute__((vector_size(8 * kLanes)));      // 2 kLanes values: a register again
typedef uint32_t u32v __attribute__((vector_size(8 * kLanes)));
typedef int32_t i32v __attribute__((vector_size(8 * kLanes)));
typedef float f32h __attribute__((vector_size(4 * kLanes)));      // half a register
typedef uint32_t u32h __attribute__((vector_size(4 * kLanes)));
typedef int32_t i32h __attribute__((vector_size(4 * kLanes)));
typedef uint16_t u16h __attribute__((vector_size(4 * kLanes)));   // bf16 and fp16 storage of an f32v

struct bf16 { uint16_t bits; };
struct fp16 { uint16_t bits; };

#define DPRS_INLINE inline __attribute__((always_inline))
#define DPRS_UNROLL _Pragma("GCC unroll 32")   // all of a short loop: what it indexes can then live in registers

template <int Value> struct Constant {
  static constexpr int value = Value;
};
DPRS_INLINE int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

template <class V, class T> DPRS_INLINE V load(const T* p) {
  V v;
  std::memcpy(&v, p, sizeof v);   // unaligned load
  return v;
}
template <class V, class T> DPRS_INLINE void store(T* p, V v) { std::memcpy(p, &v, sizeof v); }
template <class To, class From> DPRS_INLINE To bitcast(From v) {
  static_assert(sizeof(To) == sizeof(From), "same size");
  To r;
  std::memcpy(&r, &v, sizeof r);
  return r;
}
// x in an ordinary register: GCC would hold keep bits in AVX-512's mask registers alone, shift them there (4 cycles) and
// fetch them back to count them (through the ports that stores need).
DPRS_INLINE uint32_t in_register(uint32_t x) {
  __asm__("" : "+r"(x));
  return x;
}
DPRS_INLINE f64v splat(double x) { return f64v{} + x; }

// Subnormal numbers (fp32: below 1.2e-38) count as zero while this lives: some CPUs take 100 times longer over them, and callers
// (torch.set_flush_denormal) may or may not have chosen so already.
class FlushSubnormals {
#if defined(__x86_64__)
  const unsigned saved = _mm_getcsr();
 public:
  FlushSubnormals() { _mm_setcsr((saved & ~0x6000u) | 0x8040u); }   // round to nearest; FTZ, DAZ
  ~FlushSubnormals() { _mm_setcsr(saved); }
#elif defined(__aarch64__)
  uint64_t saved;
 public:
  FlushSubnormals() {
    __asm__ volatile("mrs %0, fpcr" : "=r"(saved));
    __asm__ volatile("msr fpcr, %0" : : "r"((saved & ~(3ull << 22)) | (1ull << 24)));
  }
  ~FlushSubnormals() { __asm__ volatile("msr fpcr, %0" : : "r"(saved)); }
#endif
};

DPRS_INLINE void spin_pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  __asm__ volatile("yield");
#endif
}

// a*b + c where a*b is exact in float64 (two 24-bit significands): fused or not, the same bits.
DPRS_INLINE f64v madd_exact(f64v a, f64v b, f64v c) {
#if defined(__AVX512F__)
  return _mm512_fmadd_pd(a, b, c);
#elif defined(__FMA__) && defined(__AVX2__)
  return _mm256_fmadd_pd(a, b, c);
#elif defined(__aarch64__)
  return vfmaq_f64(c, a, b);
#else
  return a * b + c;
#endif
}

DPRS_INLINE f64v sqrt(f64v x) {
#if defined(__AVX512F__)
  return _mm512_sqrt_pd(x);
#elif defined(__AVX2__)
  return _mm256_sqrt_pd(x);
#elif defined(__x86_64__)
  return _mm_sqrt_pd(x);
#elif defined(__aarch64__)
  return vsqrtq_f64(x);
#else
  for (int i = 0; i < kLanes; ++i) x[i] = __builtin_sqrt(x[i]);
  return x;
#endif
}

// Round half to even (the default rounding mode is assumed, as everywhere in torch).
DPRS_INLINE f64v rint_even(f64v x) {
#if defined(__AVX512F__)
  return _mm512_roundscale_pd(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__AVX2__)
  return _mm256_round_pd(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
#elif defined(__aarch64__)
  return vrndnq_f64(x);
#else
  for (int i = 0; i < kLanes; ++i) x[i] = __builtin_nearbyint(x[i]);
  return x;
#endif
}

// 64-bit integers to float64, rounded once. AVX-512 has an instruction. Elsewhere the two halves sit in the significands of 2^84
// and 2^52: (2^84 + hi 2^32) - (2^84 + 2^52) is exact, adding (2^52 + lo) rounds.
#if defined(__AVX512DQ__)
DPRS_INLINE f64v to_f64(u64v x) { return _mm512_cvtepu64_pd(bitcast<__m512i>(x)); }
DPRS_INLINE f64v to_f64(i64v x) { return _mm512_cvtepi64_pd(bitcast<__m512i>(x)); }
#else
DPRS_INLINE f64v to_f64(u64v x) {
  const f64v hi = bitcast<f64v>((x >> 32) | 0x4530000000000000ull);
  const f64v lo = bitcast<f64v>((x & 0xffffffffull) | 0x4330000000000000ull);
  return (hi - 19342813118337666422669312.0) + lo;   // 2^84 + 2^52
}
DPRS_INLINE f64v to_f64(i64v x) {
  const u64v u = bitcast<u64v>(x);
  const f64v hi = bitcast<f64v>((u >> 32) ^ 0x4530000080000000ull);
  const f64v lo = bitcast<f64v>((u & 0xffffffffull) | 0x4330000000000000ull);
  return (hi - 19342822341709703277445120.0) + lo;   // 2^84 + 2^63 + 2^52
}
#endif

// ---- changes of width. __builtin_convertvector would do, but GCC 12 splits it into halves.
#if defined(__AVX512F__)
DPRS_INLINE f64v widen(f32h x) { return _mm512_cvtps_pd(bitcast<__m256>(x)); }
DPRS_INLINE f32h narrow(f64v x) { return bitcast<f32h>(_mm512_cvtpd_ps(x)); }
DPRS_INLINE u64v widen(u32h x) { return bitcast<u64v>(_mm512_cvtepu32_epi64(bitcast<__m256i>(x))); }
DPRS_INLINE i64v widen(i32h x) { return bitcast<i64v>(_mm512_cvtepi32_epi64(bitcast<__m256i>(x))); }
DPRS_INLINE u32v widen(u16h x) { return bitcast<u32v>(_mm512_cvtepu16_epi32(bitcast<__m256i>(x))); }
DPRS_INLINE i32v round_to_int(f32v x) { return bitcast<i32v>(_mm512_cvtps_epi32(bitcast<__m512>(x))); }
#elif defined(__AVX2__)
DPRS_INLINE f64v widen(f32h x) { return _mm256_cvtps_pd(bitcast<__m128>(x)); }
DPRS_INLINE f32h narrow(f64v x) { return bitcast<f32h>(_mm256_cvtpd_ps(x)); }
DPRS_INLINE u64v widen(u32h x) { return bitcast<u64v>(_mm256_cvtepu32_epi64(bitcast<__m128i>(x))); }
DPRS_INLINE i64v widen(i32h x) { return bitcast<i64v>(_mm256_cvtepi32_epi64(bitcast<__m128i>(x))); }
DPRS_INLINE u32v widen(u16h x) { return bitcast<u32v>(_mm256_cvtepu16_epi32(bitcast<__m128i>(x))); }
DPRS_INLINE i32v round_to_int(f32v x) { return bitcast<i32v>(_mm256_cvtps_epi32(bitcast<__m256>(x))); }
#else
DPRS_INLINE f64v widen(f32h x) { return __builtin_convertvector(x, f64v); }
DPRS_INLINE f32h narrow(f64v x) { return __builtin_convertvector(x, f32h); }
DPRS_INLINE u64v widen(u32h x) { return __builtin_convertvector(x, u64v); }
DPRS_INLINE i64v widen(i32h x) { return __builtin_convertvector(x, i64v); }
DPRS_INLINE u32v widen(u16h x) { return __builtin_convertvector(x, u32v); }
DPRS_INLINE i32v round_to_int(f32v x) {   // half to even
#if defined(__x86_64__)
  return bitcast<i32v>(_mm_cvtps_epi32(bitcast<__m128>(x)));
#elif defined(__aarch64__)
  return bitcast<i32v>(vcvtnq_s32_f32(bitcast<float32x4_t>(x)));
#else
  i32v r;
  for (int i = 0; i < 2 * kLanes; ++i) r[i] = static_cast<int32_t>(__builtin_llrintf(x[i]));   // any x: a number
  return r;
#endif
}
#endif
// int32 from float64, half to even, and back.
#if defined(__AVX512F__)
DPRS_INLINE i32h round_to_int32(f64v x) { return bitcast<i32h>(_mm512_cvtpd_epi32(x)); }
DPRS_INLINE f64v to_f64(i32h x) { return _mm512_cvtepi32_pd(bitcast<__m256i>(x)); }
#elif defined(__AVX2__)
DPRS_INLINE i32h round_to_int32(f64v x) { return bitcast<i32h>(_mm256_cvtpd_epi32(x)); }
DPRS_INLINE f64v to_f64(i32h x) { return _mm256_cvtepi32_pd(bitcast<__m128i>(x)); }
#else
DPRS_INLINE i32h round_to_int32(f64v x) { return __builtin_convertvector(rint_even(x), i32h); }
DPRS_INLINE f64v to_f64(i32h x) { return __builtin_convertvector(x, f64v); }
#endif
// Halves of a register. By instructions: a copy of part of a variable's bytes would keep that variable in memory.
template <class Half, class Full> DPRS_INLINE Half low(Full x) {
#if defined(__AVX512F__)
  return bitcast<Half>(_mm512_castsi512_si256(bitcast<__m512i>(x)));
#elif defined(__AVX2__)
  return bitcast<Half>(_mm256_castsi256_si128(bitcast<__m256i>(x)));
#else
  Half h;
  std::memcpy(&h, &x, sizeof h);
  return h;
#endif
}
template <class Half, class Full> DPRS_INLINE Half high(Full x) {
#if defined(__AVX512F__)
  return bitcast<Half>(_mm512_extracti64x4_epi64(bitcast<__m512i>(x), 1));
#elif defined(__AVX2__)
  return bitcast<Half>(_mm256_extracti128_si256(bitcast<__m256i>(x), 1));
#else
  Half h;
  std::memcpy(&h, reinterpret_cast<const char*>(&x) + sizeof h, sizeof h);
  return h;
#endif
}

DPRS_INLINE i32v join(i32h lo, i32h hi) {
#if defined(__AVX512F__)
  return bitcast<i32v>(_mm512_inserti64x4(_mm512_castsi256_si512(bitcast<__m256i>(lo)), bitcast<__m256i>(hi), 1));
#elif defined(__AVX2__)
  return bitcast<i32v>(_mm256_inserti128_si256(_mm256_castsi128_si256(bitcast<__m128i>(lo)), bitcast<__m128i>(hi), 1));
#else
  i32v both;
  std::memcpy(&both, &lo, sizeof lo);
  std::memcpy(reinterpret_cast<char*>(&both) + sizeof lo, &hi, sizeof hi);
  return both;
#endif
}

// ---- loading per-sample gradient values; `m` selects, so that a dropped NaN or Inf becomes 0 and never meets an
// ---- arithmetic instruction.
DPRS_INLINE f32v load_f32(const float* p) { return load<f32v>(p); }
DPRS_INLINE f32v load_f32(const bf16* p) { return bitcast<f32v>(widen(load<u16h>(p)) << 16); }
DPRS_INLINE f32v load_f32(const fp16* p) {
#if defined(__AVX512F__)
  return bitcast<f32v>(_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p))));
#elif defined(__F16C__) && defined(__AVX2__)
  return bitcast<f32v>(_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
#else
  // Move exponent and significand into place and rebias: 112 more for ordinary numbers, 224 for Inf and NaN.
  // A subnormal m 2^-24 becomes (1 + m 2^-10) 2^-14 - 2^-14: no subnormal fp32 appears, since those are flushed.
  const u32v h = widen(load<u16h>(p));
  const u32v moved = (h & 0x7fff) << 13, exponent = h & 0x7c00;
  const u32v special = bitcast<u32v>(exponent == 0x7c00), tiny = bitcast<u32v>(exponent == 0);
  const u32v ordinary = moved + (112u << 23) + (special & (112u << 23));
  const u32v small = bitcast<u32v>(bitcast<f32v>(moved + (113u << 23)) - 6.103515625e-05f);   // 2^-14
  return bitcast<f32v>((tiny & small) | (~tiny & ordinary) | (h & 0x8000) << 16);
#endif
}
struct Pair {   // an f32v's values as float64
  f64v lo, hi;
};

// Keep bits come 32 coordinates (a word) at a time: kVectors vectors of kStep values.
constexpr int kStep = 2 * kLanes;
constexpr int kWord = 32;
constexpr int kVectors = kWord / kStep;
DPRS_INLINE uint32_t some_bits(uint32_t word, int from, int count) { return word >> from & ((1u << count) - 1); }

// The word's bits for vector v: which values of it are kept. AVX-512 has registers for that; elsewhere 0 or ~0 a value.
#if defined(__AVX512F__)
typedef __mmask16 Lanes;
DPRS_INLINE Lanes keep_mask(uint32_t word, int v) { return static_cast<Lanes>(word >> v * kStep); }
DPRS_INLINE u32v select(Lanes m, u32v x) { return bitcast<u32v>(_mm512_maskz_mov_epi32(m, bitcast<__m512i>(x))); }
DPRS_INLINE Pair select(Lanes m, f64v lo, f64v hi) {
  return {_mm512_maskz_mov_pd(static_cast<__mmask8>(m), lo), _mm512_maskz_mov_pd(static_cast<__mmask8>(m >> 8), hi)};
}
#else
typedef u32v Lanes;
DPRS_INLINE Lanes keep_mask(uint32_t word, int v) {
  u32v lane = {};
  for (int l = 0; l < kStep; ++l) lane[l] = 1u << l;   // a constant
  lane <<= v * kStep;
  return bitcast<u32v>(((u32v{} + word) & lane) == lane);
}
DPRS_INLINE u32v select(Lanes m, u32v x) { return x & m; }
DPRS_INLINE Pair select(Lanes m, f64v lo, f64v hi) {   // sign extension turns 32 ones into 64
  return {bitcast<f64v>(bitcast<i64v>(lo) & widen(low<i32h>(bitcast<i32v>(m)))),
          bitcast<f64v>(bitcast<i64v>(hi) & widen(high<i32h>(bitcast<i32v>(m))))};
}
#endif

// The word's bits from bit v on, as 0 or ~0 a float64.
DPRS_INLINE u64v keep_mask_wide(uint32_t word, int v) {
  u64v lane = {};
  for (int l = 0; l < kLanes; ++l) lane[l] = 1ull << l;   // a constant
  lane <<= v;
  return bitcast<u64v>(((u64v{} + word) & lane) == lane);
}

DPRS_INLINE Pair widen(f32v x) { return {widen(low<f32h>(x)), widen(high<f32h>(x))}; }

template <bool HasKeep, class T> DPRS_INLINE f32v load_kept(const T* p, Lanes m) {
  const f32v x = load_f32(p);
  return HasKeep ? bitcast<f32v>(select(m, bitcast<u32v>(x))) : x;
}
template <bool HasKeep, class T> DPRS_INLINE Pair load_pair(const T* p, Lanes m) {
  return widen(load_kept<HasKeep>(p, m));
}
template <bool HasKeep> DPRS_INLINE Pair load_pair(const double* p, Lanes m) {
  const Pair x = {load<f64v>(p), load<f64v>(p + kLanes)};
  return HasKeep ? select(m, x.lo, x.hi) : x;
}

// state = f(state, rows, offset in rows, column, keep word) for kWord columns of a tile's rows at a time. A row may end at
// the end of its allocation, so the last odd values are seen through a zero-padded copy.
template <int Count, class T, class State, class F>
DPRS_INLINE State fold_words(const T* const* rows, const uint32_t* keep, int64_t begin, int64_t end, State state, F f) {
  const int64_t whole = begin + (end - begin) / kWord * kWord;
  const T* own[Count];   // a copy: the compiler then knows that what f stores leaves the addresses alone
  const T* last[Count];
  T tails[Count][kWord];
  for (int r = 0; r < Count; ++r) own[r] = rows[r];
  if (whole < end)   // before the loop: a call behind it would keep the state out of registers within it
    for (int r = 0; r < Count; ++r) {
      std::memset(tails[r], 0, sizeof tails[r]);
      std::memcpy(tails[r], rows[r] + whole, sizeof(T) * (end - whole));
      last[r] = tails[r];
    }
  for (int64_t c = begin; c < whole; c += kWord) state = f(state, own, c, c, keep ? keep[c / kWord] : ~0u);
  if (whole < end) state = f(state, last, 0, whole, keep ? keep[whole / kWord] : ~0u);
  return state;
}

// a*b + c for the value type T: fp32 and narrower have exact products; fp64 rounds the product first,
// on every instruction set alike.
template <class T> DPRS_INLINE f64v madd(f64v a, f64v b, f64v c) { return madd_exact(a, b, c); }
template <> DPRS_INLINE f64v madd<double>(f64v a, f64v b, f64v c) { return a * b + c; }

}  // namespace DPRS_ISA
}  // namespace dprs
