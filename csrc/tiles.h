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
      tiles.push_back({p, s, padded + s, std::min<int64_t>(kTile, sizes[p] - s)});
    padded += (sizes[p] + 31) / 32 * 32;
  }
  return tiles;
}

// Contiguous shares of the tiles, balanced by coordinates (small parameters make short tiles).
inline std::vector<int64_t> share_tiles(const std::vector<Tile>& tiles, int64_t threads) {
  const int64_t count = static_cast<int64_t>(tiles.size());
  std::vector<int64_t> first(threads + 1, count);
  int64_t total = 0, seen = 0, share = 0;
  for (const Tile& t : tiles) total += t.length;
  for (int64_t i = 0; i < count; ++i) {
    while (share < threads && seen * threads >= share * total) first[share++] = i;
    seen += tiles[i].length;
  }
  return first;
}

inline int64_t row_bytes(const dprs_grads& g) {
  int64_t bytes = 0;
  for (int64_t p = 0; p < g.params; ++p)
    bytes += g.sizes[p] * (g.dtypes[p] == DPRS_F64 ? 8 : g.dtypes[p] == DPRS_F32 ? 4 : 2);
  return bytes;
}

// Samples per group. Large rows: 4, the rows that one pass over the accumulator takes; more would push the
// group out of a shared last-level cache (8 rows of 2.2 MB cost 30 % on a 32 MB cache). Small rows: about
// 1 MB, so that a barrier (a few microseconds) is a small part of a group.
inline int64_t choose_group(int64_t row) {
  return std::clamp<int64_t>((1 << 20) / std::max<int64_t>(row, 1) / 8 * 8, 4, 64);
}

constexpr int64_t kCache = 16 << 20;   // what can be hoped for of a shared last-level cache

}  // namespace dprs
