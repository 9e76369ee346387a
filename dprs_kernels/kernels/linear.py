"""linear: masked squared norms of a Linear layer's per-sample gradients, which are never written anywhere.

    g_i = sum_t e_it a_it^T                          [out, in], t = 1 .. T positions
    q_i = || keep o g_i ||^2
        = sum_o e_io^2 sum_c keep_oc a_ic^2          for T = 1: one GEMM of a^2 with the keep bits

Scaling. x 2^-k with k the exponent of the sample's largest finite |x| keeps every square inside fp32; q takes the
2^2k back in float64. Exact, as only exponents change.
Rounding. T = 1: a^2, then 31 additions in fp32, then float64; e^2 in float64: at most 32 roundings, so q is off by
2^-19 at most. T > 1: g as an fp32 GEMM makes it, |error| <= T 2^-24 sum_t |e_to a_tc|; its square and all sums of
squares in float64.
Underflow never hides a norm: what is lost against the sample's largest value is rounded up (squares_of, SLACK).
Not finite. q_i is inf if a kept coordinate of g_i is not finite, and only then. A NaN or Inf in e_ito spoils row o, one
in a_itc column c, whatever it meets there, 0 included; a row or column without a kept coordinate does not count.
"""

import triton
import triton.language as tl

LARGEST = tl.constexpr(3.4028234663852886e38)   # of fp32; what is not <= this is Inf or NaN
SPOILED = tl.constexpr(2.0**100)   # stands for (Inf or NaN)^2: no sum of scaled squares gets there, and 0 * it is 0
FLOOR = tl.constexpr(2.0**-126)    # least normal fp32
SLACK = tl.constexpr(2.0**-252)    # (2^20 times the 2^-146 that underflow can cost a product)^2
ZERO = tl.constexpr(-127)          # exponent of a sample without a finite value other than 0
UNSCALED = tl.constexpr(2.0**127)  # power(ZERO)


@triton.jit
def power(k):
    """2^-k in fp32, -127 <= k <= 126."""
    return ((127 - k) << 23).to(tl.float32, bitcast=True)


@triton.jit
def squares_of(x):
    """x^2 for |x| <= 4: at least 2^-126 unless x = 0, so that a kept small value beside a dropped large one is
    never left out of a norm; SPOILED if x is not finite."""
    squares = tl.where(x == 0, 0.0, tl.maximum(x * x, FLOOR))
    return tl.where(tl.abs(x) <= LARGEST, squares, SPOILED)


@triton.jit
def keep_words(bits_ptr, first, left, inb):
    """keep bits of 32 consecutive coordinates from bit `first` on, of which `left` count. int32

    Rows start anywhere in a word: two words and a shift. The second is asked for only if a counted bit is in it.
    """
    shift = first & 31
    count = tl.minimum(left, 32)
    low = tl.load(bits_ptr + (first >> 5), mask=inb, other=0).to(tl.int64) & 0xFFFFFFFF
    high = tl.load(bits_ptr + (first >> 5) + 1, mask=inb & (shift + count > 32), other=0).to(tl.int64) & 0xFFFFFFFF
    return (((low | (high << 32)) >> shift) & ((1 << count.to(tl.int64)) - 1)).to(tl.int32)


@triton.jit(do_not_specialize=["positions"])
def _linear_scale_kernel(
    exponent_ptr, x_ptr, positions, columns, stride_n, stride_t, stride_c, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr
):
    """k_i with max |x_i| in [2^(k-1), 2^k), kept within [-126, 126]; ZERO if there is none. grid (N,)"""
    n = tl.program_id(0).to(tl.int64)
    top = tl.zeros([BLOCK_T, BLOCK_C], dtype=tl.float32)
    for first_t in range(0, positions, BLOCK_T):
        t = first_t + tl.arange(0, BLOCK_T)[:, None]
        for first_c in range(0, columns, BLOCK_C):
            c = first_c + tl.arange(0, BLOCK_C)[None, :]
            at = x_ptr + n * stride_n + t.to(tl.int64) * stride_t + c.to(tl.int64) * stride_c
            x = tl.abs(tl.load(at, mask=(t < positions) & (c < columns), other=0).to(tl.float32))
            top = tl.maximum(top, tl.where(x <= LARGEST, x, 0.0))
    bits = tl.max(tl.reshape(top, [BLOCK_T * BLOCK_C]), axis=0).to(tl.int32, bitcast=True)
    k = tl.minimum(tl.maximum((bits >> 23) - 126, -126), 126)
    tl.store(exponent_ptr + n, tl.where(bits == 0, ZERO, k))


