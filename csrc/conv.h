// conv: per-sample weight gradients of a convolution, written straight into the rows of an arena.
//
//   G[i, co, ci, r, s] = sum_{y,x} e[i, co, y, x] xpad[i, ci, y sy + r dy - py, x sx + s dx - px]
//
// For one tap (r, s) that is a matrix product over positions, and none of its operands needs unfolding: with e
// laid out as [position][output channel] and the padded input as [position][input channel], a tile of 6 input
// channels x 2 vectors of output channels takes 8 loads for 12 multiply-adds (with AVX-512 8 x 2: 10 for 16), for any
// stride, dilation and map size, without horizontal sums; positions where the tap meets only padding are left out. Few input channels
// (a first layer, depthwise): a tile's rows are taps instead. Few output channels (what a row mask leaves): the tile is
// turned, its rows are output channels and its vectors input channels; the same products in the same order.
//
// Rounding: products are summed in fp32 in runs of at most 64 positions (48 if there are more), runs in fp32 as
// long as run + number of runs <= 64, and those sums in float64: |error| <= 64 2^-24 sum |e x| for any map.
// Each weight is summed in an order that depends on the shapes and the instruction set only: same bits for any
// number of threads.
#pragma once
#include <cstdlib>

#include "kernels.h"
#include "simd.h"

namespace dprs {
namespace DPRS_ISA {

#if defined(__AVX512F__)
// With 2 vectors: 16 accumulators, 2 loads, a broadcast: 19 of 32 registers. All of DP-CNN's convolutions take 13.0 ms in the
// place of the 14.0 that 6 rows take (44 samples, two Xeon cores with AMX); 10, 12 and 14 rows take 13.1 to 13.3.
constexpr int kTileRows = 8;
#else
constexpr int kTileRows = 6;           // with 2 vectors: 12 accumulators, 2 loads, a broadcast: 15 of 16 registers
#endif
constexpr int kPanel = 2 * kStep;      // output channels of a tile
constexpr int kNarrow = 4;             // fewer input channels: rows are taps
constexpr int64_t kRoundings = 64;     // of one value in fp32
constexpr int64_t kRun = 48;
constexpr int64_t kBand = 128;         // positions: e, x and sums of a band fit L1 (256: 10 % slower for 32 x 32)

DPRS_INLINE int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
DPRS_INLINE int64_t round_up(int64_t a, int64_t unit) { return (a + unit - 1) / unit * unit; }

DPRS_INLINE f32v madd_f32(f32v a, f32v b, f32v c) {
#if defined(__AVX512F__)
  return bitcast<f32v>(_mm512_fmadd_ps(bitcast<__m512>(a), bitcast<__m512>(b), bitcast<__m512>(c)));
#elif defined(__FMA__) && defined(__AVX2__)
  return bitcast<f32v>(_mm256_fmadd_ps(bitcast<__m256>(a), bitcast<__m256>(b), bitcast<__m256>(c)));
#elif defined(__aarch64__)
  return bitcast<f32v>(vfmaq_f32(bitcast<float32x4_t>(c), bitcast<float32x4_t>(a), bitcast<float32x4_t>(b)));
#else
  return a * b + c;
#endif
}

// to[c][r] = from[r][c] for a square of 4 x 4; Add: +=.
template <bool Add>
DPRS_INLINE void transpose_square(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  typedef float f32x4 __attribute__((vector_size(16)));
#if defined(__x86_64__) || defined(__aarch64__)
  f32x4 row[4], column[4];
  for (int i = 0; i < 4; ++i) row[i] = load<f32x4>(from + i * from_stride);
#if defined(__x86_64__)
  const __m128 low02 = _mm_unpacklo_ps(row[0], row[2]), low13 = _mm_unpacklo_ps(row[1], row[3]);
  const __m128 high02 = _mm_unpackhi_ps(row[0], row[2]), high13 = _mm_unpackhi_ps(row[1], row[3]);
  column[0] = _mm_unpacklo_ps(low02, low13);
  column[1] = _mm_unpackhi_ps(low02, low13);
  column[2] = _mm_unpacklo_ps(high02, high13);
  column[3] = _mm_unpackhi_ps(high02, high13);
#else
  const float32x4_t low02 = vzip1q_f32(row[0], row[2]), low13 = vzip1q_f32(row[1], row[3]);
  const float32x4_t high02 = vzip2q_f32(row[0], row[2]), high13 = vzip2q_f32(row[1], row[3]);
  column[0] = vzip1q_f32(low02, low13);
  column[1] = vzip2q_f32(low02, low13);
  column[2] = vzip1q_f32(high02, high13);
  column[3] = vzip2q_f32(high02, high13);
#endif
  for (int i = 0; i < 4; ++i) {
    float* p = to + i * to_stride;
    store(p, Add ? load<f32x4>(p) + column[i] : column[i]);
  }
#else
  for (int r = 0; r < 4; ++r)
    for (int c = 0; c < 4; ++c) {
      float& p = to[c * to_stride + r];
      p = Add ? p + from[r * from_stride + c] : from[r * from_stride + c];
    }
#endif
}

// The same for any rows x columns. A cache line of columns at a time: planes whose sizes are powers of two
// share cache sets, and a line must be used up before the next plane pushes it out.
template <bool Add>
inline void transpose(const float* from, int64_t from_stride, int64_t rows, int64_t columns, float* to,
                      int64_t to_stride) {
  const int64_t whole_rows = rows / 4 * 4, whole_columns = columns / 4 * 4;
  for (int64_t begin = 0; begin < whole_columns; begin += 16)
    for (int64_t r = 0; r < whole_rows; r += 4)
      for (int64_t c = begin; c < least(begin + 16, whole_columns); c += 4)
        transpose_square<Add>(from + r * from_stride + c, from_stride, to + c * to_stride + r, to_stride);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t c = r < whole_rows ? whole_columns : 0; c < columns; ++c) {
      float& p = to[c * to_stride + r];
      p = Add ? p + from[r * from_stride + c] : from[r * from_stride + c];
    }
}

struct Range {
  int64_t begin, end;
};

// Output positions o in [0, outputs) whose input o stride + tap dilation - padding lies in [0, inputs).
inline Range met_by_tap(int64_t tap, int64_t inputs, int64_t outputs, int64_t stride, int64_t padding,
                        int64_t dilation) {
  const int64_t first = most(padding - tap * dilation, 0);          // o stride >= first
  const int64_t last = inputs - 1 + padding - tap * dilation;       // o stride <= last
  const int64_t begin = least((first + stride - 1) / stride, outputs);
  return {begin, last < 0 ? begin : most(begin, least(last / stride + 1, outputs))};
}

// Shapes of one group of channels, and what follows from them.
struct Filter {
  dprs_conv c;
  int64_t inputs, outputs;   // channels of the group
  int64_t taps, weights;     // kh kw, inputs kh kw
  int64_t positions;         // Ho Wo
  int64_t pixel, line;       // the padded input is [lines][width][pixel] floats, line = width pixel
  int64_t padded;            // floats of it
  int64_t panels;
  int64_t run_y, run_x;      // positions summed in registers
  int64_t runs;              // summed in fp32
  int64_t band;              // lines that all taps visit before the next ones: they stay in L1
  bool narrow, fold;         // fold: more runs than that, float64 goes on
  bool turned;
  int64_t chunk;             // weights per output channel that a thread holds at once

