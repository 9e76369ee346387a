// tile_sums: one tile's sums of a group of samples, all at once, or some columns at a time beside norms of another tile.
#pragma once
#include "ask.h"
#include "norms.h"
#include "rows.h"
#include "sums.h"

namespace dprs {
namespace DPRS_ISA {

struct RowRange {   // of a group
  int64_t begin, end;
};
struct Scratch {   // one thread's
  alignas(64) double rows[kRows][kTile] = {};             // gathered rows of any dtype
  alignas(64) double packed[kRows][kTile + kWord];        // their kept values, where there are no slots
  Asker asker;
};
alignas(64) const double kZeros[kTile] = {};

// Calls f(first row, number of rows) for some of a group's rows, at_once at a time, the rest by fewer.
template <class F> DPRS_INLINE void for_rows(RowRange rows, int64_t at_once, F f) {
  int64_t i = rows.begin;
  if (at_once >= 4)
    for (; i + 4 <= rows.end; i += 4) f(i, Constant<4>());
  if (at_once >= 2)
    for (; i + 2 <= rows.end; i += 2) f(i, Constant<2>());
  for (; i < rows.end; ++i) f(i, Constant<1>());
}

// Row i of the group that a tile's slot holds.
template <class T> DPRS_INLINE typename PackedOf<T>::type* packed_of(const Part& part, const Tile& tile, int64_t i) {
  return reinterpret_cast<typename PackedOf<T>::type*>(part.packed + tile.slot) + i * packed_row(tile);
}

// The values of row i of a group for sums: zeros where its factor is 0, which may mean NaN or Inf in the row (a select: the same
// instructions; a row that is not packed is then not read a second time).
template <class T> DPRS_INLINE const T* summed(const Accumulate& a, const double* factors, int64_t i, const T* values) {
  return factors[i * a.clip.segments] != 0 ? values : reinterpret_cast<const T*>(kZeros);
}

// rows_from(i, count, rows): where the values of rows [i, i + count) of the group lie, `length` of each.
template <class T, Sum How, class RowsFrom>
DPRS_INLINE void sums_of_rows(const Accumulate& a, const Part& part, const Tile& tile, RowRange some, int64_t length,
                              RowsFrom rows_from) {
  const double* factors = part.factors + a.clip.segment_of[tile.param];
  for_rows(some, kRows, [&](int64_t i, auto rows_at_once) {
    constexpr int Count = decltype(rows_at_once)::value;
    const T* rows[Count];
    rows_from(i, rows_at_once, rows);
    for (int r = 0; r < Count; ++r) rows[r] = summed(a, factors, i + r, rows[r]);
    add_rows<T, How, Count>(rows, factors + i * a.clip.segments, a.clip.segments, length, part.acc + 8 * tile.sum);
  });
}

template <class T, class RowsFrom>
void sums_of_rows(const Accumulate& a, const Part& part, const Tile& tile, RowRange some, int64_t length, RowsFrom from) {
  constexpr Sum kSmall = sizeof(T) < 8 ? Sum::small : Sum::integer;
  if (!a.integers) sums_of_rows<T, Sum::real>(a, part, tile, some, length, from);
  else if (a.small) sums_of_rows<T, kSmall>(a, part, tile, some, length, from);
  else sums_of_rows<T, Sum::integer>(a, part, tile, some, length, from);
}

template <class T>
void sums_of_tile_as(const Accumulate& a, Scratch& own, const Part& part, const Tile& tile, int64_t k, RowRange some) {
  typedef typename PackedOf<T>::type P;
  const auto gathered = [&](int64_t i, auto count, const T** rows) {
    for (int r = 0; r < count.value; ++r)
      rows[r] = row_of<T>(a.grads, tile, first_of(a, part, k) + i + r, reinterpret_cast<T*>(own.rows[r]));
  };
  if (tile.kept == Kept::none) return;
  if (tile.slot >= 0) {
    const auto from_slot = [&](int64_t i, auto count, const P** rows) {
      for (int r = 0; r < count.value; ++r) rows[r] = packed_of<T>(part, tile, i + r);
    };
    sums_of_rows<P>(a, part, tile, some, padded(tile.count), from_slot);
  } else if (tile.kept == Kept::all) {
    sums_of_rows<T>(a, part, tile, some, tile.length, gathered);
  } else {
    const auto anew = [&](int64_t i, auto count, const P** rows) {
      constexpr int Count = decltype(count)::value;
      const T* whole[Count];
      P* to[Count];
      gathered(i, count, whole);
      for (int r = 0; r < Count; ++r) rows[r] = to[r] = reinterpret_cast<P*>(own.packed[r]);
      pack_rows<Count>(whole, a.keep + tile.padded / kWord, tile.blocks, tile.length, a.order.ahead, to);
    };
    sums_of_rows<P>(a, part, tile, some, padded(tile.count), anew);
  }
}

// Calls visit with a value of the dtype that the tile's gradients have.
template <class Visit> DPRS_INLINE void with_dtype(const Accumulate& a, const Tile& tile, Visit visit) {
  switch (a.grads.dtypes[tile.param]) {
    case DPRS_F32: visit(float()); break;
    case DPRS_F64: visit(double()); break;
    case DPRS_BF16: visit(bf16()); break;
    default: visit(fp16()); break;
  }
}

inline void sums_of_tile(const Accumulate& a, Scratch& own, const Part& part, const Tile& tile, int64_t k, RowRange some) {
  with_dtype(a, tile, [&](auto value) { sums_of_tile_as<decltype(value)>(a, own, part, tile, k, some); });
}
inline void sums_of_tile(const Accumulate& a, Scratch& own, const Part& part, const Tile& tile, int64_t k) {   // all rows
  sums_of_tile(a, own, part, tile, k, {0, count_of(a, part, k)});
}

// Sums of Count rows of one tile, in four goes beside the norms of another tile's four blocks: memory is then read all the time,
// though no line is asked for during sums. All of it is to stay in registers: with its state in memory, stored and read again
// between the 128 stores to slots that norms make a tile, DP-CNN/S's pass took 7 % longer. (The likely reason, not proven: a load
// finds the latest store by the last 12 bits of its address, and waits if that is another one.)
template <int Count> class TileSums {
  const float* rows[Count];
  float factors[Count];
  char* acc;
  int64_t columns, some, done = 0;   // some: of a go

 public:
  // Of group k of `tile`.
  DPRS_INLINE TileSums(const Accumulate& a, const Part& part, const Tile* tile, int64_t k) {
    const Rows<const float> from =
        tile->slot < 0 ? Rows<const float>{const_cast<char*>(tile->first) + first_of(a, part, k) * tile->step, tile->step}
                       : Rows<const float>{part.packed + tile->slot, 4 * packed_row(*tile)};
    const double* f = part.factors + a.clip.segment_of[tile->param];
    DPRS_UNROLL for (int r = 0; r < Count; ++r) {
      rows[r] = summed(a, f, r, from[r]);
      factors[r] = static_cast<float>(f[r * a.clip.segments]);
    }
    acc = part.acc + 8 * tile->sum;
    columns = tile->slot < 0 ? tile->length : padded(tile->count);
    some = padded((columns + 3) / 4);
  }
  // Whether these are sums of this kind.
  static bool fits(const Accumulate& a, const Part& part, const Tile& tile, int64_t k) {
    const int64_t dtype = a.grads.dtypes[tile.param];
    return a.integers && a.small && count_of(a, part, k) == Count && tile.kept != Kept::none && dtype != DPRS_F64 &&
           (tile.slot >= 0 || (dtype == DPRS_F32 && tile.length % kWord == 0));
  }

  DPRS_INLINE void go_on() {
    const int64_t end = least(columns, done + some);
    for (; done < end; done += kStep) add_columns<float, Sum::small, Count>(rows, done, factors, acc + 8 * done);
  }
  DPRS_INLINE void finish() {
    some = columns;
    go_on();
  }
};
struct NoSums {
  DPRS_INLINE NoSums(const Accumulate&, const Part&, const Tile*, int64_t) {}
  DPRS_INLINE void go_on() {}
  DPRS_INLINE void finish() {}
};

// Sums of a tile of all threads, at `to`, which may be the first one's own. Integers, so the order is free.
inline void join_tile(const Work& work, const Tile& tile, char* to) {
  for (int64_t c = 0; c < tile.count; c += kLanes) {
    const int64_t at = 8 * (tile.sum + c);
    u64v sum = load<u64v>(work.parts[0].acc + at);
    for (int64_t w = 1; w < work.threads; ++w) sum += load<u64v>(work.parts[w].acc + at);
    store(to + 8 * c, sum);
  }
}
inline bool are_apart(const Work& work) { return work.threads > 1 && work.parts[1].acc != work.parts[0].acc; }

}  // namespace DPRS_ISA
}  // namespace dprs
