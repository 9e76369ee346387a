"""sums: clipped rows added up in integers. S_j / h = sum_i rint(fl(F_i g_ij)) over samples with F_i != 0.

Integers add up exactly in any order, so rows may be split between programs and added with atomics, and the
result is still the same bits as the reference's and the CPU's. Three ways to hold a contribution:
    SMALL  |k| < 2^29 units: four of them fit an int32, then int64
    WIDE   int64 throughout (tiny noise)
    FLOAT  no unit (no noise, or no bound): float64, rows in order, one program per tile
"""

import triton
import triton.language as tl
from triton.language.extra import libdevice

from dprs_kernels.kernels.vectors import (
    keep_of_vectors,
    kept_values,
    load_rows,
    row_fields,
    row_pointers,
    tile_fields,
    vector_range,
)

SMALL, WIDE, FLOAT = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2)
INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)


@triton.jit
def rint(x):
    """x rounded to the nearest whole number, half to even.

    From 2^52 (2^23 in fp32) on, x is whole; below, adding that number with the sign of x rounds. fp32 has an
    instruction for it, but not in the interpreter; and on gfx942 libdevice.rint cannot serve both types in one kernel.
    """
    if x.dtype == tl.float64:
        big = ((x.to(tl.int64, bitcast=True) & -9223372036854775808) | 0x4330000000000000).to(tl.float64, bitcast=True)
        y = tl.where(tl.abs(x) < 4503599627370496.0, (x + big) - big, x)
    elif INTERPRETED:
        big = tl.where(x < 0, -8388608.0, 8388608.0)
        y = tl.where(tl.abs(x) < 8388608.0, (x + big) - big, x)
    else:
        y = libdevice.rint(x)
    return y


@triton.jit
def tile_units(
    pointers, factors, keep,
    DTYPE: tl.constexpr, E: tl.constexpr, MODE: tl.constexpr, ALIGNED: tl.constexpr,
):   # fmt: skip
    """sum over the rows of rint(F g) at the tile's columns. [C, L, E] int64, or float64 without rounding

    Rows with F = 0 are not requested. What a dropped column adds up to is meaningless (a NaN converts to any
    integer): callers store kept columns only. SMALL: at most 4 rows. Second and last touch: evict first.
    """
    x = load_rows(pointers, keep, factors != 0, DTYPE, E, ALIGNED, "evict_first")
    f = factors[:, None, None, None]
    if MODE == FLOAT:
        units = tl.sum(x.to(tl.float64) * f.to(tl.float64), axis=0)
    elif MODE == WIDE:
        units = tl.sum(rint(x * f.to(x.dtype)).to(tl.int64), axis=0)
    else:
        units = tl.sum(rint(x * f.to(tl.float32)).to(tl.int32), axis=0).to(tl.int64)
    return units


@triton.jit
def add_units(total_ptr, word, keep, units, E: tl.constexpr, MODE: tl.constexpr):
    """total += units [C, L, E] at the kept columns."""
    C: tl.constexpr = keep.shape[0]
    L: tl.constexpr = keep.shape[1]
    # Constants last, as in load_rows: immediates of the atomics.
    at = total_ptr + word * 32 + (tl.arange(0, L) * E)[None, :, None]
    at = at + tl.arange(0, E)[None, None, :] + (tl.arange(0, C) * (L * E))[:, None, None]
    kept = kept_values(keep, E)
    if MODE == FLOAT:
        tl.store(at, tl.load(at, mask=kept, other=0.0) + units, mask=kept)
    else:
        tl.atomic_add(at, units, mask=kept, sem="relaxed")


@triton.jit(do_not_specialize=["blocks", "per_split"])
def _sums_tile_kernel(
    total_ptr, tile_ptr, row_ptr, bits_ptr, factor_ptr, segment_ptr, blocks, per_split,
    DTYPE: tl.constexpr, ROWS: tl.constexpr, C: tl.constexpr, L: tl.constexpr, E: tl.constexpr,
    MODE: tl.constexpr, HAS_KEEP: tl.constexpr, ALIGNED: tl.constexpr,
):   # fmt: skip
    """total += S of one tile over one split of the row blocks. grid (tiles, splits)

    A block is ROWS samples. factor, fp32 or fp64 [segments, blocks * ROWS], is 0 beyond the last sample, so
    nothing else bounds the rows. Blocks go backwards: the last that the norms read may still be in L2.
    """
    tile = tl.program_id(0)
    param, column, columns, word = tile_fields(tile_ptr, tile)
    address, stride = row_fields(row_ptr, param)
    factor_ptr += tl.load(segment_ptr + param).to(tl.int64) * blocks * ROWS
    keep = keep_of_vectors(bits_ptr, word, vector_range(C, L), columns, E, HAS_KEEP)
    first = tl.program_id(1) * per_split
    last = tl.minimum(first + per_split, blocks)
    acc = tl.zeros([C, L, E], dtype=tl.float64 if MODE == FLOAT else tl.int64)
    for done in range(last - first):
        row = (last - 1 - done) * ROWS
        pointers = row_pointers(address, stride, column, row, ROWS, DTYPE, E, ALIGNED)
        factors = tl.load(factor_ptr + row + tl.arange(0, ROWS))
        acc += tile_units(pointers, factors, keep, DTYPE, E, MODE, ALIGNED)
    add_units(total_ptr, word, keep, acc, E, MODE)
