"""vectors: a tile of per-sample gradients as [R, C, L, E]: R samples, C * L vectors of 16 bytes, E values each.

A tile is a run of columns of one parameter, so that every address is base + row * stride + column: no index table
per value, and 128-bit loads. E keep bits belong to a vector; a vector with none of them set is never requested
(the mask is public, so skipping tells nobody anything). L neighbouring vectors go to L threads, C is unrolled.

tile table, int64 [tiles, 4]:   parameter, first column / 32, columns in the tile, first padded coordinate / 32
row table, int64 [params, 2]:   address of sample 0, distance between samples in vectors (in values if not ALIGNED)

Distances are stored divided and multiplied back here: a product with a constant is how Triton learns that an
address is a multiple of 16 bytes (tl.multiple_of on an argument of a device function is lost when it is inlined).
"""

import triton
import triton.language as tl


@triton.jit
def tile_fields(tile_ptr, tile):
    """parameter, first column / 32, columns, first padded coordinate / 32 of a tile."""
    at = tile_ptr + tile.to(tl.int64) * 4
    return tl.load(at), tl.load(at + 1), tl.load(at + 2).to(tl.int32), tl.load(at + 3)


@triton.jit
def row_fields(row_ptr, param):
    """Address and stride of a parameter's gradients."""
    return tl.load(row_ptr + param * 2), tl.load(row_ptr + param * 2 + 1)


@triton.jit
def vector_range(C: tl.constexpr, L: tl.constexpr):
    """0 .. C * L - 1 as [C, L]."""
    return tl.arange(0, C)[:, None] * L + tl.arange(0, L)[None, :]


@triton.jit
def keep_of_vectors(bits_ptr, word, v, columns, E: tl.constexpr, HAS_KEEP: tl.constexpr):
    """The E keep bits of each vector v [C, L], int32: bit i is value i. 0 beyond the tile's columns."""
    if HAS_KEEP:
        per_word: tl.constexpr = 32 // E
        words = tl.load(bits_ptr + word + v // per_word, mask=v * E < columns, other=0)
        keep = (words >> (v % per_word) * E) & ((1 << E) - 1)
    else:
        keep = (1 << tl.minimum(tl.maximum(columns - v * E, 0), E)) - 1
    return keep


@triton.jit
def kept_values(keep, E: tl.constexpr):
    """Bool [C, L, E]."""
    return ((keep[:, :, None] >> tl.arange(0, E)) & 1) != 0


@triton.jit
def row_pointers(
    address, stride, column, first, R: tl.constexpr, DTYPE: tl.constexpr, E: tl.constexpr, ALIGNED: tl.constexpr
):
    """Pointers [R] to column 32 `column` of samples first .. first + R - 1.

    bf16 is read as integers, int32 pairs where aligned: unpacking them is cheaper than Triton's conversion (1
    instruction a value instead of 1.5) and right in the interpreter, whose bf16 is not.
    """
    if tl.bfloat16 == DTYPE:
        HELD: tl.constexpr = tl.int32 if ALIGNED else tl.int16
        PER: tl.constexpr = 2 if ALIGNED else 1
    else:
        HELD: tl.constexpr = DTYPE
        PER: tl.constexpr = 1
    base = address.to(tl.pointer_type(HELD), bitcast=True)
    if ALIGNED:
        base = tl.multiple_of(base, 16)
        stride = stride * (E // PER)
    rows = first.to(tl.int64) * stride + tl.arange(0, R).to(tl.int64) * stride
    return base + column * (32 // PER) + rows


@triton.jit
def load_rows(pointers, keep, wanted, DTYPE: tl.constexpr, E: tl.constexpr, ALIGNED: tl.constexpr, EVICT: tl.constexpr):
    """Values [R, C, L, E] of the rows at `pointers` [R], in fp32 (fp64 as it is); vector (c, l) is columns
    (c L + l) E + i. Requested only where `wanted` [R] and kept [C, L]; what is not requested is 0.

    ALIGNED promises rows that start at multiples of 16 bytes: 128-bit loads, requested where any value of the
    vector is kept. Otherwise each kept value is requested by itself.
    """
    C: tl.constexpr = keep.shape[0]
    L: tl.constexpr = keep.shape[1]
    PAIRS: tl.constexpr = ALIGNED and tl.bfloat16 == DTYPE
    HELD: tl.constexpr = E // 2 if PAIRS else E
    ask = (keep != 0)[None, :, :, None] if ALIGNED else kept_values(keep, E)[None, :, :, :]
    # The constant part of the offset is added last: it becomes an immediate of the load, not an addition.
    within = (tl.arange(0, L)[:, None] * HELD + tl.arange(0, HELD)[None, :])[None, None, :, :]
    at = pointers[:, None, None, None] + within + (tl.arange(0, C) * (L * HELD))[None, :, None, None]
    x = tl.load(at, mask=ask & wanted[:, None, None, None], other=0, eviction_policy=EVICT)
    if PAIRS:
        low, high = (x << 16).to(tl.float32, bitcast=True), (x & -65536).to(tl.float32, bitcast=True)
        y = tl.reshape(tl.join(low, high), [pointers.shape[0], C, L, E])
    elif tl.bfloat16 == DTYPE:
        y = (x.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    elif tl.float64 == DTYPE:
        y = x
    else:
        y = x.to(tl.float32)
    return y


@triton.jit
def select_kept(x, keep, E: tl.constexpr):
    """x [R, C, L, E] where kept, +0 elsewhere: an AND with a mask, so a dropped NaN is not there."""
    masks = (keep[:, :, None] << (31 - tl.arange(0, E))) >> 31   # [C, L, E]: all ones or all zeros
    if x.dtype == tl.float64:
        y = (x.to(tl.int64, bitcast=True) & masks.to(tl.int64)[None, :, :, :]).to(tl.float64, bitcast=True)
    else:
        y = (x.to(tl.int32, bitcast=True) & masks[None, :, :, :]).to(tl.float32, bitcast=True)
    return y
