// tiles: cutting parameters into tiles and sharing them out. Norms are float64 sums within a tile, then over
// tiles in index order: no result depends on how tiles are shared among threads.
#pragma once
#include <algorithm>
#include <vector>

#include "kernels.h"

namespace dprs {

inline std::vector<Tile> make_tiles(const int64_t* sizes, int64_t params) {
  std::vector<Tile> tiles;
  int64_t padded = 0;
  for (int64_t p = 0; p < params; ++p) {
    for (int64_t s = 0; s < sizes[p]; s += kTile)
      tiles.push_back({p, s, padded + s, std::min<int64_t>(kTile, sizes[p] - s), Kept::all, 0xF, false, 0});
    padded += (sizes[p] + 31) / 32 * 32;
  }
  return tiles;
}

inline int64_t touched(const Tile& tile) {   // coordinates
  return std::min<int64_t>(tile.length, kBlock * __builtin_popcount(tile.blocks));
}

// Contiguous shares of the tiles, balanced by coordinates (small parameters make short tiles).
inline std::vector<int64_t> share_tiles(const std::vector<Tile>& tiles, int64_t threads) {
  const int64_t count = static_cast<int64_t>(tiles.size());
  std::vector<int64_t> first(threads + 1, count);
  int64_t total = 0, seen = 0, share = 0;
  for (const Tile& t : tiles) total += touched(t);
  for (int64_t i = 0; i < count; ++i) {
    while (share < threads && seen * threads >= share * total) first[share++] = i;
    seen += touched(tiles[i]);
  }
  return first;
}

// What the mask leaves of each tile.
inline void note_kept(std::vector<Tile>& tiles, const uint32_t* keep) {
  if (!keep) return;
  for (Tile& tile : tiles) {
    uint32_t every = ~0u;
    tile.blocks = 0;
    for (int64_t c = 0; c < tile.length; c += 32) {
      const uint32_t word = keep[(tile.padded + c) / 32];
      const int64_t rest = tile.length - c;
      tile.blocks |= (word != 0) << c / kBlock;
      every &= rest >= 32 ? word : word | ~((1u << rest) - 1);
    }
    tile.kept = tile.blocks == 0 ? Kept::none : every == ~0u ? Kept::all : Kept::some;
  }
}

// Where a tile's kept coordinates lie in a gradient of which only some rows are held. One run of it, in rows that
// follow each other there too, is read in place; its blocks must not reach beyond what is held.
inline void note_held(std::vector<Tile>& tiles, const dprs_grads& g) {
  int64_t rows = 0;   // held, of the tile's parameter
  for (Tile& tile : tiles) {
    const int64_t* held = g.held[tile.param];
    if (!held) continue;
    const int64_t row = g.row_sizes[tile.param];
    if (tile.start == 0) rows = std::count_if(held, held + g.sizes[tile.param] / row, [](int64_t at) { return at >= 0; });
    if (tile.kept == Kept::none) continue;
    bool first = true;
    for (int64_t o = tile.start / row; o * row < tile.start + tile.length; ++o) {
      if (held[o] < 0) continue;
      const int64_t shift = (held[o] - o) * row;
      if (!first && shift != tile.shift) tile.scattered = true;
      tile.shift = shift;
      first = false;
    }
    for (int64_t c = 0; c < tile.length; c += kBlock) {
      const int64_t at = tile.start + c + tile.shift;
      if (tile.blocks >> c / kBlock & 1 && (at < 0 || at + std::min<int64_t>(kBlock, tile.length - c) > rows * row))
        tile.scattered = true;
    }
  }
}

// Of one sample, as far as they are read from memory: an outer product is not.
inline int64_t row_bytes(const std::vector<Tile>& tiles, const dprs_grads& g) {
  int64_t bytes = 0;
  for (const Tile& tile : tiles)
    if (!g.right[tile.param]) {
      const int64_t dtype = g.dtypes[tile.param];
      bytes += touched(tile) * (dtype == DPRS_F64 ? 8 : dtype == DPRS_F32 ? 4 : 2);
    }
  return bytes;
}

constexpr int64_t kCache = 16 << 20;   // what can be hoped for of a shared last-level cache
constexpr int64_t kOwnCache = 256 << 10;   // a thread's group: half, or a quarter, of its core's own cache

inline Cache cache_of(int64_t bytes, int64_t threads) {   // of a group
  return bytes <= threads * kOwnCache ? Cache::own : bytes <= kCache ? Cache::shared : Cache::none;
}

// Samples per group. Small rows: kOwnCache a thread, so that sums read what norms have left there (DP-CNN/S, rows of
// 104 KB: 4 rows are 4 to 10 % faster than 8). Large rows: 4, the rows that one pass over the accumulator takes; more
// would push the group out of the last-level cache (8 rows of 2.2 MB cost 30 % on 32 MB). Rows that no cache holds are
// read twice anyway: 32, because the accumulator, 8 bytes a coordinate, is read and written once a group.
inline int64_t choose_group(int64_t row, int64_t threads) {
  if (4 * row > kCache) return 32;
  return std::clamp<int64_t>(threads * kOwnCache / std::max<int64_t>(row, 1) / 4 * 4, 4, 64);
}

}  // namespace dprs
