"""noise: standard normals from ChaCha20 words by Box-Muller in float64, and the noised release.

A block's 128-bit lane p gives the pair of coordinates (2p, 2p+1): low 64-bit word w, high word v,
    u = (w+1) 2^-64,  r = sqrt(-2 ln u) <= 9.42,  (z_2p, z_2p+1) = r (cos, sin)(2 pi v 2^-64)
    out = keep o (rint(S/g) + rint(noise_std z/g)) (g / B)           without noise: keep o S/B

Log, sine and cosine are the Taylor series of csrc/normals.h in the same order, with fused multiply-adds: a few units in
the last place of float64, while the grid that z is rounded to (2^-20 of the standard deviation) is 2^32 times
coarser. No approximate instruction: square roots and divisions of float64 round correctly.

release table, float64 [3]:  h/g (exact: powers of two; h = 1 without a unit, g = 1 without noise), noise_std / g, g / B
"""

import triton
import triton.language as tl

from dprs_kernels.kernels.rng import chacha20
from dprs_kernels.kernels.sums import rint
from dprs_kernels.kernels.vectors import tile_fields

LN_2 = tl.constexpr(0.6931471805599453)
QUARTER_TURN = tl.constexpr(1.5707963267948966 / 4611686018427387904.0)   # pi/2 2^-62
EXPONENT = tl.constexpr(4503599627370496.0 + 1023 + 64)                   # 2^52, the bias, the 2^-64 of u


@triton.jit
def _word(low, high):
    return low.to(tl.uint64) | (high.to(tl.uint64) << 32)


@triton.jit
def _like(x, VALUE: tl.constexpr):
    """A float64 constant in the shape of x (a bare number would be made fp32)."""
    return tl.full(x.shape, VALUE, tl.float64)


@triton.jit
def _linear(x, A: tl.constexpr, B: tl.constexpr):
    """A + B x."""
    return tl.fma(x, _like(x, B), _like(x, A))


@triton.jit
def minus_two_log(w_plus_1):
    """-2 ln u for u = (w+1) 2^-64. m 2^e = w+1 with m in [sqrt(1/2), sqrt(2)), s = (m-1)/(m+1):
    ln m = 2 atanh s = 2 s (1 + s^2/3 + s^4/5 + ...), |s| < 0.1716, so 11 terms reach 2^-56."""
    bits = w_plus_1.to(tl.int64, bitcast=True)
    shifted = bits - 0x3FE6A09E667F3BCD + (1023 << 52)                    # from sqrt(1/2): >> is a floor
    exponent = shifted >> 52                                              # e + 1023
    m = (bits - ((exponent - 1023) << 52)).to(tl.float64, bitcast=True)
    e = (exponent | 0x4330000000000000).to(tl.float64, bitcast=True) - EXPONENT
    s = (m - 1.0) / (m + 1.0)
    z = s * s
    # Estrin's order, here and below: half the latency of Horner's at the same number of operations.
    z2 = z * z
    z4 = z2 * z2
    low = tl.fma(z2, _linear(z, 1.0 / 7, 1.0 / 9), _linear(z, 1.0 / 3, 1.0 / 5))
    high = tl.fma(z2, _linear(z, 1.0 / 15, 1.0 / 17), _linear(z, 1.0 / 11, 1.0 / 13))
    high = tl.fma(z4, _linear(z, 1.0 / 19, 1.0 / 21), high)
    log_m = tl.fma(s, z * tl.fma(z4, high, low), s)                       # half of ln m
    return tl.fma(log_m, _like(z, -4.0), e * (-2.0 * LN_2))


@triton.jit
def cos_sin(v):
    """(cos, sin) of 2 pi v 2^-64: v = q 2^62 + rest with |rest| <= 2^61, so the angle is q quarter turns plus x
    in [-pi/4, pi/4]; the reduction is exact integer arithmetic."""
    q = ((v + (1 << 61)) >> 62).to(tl.int64)
    x = (v.to(tl.int64, bitcast=True) - (q << 62)).to(tl.float64) * QUARTER_TURN
    y = x * x
    y2 = y * y
    y4 = y2 * y2
    s_tail = tl.fma(y2, _linear(y, -1.0 / 5040, 1.0 / 362880), _linear(y, -1.0 / 6, 1.0 / 120))
    s_high = _linear(y, -1.0 / 39916800, 1.0 / 6227020800.0)
    s_high = tl.fma(y2, _linear(y, -1.0 / 1307674368000.0, 1.0 / 355687428096000.0), s_high)
    c_tail = tl.fma(y2, _linear(y, 1.0 / 40320, -1.0 / 3628800), _linear(y, 1.0 / 24, -1.0 / 720))
    c_high = _linear(y, 1.0 / 479001600, -1.0 / 87178291200.0)
    c_high = tl.fma(y2, _like(y, 1.0 / 20922789888000.0), c_high)
    sine = tl.fma(x, y * tl.fma(y4, s_high, s_tail), x)
    cosine = tl.fma(y2, tl.fma(y4, c_high, c_tail), _linear(y, 1.0, -0.5))
    odd = (q & 1) != 0
    c = tl.where(odd, sine, cosine).to(tl.int64, bitcast=True) ^ ((q ^ (q >> 1)) << 63)
    s = tl.where(odd, cosine, sine).to(tl.int64, bitcast=True) ^ ((q >> 1) << 63)
    return c.to(tl.float64, bitcast=True), s.to(tl.float64, bitcast=True)