  explicit Filter(const dprs_conv& conv) : c(conv) {
    inputs = c.channels[0] / c.groups;
    outputs = c.channels[1] / c.groups;
    taps = c.kernel[0] * c.kernel[1];
    weights = inputs * taps;
    positions = c.outputs[0] * c.outputs[1];
    narrow = inputs < kNarrow;
    pixel = narrow ? inputs : round_up(inputs, 4);
    if (pixel % 32 == 0) pixel += 4;   // else pixels share a few cache sets
    int64_t size[2];
    for (int d = 0; d < 2; ++d)
      size[d] = most(c.inputs[d] + c.padding[d],
                     (c.outputs[d] - 1) * c.stride[d] + (c.kernel[d] - 1) * c.dilation[d] + 1);
    line = size[1] * pixel;
    padded = size[0] * line;
    panels = (outputs + kPanel - 1) / kPanel;
    const bool one = positions <= kRoundings;
    run_x = one ? c.outputs[1] : least(c.outputs[1], kRun);
    run_y = one ? c.outputs[0] : most(kRun / c.outputs[1], 1);
    runs = most(kRoundings - run_x * run_y, 1);
    band = run_y * most(least(kBand / (run_y * run_x), runs), 1);
    fold = round_up(c.outputs[0], band) / run_y * (round_up(c.outputs[1], run_x) / run_x) > runs;
    chunk = narrow ? weights : kTileRows * taps;
    // Vectors of multiply-adds for one tap and position. Of equal ones those that come two at a time.
    const int64_t upright = (outputs + kStep - 1) / kStep * inputs, turn = (inputs + kStep - 1) / kStep * outputs;
    turned = !narrow && (turn < upright || (turn == upright && outputs <= kStep));
  }
};

// One thread's memory: a single block of zeros, since the borders of x stay zero.
struct ConvScratch {
  void* block;
  float* x;           // [padded] one sample's group
  float* e;           // [positions][kPanel]
  float* sums;        // [chunk][kPanel]
  double* total;      // the same, if fold
  int64_t* offsets;   // [weights] floats from a position's first input to the one that weight (ci, r, s) meets
  Range* ys;          // [kh]
  Range* xs;          // [kw]

