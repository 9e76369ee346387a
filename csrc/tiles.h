// tiles: cutting parameters into tiles, and what of them is kept, and where. Norms are float64 sums within a tile, then over
// tiles in index order: no result depends on how tiles are shared among threads.
#pragma once
#include <algorithm>
#include <vector>

#include "kernels.h"

namespace dprs {

inline std::vector<Tile> make_tiles(const int64_t* sizes, int64_t params) {
  std::vector<Tile> tiles;
  int64_t count = 0, first = 0;   // first: padded coordinate of the parameter
  for (int64_t p = 0; p < params; ++p) count += (sizes[p] + kTile - 1) / kTile;
  tiles.reserve(count);
  for (int64_t p = 0; p < params; ++p) {
    for (int64_t s = 0; s < sizes[p]; s += kTile)
      tiles.push_back({p, s, first + s, std::min<int64_t>(kTile, sizes[p] - s), Kept::all, 0xF, false, 0, 0, 0, -1,
                       nullptr, 0});
    first += padded(sizes[p]);
  }
  return tiles;
}

// Bits that are set in at most 16 words: byte by byte, then the sum of the bytes. This file is compiled for any CPU, where
// __builtin_popcount is a call: 70 us for DP-CNN's mask.
inline int64_t popcount(const uint32_t* words, int64_t count) {
  uint32_t bytes = 0;
  for (int64_t i = 0; i < count; ++i) {
    uint32_t x = words[i];
    x -= x >> 1 & 0x55555555u;
    x = (x & 0x33333333u) + (x >> 2 & 0x33333333u);
    bytes += (x + (x >> 4)) & 0x0f0f0f0fu;
  }
  bytes = (bytes & 0xff00ffu) + (bytes >> 8 & 0xff00ffu);
  return (bytes & 0xffff) + (bytes >> 16);
}

// What the mask leaves of each tile. Returns how long the sums of all are, with room for a register that ends beyond.
inline int64_t note_kept(std::vector<Tile>& tiles, const uint32_t* keep) {
  int64_t sums = 0;
  for (Tile& tile : tiles) {
    tile.count = tile.length;
    if (keep) {
      tile.count = tile.blocks = 0;
      for (int64_t c = 0; c < tile.length; c += kBlock) {   // no bit is set beyond the end of a parameter
        const int64_t kept = popcount(keep + (tile.padded + c) / 32, padded(std::min<int64_t>(kBlock, tile.length - c)) / 32);
        tile.blocks |= (kept != 0) << c / kBlock;
        tile.count += kept;
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

// Where the tiles' values lie.
inline void note_places(std::vector<Tile>& tiles, const dprs_grads& g) {
  for (Tile& tile : tiles) {
    if (g.right[tile.param] || tile.scattered || g.dims[tile.param] != 0) continue;
    const int64_t width = width_of(g.dtypes[tile.param]);
    tile.first = static_cast<const char*>(g.data[tile.param]) + width * (tile.start + tile.shift);
    tile.step = width * g.row_strides[tile.param];
  }
}

// Whether a tile's kept values are packed: not where all of it is kept and lies where the gradients are, one after another.
inline bool is_packed(const Tile& tile) { return tile.kept == Kept::some || (tile.kept == Kept::all && !tile.first); }
inline int64_t slot_bytes(const dprs_grads& g, const Tile& tile) {   // of one sample
  return packed_row(tile) * (g.dtypes[tile.param] == DPRS_F64 ? 8 : 4);
}

// What one sample has for sums to read, in bytes: packed values of gradients that lie one after another, packed values of
// those that are gathered or made, and gradients that are read again where they lie; and what the first would be, read again.
struct RowBytes {
  int64_t packed, made, again, whole;
};
inline RowBytes row_bytes(const std::vector<Tile>& tiles, const dprs_grads& g) {
  RowBytes row = {0, 0, 0, 0};
  for (const Tile& tile : tiles) {
    const int64_t width = width_of(g.dtypes[tile.param]);
    if (!is_packed(tile)) row.again += tile.count * width;
    else if (!tile.first) row.made += slot_bytes(g, tile);
    else row.packed += slot_bytes(g, tile), row.whole += tile.length * width;
  }
  return row;
}

// Slots for the packed values of a group of samples; returns the bytes of all.
inline int64_t place_slots(std::vector<Tile>& tiles, const dprs_grads& g, int64_t group) {
  int64_t bytes = 0;
  for (Tile& tile : tiles) {
    if (!is_packed(tile)) continue;
    tile.slot = bytes;
    bytes += group * slot_bytes(g, tile);
  }
  return bytes;
}

}  // namespace dprs
