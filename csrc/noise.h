// noise: rint(noise_std z / g) of a tile's kept coordinates, one after another as its sums are.
#pragma once
#include "normals.h"
#include "pack.h"

namespace dprs {
namespace DPRS_ISA {

// |z| <= 9.42 and noise_std / g < 2^21: below 2^25 in absolute value (noise_fits of dispatch.cpp sees to it that it fits). `to` has
// room for kWord more. keep: the tile's, or null.
inline void noise_of_tile(const dprs_release& r, const uint32_t* keep, const Tile& tile, int32_t* to) {
  Blocks<kTile / 8> list;
  int count = 0, place[kTile / 8];   // the normals of block b are at z + 8 place[b]; those of none kept are anything
  for (int b = 0; 8 * b < tile.length; b += 4) {   // by words: padding, too, which is no other's, and which release leaves
    const uint32_t word = keep ? keep[b / 4] : ~0u;
    for (int i = 0; i < 4; ++i) {
      list.set(count, tile.padded / 8 + b + i);
      place[b + i] = count;
      count += (word >> 8 * i & 0xff) != 0;   // nothing kept: public, so skipping tells nobody anything
    }
  }
  alignas(64) double z[kTile];
  const ChaCha20 cipher(r.key, r.step);
  normals_of_blocks(count, z, [&](int64_t first, u32v (&words)[kSets][16]) {
    cipher(list.low + first, list.high + first, words);
  });
  const double per_grid = r.noise_std * (1 / r.grid);   // both exact: g is a power of two
  const auto rounded = [&](int64_t c) { return round_to_int32(load<f64v>(z + 8 * place[c / 8] + c % 8) * per_grid); };
  for (int64_t c = 0; c < padded(tile.length); c += kWord)
    for (int v = 0; v < kWord; v += kStep) {
      const i32v both = join(rounded(c + v), rounded(c + v + kLanes));
      const uint32_t bits = keep ? some_bits(keep[c / kWord], v, kStep) : ~0u;
      if (keep) pack(reinterpret_cast<float*>(to), bitcast<f32v>(both), bits);   // which does not look at the values
      else store(to, both);
      to += keep ? count_bits(bits) : kStep;
    }
}

}  // namespace DPRS_ISA
}  // namespace dprs
