// noise: rint(noise_std z / g) of a tile's kept coordinates, one after another as its sums are, and who makes it when.
//
// A step makes its noise beside the pass over the gradients, a tile of it after every so many tiles of norms: arithmetic in
// registers, while memory goes on with what it was asked for. Against the same noise behind the pass DP-CNN's step of 128
// samples takes 2 to 4 % less where memory is slow (Zen 4, 35 GB/s), and the same where it is fast (55 GB/s). Asking for more
// gradients meanwhile brought nothing.
#pragma once
#include "factors.h"
#include "normals.h"
#include "pack.h"

namespace dprs {
namespace DPRS_ISA {

// |z| <= 9.42 and noise_std / g < 2^21: below 2^25 in absolute value (has_noise of dispatch.cpp sees to it that it fits). `to` has
// room for kWord more.
inline void noise_of_tile(const dprs_release& r, const uint32_t* keep, const Tile& tile, int32_t* to) {
  Blocks<kTile / 8> list;
  int count = 0, place[kTile / 8] = {};   // the normals of block b are at z + 8 place[b]; those of none kept are anything
  const uint32_t* words_kept = keep ? keep + tile.padded / kWord : nullptr;
  for (int b = 0; b < (tile.length + 7) / 8; ++b) {
    const uint32_t bits = keep ? words_kept[b / 4] >> (8 * (b % 4)) & 0xff : 0xff;
    list.set(count, tile.padded / 8 + b);
    place[b] = count;
    count += bits != 0;   // nothing kept: public, so skipping tells nobody anything
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
      const uint32_t bits = keep ? some_bits(words_kept[c / kWord], v, kStep) : ~0u;
      if (keep) pack(reinterpret_cast<float*>(to), bitcast<f32v>(both), bits);   // which does not look at the values
      else store(to, both);
      to += keep ? count_bits(bits) : kStep;
    }
}

// Where a tile's noise begins, among that of all.
inline int64_t noise_at(const Work& work, int64_t t) { return work.tiles[t].sum + kWord * t; }

// One part's noise beside the norms of group k: its share of tiles goes evenly over the groups, and over the tiles of norms.
class NoiseBeside {
  const Accumulate& a;
  const Work& work;
  int64_t next = 0, end = 0, due, visits, credit = 0;   // tiles

  void make() {
    noise_of_tile(*a.release, a.keep, work.tiles[next], a.noise + noise_at(work, next));
    ++next;
  }

 public:
  // visits: how often go_on will be called.
  NoiseBeside(const Accumulate& a, const Work& work, const Part& part, int64_t k, int64_t visits)
      : a(a), work(work), visits(visits) {
    const int64_t groups = groups_of(a, part), share = part.last_noise - part.first_noise;
    if (a.noise && (k < groups || groups == 0)) {   // no samples: all of it at once
      next = part.first_noise + (groups ? share * k / groups : 0);
      end = part.first_noise + (groups ? share * (k + 1) / groups : share);
    }
    due = end - next;
  }
  DPRS_INLINE void go_on() {
    for (credit += due; credit >= visits; credit -= visits) make();
  }
  void finish() {   // where there were no visits
    while (next < end) make();
  }
};

}  // namespace DPRS_ISA
}  // namespace dprs
