"""norms: squared norms of rows over tiles, and the clip factors that follow from them.

    partial_ti = sum_{j in tile t} (scale keep_j g_ij)^2        fp32 over at most 1024 values, then float64
    n_i        = sqrt(sum_t partial_ti) / scale * loss_scale    inf from 2^61 on: the sample counts as not finite
    F_i        = f_i loss_scale / h truncated to 24 bits        f_i = 1 if n_i <= C' else C'/n_i; 0 if not finite

clip table, float64 [4 + 2 S]:  loss_scale, 1/h (1 without a unit), gamma (-1: none), norm limit,
                                then bound C' and scale of each of the S segments
"""

import triton
import triton.language as tl

from dprs_kernels.kernels.vectors import (
    keep_of_vectors,
    load_rows,
    row_fields,
    row_pointers,
    select_kept,
    tile_fields,
    vector_range,
)

CLIP_FIELDS = tl.constexpr(4)


@triton.jit
def segment_scale(clip_ptr, segment):
    return tl.load(clip_ptr + CLIP_FIELDS + 2 * segment + 1)


@triton.jit
def add_squares(
    acc, c, bits_ptr, pointers, columns, word, wanted, scale,
    DTYPE: tl.constexpr, L: tl.constexpr, E: tl.constexpr, HAS_KEEP: tl.constexpr, ALIGNED: tl.constexpr,
):   # fmt: skip
    """acc [R, 1, L, E] + (scale g)^2 at the kept of columns c L E .. (c + 1) L E - 1."""
    keep = keep_of_vectors(bits_ptr, word, c * L + vector_range(1, L), columns, E, HAS_KEEP)
    pointers += c * (L * E // 2 if ALIGNED and tl.bfloat16 == DTYPE else L * E)
    x = load_rows(pointers, keep, wanted, DTYPE, E, ALIGNED, "")
    if HAS_KEEP and ALIGNED:
        x = select_kept(x, keep, E)
    x = x * scale
    return tl.fma(x, x, acc)


@triton.jit
def tile_squares(
    bits_ptr, pointers, columns, word, wanted, scale,
    DTYPE: tl.constexpr, L: tl.constexpr, E: tl.constexpr, CHUNKS: tl.constexpr, UNROLL: tl.constexpr,
    HAS_KEEP: tl.constexpr, ALIGNED: tl.constexpr,
):   # fmt: skip
    """sum (scale g)^2 over the kept of a tile of at most CHUNKS * L * E columns. [R] float64

    A thread adds at most CHUNKS * E squares of its own, then LANES neighbours add theirs: 1024 values in fp32
    at most, with a rounding error of (CHUNKS + log2(E * LANES)) 2^-24 of the square: well inside C' = C (1 - 2^-20).
    What follows is float64. UNROLL takes all chunks in straight-line code: for a few, a loop costs as much again.
    """
    R: tl.constexpr = pointers.shape[0]
    LANES: tl.constexpr = 1024 // (CHUNKS * E) if CHUNKS * E > 32 else 32   # within a warp: no shared memory yet
    COMPUTE: tl.constexpr = tl.float64 if tl.float64 == DTYPE else tl.float32
    scale = scale.to(COMPUTE)
    acc = tl.zeros([R, 1, L, E], dtype=COMPUTE)
    if UNROLL:
        for c in tl.static_range(CHUNKS):
            acc = add_squares(
                acc, c, bits_ptr, pointers, columns, word, wanted, scale, DTYPE, L, E, HAS_KEEP, ALIGNED
            )
    else:
        for c in range(tl.cdiv(columns, L * E)):
            acc = add_squares(
                acc, c, bits_ptr, pointers, columns, word, wanted, scale, DTYPE, L, E, HAS_KEEP, ALIGNED
            )
    lanes = tl.sum(tl.reshape(acc, [R, L, E]), axis=2)                           # [R, L]
    blocks = tl.sum(tl.reshape(lanes, [R, L // LANES, LANES]), axis=2)           # [R, L / LANES]
    return tl.sum(blocks.to(tl.float64), axis=1)


@triton.jit
def clip_factor(squares, inverse_scale, bound, clip_ptr):
    """norm and factor, float64, of squares (already summed over the segment's tiles)."""
    loss_scale, per_unit = tl.load(clip_ptr), tl.load(clip_ptr + 1)
    gamma, limit = tl.load(clip_ptr + 2), tl.load(clip_ptr + 3)
    scaled = tl.sqrt(squares)
    infinity = float("inf")
    norm = tl.where(scaled < limit, scaled, infinity) * inverse_scale * loss_scale   # NaN is not < limit
    automatic = bound / (norm + tl.maximum(gamma, 1e-30))
    within = norm <= bound
    plain = tl.where(within, 1.0, bound / tl.where(within, 1.0, norm))
    f = tl.where(gamma > 0, automatic, plain) * loss_scale * per_unit
    f = tl.where(norm < infinity, f, 0.0)
    truncated = (f.to(tl.int64, bitcast=True) & -536870912).to(tl.float64, bitcast=True)   # 2^29 = 53 - 24 bits
    return norm, truncated


@triton.jit(do_not_specialize=["samples", "tiles"])
def _norms_tile_kernel(
    partial_ptr, tile_ptr, row_ptr, bits_ptr, clip_ptr, segment_ptr, samples, tiles,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, L: tl.constexpr, E: tl.constexpr, CHUNKS: tl.constexpr,
    HAS_KEEP: tl.constexpr, ALIGNED: tl.constexpr,
):   # fmt: skip
    """partial[tile, row] of ROWS samples and one tile. grid (tiles * row blocks,): the other axes end at 65535"""
    tile = tl.program_id(0) % tiles
    param, column, columns, word = tile_fields(tile_ptr, tile)
    address, stride = row_fields(row_ptr, param)
    scale = segment_scale(clip_ptr, tl.load(segment_ptr + param))
    first = tl.program_id(0) // tiles * ROWS
    rows = first + tl.arange(0, ROWS)
    inb = rows < samples
    pointers = row_pointers(address, stride, column, first, ROWS, DTYPE, E, ALIGNED)
    squares = tile_squares(bits_ptr, pointers, columns, word, inb, scale, DTYPE, L, E, CHUNKS, False, HAS_KEEP, ALIGNED)
    tl.store(partial_ptr + tile.to(tl.int64) * samples + rows, squares, mask=inb)


@triton.jit(do_not_specialize=["samples", "padded_samples"])
def _norms_factor_kernel(
    norm_ptr, factor_ptr, partial_ptr, range_ptr, clip_ptr, samples, padded_samples, segments,
    BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr,
):   # fmt: skip
    """norm, float64 [segments, samples], and factor, fp32 or fp64 [segments, padded_samples], of BLOCK_N samples.

    range, int64 [segments, 2]: first tile of each segment and the one after its last. The order of addition is
    fixed: BLOCK_T tiles at a time. A sample with any norm not finite has all its factors 0, and so have those that
    pad the last block.
    """
    rows = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inb = rows < samples
    lanes = tl.arange(0, BLOCK_T)
    finite = rows == rows
    for s in range(segments):
        begin, end = tl.load(range_ptr + 2 * s).to(tl.int32), tl.load(range_ptr + 2 * s + 1).to(tl.int32)
        squares = tl.zeros([BLOCK_T, BLOCK_N], dtype=tl.float64)
        for t in range(begin, end, BLOCK_T):
            tiles = t + lanes
            at = partial_ptr + tiles.to(tl.int64)[:, None] * samples + rows[None, :]
            squares += tl.load(at, mask=(tiles < end)[:, None] & inb[None, :], other=0.0)
        bound, scale = tl.load(clip_ptr + CLIP_FIELDS + 2 * s), segment_scale(clip_ptr, s)
        norm, factor = clip_factor(tl.sum(squares, axis=0), 1 / scale, bound, clip_ptr)
        finite = finite & (norm < float("inf"))
        tl.store(norm_ptr + s * samples + rows, norm, mask=inb)
        tl.store(factor_ptr + s * padded_samples + rows, factor.to(factor_ptr.dtype.element_ty), mask=inb & finite)
    for s in range(segments):
        spoiled = (finite == 0) | (inb == 0)
        tl.store(
            factor_ptr + s * padded_samples + rows, tl.zeros([BLOCK_N], dtype=factor_ptr.dtype.element_ty),
            mask=spoiled & (rows < padded_samples),
        )   # fmt: skip
