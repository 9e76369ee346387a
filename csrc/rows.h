// rows: a tile of one sample's gradient as contiguous values, wherever they lie.
#pragma once
#include "kernels.h"
#include "simd.h"

namespace dprs {
namespace DPRS_ISA {

// Rows that lie `step` bytes apart. Two numbers: with an address for each of four rows, and for each of the four that they
// are packed to, x86 runs out of registers.
template <class T> struct Rows {
  char* first;
  int64_t step;

  DPRS_INLINE T* operator[](int r) const { return reinterpret_cast<T*>(first + r * step); }
  DPRS_INLINE Rows from(int64_t at) const { return {first + at * static_cast<int64_t>(sizeof(T)), step}; }
};

// Copies values [start, start + length) of a strided sample (row-major order of its shape) into `out`.
template <class T>
inline void gather(const T* sample, const int64_t* shape, const int64_t* stride, int64_t dims,
                   int64_t start, int64_t length, T* out) {
  int64_t index[DPRS_MAX_DIMS];
  for (int64_t d = dims - 1, rest = start; d >= 0; --d) {
    index[d] = rest % shape[d];
    rest /= shape[d];
  }
  const int64_t inner = shape[dims - 1], step = stride[dims - 1];
  for (int64_t done = 0; done < length;) {
    const T* p = sample;
    for (int64_t d = 0; d < dims; ++d) p += index[d] * stride[d];
    const int64_t run = least(length - done, inner - index[dims - 1]);
    for (int64_t i = 0; i < run; ++i) out[done + i] = p[i * step];
    done += run;
    index[dims - 1] += run;
    for (int64_t d = dims - 1; d > 0 && index[d] == shape[d]; --d) {   // carry
      index[d] = 0;
      ++index[d - 1];
    }
  }
}

// Values [start, start + length) of the outer product e a^T, row-major [.., in]: the gradient of a Linear's weight.
// 4 KB in L1 for a tile, where a stored gradient comes from memory.
template <class T>
inline void outer(const T* e, const T* a, int64_t in, int64_t start, int64_t length, T* out) {
  int64_t o = start / in, c = start % in;
  for (int64_t done = 0; done < length; ++o, c = 0) {
    const int64_t run = least(length - done, in - c);
    const T* from = a + c;
    const T left = e[o];
    for (int64_t i = 0; i < run; ++i) out[done + i] = left * from[i];
    done += run;
  }
}

// Values [start, start + length) of a sample of which some rows are held (dprs_grads::held): those to their places in
// `out`; what is not there stays as it is, since nobody looks at it.
template <class T>
inline void place(const T* sample, const int64_t* held, int64_t row, int64_t start, int64_t length, T* out) {
  int64_t o = start / row, c = start % row;
  for (int64_t done = 0; done < length; ++o, c = 0) {
    const int64_t run = least(length - done, row - c);
    if (held[o] >= 0) std::memcpy(out + done, sample + held[o] * row + c, sizeof(T) * run);
    done += run;
  }
}

// Calls f(first value, number of values) for each run of a tile's blocks that have a kept coordinate.
template <class F> DPRS_INLINE void for_blocks(const Tile& tile, F f) {
  for (int64_t begin = 0; begin < tile.length; begin += kBlock)
    if (tile.blocks >> begin / kBlock & 1) f(begin, least(kBlock, tile.length - begin));
}

// The values of `tile` for sample i where they do not lie one after another: gathered or made in `scratch`, in blocks that
// have a kept coordinate.
template <class T> inline const T* made_row(const dprs_grads& g, const Tile& tile, int64_t i, T* scratch) {
  const T* sample = static_cast<const T*>(g.data[tile.param]) + i * g.row_strides[tile.param];
  const int64_t at = tile.param * DPRS_MAX_DIMS;
  if constexpr (sizeof(T) >= 4)   // 16-bit factors are widened by the caller
    if (g.right[tile.param]) {
      const T* a = static_cast<const T*>(g.right[tile.param]) + i * g.strides[at];
      for_blocks(tile, [&](int64_t c, int64_t n) { outer(sample, a, g.shapes[at], tile.start + c, n, scratch + c); });
      return scratch;
    }
  if (tile.scattered) {
    const int64_t* held = g.held[tile.param];
    const int64_t row = g.row_sizes[tile.param];
    for_blocks(tile, [&](int64_t c, int64_t n) { place(sample, held, row, tile.start + c, n, scratch + c); });
    return scratch;
  }
  gather(sample, g.shapes + at, g.strides + at, g.dims[tile.param], tile.start, tile.length, scratch);
  return scratch;
}

template <class T> DPRS_INLINE const T* row_of(const dprs_grads& g, const Tile& tile, int64_t i, T* scratch) {
  return tile.first ? reinterpret_cast<const T*>(tile.first + i * tile.step) : made_row(g, tile, i, scratch);
}

}  // namespace DPRS_ISA
}  // namespace dprs
