// ask: which of the values that norms will read memory is asked for, while they read others.
//
// Where a CPU reads nothing ahead by itself, each line must be asked for 142 ns (Zen 5) before it is needed, some 100 of them
// under way on a core. Measured there, in reads of the gradients at full bandwidth (a loop of its own, half dropped):
//  - A core that has no place for another line forgets what it is asked: 32 lines asked for at once, in the place of one after
//    another between the arithmetic, take 2.5 reads, not 1.3. So lines are asked for at the pace at which they are read.
//  - Slots and sums take places, too, so some lines are forgotten at any pace. Asking early, and again half the way later,
//    brings 1.40 -> 1.24 with small rows; a line that is there, or under way, costs an instruction. A third time brings nothing.
//  - Lines that wait in the first cache for too long are displaced, where slots and sums leave little room: with large rows
//    8 KB ahead are too many, 6 are best (1.44, 1.32; 4 KB: 1.35).
// On Zen 4 lines asked for into the first cache (prefetcht0) make 2.2 to 2.6 reads of DP-CNN/S's gradients, into the second
// (prefetcht1) 1.2 to 1.3. The likely reason, not proven (no counters were at hand): places for lines under way to the first
// cache are few, 24 it is said, 14 GB/s at 110 ns each where two cores read at 61, and to the second there are more.
// What is asked for runs through tiles, rows and groups in the order of accumulate.h: a row that begins has been asked for.
// CPUs that read ahead by themselves (a Xeon with AMX) need little: a line once, a block of columns early. Two things pay there:
//  - Rows that are read together are asked for 64 bytes apart: those of a layer whose size is a power of two lie whole pages apart,
//    and lines at the same place of four pages are slow (16,384 coordinates, 3,250 samples: 1.17 -> 1.12 reads). Likely reason,
//    not proven: they go to the same part of memory at the same time.
//  - Towards the end of a parameter the next one's rows are asked for, at the same pace; as many lines asked for all at once
//    brought nothing. In the kernels: DP-CNN/S, 8 parameters, 1.22 -> 1.14; 26 parameters of 1024, 1.59 -> 1.38; DP-CNN 1.52 ->
//    1.49.
#pragma once
#include "factors.h"
#include "pack.h"
#include "rows.h"

namespace dprs {
namespace DPRS_ISA {

// How lines are asked for (order.h): once, or early and again, into a core's first cache; or twice into its second one.
enum class Ask { once, twice, second };
template <Ask How> struct Way {
  static constexpr Ask value = How;
};

// What to ask for while a tile is read.
template <class T, Ask How> struct Asked {
  Rows<const T> early, again;

  DPRS_INLINE Asked from(int64_t at) const { return {early.from(at), again.from(at)}; }   // a column
  DPRS_INLINE void line(int r, int v) const {   // of vector v of row r
    if (How == Ask::twice) ask<Into::once>(early[r], v);
    if (How == Ask::second) ask<Into::second>(early[r], v);
    ask<How == Ask::second ? Into::second : Into::first>(again[r], v);
  }
};

// For each column of a tile: from `turn` on it is `next`, what the tile that is read after this one asks for.
template <class T, Ask How> struct Asks {
  Asked<T, How> here, next;
  int64_t turn;

  DPRS_INLINE const Asked<T, How>& at(int64_t column) const { return How == Ask::once && column >= turn ? next : here; }
};

// Bytes by which places of rows that are read together differ, beside the rows' own distance.
template <Ask How> constexpr int64_t kApart = How == Ask::once ? 64 : 0;

// What comes behind `rows` in memory. Twice without an early distance: the line that is read, which costs an instruction.
template <Ask How, class T> DPRS_INLINE Asks<T, How> behind(const Accumulate& a, Rows<const T> rows) {
  const Asked<T, How> here = {{rows.first + a.order.early, rows.step}, {rows.first + a.order.ahead, rows.step + kApart<How>}};
  return {here, here, kTile};
}

// Walks through the tiles that one thread's norms will read, a.order.early and a.order.ahead bytes of a row before them;
// near, through those of a block or more, one tile before. (So it does for values that are not asked for once, as fp64: nobody
// looks there.)
class Asker {
  static constexpr uint64_t kMost = 16;   // tiles: a power of two
  char* firsts[kMost];                    // of the last ones that were asked for
  int64_t steps[kMost];
  uint64_t asked, early, ahead;           // how many, and how many tiles before they are read
  int64_t rest;                           // early: bytes beyond whole tiles
  bool near;                              // less than a tile ahead: the next tile's rows from the end of this one on
  int64_t k, i, t;                        // the next: group, row of the group, tile
  const Part* part = nullptr;