  explicit ConvScratch(const Filter& f) {
    const int64_t floats[] = {f.padded + kPanel, f.positions * kPanel, f.chunk * kPanel};   // vectors may reach over
    const int64_t words[] = {f.fold ? f.chunk * kPanel : 0, f.weights, 2 * f.c.kernel[0], 2 * f.c.kernel[1]};
    int64_t bytes = 64;
    for (int64_t n : floats) bytes += round_up(4 * n, 64);
    for (int64_t n : words) bytes += round_up(8 * n, 64);
    block = std::calloc(static_cast<size_t>(bytes), 1);
    if (!block) return;
    char* next = reinterpret_cast<char*>(round_up(static_cast<int64_t>(reinterpret_cast<uintptr_t>(block)), 64));
    auto take = [&next](int64_t size) {
      char* mine = next;
      next += round_up(size, 64);
      return static_cast<void*>(mine);
    };
    x = static_cast<float*>(take(4 * floats[0]));
    e = static_cast<float*>(take(4 * floats[1]));
    sums = static_cast<float*>(take(4 * floats[2]));
    total = static_cast<double*>(take(8 * words[0]));
    offsets = static_cast<int64_t*>(take(8 * words[1]));
    ys = static_cast<Range*>(take(8 * words[2]));
    xs = static_cast<Range*>(take(8 * words[3]));
    const dprs_conv& c = f.c;
    for (int64_t w = 0; w < f.weights; ++w) {
      const int64_t r = w % f.taps / c.kernel[1], s = w % c.kernel[1];
      offsets[w] = w / f.taps + r * c.dilation[0] * f.line + s * c.dilation[1] * f.pixel;
    }
    for (int64_t r = 0; r < c.kernel[0]; ++r)
      ys[r] = met_by_tap(r, c.inputs[0], c.outputs[0], c.stride[0], c.padding[0], c.dilation[0]);
    for (int64_t s = 0; s < c.kernel[1]; ++s)
      xs[s] = met_by_tap(s, c.inputs[1], c.outputs[1], c.stride[1], c.padding[1], c.dilation[1]);
  }
  ~ConvScratch() { std::free(block); }
  ConvScratch(const ConvScratch&) = delete;
  ConvScratch& operator=(const ConvScratch&) = delete;
};

// Rows a = 0, 1, ... of a tile are weights first + a step.
struct TileRows {
  const int64_t* offsets;
  float* sums;
  int64_t step;
};
struct Steps {   // from one position to the one below and to the next
  int64_t line, next;
};
struct Walk {   // the positions, and how far apart they are in what is loaded as vectors and in what is broadcast
  Range y, x;
  int64_t run;   // lines y that are summed in registers
  Steps vectors, rows;
};

// sums[row][lane] = (add: +=) sum over the walk of from_row[position + offset(row)] from_vector[position][lane]
// Together: offset(row) = offset(0) + row. One address then serves all rows; eight addresses do not fit the registers.
template <int Rows, int Vectors, bool Together>
void conv_tile(const Walk& walk, const float* from_vector, const float* from_row, const TileRows& rows, bool add) {
  const float* input[Together ? 1 : Rows];
  for (int r = 0; r < (Together ? 1 : Rows); ++r) input[r] = from_row + rows.offsets[r * rows.step];
  const int64_t count = walk.x.end - walk.x.begin, next = walk.vectors.next, row_next = walk.rows.next;
  int64_t y = walk.y.begin;
  do {   // once even if there is no position: the sum is then 0
    f32v acc[Rows][Vectors];
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < Vectors; ++v) acc[r][v] = f32v{};   // GCC 12 clears the whole array with a slow `rep stos`
    for (const int64_t end = least(y + walk.run, walk.y.end); y < end; ++y) {
      const float* p = from_vector + y * walk.vectors.line + walk.x.begin * next;
      int64_t at = y * walk.rows.line + walk.x.begin * row_next;
      for (const float* last = p + count * next; p != last; p += next, at += row_next) {
        f32v value[Vectors];
        for (int v = 0; v < Vectors; ++v) value[v] = load<f32v>(p + v * kStep);
        for (int r = 0; r < Rows; ++r) {
          const f32v all = (Together ? input[0][at + r] : input[r][at]) - f32v{};   // - 0, unlike + 0, is known to change nothing
          for (int v = 0; v < Vectors; ++v) acc[r][v] = madd_f32(all, value[v], acc[r][v]);
        }
      }
    }
    for (int r = 0; r < Rows; ++r)
      for (int v = 0; v < Vectors; ++v) {
        float* p = rows.sums + r * rows.step * kPanel + v * kStep;
        store(p, add ? load<f32v>(p) + acc[r][v] : acc[r][v]);
      }
    add = true;
  } while (y < walk.y.end);
}

