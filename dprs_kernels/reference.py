"""The specification in plain torch and numpy: each function's docstring is its equation.

Nothing here is fast. Backends have the same verbs and are tested against these; what is integer (words, masks,
indices, sums in units) must be equal bit for bit.
Names: N samples, D coordinates, P parameters, keep in {0,1}^D, g_i the gradient of sample i.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import torch

from dprs_kernels.layout import WORD, Layout
from dprs_kernels.plan import NORM_LIMIT, StepPlan

# ---- mask


def mix(j: np.ndarray, key: Sequence[int]) -> np.ndarray:
    """h_j: a keyed bijection of 64-bit words (xor-shifts, odd multiplications, additions), modulo 2^64."""
    k = [np.uint64(word) for word in key]
    with np.errstate(over="ignore"):
        x = j.astype(np.uint64) + k[0]
        x = (x ^ (x >> np.uint64(32))) * np.uint64(0x9E3779B97F4A7C15)
        x = (x ^ k[1] ^ (x >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        x = x + k[2]
        x = (x ^ (x >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
        return x ^ (x >> np.uint64(31)) ^ k[3]


def draw_mask(layout: Layout, dropped: int, key: Sequence[int]) -> tuple[torch.Tensor, int]:
    """keep_j = [h_j > tau], tau the `dropped`-th smallest h; packed bits and tau (0 if nothing is dropped)."""
    h = mix(np.arange(layout.size, dtype=np.uint64), key)
    tau = np.partition(h, dropped - 1)[dropped - 1] if dropped else np.uint64(0)
    keep = torch.from_numpy((h > tau) | (dropped == 0)).split(layout.sizes)
    return pack_bits(layout, keep), int(tau)


def pack_bits(layout: Layout, dense: Sequence[torch.Tensor]) -> torch.Tensor:
    """Bool tensors [P] -> int32 [padded / 32]; bit b of word w is padded coordinate 32 w + b."""
    flat = np.zeros(layout.padded, dtype=bool)
    for part, start, size in zip(dense, layout.starts, layout.sizes, strict=True):
        flat[start : start + size] = part.detach().cpu().reshape(-1).numpy()
    return torch.from_numpy(np.packbits(flat, bitorder="little").view("<i4").astype(np.int32))


def unpack_bits(layout: Layout, bits: torch.Tensor) -> list[torch.Tensor]:
    """The inverse of pack_bits: bool tensors in the parameters' shapes."""
    shifts = torch.arange(WORD, dtype=torch.int32, device=bits.device)
    flat = ((bits.unsqueeze(1) >> shifts) & 1).bool().reshape(-1)
    return layout.split(flat)


# ---- norms, factors, sums


def kept(grad: torch.Tensor, keep: torch.Tensor | None) -> torch.Tensor:
    """keep o g by selection: a dropped NaN or Inf is never multiplied, it is not there."""
    return grad if keep is None else torch.where(keep, grad, torch.zeros((), dtype=grad.dtype, device=grad.device))


def norms(grads: Sequence[torch.Tensor], keep: Sequence[torch.Tensor] | None, plan: StepPlan) -> torch.Tensor:
    """n_is = scale || keep o g_i ||_2 over the parameters of segment s, in float64. [N, segments]

    An n of 2^97 bounds or more is inf: the sample counts as not finite on every backend.
    """
    samples = grads[0].shape[0]
    scales = plan.norm_scales(plan.loss_scale(samples))
    squares = torch.zeros(samples, len(plan.bounds), dtype=torch.float64, device=grads[0].device)
    for p, grad in enumerate(grads):
        s = plan.segment_of[p]
        values = kept(grad, None if keep is None else keep[p]).double().reshape(samples, plan.layout.sizes[p])
        squares[:, s] += (values * scales[s]).square().sum(1)
    scaled = squares.sqrt()
    scaled = torch.where(scaled < NORM_LIMIT, scaled, math.inf)   # NaN, too
    return scaled / torch.tensor(scales, dtype=torch.float64, device=scaled.device) * plan.loss_scale(samples)


def factors(norms: torch.Tensor, plan: StepPlan) -> torch.Tensor:
    """F = f scale / h with f = 1 if n <= C' else C'/n, or C'/(n + gamma) under automatic clipping, truncated to
    24 significant bits; 0 for a sample with any norm not finite. [N, segments] float64

    Truncation makes F an fp32 number without ever raising a clipped norm; h = 1 where there is no unit.
    """
    bounds = torch.tensor(plan.bounds, dtype=torch.float64, device=norms.device)
    f = bounds / (norms + plan.gamma) if plan.gamma > 0 else torch.where(norms <= bounds, 1.0, bounds / norms)
    f = f * plan.loss_scale(norms.shape[0]) * (1 / plan.unit if plan.unit else 1.0)
    finite = norms.isfinite().all(1, keepdim=True)
    bits = torch.where(finite, f, 0.0).view(torch.int64) & ~((1 << 29) - 1)
    return bits.view(torch.float64)