  bool is_followed(const Tile& tile) const {   // whole, or near: long enough
    return tile.length >= (near ? kBlock : kTile) && tile.first && tile.kept != Kept::none;
  }

  // To the next whole tile. What is shorter, at the end of a parameter, is asked for in passing, its first block; the rest of it
  // while that is read. Behind the last sample: the first tiles once more, of which nothing is missed.
  void next(const Accumulate& a, const Work& work) {
    for (int64_t tiles = part->last_tile - part->first_tile; tiles > 0; --tiles) {
      if (t == part->last_tile) {
        t = part->first_tile;
        i += a.order.at_once;
        if (i >= count_of(a, *part, k)) {
          i = 0;
          ++k;
        }
        if (count_of(a, *part, k) <= 0) k = 0;
      }
      const Tile& tile = work.tiles[t++];
      if (!tile.first || tile.kept == Kept::none) continue;
      char* const first = const_cast<char*>(tile.first) + (first_of(a, *part, k) + i) * tile.step;
      if (is_followed(tile)) {
        firsts[asked % kMost] = first;
        steps[asked % kMost] = tile.step;
        break;
      }
      const int64_t bytes = least(tile.length, kBlock) * width_of(a.grads.dtypes[tile.param]);
      for (int64_t r = 0; r < least(a.order.at_once, count_of(a, *part, k) - i); ++r)
        for (int64_t b = 0; b < bytes; b += 64) {
          if (a.order.cache == 2) __builtin_prefetch(first + r * tile.step + b, 0, 2);
          else __builtin_prefetch(first + r * tile.step + b, 0, 3);
        }
    }
    ++asked;
  }

 public:
  // From the first group of a part on.
  void begin(const Accumulate& a, const Work& work, const Part& of) {
    part = &of;
    asked = 0;
    k = i = 0;
    t = of.first_tile;
    for (uint64_t n = 0; n < kMost; ++n) firsts[n] = nullptr, steps[n] = 0;
    // By the width of the first whole tile; another dtype is asked for at another distance, and in part.
    near = a.order.early == 0 && a.order.cache == 1 && a.order.ahead < 4 * kTile;   // Ask::once
    int64_t whole = t;
    while (whole < of.last_tile && !is_followed(work.tiles[whole])) ++whole;
    const bool none = whole == of.last_tile;
    const int64_t bytes = none ? 0 : kTile * width_of(a.grads.dtypes[work.tiles[whole].param]);
    early = none ? 0 : static_cast<uint64_t>(least(kMost - 1, a.order.early / bytes));
    ahead = none ? 0 : near ? 1 : static_cast<uint64_t>(least(kMost - 1, a.order.ahead / bytes));
    rest = none || early == 0 ? 0 : a.order.early % bytes;
    if (early < ahead) early = ahead;
    for (uint64_t n = 0; ahead > 0 && n < early; ++n) next(a, work);
  }
  bool follows(const Part& of) const { return part == &of; }

  // While `tile` is read, whose rows are at `rows`.
  template <Ask How, class T>
  DPRS_INLINE Asks<T, How> at(const Accumulate& a, const Work& work, const Tile& tile, Rows<const T> rows) {
    Asks<T, How> asks = behind<How>(a, rows);
    if (ahead == 0) return asks;   // less than a tile and not near, or no tile to follow
    if (!is_followed(tile)) {
      asks.here = {rows, rows.from(kBlock)};
      return asks;
    }
    next(a, work);
    const uint64_t now = (asked - 1) % kMost, again = (asked - 1 - early + ahead) % kMost;
    if (near) {
      constexpr int64_t kWidth = sizeof(T);
      const int64_t whole = tile.length / kBlock * kBlock, distance = (a.order.ahead / kWidth + kBlock - 1) / kBlock * kBlock;
      asks.turn = whole > distance ? whole - distance : 0;
      char* const first = firsts[now] - kWidth * asks.turn;
      asks.next = {{first, steps[now]}, {first, steps[now] + kApart<How>}};
    } else {
      asks.here = {{firsts[now] + rest, steps[now]}, {firsts[again], steps[again]}};
    }
    return asks;
  }
};

}  // namespace DPRS_ISA
}  // namespace dprs