typedef void (*ConvTile)(const Walk&, const float*, const float*, const TileRows&, bool);
// [rows - 1]. Not a static of a template: all libraries of a process would share the first one's (STB_GNU_UNIQUE).
struct ConvTiles {
  ConvTile of[kTileRows];
};
template <int Vectors, bool Together> constexpr ConvTiles conv_tiles() {
  return {{conv_tile<1, Vectors, Together>, conv_tile<2, Vectors, Together>, conv_tile<3, Vectors, Together>,
           conv_tile<4, Vectors, Together>, conv_tile<5, Vectors, Together>, conv_tile<6, Vectors, Together>,
#if defined(__AVX512F__)
           conv_tile<7, Vectors, Together>, conv_tile<8, Vectors, Together>,
#endif
  }};
}
const ConvTiles kTogether1 = conv_tiles<1, true>(), kTogether2 = conv_tiles<2, true>();
const ConvTiles kApart1 = conv_tiles<1, false>(), kApart2 = conv_tiles<2, false>();

// How many of `rest` rows to take next: whole tiles, then fours: small tiles wait for their own sums. (Of 6 rows at most, a tile
// of 5 takes as long as one of 6.)
DPRS_INLINE int64_t next_rows(int64_t rest) {
  return rest <= kTileRows ? rest : rest < kTileRows + 4 ? 4 : kTileRows;
}

constexpr int64_t kNoOffset = 0;   // of a turned tile's first row

// own.sums of a tile's rows and lanes. Upright: `width` input channels from `row` on, lanes are the panel's output
// channels. Turned: `width` output channels of the panel from `row` on, lanes are input channels from `lane` on.
inline void conv_chunk(const Filter& f, const ConvScratch& own, int64_t row, int64_t width, int64_t lane, int vectors) {
  const dprs_conv& c = f.c;
  // Offsets of a tile's rows are 1 apart: they are input channels, turned: output channels. But not where they are taps (narrow).
  const ConvTile together = (vectors == 1 ? kTogether1 : kTogether2).of[width - 1];
  const ConvTile* const apart = (vectors == 1 ? kApart1 : kApart2).of;
  const Steps of_e = {c.outputs[1] * kPanel, kPanel}, of_x = {c.stride[0] * f.line, c.stride[1] * f.pixel};
  Walk walk = {{}, {}, f.run_y, f.turned ? of_x : of_e, f.turned ? of_e : of_x};
  const int64_t count = width * f.taps;
  const float* x = own.x + (f.turned ? lane : row);
  int64_t runs = 0;
  bool folded = false;
  auto fold = [&] {
    for (int64_t i = 0; i < count * kPanel; ++i) own.total[i] = (folded ? own.total[i] : 0.0) + own.sums[i];
    folded = true;
    runs = 0;
  };
  for (int64_t y = 0; y < c.outputs[0]; y += f.band)
    for (int64_t column = 0; column < c.outputs[1]; column += f.run_x) {
      const Range all_y = {y, least(y + f.band, c.outputs[0])};
      const Range all_x = {column, least(column + f.run_x, c.outputs[1])};
      if (f.narrow) {
        walk.y = all_y;
        walk.x = all_x;
        for (int64_t w = 0, some; w < count; w += some) {
          some = next_rows(count - w);
          apart[some - 1](walk, own.e, x, {own.offsets + w, own.sums + w * kPanel, 1}, runs > 0);
        }
      } else {
        for (int64_t r = 0, tap = 0; r < c.kernel[0]; ++r) {
          walk.y = {most(all_y.begin, own.ys[r].begin), least(all_y.end, own.ys[r].end)};
          for (int64_t s = 0; s < c.kernel[1]; ++s, ++tap) {
            walk.x = {most(all_x.begin, own.xs[s].begin), least(all_x.end, own.xs[s].end)};
            if (walk.x.end < walk.x.begin) walk.x.end = walk.x.begin;
            float* sums = own.sums + tap * kPanel;
            if (f.turned) together(walk, x + own.offsets[tap], own.e + row, {&kNoOffset, sums, f.taps}, runs > 0);
            else together(walk, own.e, x, {own.offsets + tap, sums, f.taps}, runs > 0);
          }
        }
      }
      if ((runs += f.band / f.run_y) + f.band / f.run_y > f.runs && f.fold) fold();
    }
  if (f.fold) {
    if (runs > 0) fold();
    for (int64_t i = 0; i < count * kPanel; ++i) own.sums[i] = static_cast<float>(own.total[i]);
  }
}