@triton.jit(do_not_specialize=["samples"])
def _linear_squares_kernel(
    partial_ptr, a_ptr, e_ptr, exponent_ptr, bits_ptr, samples, outs, columns,
    a_stride_n, a_stride_c, e_stride_n, e_stride_o,
    BLOCK_N: tl.constexpr, BLOCK_O: tl.constexpr, SPLIT: tl.constexpr, HAS_KEEP: tl.constexpr,
):   # fmt: skip
    """One position: partial of BLOCK_N samples, BLOCK_O rows and SPLIT columns. grid (n blocks, o blocks, splits)

    SPLIT is a multiple of 32. partial, float64 [o blocks * splits, N], in units of 2^2k_i. Bit o * columns + c of
    `bits` is keep_oc.
    """
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    o = tl.program_id(1) * BLOCK_O + tl.arange(0, BLOCK_O)
    b = tl.arange(0, 32)
    n_inb, o_inb = n < samples, o < outs
    scale = power(tl.load(exponent_ptr + n, mask=n_inb, other=0))
    first = tl.program_id(2) * SPLIT
    a_at = a_ptr + n.to(tl.int64)[:, None] * a_stride_n + (first + b).to(tl.int64)[None, :] * a_stride_c
    acc = tl.zeros([BLOCK_N, BLOCK_O], dtype=tl.float64)
    row_kept = tl.zeros([BLOCK_O], dtype=tl.int32)
    for begin in range(first, tl.minimum(first + SPLIT, columns), 32):
        a = tl.load(a_at, mask=n_inb[:, None] & (b < columns - begin)[None, :], other=0).to(tl.float32)
        a_at += 32 * tl.cast(a_stride_c, tl.int64)
        squares = squares_of(a * scale[:, None])                                      # [BLOCK_N, 32]
        if HAS_KEEP:
            words = keep_words(bits_ptr, o.to(tl.int64) * columns + begin, columns - begin, o_inb)
        else:   # columns beyond the last are 0 in `squares`
            words = tl.where(o_inb, tl.full([BLOCK_O], -1, tl.int32), 0)
        row_kept |= words
        keep = ((words[None, :] >> b[:, None]) & 1).to(tl.float32)                    # [32, BLOCK_O]
        acc += tl.dot(squares, keep, input_precision="ieee").to(tl.float64)
    at = e_ptr + n.to(tl.int64)[:, None] * e_stride_n + o.to(tl.int64)[None, :] * e_stride_o
    e = tl.load(at, mask=n_inb[:, None] & o_inb[None, :], other=0).to(tl.float32)
    finite = tl.abs(e) <= LARGEST
    spoiled = (acc >= SPOILED) | (~finite & (row_kept != 0)[None, :])
    e = tl.where(finite, e, 0.0).to(tl.float64)
    total = tl.sum(tl.where(spoiled, float("inf"), e * e * acc), axis=1)              # [BLOCK_N]
    slot = (tl.program_id(1) * tl.num_programs(2) + tl.program_id(2)).to(tl.int64)
    tl.store(partial_ptr + slot * samples + n, total, mask=n_inb)


