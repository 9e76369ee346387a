"""mask: keep bits from a public key, made where they are used. keep_j = [h_j > tau], tau the k-th smallest h.

h_j = mix(unpadded coordinate) is a bijection, so no two are equal and exactly k coordinates drop. tau is found
by radix select, 11 bits a pass from the top: count the next 11 bits of every h_j that starts with the bits known
so far, take the bin in which the k-th one lies, go on inside it. Counts are integers: atomics in any order give
the same sum.

draw, int64 [8]:          known top bits of tau, rank left, four key words, base coordinate, D
tile table, int64 [T, 3]: first padded word, first unpadded coordinate less base, coordinates in the tile

Keys and sizes come through `draw` and not as arguments: Triton compiles anew for integers by their width and
divisibility, refuses those from 2^63 on, and a captured graph would freeze them.
"""

import triton
import triton.language as tl

PREFIX, RANK, KEY, BASE, SIZE = tl.constexpr(0), tl.constexpr(1), tl.constexpr(2), tl.constexpr(6), tl.constexpr(7)
TILE_FIELDS = tl.constexpr(3)
DIGIT = tl.constexpr(11)     # bits a pass; 64 = 5 * 11 + 9
BINS = tl.constexpr(2048)


@triton.jit
def word(draw_ptr, i):
    """A 64-bit word of the draw, without its sign."""
    return tl.load(draw_ptr + i).to(tl.uint64, bitcast=True)


@triton.jit
def mix(j, k0, k1, k2, k3):
    """h_j of int64 coordinates: reference.mix, modulo 2^64."""
    x = j.to(tl.uint64, bitcast=True) + k0
    x = (x ^ (x >> 32)) * 0x9E3779B97F4A7C15
    x = (x ^ k1 ^ (x >> 29)) * 0xBF58476D1CE4E5B9
    x = x + k2
    x = (x ^ (x >> 32)) * 0x94D049BB133111EB
    return x ^ (x >> 31) ^ k3


@triton.jit
def key_words(draw_ptr):
    """The four key words; loaded once, for the compiler may not keep what it reads across an atomic."""
    return word(draw_ptr, KEY), word(draw_ptr, KEY + 1), word(draw_ptr, KEY + 2), word(draw_ptr, KEY + 3)


@triton.jit
def digit_place(step):
    """Lowest bit and width of pass `step`'s digit: 53, 42, 31, 20, 9 of 11 bits, then 0 of 9."""
    width = tl.minimum(64 - step * DIGIT, DIGIT)
    return (64 - step * DIGIT - width).to(tl.uint64), width.to(tl.uint64)


@triton.jit(do_not_specialize=["step"])
def _mask_count_kernel(count_ptr, draw_ptr, step, BLOCK: tl.constexpr):
    """count[digit] += 1 for every h_j that starts with the known bits. Any grid: programs stride over D."""
    shift, width = digit_place(step)
    prefix = word(draw_ptr, PREFIX)
    k0, k1, k2, k3 = key_words(draw_ptr)
    base, size = tl.load(draw_ptr + BASE), tl.load(draw_ptr + SIZE)
    chunks = tl.cdiv(size, BLOCK)
    for chunk in range(tl.program_id(0).to(tl.int64), chunks, tl.num_programs(0).to(tl.int64)):
        j = chunk * BLOCK + tl.arange(0, BLOCK)
        rest = mix(base + j, k0, k1, k2, k3) >> shift
        digit = (rest & ((tl.full([], 1, tl.uint64) << width) - 1)).to(tl.int64)
        # Two shifts: in the first pass together they are 64, which no processor shifts by.
        wanted = ((rest >> width) == prefix) & (j < size)
        tl.atomic_add(count_ptr + digit, tl.full([BLOCK], 1, tl.int64), mask=wanted, sem="relaxed")


@triton.jit(do_not_specialize=["step"])
def _mask_narrow_kernel(count_ptr, draw_ptr, step):
    """Appends the bin of the rank-th h to the known bits, subtracts those before it, clears the counts. grid (1,)"""
    _, width = digit_place(step)
    bins = tl.arange(0, BINS)
    prefix, rank = word(draw_ptr, PREFIX), tl.load(draw_ptr + RANK)
    upto = tl.cumsum(tl.load(count_ptr + bins), axis=0)   # [BINS]
    before = upto < rank
    digit = tl.sum(before.to(tl.int64), axis=0).to(tl.uint64)
    rank -= tl.max(tl.where(before, upto, 0), axis=0)
    tl.store(draw_ptr + PREFIX, ((prefix << width) | digit).to(tl.int64, bitcast=True))
    tl.store(draw_ptr + RANK, rank)
    tl.store(count_ptr + bins, tl.zeros([BINS], dtype=tl.int64))


@triton.jit
def _mask_pack_kernel(bits_ptr, draw_ptr, tile_ptr, WORDS: tl.constexpr):
    """The words of one tile of at most 32 WORDS coordinates of one parameter; padding is 0. grid (tiles,)

    Rank 0 says that nothing is dropped: a k-th smallest has k >= 1.
    """
    at = tile_ptr + tl.program_id(0).to(tl.int64) * TILE_FIELDS
    at_word, first, columns = tl.load(at), tl.load(at + 1), tl.load(at + 2)
    w, b = tl.arange(0, WORDS), tl.arange(0, 32)
    column = w[:, None] * 32 + b[None, :]                 # [WORDS, 32]
    k0, k1, k2, k3 = key_words(draw_ptr)
    h = mix(tl.load(draw_ptr + BASE) + first + column, k0, k1, k2, k3)
    keep = (h > word(draw_ptr, PREFIX)) | (tl.load(draw_ptr + RANK) == 0)
    keep = (keep & (column < columns)).to(tl.int32) << b[None, :]
    tl.store(bits_ptr + at_word + w, tl.sum(keep, axis=1), mask=w * 32 < columns)