// The sums of one panel, own.e, to out [channels][inputs][taps].
template <bool Add>
void conv_upright(const Filter& f, const ConvScratch& own, int64_t channels, float* out) {
  for (int64_t first = 0, width; first < f.inputs; first += width) {
    width = f.narrow ? f.inputs : next_rows(f.inputs - first);
    float* to = out + first * f.taps;
    for (int64_t k = 0; k < channels; ++k)   // arriving while the sums are made
      for (int64_t w = 0; w < width * f.taps; w += 16) __builtin_prefetch(to + k * f.weights + w, 1);
    conv_chunk(f, own, first, width, 0, channels > kStep ? 2 : 1);
    transpose<Add>(own.sums, kPanel, width * f.taps, channels, to, f.weights);
  }
}

template <bool Add>
void conv_turned(const Filter& f, const ConvScratch& own, int64_t channels, float* out) {
  for (int64_t first = 0; first < f.inputs; first += kPanel) {
    const int64_t lanes = least(kPanel, f.inputs - first);
    for (int64_t k = 0, width; k < channels; k += width) {
      width = next_rows(channels - k);
      conv_chunk(f, own, k, width, first, lanes > kStep ? 2 : 1);
      for (int64_t r = 0; r < width; ++r)   // [taps][lanes] to [lanes][taps]
        transpose<Add>(own.sums + r * f.taps * kPanel, kPanel, f.taps, lanes,
                       out + (k + r) * f.weights + first * f.taps, f.taps);
    }
  }
}

inline void conv_panel(const Conv& a, const Filter& f, const ConvScratch& own, int64_t sample, int64_t group,
                       int64_t panel) {
  const int64_t channels = least(kPanel, f.outputs - panel * kPanel);
  const int64_t channel = group * f.outputs + panel * kPanel;
  const float* e = a.e + (sample * f.c.channels[1] + channel) * f.positions;
  transpose<false>(e, f.positions, channels, f.positions, own.e, kPanel);
  float* out = a.out + sample * a.row_stride + channel * f.weights;
  if (f.turned) (a.accumulate ? conv_turned<true> : conv_turned<false>)(f, own, channels, out);
  else (a.accumulate ? conv_upright<true> : conv_upright<false>)(f, own, channels, out);
}

// One sample's input of one group, [ci][h][w], to own.x.
inline void conv_input(const Conv& a, const Filter& f, const ConvScratch& own, int64_t sample, int64_t group) {
  const dprs_conv& c = f.c;
  const int64_t plane = c.inputs[0] * c.inputs[1];
  const float* from = a.x + (sample * c.channels[0] + group * f.inputs) * plane;
  for (int64_t h = 0; h < c.inputs[0]; ++h)
    transpose<false>(from + h * c.inputs[1], plane, f.inputs, c.inputs[1],
                     own.x + (h + c.padding[0]) * f.line + c.padding[1] * f.pixel, f.pixel);
}

// Threads take shares (a sample's panels, or a part of them if there are few samples) as they come. False: no memory.
inline bool conv_weight_grads(const Conv& a) {
  const Filter f(a.shape);
  const int64_t panels = f.c.groups * f.panels, samples = a.shape.samples;
  const int64_t parts = samples ? least(panels, (4 * a.threads + samples - 1) / samples) : 1;
  const int64_t shares = samples * parts;
  int64_t taken = 0;
#pragma omp parallel num_threads(a.threads)
  {
    const FlushSubnormals flush;
    const ConvScratch own(f);
    if (own.block)
      for (int64_t share; (share = __atomic_fetch_add(&taken, 1, __ATOMIC_RELAXED)) < shares;) {
        const int64_t sample = share / parts, part = share % parts;
        int64_t held = -1;   // the group whose input own.x has
        for (int64_t p = panels * part / parts; p < panels * (part + 1) / parts; ++p) {
          const int64_t group = p / f.panels;
          if (group != held) conv_input(a, f, own, sample, group);
          held = group;
          conv_panel(a, f, own, sample, group, p % f.panels);
        }
      }
  }
  return taken >= shares;
}

}  // namespace DPRS_ISA
}  // namespace dprs
