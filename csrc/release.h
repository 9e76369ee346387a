// release: sums and noise, on the grid, as the gradients that are handed out.
#pragma once
#ifdef _OPENMP
#include <omp.h>
#endif

#include "noise.h"
#include "tile_sums.h"

namespace dprs {
namespace DPRS_ISA {

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

// One tile: out = (rint(S/g) + rint(std z/g)) (g/divisor) where kept, +0 elsewhere. Noise is added to sums before both are spread
// out. (Made beside the pass over the gradients, some of it after every so many tiles, it saved up to 3 % of DP-CNN's step where
// memory is slow and nothing where it is fast, for 4 bytes a kept coordinate that had to be right.)
template <class T, bool HasUnit, bool HasGrid>
void release_tile(const dprs_release& r, const uint32_t* bits, const Work& work, const Tile& tile) {
  const uint32_t* keep = bits ? bits + tile.padded / kWord : nullptr;
  alignas(64) int32_t noise[kTile + kWord];
  if (HasGrid) noise_of_tile(r, keep, tile, noise);
  alignas(64) char joined[8 * (kTile + kWord)];
  const char* acc = work.parts[0].acc + 8 * tile.sum;
  if (HasUnit && are_apart(work)) {
    join_tile(work, tile, joined);
    acc = joined;
  }
  // Copies: the compiler then knows that storing results leaves them alone.
  const double per_grid = HasGrid ? 1 / r.grid : 0;   // exact: g is a power of two
  const double unit = r.unit, divisor = r.divisor, step = r.grid / r.divisor;
  const auto value = [=, &noise](int64_t at) {   // of kLanes kept coordinates, from the tile's at-th on
    f64v x = HasUnit ? to_f64(load<i64v>(acc + 8 * at)) * unit : load<f64v>(acc + 8 * at);
    if (HasGrid) x = (rint_even(x * per_grid) + to_f64(load<i32h>(noise + at))) * step;
    else x = x / divisor;
    return bitcast<u64v>(x + 0.0);   // no -0
  };
  T* out = static_cast<T*>(r.out[tile.param]) + tile.start;
  T last[kWord];
  int64_t at = 0;
  for (int64_t c = 0; c < tile.length; c += kWord) {
    const bool whole = c + kWord <= tile.length;
    T* to = whole ? out + c : last;
    const uint32_t word = keep ? keep[c / kWord] : ~0u;
    for (int v = 0; v < kWord; v += kLanes) {
      const uint32_t some = some_bits(word, v, kLanes);
      store_as(to + v, bitcast<f64v>(keep ? unpack(value(at), some) : value(at)));
      at += keep ? count_bits(some) : kLanes;
    }
    if (!whole) std::memcpy(out + c, last, sizeof(T) * (tile.length - c));
  }
}
template <class T> void release_tile(const dprs_release& r, const uint32_t* bits, const Work& work, const Tile& tile) {
  if (r.unit != 0 && r.grid != 0) release_tile<T, true, true>(r, bits, work, tile);
  else if (r.unit != 0) release_tile<T, true, false>(r, bits, work, tile);
  else if (r.grid != 0) release_tile<T, false, true>(r, bits, work, tile);
  else release_tile<T, false, false>(r, bits, work, tile);
}

// The parts have the sums, all the same ones or each its own.
inline void release(const dprs_release& r, const uint32_t* keep, const Work& work) {
#pragma omp parallel for num_threads(work.threads) schedule(static)
  for (int64_t t = 0; t < work.count; ++t) {
    switch (r.dtypes[work.tiles[t].param]) {
      case DPRS_F32: release_tile<float>(r, keep, work, work.tiles[t]); break;
      case DPRS_F64: release_tile<double>(r, keep, work, work.tiles[t]); break;
      case DPRS_BF16: release_tile<bf16>(r, keep, work, work.tiles[t]); break;
      default: release_tile<fp16>(r, keep, work, work.tiles[t]); break;
    }
  }
}

}  // namespace DPRS_ISA
}  // namespace dprs
