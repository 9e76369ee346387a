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

inline std::vector<Kept> kept_in(const std::vector<Tile>& tiles, const uint32_t* keep) {
  std::vector<Kept> kept(tiles.size(), Kept::all);
  for (size_t t = 0; keep && t < tiles.size(); ++t) {
    uint32_t any = 0, every = ~0u;
    for (int64_t c = 0; c < tiles[t].length; c += 32) {
      const uint32_t word = keep[(tiles[t].padded + c) / 32];
      const int64_t rest = tiles[t].length - c;
      any |= word;
      every &= rest >= 32 ? word : word | ~((1u << rest) - 1);
    }
    kept[t] = any == 0 ? Kept::none : every == ~0u ? Kept::all : Kept::some;
  }
  return kept;
}

inline int64_t row_bytes(const dprs_grads& g) {
  int64_t bytes = 0;
  for (int64_t p = 0; p < g.params; ++p)   // an outer product is not read from memory
    if (!g.right[p]) bytes += g.sizes[p] * (g.dtypes[p] == DPRS_F64 ? 8 : g.dtypes[p] == DPRS_F32 ? 4 : 2);
  return bytes;
}

constexpr int64_t kCache = 16 << 20;   // what can be hoped for of a shared last-level cache

// Samples per group. Small rows: 256 KB a thread, half of a core's own cache, so that sums read what norms have left
// there (DP-CNN/S, rows of 104 KB: 4 rows are 4 to 10 % faster than 8). Large rows: 4, the rows that one pass over the
// accumulator takes; more would push the group out of the last-level cache (8 rows of 2.2 MB cost 30 % on 32 MB).
// Rows that no cache holds are read twice anyway: 32, because the accumulator, 8 bytes a coordinate, is read and
// written once a group.
inline int64_t choose_group(int64_t row, int64_t threads) {
  if (4 * row > kCache) return 32;
  return std::clamp<int64_t>(threads * (256 << 10) / std::max<int64_t>(row, 1) / 4 * 4, 4, 64);
}

}  // namespace dprs
