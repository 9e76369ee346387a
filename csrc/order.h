// order: which way accumulate goes through samples and tiles, and who has which part of them. Pure functions of sizes and of
// the CPU's make: nothing is timed, and results do not depend on it.
#pragma once
#if defined(__x86_64__)
#include <cpuid.h>
#endif

#include "tiles.h"

namespace dprs {

constexpr int64_t kOwnCache = 768 << 10;      // slots and sums of a thread, where cores have 1 MB of their own, or more
constexpr int64_t kGroupCache = 128 << 10;    // slots of a thread, of groups larger than need be: fewer barriers
constexpr int64_t kSharedCache = 32 << 20;    // for what a group leaves for its sums

// By its family, which a hypervisor shows where it hides the name: 23 Zen 1 and 2, 25 Zen 3 and 4, 26 Zen 5.
inline dprs_make make_of_cpu() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  unsigned a = 0, b, c, d;
  if (!__builtin_cpu_is("amd") || !__get_cpuid(1, &a, &b, &c, &d)) return DPRS_ANY_MAKE;
  const unsigned family = (a >> 8 & 15) + (a >> 20 & 255);
  return family >= 26 ? DPRS_ZEN5 : DPRS_ZEN4;
#else
  return DPRS_ANY_MAKE;
#endif
}

// What the choice goes by.
struct Sizes {
  RowBytes row;
  int64_t sums, samples, threads;
  bool exact;   // sums are integers: samples may be added in any order

  int64_t all() const { return row.packed + row.made + row.again; }
  int64_t pair() const { return 2 * all() + 8 * sums; }   // slots and sums of a thread that has groups of 2 for itself
  int64_t four() const { return 4 * all() + 8 * sums; }
  bool shareable() const { return exact && samples >= 16 * threads; }
  int64_t group() const {   // of a thread, whose slots stay in its cache; in fours
    return std::min<int64_t>(threads * kGroupCache / std::max<int64_t>(all(), 1) / 4 * 4, 64);
  }
};

// A thread that has samples for itself meets nobody and reads them end to end, where all threads' slots and sums stay in
// caches; else threads share the tiles. How many rows are read at once, how far ahead and into which cache (ask.h), goes by the
// CPU's make. The tables below: time of a pass in reads of the gradients at full bandwidth on two cores (11M: one tensor of as
// many, 16 samples).

// Zen 5. A core reads hardly anything ahead by itself once there are stores between: half the lines not asked for take three
// times as long as all asked for.
//                                               DP-CNN, r = 0.5, 0, 0.9   DP-CNN/S  11M
//   tiles, groups of 4, 2 rows, 3 and 4 KB                                          3.4
//   tiles, groups of 2, 2 rows, 3 and 4 KB      1.60   2.15  1.41                   3.6 to 3.8
//   tiles, groups of 2, 2 rows, 4 and 8 KB      1.62   2.26  1.42                   3.9
//   samples, groups of 2, 2 rows, 4 and 4 KB    1.35                        1.39
//   samples, groups of 2, 2 rows, 4 and 6 KB    1.32                        1.32
//   samples, groups of 2, 2 rows, 3 and 4 KB    1.35   2.46  1.21           1.79
//   samples, groups of 2, 2 rows, 4 and 8 KB    1.45   2.66  1.12           1.32
//   samples, groups of 4, 2 rows, 4 and 8 KB    1.71                        1.70
// That was at 88 GB/s. At 52, as another such machine has it, tiles in groups of 2 and samples, both at 4 and 6 KB, are alike
// (1.21 and 1.22; r = 0.9: 1.11 and 1.10).
inline dprs_order order_on_zen5(const Sizes& s) {
  if (s.shareable() && s.pair() <= kOwnCache) return {DPRS_SAMPLES, 2, 2, 4096, 8192, 1};
  if (s.shareable() && s.threads * s.pair() <= kSharedCache / 2) return {DPRS_SAMPLES, 2, 2, 4096, 6144, 1};
  // Rows that no cache holds. Outer products and strided gradients are made twice sooner than packed in memory: 16 of 4096 x 4096
  // in 26 ms in the place of 58. Packed values go to memory and come back, and before they go the lines for them come: three times
  // their bytes. Where most is kept, or of 16 bits, which are packed in 32, reading gradients again is less. 11M coordinates, 16
  // samples, ms, packed and read twice (memory at 46 to 50 GB/s):
  //   r        0           0.25        0.5         0.6         0.75        0.9
  //   fp32     54.3 49.1   65.5 52.6   51.7 49.8   51.3 52.7   43.8 47.3   31.7 42.2
  //   bf16                             49.8 33.4   42.4 31.4   35.5 29.9   25.3 25.3
  // Groups of 32: sums, 8 bytes a coordinate, come from memory once a group, too.
  const dprs_order twice = {DPRS_TWICE, 32, 4, 2048, 0, 1};
  if (2 * (s.row.made + s.row.again) > kSharedCache) return twice;
  if (s.group() >= 4) return {DPRS_TILES, s.group(), 4, 2048, 0, 1};
  if (s.pair() > kSharedCache && 2 * s.row.packed > s.row.whole) return twice;
  if (s.pair() > kSharedCache) return {DPRS_TILES, 4, 2, 3072, 4096, 1};   // sums half as often
  // A distance of a tile or more is followed from one parameter to the next, a shorter one goes on behind the row's end: 2^20
  // coordinates in 1000 tensors (64 samples) took 13.3 ms with 3 and 4 KB, 9.3 with 4 and 6, one tensor 5.5 with both.
  if (s.row.packed > s.row.again) return {DPRS_TILES, 2, 2, 4096, 6144, 1};
  return {DPRS_TILES, 2, 2, 3072, 4096, 1};   // what is not packed stays in the first cache for its sums: 4 and 6 take 3 % more
}

