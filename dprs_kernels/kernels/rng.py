"""rng: ChaCha20 words, a pure function of (key, step, block); bit-identical to reference.words and csrc/rng.h.

Key and step come from device memory, never as arguments: Triton specialises integers by value, and a captured
CUDA graph would replay them, which is the same noise twice.

key, int64 [4]:  words 0-1, 2-3, 4-5, 6-7, low half first;  step, int64 [1]
"""

import triton
import triton.language as tl


@triton.jit
def _quarter_round(a, b, c, d):
    """RFC 8439's: add, xor, rotate. Rotations are written out: a call costs the interpreter a millisecond."""
    a += b
    d ^= a
    d = (d << 16) | (d >> 16)
    c += d
    b ^= c
    b = (b << 12) | (b >> 20)
    a += b
    d ^= a
    d = (d << 8) | (d >> 24)
    c += d
    b ^= c
    b = (b << 7) | (b >> 25)
    return a, b, c, d


@triton.jit
def _halves(word):
    """Low and high 32 bits of a 64-bit word."""
    return (word & 0xFFFFFFFF).to(tl.uint32), ((word >> 32) & 0xFFFFFFFF).to(tl.uint32)


@triton.jit
def _constant(zero, VALUE: tl.constexpr):
    return zero + VALUE


@triton.jit
def chacha20(key_ptr, step_ptr, block):
    """The 16 words of each block [B] (int64), uint32 [B] each."""
    zero = (block * 0).to(tl.uint32)
    k0, k1 = _halves(tl.load(key_ptr))
    k2, k3 = _halves(tl.load(key_ptr + 1))
    k4, k5 = _halves(tl.load(key_ptr + 2))
    k6, k7 = _halves(tl.load(key_ptr + 3))
    s0, s1 = _halves(tl.load(step_ptr))
    b0, b1 = _halves(block)
    # "expand 32-byte k", key, 64-bit block counter, 64-bit nonce = the step
    c0, c1 = _constant(zero, 0x61707865), _constant(zero, 0x3320646E)
    c2, c3 = _constant(zero, 0x79622D32), _constant(zero, 0x6B206574)
    x0, x1, x2, x3 = c0, c1, c2, c3
    x4, x5, x6, x7 = zero + k0, zero + k1, zero + k2, zero + k3
    x8, x9, x10, x11 = zero + k4, zero + k5, zero + k6, zero + k7
    x12, x13, x14, x15 = b0, b1, zero + s0, zero + s1
    for _ in range(10):
        x0, x4, x8, x12 = _quarter_round(x0, x4, x8, x12)
        x1, x5, x9, x13 = _quarter_round(x1, x5, x9, x13)
        x2, x6, x10, x14 = _quarter_round(x2, x6, x10, x14)
        x3, x7, x11, x15 = _quarter_round(x3, x7, x11, x15)
        x0, x5, x10, x15 = _quarter_round(x0, x5, x10, x15)
        x1, x6, x11, x12 = _quarter_round(x1, x6, x11, x12)
        x2, x7, x8, x13 = _quarter_round(x2, x7, x8, x13)
        x3, x4, x9, x14 = _quarter_round(x3, x4, x9, x14)
    return (
        x0 + c0, x1 + c1, x2 + c2, x3 + c3, x4 + k0, x5 + k1, x6 + k2, x7 + k3,
        x8 + k4, x9 + k5, x10 + k6, x11 + k7, x12 + b0, x13 + b1, x14 + s0, x15 + s1,
    )   # fmt: skip


@triton.jit
def _words_kernel(word_ptr, key_ptr, step_ptr, first_ptr, blocks, BLOCK_B: tl.constexpr):
    """uint32 [blocks, 16] of consecutive blocks from the int64 at first_ptr: for known-answer tests."""
    b = tl.program_id(0) * BLOCK_B + tl.arange(0, BLOCK_B)
    x0, x1, x2, x3, x4, x5, x6, x7, x8, x9, x10, x11, x12, x13, x14, x15 = chacha20(
        key_ptr, step_ptr, tl.load(first_ptr) + b
    )
    at = word_ptr + b.to(tl.int64) * 16
    inb = b < blocks
    tl.store(at, x0, mask=inb)
    tl.store(at + 1, x1, mask=inb)
    tl.store(at + 2, x2, mask=inb)
    tl.store(at + 3, x3, mask=inb)
    tl.store(at + 4, x4, mask=inb)
    tl.store(at + 5, x5, mask=inb)
    tl.store(at + 6, x6, mask=inb)
    tl.store(at + 7, x7, mask=inb)
    tl.store(at + 8, x8, mask=inb)
    tl.store(at + 9, x9, mask=inb)
    tl.store(at + 10, x10, mask=inb)
    tl.store(at + 11, x11, mask=inb)
    tl.store(at + 12, x12, mask=inb)
    tl.store(at + 13, x13, mask=inb)
    tl.store(at + 14, x14, mask=inb)
    tl.store(at + 15, x15, mask=inb)
