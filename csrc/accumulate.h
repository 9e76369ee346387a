// accumulate: norms -> factors -> sums of one micro-batch, reading masked gradients once.
//
// Samples go in groups. Norms read a group from memory and leave its kept values, packed, in slots; when the factors are
// known, sums take them from there. Both go tile by tile, sums a tile ahead, a block of norms and a quarter of sums in turn, so
// that memory is read all the time, and a slot is written to while it is at hand:
//   rows 0 .. r-1 of group k:   each tile t: norms of these rows (from memory, into slot t) | sums of group k-1 (from slot t+1)
//   the other rows of group k:  each tile: norms                                            | then the factors of k
// Threads have tiles, of all samples, and meet after each group; or samples, with sums of their own, and never meet (order.h
// says which, and what was measured). Contributions are integers, so no result depends on that, on the number of threads, on
// the group's size or on the split into micro-batches. Float64 sums (no unit) go by the order of samples: tiles.
// Where all of a tile is kept and lies in place there is nothing to pack: sums read the gradients again. So they do, in
// long streams, where no cache holds them until then (`stream`).
//
// What is in the way of one read of the gradients (Zen 5, DP-CNN, r = 0.5, where a pass takes 1.33 to 1.5): norms alone take
// 1.07, packed into a slot that stays in the first cache 0.02 more, slots of their size 0.1 to 0.15, sums 0.1. What cost as much
// and is gone: sums between the norms of whole tiles, when no line is under way; rows that begin unasked for, and lines that
// are forgotten (ask.h); values that are stored and read again between 100 stores to slots (TileSums: 0.2 ms of DP-CNN/S's
// 3.2), two threads' factors in lines side by side (0.25 ms), new pages in every step (0.25 ms).
// On a Xeon with AMX (order.h), where a pass takes 1.45 to 1.5, norms alone take 1.1, slots and sums the rest: for 16 KB of
// gradients 12 KB of them come from the shared cache, since what memory sends displaces them in 2 MB of L2 (slots kept to
// 600 KB, with a wrong result, bring 1.32, sums kept small as well 1.2). A loop that does nothing but read 16 KB of memory and
// write 12 KB of that cache takes 1.36 to 1.4. Tried there, bits compared: asking for slots and sums (nothing), groups of 8 with
// a tile's rows all in turn (fewer sums, but slots that fill the shared cache: nothing), tiles backwards every other group (8 to
// 10 % more: the CPU reads on beyond the end of each tile; 16 tiles at a time 2 % less), giving lines back by cldemote (44 % more).
#pragma once
#include <sched.h>
#ifdef _OPENMP
#include <omp.h>
#endif

#include "factors.h"
#include "tile_sums.h"