def sums(
    grads: Sequence[torch.Tensor],
    keep: Sequence[torch.Tensor] | None,
    factors: torch.Tensor,
    plan: StepPlan,
) -> torch.Tensor:
    """S_j = sum_i f_i keep_j g_ij over samples with f_i != 0. [padded]

    With a unit h: int64, S_j/h = sum_i rint(fl(F_i g_ij)), the product in fp32 (float64 for fp64 gradients).
    Integers add up exactly, in any order. Without: float64.
    """
    total = torch.zeros(plan.layout.padded, dtype=total_dtype(plan), device=grads[0].device)
    for p, (grad, start) in enumerate(zip(grads, plan.layout.starts, strict=True)):
        samples, size = grad.shape[0], plan.layout.sizes[p]
        f = factors[:, plan.segment_of[p]].unsqueeze(1)
        values = kept(grad, None if keep is None else keep[p]).reshape(samples, size)
        values = torch.where(f != 0, values, torch.zeros((), dtype=grad.dtype, device=grad.device))
        if plan.unit == 0:
            part = (values.double() * f).sum(0)
        else:
            exact = torch.float64 if grad.dtype == torch.float64 else torch.float32
            part = (values.to(exact) * f.to(exact)).double().round().long().sum(0)
        total[start : start + size] = part
    return total


def total_dtype(plan: StepPlan) -> torch.dtype:
    """What S is held in: int64 units of h, or float64."""
    return torch.int64 if plan.unit else torch.float64


# ---- noise

_CONSTANTS = np.frombuffer(b"expand 32-byte k", dtype="<u4").astype(np.uint32)
_ROUNDS = [(0, 4, 8, 12), (1, 5, 9, 13), (2, 6, 10, 14), (3, 7, 11, 15),
           (0, 5, 10, 15), (1, 6, 11, 12), (2, 7, 8, 13), (3, 4, 9, 14)]   # fmt: skip


def words(key: bytes, step: int, first_block: int, blocks: int) -> np.ndarray:
    """ChaCha20 (RFC 8439's rounds) of consecutive blocks, uint32 [blocks, 16]. The last four state words are a
    64-bit block counter and a 64-bit nonce, the step."""
    counter = np.uint64(first_block) + np.arange(blocks, dtype=np.uint64)
    state = np.empty((16, blocks), dtype=np.uint32)
    state[:4] = _CONSTANTS[:, None]
    state[4:12] = np.frombuffer(key, dtype="<u4").astype(np.uint32)[:, None]
    state[12], state[13] = counter & np.uint64(0xFFFFFFFF), counter >> np.uint64(32)
    state[14], state[15] = step & 0xFFFFFFFF, step >> 32
    x = state.copy()

    def rotate(v: np.ndarray, by: int) -> np.ndarray:
        return (v << np.uint32(by)) | (v >> np.uint32(32 - by))

    for _ in range(10):
        for a, b, c, d in _ROUNDS:
            for left, right, mixed, by in ((a, b, d, 16), (c, d, b, 12), (a, b, d, 8), (c, d, b, 7)):
                x[left] += x[right]
                x[mixed] = rotate(x[mixed] ^ x[left], by)
    return (x + state).T.copy()


def normals(words: np.ndarray) -> np.ndarray:
    """z of 8 coordinates per block, float64 [8 blocks]. Lane p = words 4p..4p+3 = (w, v) as 64-bit words:
    u = (w + 1) 2^-64, r = sqrt(-2 ln u), (z_2p, z_2p+1) = r (cos, sin)(2 pi v 2^-64)."""
    wide = words.astype("<u4").view("<u8").reshape(-1, 4, 2)
    radius = np.sqrt(-2 * np.log((wide[..., 0].astype(np.float64) + 1) * 2.0**-64) + 0.0)
    angle = wide[..., 1].view(np.int64).astype(np.float64) * (math.pi * 2.0**-63)
    return np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=-1).reshape(-1)


def noise(plan: StepPlan, key: bytes, step: int) -> torch.Tensor:
    """rint(noise_std z_j / g) for every padded coordinate, as float64 integers. [padded]"""
    z = normals(words(key, step, 0, plan.layout.padded // 8))
    return torch.from_numpy(z * (plan.noise_std / plan.grid)).round()


# ---- the two verbs of a backend


def accumulate_(
    total: torch.Tensor, grads: Sequence[torch.Tensor], bits: torch.Tensor | None, plan: StepPlan
) -> torch.Tensor:
    """total += S of one micro-batch; returns its norms [N, segments], which are private."""
    keep = None if bits is None else unpack_bits(plan.layout, bits.to(grads[0].device))
    n = norms(grads, keep, plan)
    total += sums(grads, keep, factors(n, plan), plan)
    return n


def release(
    outs: Sequence[torch.Tensor],
    total: torch.Tensor,
    bits: torch.Tensor | None,
    plan: StepPlan,
    key: bytes,
    step: int,
) -> None:
    """out = keep o (rint(S/g) + rint(noise_std z/g)) (g / B), cast once; without noise S/B. Writes all of outs."""
    s = total.double() * plan.unit if plan.unit else total
    if plan.grid:
        s = ((s / plan.grid).round() + noise(plan, key, step).to(s.device)) * (plan.grid / plan.expected_batch_size)
    else:
        s = s / plan.expected_batch_size
    keep = None if bits is None else unpack_bits(plan.layout, bits.to(s.device))
    for p, (out, value) in enumerate(zip(outs, plan.layout.split(s), strict=True)):
        out.copy_(kept(value, None if keep is None else keep[p]) + 0.0)
