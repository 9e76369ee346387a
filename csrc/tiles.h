// tiles: cutting parameters into tiles and sharing them out. Norms are float64 sums within a tile, then over
// tiles in index order: no result depends on how tiles are shared among threads.
#pragma once
#include <algorithm>
#include <vector>

#include "kernels.h"

namespace dprs {

inline std::vector<Tile> make_tiles(const int64_t* sizes, int64_t params) {
  std::vector<Tile> tiles;
  int64_t first = 0;   // padded coordinate of the parameter
  for (int64_t p = 0; p < params; ++p) {
    for (int64_t s = 0; s < sizes[p]; s += kTile)
      tiles.push_back({p, s, first + s, std::min<int64_t>(kTile, sizes[p] - s), Kept::all, 0xF, false, 0, 0, 0, -1});
    first += padded(sizes[p]);
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

// What the mask leaves of each tile. Returns how long the sums of all are, with room for a register that ends beyond.
inline int64_t note_kept(std::vector<Tile>& tiles, const uint32_t* keep) {
  int64_t sums = 0;
  for (Tile& tile : tiles) {
    tile.count = tile.length;
    if (keep) {
      tile.count = tile.blocks = 0;
      for (int64_t c = 0; c < tile.length; c += 32) {
        const uint32_t word = keep[(tile.padded + c) / 32];   // no bit is set beyond the end of a parameter
        tile.blocks |= (word != 0) << c / kBlock;
        tile.count += __builtin_popcount(word);
      }
      tile.kept = tile.count == 0 ? Kept::none : tile.count == tile.length ? Kept::all : Kept::some;
    }
    tile.sum = sums;
    sums += padded(tile.count);
  }
  return sums + 32;
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

// Whether a tile's kept values are packed: not where all of it is kept and lies where the gradients are, one after another.
inline bool is_packed(const dprs_grads& g, const Tile& tile) {
  const bool in_place = !g.right[tile.param] && !tile.scattered && g.dims[tile.param] == 0;
  return tile.kept == Kept::some || (tile.kept == Kept::all && !in_place);
}
inline int64_t slot_bytes(const dprs_grads& g, const Tile& tile) {   // of one sample
  return packed_row(tile) * (g.dtypes[tile.param] == DPRS_F64 ? 8 : 4);
}

// Of one sample, what sums read.
inline int64_t row_bytes(const std::vector<Tile>& tiles, const dprs_grads& g) {
  int64_t bytes = 0;
  for (const Tile& tile : tiles) {
    const int64_t dtype = g.dtypes[tile.param], width = dtype == DPRS_F64 ? 8 : dtype == DPRS_F32 ? 4 : 2;
    bytes += is_packed(g, tile) ? slot_bytes(g, tile) : tile.count * width;
  }
  return bytes;
}

constexpr int64_t kOwnCache = 128 << 10;   // of slots, a thread: an eighth, or a quarter, of its core's own cache
constexpr int64_t kMostSlots = 32 << 20;   // of all: beyond, writing and reading them takes as long as a second read

inline bool fits_slots(int64_t row) { return 4 * row <= kMostSlots; }

// Samples per group: kOwnCache a thread, so that sums read what norms have left there; at least 4, the rows that one pass
// over the sums takes. Rows that are read twice: 32, because sums, 8 bytes a coordinate, are read and written once a group.
inline int64_t choose_group(int64_t row, int64_t threads) {
  if (!fits_slots(row)) return 32;
  return std::clamp<int64_t>(threads * kOwnCache / std::max<int64_t>(row, 1) / 4 * 4, 4, 64);
}

// Slots for the packed values of a group of samples; returns the bytes of all.
inline int64_t place_slots(std::vector<Tile>& tiles, const dprs_grads& g, int64_t group) {
  int64_t bytes = 0;
  for (Tile& tile : tiles) {
    if (!is_packed(g, tile)) continue;
    tile.slot = bytes;
    bytes += group * slot_bytes(g, tile);
  }
  return bytes;
}

}  // namespace dprs