@triton.jit
def box_muller(w, v):
    """The pair (r cos, r sin) of 64-bit words w, v."""
    r = tl.sqrt(minus_two_log(w.to(tl.float64) + 1.0))
    c, s = cos_sin(v)
    return r * c, r * s


@triton.jit
def normals_of_blocks(key_ptr, step_ptr, block):
    """z of 8 coordinates per block: float64 [B, 8]."""
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15 = chacha20(key_ptr, step_ptr, block)
    # Lanes 0..3 as [B, 2, 2]: joining (0, 2) with (1, 3) puts the low bit of the lane last.
    w = tl.join(tl.join(_word(x0, x1), _word(x8, x9)), tl.join(_word(x4, x5), _word(x12, x13)))
    v = tl.join(tl.join(_word(x2, x3), _word(x10, x11)), tl.join(_word(x6, x7), _word(x14, x15)))
    even, odd = box_muller(w, v)
    return tl.reshape(tl.join(even, odd), [block.shape[0], 8])


@triton.jit
def release_tile(
    out_address, column, columns, word, total_ptr, bits_ptr, release_ptr, key_ptr, step_ptr,
    OUT: tl.constexpr, BLOCKS: tl.constexpr, HAS_KEEP: tl.constexpr, HAS_NOISE: tl.constexpr,
):   # fmt: skip
    """Writes out at the tile's columns: BLOCKS ChaCha20 blocks of 8 coordinates."""
    b = tl.arange(0, BLOCKS)
    offset = b[:, None] * 8 + tl.arange(0, 8)[None, :]                    # [BLOCKS, 8]
    inb = offset < columns
    per_grid, noise_scale, divisor = tl.load(release_ptr), tl.load(release_ptr + 1), tl.load(release_ptr + 2)
    total = tl.load(total_ptr + word * 32 + offset, mask=inb, other=0)
    s = total.to(tl.float64) * per_grid
    if HAS_NOISE:
        z = normals_of_blocks(key_ptr, step_ptr, word * 4 + b) * noise_scale     # |z| < 2^25: adding 1.5 2^52 rounds it
        s = rint(s) + ((z + 6755399441055744.0) - 6755399441055744.0)
    s = tl.fma(s, divisor + tl.zeros_like(s), tl.zeros_like(s))           # + 0.0: no -0
    if HAS_KEEP:
        kept = tl.load(bits_ptr + word + b // 4, mask=b * 8 < columns, other=0) >> (b % 4) * 8
        s = tl.where(((kept[:, None] >> tl.arange(0, 8)) & 1) != 0, s, 0.0)
    at = column * 32 + offset
    if tl.bfloat16 == OUT:   # by hand: the interpreter's cast truncates
        bits = s.to(tl.float32).to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        tl.store(out_address.to(tl.pointer_type(tl.int16), bitcast=True) + at, bits.to(tl.int16), mask=inb)
    elif tl.float16 == OUT:   # through fp32, as torch's casts do
        tl.store(out_address.to(tl.pointer_type(OUT), bitcast=True) + at, s.to(tl.float32).to(OUT), mask=inb)
    else:
        tl.store(out_address.to(tl.pointer_type(OUT), bitcast=True) + at, s.to(OUT), mask=inb)


@triton.jit
def _release_tile_kernel(
    out_ptr, total_ptr, tile_ptr, bits_ptr, release_ptr, key_ptr, step_ptr,
    OUT: tl.constexpr, BLOCKS: tl.constexpr, HAS_KEEP: tl.constexpr, HAS_NOISE: tl.constexpr,
):   # fmt: skip
    """One tile of out. out_ptr, int64 [params]: addresses of contiguous outputs. grid (tiles,)"""
    param, column, columns, word = tile_fields(tile_ptr, tl.program_id(0))
    release_tile(
        tl.load(out_ptr + param), column, columns, word, total_ptr, bits_ptr, release_ptr, key_ptr, step_ptr,
        OUT, BLOCKS, HAS_KEEP, HAS_NOISE,
    )   # fmt: skip


@triton.jit
def _normals_kernel(z_ptr, word_ptr, blocks, BLOCK_B: tl.constexpr):
    """z, float64 [blocks, 4, 2], of given words, int64 [blocks, 4, 2] (w, v): for tests of chosen words."""
    lane = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    inb = lane < blocks * 4
    w = tl.load(word_ptr + lane * 2, mask=inb, other=0).to(tl.uint64, bitcast=True)
    v = tl.load(word_ptr + lane * 2 + 1, mask=inb, other=0).to(tl.uint64, bitcast=True)
    even, odd = box_muller(w, v)
    tl.store(z_ptr + lane * 2, even, mask=inb)
    tl.store(z_ptr + lane * 2 + 1, odd, mask=inb)