@triton.jit(do_not_specialize=["samples", "positions"])
def _linear_positions_kernel(
    partial_ptr, a_ptr, e_ptr, exponent_ptr, bits_ptr, samples, positions, outs, columns,
    a_stride_n, a_stride_t, a_stride_c, e_stride_n, e_stride_t, e_stride_o,
    BLOCK_O: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_T: tl.constexpr, HAS_KEEP: tl.constexpr,
):   # fmt: skip
    """Forms a tile of g_i, keeps the kept, squares, drops the tile. grid (N * tiles,), a sample's tiles together

    partial, float64 [tiles, N], in units of 2^(2k_i + 2l_i); exponent [2, N] holds the k of a, then the l of e.
    """
    across = tl.cdiv(columns, BLOCK_C)
    tiles = tl.cdiv(outs, BLOCK_O) * across
    n = (tl.program_id(0) // tiles).to(tl.int64)
    tile = tl.program_id(0) % tiles
    o = (tile // across) * BLOCK_O + tl.arange(0, BLOCK_O)
    c = (tile % across) * BLOCK_C + tl.arange(0, BLOCK_C)
    o_inb, c_inb = o < outs, c < columns
    a_scale, e_scale = power(tl.load(exponent_ptr + n)), power(tl.load(exponent_ptr + samples + n))
    a_at = a_ptr + n * a_stride_n + c.to(tl.int64)[None, :] * a_stride_c
    e_at = e_ptr + n * e_stride_n + o.to(tl.int64)[:, None] * e_stride_o
    g = tl.zeros([BLOCK_O, BLOCK_C], dtype=tl.float32)
    for first in range(0, positions, BLOCK_T):
        t = first + tl.arange(0, BLOCK_T)
        t_inb, far = t < positions, t.to(tl.int64)
        a = tl.load(a_at + far[:, None] * a_stride_t, mask=t_inb[:, None] & c_inb[None, :], other=0).to(tl.float32)
        e = tl.load(e_at + far[None, :] * e_stride_t, mask=t_inb[None, :] & o_inb[:, None], other=0).to(tl.float32)
        g = tl.dot(e * e_scale, a * a_scale, g, input_precision="ieee")
    keep = o_inb[:, None] & c_inb[None, :]
    if HAS_KEEP:
        bit = o.to(tl.int64)[:, None] * columns + c[None, :]
        words = tl.load(bits_ptr + (bit >> 5), mask=keep, other=0)
        keep = keep & ((words >> (bit & 31).to(tl.int32)) & 1 != 0)
    g64 = tl.where(keep, g, 0.0).to(tl.float64)
    total = tl.sum(tl.reshape(g64 * g64, [BLOCK_O * BLOCK_C]), axis=0)
    steps = positions.to(tl.float64)
    hidden = SLACK * (BLOCK_O * BLOCK_C) * steps * steps
    total += tl.where(tl.maximum(a_scale, e_scale) < UNSCALED, hidden, 0.0)
    tl.store(partial_ptr + tile.to(tl.int64) * samples + n, total)


@triton.jit(do_not_specialize=["samples"])
def _linear_finish_kernel(
    out_ptr, partial_ptr, exponent_ptr, samples, slots, OPERANDS: tl.constexpr, BLOCK_N: tl.constexpr
):
    """q_i = 2^(2 sum of exponents) sum of partials, slots in order; inf for NaN. grid (n blocks,)"""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    inb = n < samples
    total = tl.zeros([BLOCK_N], dtype=tl.float64)
    for slot in range(slots):
        total += tl.load(partial_ptr + tl.cast(slot, tl.int64) * samples + n, mask=inb, other=0)
    k = tl.zeros([BLOCK_N], dtype=tl.int64)
    for operand in tl.static_range(OPERANDS):
        k += tl.load(exponent_ptr + operand * samples + n, mask=inb, other=0)
    total *= ((1023 + 2 * k) << 52).to(tl.float64, bitcast=True)
    tl.store(out_ptr + n, tl.where(total < float("inf"), total, float("inf")), mask=inb)