// Zen 4, whose memory takes 9 to 11 or 16 to 18 ms for DP-CNN's gradients, by the minute; ratios to the fast read, those to the
// slow one in brackets. AMD's older cores were not at hand: they are taken for Zen 4, a guess.
//                                                         DP-CNN, r = 0.5         0     0.9    DP-CNN/S, r = 0.5, 0   11M
//   samples, groups of 2, 2 rows, 4 and 8 KB, first cache         2.1 to 2.6                   2.2 to 2.6
//   the same, second cache                                1.50 to 1.53 (1.12)   (1.9)  (1.12)  1.19 to 1.31  2.1
//   samples, groups of 2, 2 rows, 8 and 10 KB, second     1.37         (1.12)                  (1.07)
//   samples, groups of 4, 4 rows, 4 and 8 KB, second      1.54                         (1.09)  1.35          1.71
//   tiles, groups of 2, 2 rows, 3 and 4 KB, second                              (1.32)
//   tiles, groups of 4, 2 rows, 3 and 4 KB, second                                                                    2.7
//   tiles, groups of 4, 4 rows, 4 and 8 KB, second        1.48 to 1.54 (1.21)   (1.61) (1.11)  1.74          1.78     2.4
inline dprs_order order_on_zen4(const Sizes& s) {
  // Where nothing is packed, sums load sums as often as gradients: four rows at once halve that.
  if (s.shareable() && s.four() <= kOwnCache && s.row.again > s.row.packed) return {DPRS_SAMPLES, 4, 4, 4096, 8192, 2};
  if (s.shareable() && s.pair() <= kOwnCache) return {DPRS_SAMPLES, 2, 2, 4096, 8192, 2};
  if (s.shareable() && s.threads * s.pair() <= kSharedCache / 2) return {DPRS_SAMPLES, 2, 2, 8192, 10240, 2};
  if (2 * (s.row.made + s.row.again) > kSharedCache) return {DPRS_TWICE, 32, 2, 4096, 8192, 2};
  if (s.group() >= 4) return {DPRS_TILES, s.group(), 4, 2048, 0, 2};
  if (s.pair() > kSharedCache) return {DPRS_TILES, 4, 4, 4096, 8192, 2};
  if (s.row.packed > s.row.again) return {DPRS_TILES, 2, 2, 4096, 6144, 2};   // as on Zen 5; not measured here
  return {DPRS_TILES, 2, 2, 3072, 4096, 2};
}

// Everybody else: CPUs that read ahead by themselves, best with four streams. Two Xeons are known.
// Ice Lake (commit 43cbc60), whose shared cache is slow, so that slots beyond a core's own did not pay: tiles, groups of 4, 4 rows
// at once, 1 KB take 1.5 for DP-CNN, 1.3 to 1.4 for DP-CNN/S. With AMX (2 MB of L2 each, some 16 MB of the shared cache for
// both), 18 ms for DP-CNN's gradients, before the next tile's rows were asked for (ask.h has what that brings):
//                                                       DP-CNN, r = 0.5         0     0.9    DP-CNN/S, r = 0.5   11M
//   tiles, groups of 4, 4 rows at once, 1 KB            1.45 to 1.51            2.05  1.16                       2.8 to 2.9
//   the same, 2 KB; second cache                        1.46 to 1.51; 1.48      2.06  1.17
//   tiles, groups of 8; 16 (11M)                        1.72                    2.23                             4.1
//   tiles, groups of 2, 2 rows, 1 or 2 KB               1.55 to 1.59            2.23  1.22
//   tiles, groups of 1                                  1.88
//   samples, groups of 4, 4 rows, 1 KB                  1.50                    2.2   1.16   1.20 to 1.27
//   samples, groups of 2, 2 rows, 1 or 2 KB             1.57                                 1.40
//   twice, groups of 32; 4                                                      2.35                             2.7; 3.0
// Asking early by prefetchnta, as Zen 5 likes it, takes 2.8 there: such lines go past the second cache, where that CPU's own
// reading ahead would have had them.
inline dprs_order order_elsewhere(const Sizes& s) {
  if (s.shareable() && s.four() <= kOwnCache) return {DPRS_SAMPLES, 4, 4, 1024, 0, 1};
  if (4 * s.all() > kSharedCache) return {DPRS_TWICE, 32, 4, 1024, 0, 1};
  return {DPRS_TILES, std::max<int64_t>(s.group(), 4), 4, 1024, 0, 1};
}

inline dprs_order choose_order(const Sizes& s, dprs_make make) {
  return make == DPRS_ZEN5 ? order_on_zen5(s) : make == DPRS_ZEN4 ? order_on_zen4(s) : order_elsewhere(s);
}

inline int64_t touched(const Tile& tile) {   // coordinates
  const uint32_t blocks = tile.blocks;
  return std::min<int64_t>(tile.length, kBlock * popcount(&blocks, 1));
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

}  // namespace dprs