namespace dprs {
namespace DPRS_ISA {

// One thread's way through its part: norms of group k, sums of the one before.
struct Pass {
  const Accumulate& a;
  const Work& work;
  Scratch& own;
  const Part& part;
  int64_t k;
};

// A tile of samples [i, i + Count): where they lie, or made in this thread's scratch.
template <class T, int Count>
DPRS_INLINE Rows<const T> rows_of(const dprs_grads& g, const Tile& tile, int64_t i, Scratch& own) {
  if (tile.first) return {const_cast<char*>(tile.first) + i * tile.step, tile.step};
  for (int r = 0; r < Count; ++r) made_row(g, tile, i + r, reinterpret_cast<T*>(own.rows[r]));
  return {reinterpret_cast<char*>(own.rows), sizeof own.rows[0]};
}

// Rows [i, i + Count) of group k of a tile, and beside them sums of group k - 1 of the tile `next`. A function for each number
// of rows: its loops have the registers for themselves.
template <class T, bool HasKeep, bool Pack, int Count, Ask How, class Sums>
__attribute__((noinline)) void norms_of_rows(const Pass& p, const Tile& tile, int64_t i, bool follow, double* out,
                                             const Tile* next) {
  typedef typename PackedOf<T>::type P;
  const Rows<const T> rows = rows_of<T, Count>(p.a.grads, tile, first_of(p.a, p.part, p.k) + i, p.own);
  const Rows<P> to = {Pack ? reinterpret_cast<char*>(packed_of<T>(p.part, tile, i)) : nullptr,
                      Pack ? packed_row(tile) * static_cast<int64_t>(sizeof(P)) : 0};
  const Asks<T, How> asks =
      follow ? p.own.asker.template at<How>(p.a, p.work, tile, rows) : behind<How>(p.a, rows);
  Sums sums(p.a, p.part, next, p.k - 1);
  square_norms<HasKeep, Pack, Count>(rows, HasKeep ? p.a.keep + tile.padded / kWord : nullptr, tile.blocks, tile.length,
                                     p.a.clip.scales[p.a.clip.segment_of[tile.param]], asks, out + i, to,
                                     [&] { sums.go_on(); });
  sums.finish();
}

template <class T, bool HasKeep, bool Pack, Ask How>
DPRS_INLINE void norms_of_tile(const Pass& p, const Tile& tile, RowRange some, double* out, const Tile* next) {
  for_rows(some, p.a.order.at_once, [&](int64_t i, auto rows_at_once) {
    constexpr int Count = decltype(rows_at_once)::value;
    // Rows that are asked for once are read by fours: a rest of them needs no code of its own.
    constexpr Ask kAsk = Count < 4 && How == Ask::once ? Ask::twice : How;
    // Where rows are fewer than at_once, a tile is read in several turns: the first one asks, and adds sums.
    const bool first = i == some.begin, follow = first && tile.first && p.own.asker.follows(p.part);
    const Tile* sums = first ? next : nullptr;
    if constexpr (sizeof(T) < 8) {
      if (sums && TileSums<Count>::fits(p.a, p.part, *sums, p.k - 1))
        return norms_of_rows<T, HasKeep, Pack, Count, kAsk, TileSums<Count>>(p, tile, i, follow, out, sums);
    }
    if (sums) sums_of_tile(p.a, p.own, p.part, *sums, p.k - 1);
    norms_of_rows<T, HasKeep, Pack, Count, kAsk, NoSums>(p, tile, i, follow, out, nullptr);
  });
}

// Calls visit with how lines are asked for. Code for each way is made where it can matter, since a loop more takes the compiler
// longer: with AVX2 or AVX-512, for values that wait for memory and not for arithmetic.
template <class T, class Visit> DPRS_INLINE void with_asking(const Accumulate& a, Visit visit) {
  if constexpr (kLanes > 2 && sizeof(T) < 8) {
    if (a.order.cache == 2) return visit(Way<Ask::second>());
    if (a.order.early == 0) return visit(Way<Ask::once>());
  }
  visit(Way<Ask::twice>());
}

// Norms of some rows of tile t, and beside them sums of the group before of `next`, if given.
inline void norms_of_tile(const Pass& p, int64_t t, RowRange some, const Tile* next) {
  const Tile& tile = p.work.tiles[t];
  double* out = partials(p.a, p.work, p.part, t, p.k);
  if (tile.kept == Kept::none) {   // public: the mask never depends on data
    for (int64_t i = some.begin; i < some.end; ++i) out[i] = 0;
    if (next) sums_of_tile(p.a, p.own, p.part, *next, p.k - 1);
    return;
  }
  const bool masked = tile.kept == Kept::some, packed = tile.slot >= 0;
  with_dtype(p.a, tile, [&](auto value) {
    typedef decltype(value) T;
    with_asking<T>(p.a, [&](auto how) {
      constexpr Ask How = decltype(how)::value;
      if (masked && packed) norms_of_tile<T, true, true, How>(p, tile, some, out, next);
      else if (masked) norms_of_tile<T, true, false, How>(p, tile, some, out, next);
      else if (packed) norms_of_tile<T, false, true, Ask::twice>(p, tile, some, out, next);   // was made: not in memory
      else norms_of_tile<T, false, false, How>(p, tile, some, out, next);
    });
  });
}

// A group that comes from memory twice: four rows (at_once of them side by side) from end to end of some tiles, then the
// next four: f(tile, rows). Memory likes long streams; the last tiles first, for the sums: the cache may still hold them.
template <class F> DPRS_INLINE void stream(const Part& part, int64_t count, int64_t chunk, F f) {
  const int64_t all = part.last_tile - part.first_tile;
  for (int64_t c = (all + chunk - 1) / chunk - 1; c >= 0; --c)
    for (int64_t i = 0; i < count; i += kRows)
      for (int64_t t = c * chunk; t < least(all, (c + 1) * chunk); ++t)
        f(part.first_tile + t, RowRange{i, least(i + kRows, count)});
}

inline void visit_part_twice(const Pass& p) {
  constexpr int64_t kChunk = 16;   // tiles of which sums, 128 KB of them, stay in a core's own cache
  const Part& part = p.part;
  if (part.first_tile == part.last_tile) return;
  if (p.k > 0)
    stream(part, count_of(p.a, part, p.k - 1), kChunk,
           [&](int64_t t, RowRange some) { sums_of_tile(p.a, p.own, part, p.work.tiles[t], p.k - 1, some); });
  stream(part, count_of(p.a, part, p.k), part.last_tile - part.first_tile,
         [&](int64_t t, RowRange some) { norms_of_tile(p, t, some, nullptr); });
}

// Sums of group k - 1 and norms of group k, as far as there are such groups. Sums are a tile ahead of norms, so that a tile's
// come before the first norms that are packed to its slot.
inline void visit_part(const Pass& p) {
  const Accumulate& a = p.a;
  const Part& part = p.part;
  if (p.k == 0 && part.fresh)
    for (int64_t t = part.first_tile; t < part.last_tile; ++t)
      std::memset(part.acc + 8 * p.work.tiles[t].sum, 0, 8 * padded(p.work.tiles[t].count));   // also 0 as integers
  if (a.order.split == DPRS_TWICE) return visit_part_twice(p);
  if (p.k == 0) p.own.asker.begin(a, p.work, part);
  const int64_t norms = count_of(a, part, p.k);
  for (int64_t i = 0; i == 0 || i < norms; i += a.order.at_once) {
    const bool sums = i == 0 && p.k > 0;
    for (int64_t t = part.first_tile; t < part.last_tile; ++t) {
      if (sums && (t == part.first_tile || norms <= 0)) sums_of_tile(a, p.own, part, p.work.tiles[t], p.k - 1);
      if (i >= norms) continue;
      const Tile* next = sums && t + 1 < part.last_tile ? p.work.tiles + t + 1 : nullptr;
      norms_of_tile(p, t, {i, least(i + a.order.at_once, norms)}, next);
    }
  }
}

// Returns when all workers have called it. Spins for some microseconds, then gives its CPU away.
inline void meet(Barrier& b, int64_t workers) {
  const int64_t now = __atomic_load_n(&b.generation, __ATOMIC_ACQUIRE);
  if (__atomic_add_fetch(&b.arrived, 1, __ATOMIC_ACQ_REL) == workers) {
    __atomic_store_n(&b.arrived, 0, __ATOMIC_RELAXED);
    __atomic_store_n(&b.generation, now + 1, __ATOMIC_RELEASE);
    return;
  }
  for (int spins = 0; __atomic_load_n(&b.generation, __ATOMIC_ACQUIRE) == now; ++spins) {
    if (spins < 2000) spin_pause();
    else sched_yield();
  }
}

// Each thread has its samples, meets nobody, and has sums of its own.
inline void accumulate_samples(const Accumulate& a, const Work& work, Scratch& own, int64_t me, int64_t workers) {
  for (int64_t w = me; w < work.threads; w += workers) {
    const Part& part = work.parts[w];
    for (int64_t k = 0; k <= groups_of(a, part); ++k) {
      visit_part({a, work, own, part, k});
      if (k < groups_of(a, part)) factors_of_group(a, work, part, k, a.norms);
    }
  }
}

// Each thread has its tiles, of all samples.
inline void accumulate_tiles(const Accumulate& a, const Work& work, Scratch& own, int64_t me, int64_t workers) {
  const int64_t groups = groups_of(a, work.parts[0]);
  for (int64_t k = 0; k <= groups; ++k) {
    // With fewer threads than asked for, each takes several parts.
    for (int64_t w = me; w < work.threads; w += workers) visit_part({a, work, own, work.parts[w], k});
    if (k == groups) break;
    meet(*a.barrier, workers);
    // No barrier behind the factors: the norms of group k + 1 go to the other half of `partial`.
    for (int64_t w = me; w < work.threads; w += workers)
      factors_of_group(a, work, work.parts[w], k, w == 0 ? a.norms : nullptr);
  }
}

// The sums of all threads to those of the first, where nothing will release them.
inline void join_sums(const Work& work) {
#pragma omp parallel for num_threads(work.threads) schedule(static)
  for (int64_t t = 0; t < work.count; ++t) join_tile(work, work.tiles[t], work.parts[0].acc + 8 * work.tiles[t].sum);
}

inline void accumulate(const Accumulate& a, const Work& work) {
  const bool samples = a.order.split == DPRS_SAMPLES;
#pragma omp parallel num_threads(work.threads)
  {
#ifdef _OPENMP
    const int64_t workers = omp_get_num_threads(), me = omp_get_thread_num();
#else
    const int64_t workers = 1, me = 0;
#endif
    const FlushSubnormals flush;
    Scratch own;
    if (samples) accumulate_samples(a, work, own, me, workers);
    else accumulate_tiles(a, work, own, me, workers);
  }
  if (!a.released && are_apart(work)) join_sums(work);
}

}  // namespace DPRS_ISA
}  // namespace dprs
