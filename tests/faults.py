"""Planted faults of the private step: FAULTS[name] = (the suite of the audit that must catch it, the stages)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch

from dprs_kernels.plan import MARGIN
from tests.plain_step import CLEAN, Run, Stages, add, factors, release, words_to_normals, z


def _scaled(factor: float) -> Stages:
    return replace(CLEAN, noise=lambda r, noise: noise * factor)


def _uniform(r: Run, noise: torch.Tensor) -> torch.Tensor:
    return (torch.special.ndtr(noise / (r.sigma * r.bound)) - 0.5) * math.sqrt(12) * r.sigma * r.bound


def _logistic(r: Run, noise: torch.Tensor) -> torch.Tensor:
    return torch.logit(torch.special.ndtr(noise / (r.sigma * r.bound))) * (math.sqrt(3) / math.pi * r.sigma * r.bound)


def _without(places: Callable[[Run, torch.Tensor], torch.Tensor]) -> Stages:
    """No noise where places(r, coordinate) holds."""
    return replace(CLEAN, noise=lambda r, noise: torch.where(places(r, torch.arange(noise.numel())), 0.0, noise))


def _other_mask(r: Run, out: torch.Tensor) -> torch.Tensor:
    return torch.where(r.keep.roll(1), out, 0.0)


def _repeated(width: int) -> Callable[[Run], torch.Tensor]:
    """The first `width` normals over and over."""
    return lambda r: z(r)[:width].repeat(-(-r.layout.padded // width))[: r.layout.padded]


def _per_tensor(r: Run) -> torch.Tensor:
    out = torch.zeros(r.layout.padded, dtype=torch.float64)
    for part in r.layout.split(out):
        part.copy_(words_to_normals(r.key, r.step, -(-part.numel() // 32) * 32)[: part.numel()].view(part.shape))
    return out


def _cosine_twice(r: Run) -> torch.Tensor:
    """Both halves of a pair take the cosine."""
    return z(r)[0::2].repeat_interleave(2)


def _next_stream(r: Run) -> torch.Tensor:
    """The step added to the block counter instead of the nonce: each step is the last one, 8 places on."""
    return words_to_normals(r.key, 0, r.layout.padded + 8 * r.step)[8 * r.step :]


def _alternating(r: Run) -> torch.Tensor:
    return words_to_normals(r.key, r.step // 2, r.layout.padded) * (-1) ** r.step


def _seeded(r: Run) -> torch.Generator:
    return torch.Generator().manual_seed(int.from_bytes(r.key[:7], "little") + r.step)


def _torch_normal(r: Run) -> torch.Tensor:
    return torch.normal(0.0, 1.0, (r.layout.padded,), generator=_seeded(r)).double()


def _four(r: Run) -> torch.Tensor:
    generator = _seeded(r)
    parts = [torch.normal(0.0, 1.0, (r.layout.padded,), generator=generator) for _ in range(4)]
    return ((parts[0] + parts[1] + parts[2] + parts[3]) / 2).double()


def _fp32_release(r: Run, total: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return (total.float() + noise.float()) / r.batch


def _clip_by(change: Callable[[Run, torch.Tensor], torch.Tensor]) -> Stages:
    def changed(r: Run, n: torch.Tensor) -> torch.Tensor:
        return factors(r, n) * torch.where(n > r.bound * (1 - MARGIN), change(r, n), 1.0)

    return replace(CLEAN, factors=changed)


def _nan_passes(r: Run, n: torch.Tensor) -> torch.Tensor:
    return torch.where(n.isfinite(), factors(r, n), 1.0)


def _clipped_sum(r: Run, total: torch.Tensor) -> torch.Tensor:
    return total * min(1.0, r.bound * (1 - MARGIN) / max(float(total.norm()), 1e-300))


def _first_tensor_norm(r: Run, kept: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return kept[:, : r.layout.sizes[0]].norm(dim=1)


def _each_tensor(r: Run, kept: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    """Every tensor clipped to C: sqrt(P) C in all."""
    parts = [add(r, part, factors(r, part.norm(dim=1))) for part in kept.split(r.layout.sizes, 1)]
    return torch.cat(parts)


def _rows_but(select: Callable[[torch.Tensor], torch.Tensor]) -> Stages:
    return replace(CLEAN, rows=lambda r, rows: select(rows))


def _realised(r: Run, total: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return release(r, total, noise) * (r.batch / max(r.rows, 1))


def _mean_after_clip(r: Run, kept: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    """The mean loss undone after clipping instead of before: a sample is worth up to n C."""
    n = kept.shape[0] if r.mean else 1
    return add(r, kept / n, factors(r, (kept / n).norm(dim=1))) * n


def _largest_norm(r: Run, noise: torch.Tensor) -> torch.Tensor:
    seen = torch.cat(r.norms)
    seen = seen[seen.isfinite()]
    return noise * (min(float(seen.max()) / r.bound, 1.0) if seen.numel() else 1.0)


def _unclipped(where: Callable[[Run], bool]) -> Stages:
    return replace(CLEAN, factors=lambda r, n: n.isfinite().double() if where(r) else factors(r, n))


def _silent(where: Callable[[Run], bool]) -> Stages:
    """No noise."""
    return replace(CLEAN, noise=lambda r, noise: noise * 0 if where(r) else noise)


def _short_norm(places: int) -> Stages:
    return replace(CLEAN, norms=lambda r, kept, rows: kept[:, :places].norm(dim=1))


def _at_step(change: Callable[[int], int]) -> Stages:
    return replace(CLEAN, z=lambda r: words_to_normals(r.key, change(r.step), r.layout.padded))


def _first_tensors_norm(r: Run, kept: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return kept[:, : sum(r.layout.sizes[:64])].norm(dim=1)


def _shared_key(r: Run) -> torch.Tensor:
    return words_to_normals(bytes(32) if r.secure else r.key, r.step, r.layout.padded)


def _added_to(r: Run, out: torch.Tensor) -> torch.Tensor:
    """p.grad += instead of p.grad =, where there is something to add to."""
    out = CLEAN.mask(r, out)
    return out + r.held if r.held is not None and r.held.isfinite().all() else out


FAULTS: dict[str, tuple[str, Stages]] = {
    # Noise of the wrong size.
    "noise x 0.5": ("S2", _scaled(0.5)),
    "noise x 0.5, seen from outside": ("S3", _scaled(0.5)),
    "noise x 0.9": ("S2", _scaled(0.9)),
    "noise x 0.99": ("S2", _scaled(0.99)),
    "noise x 0.995": ("S2", _scaled(0.995)),
    "noise x 1.01": ("S2", _scaled(1.01)),
    "noise / sqrt(B)": ("S2", replace(CLEAN, noise=lambda r, noise: noise / math.sqrt(r.batch))),
    "noise / realised batch": ("S4", replace(CLEAN, noise=lambda r, noise: noise * (r.batch / max(r.rows, 1)))),
    "release / realised batch": ("S4", replace(CLEAN, release=_realised)),
    "std = sigma instead of sigma C": ("S2", replace(CLEAN, noise=lambda r, noise: noise / r.bound)),
    "noise by the largest norm seen": ("S4", replace(CLEAN, noise=_largest_norm)),
    # Noise of the wrong shape.
    "uniform noise": ("S2", replace(CLEAN, noise=_uniform)),
    "logistic noise": ("S2", replace(CLEAN, noise=_logistic)),
    "noise cut at 4 sigma": ("S2", replace(CLEAN, z=lambda r: z(r).clamp(-4, 4))),
    "noise never negative": ("S2", replace(CLEAN, z=lambda r: z(r).abs())),
    "noise off by 0.01 sigma": ("S2", replace(CLEAN, z=lambda r: z(r) + 0.01)),
    # Noise missing.
    "no noise on an empty batch": ("S2", replace(CLEAN, noise=lambda r, noise: noise if r.rows else noise * 0)),
    "no noise on a batch of one": ("S4", replace(CLEAN, noise=lambda r, noise: noise if r.rows != 1 else noise * 0)),
    "noise missing on 1 %": ("S2", _without(lambda r, j: j % 100 == 17)),
    "noise missing on one coordinate": ("S2", _without(lambda r, j: j == 1234)),
    "noise missing on the tail block": ("S2", _without(lambda r, j: j >= j.numel() // 1024 * 1024)),
    "noise missing on the last coordinate": ("S2", _without(lambda r, j: j == j.numel() - 1)),
    "noise every other step": ("S2", replace(CLEAN, noise=lambda r, noise: noise * (r.step % 2))),
    # Noise in the wrong place.
    "noise with another mask": ("S2", replace(CLEAN, mask=_other_mask)),
    "dropped coordinates released": ("S2", replace(CLEAN, mask=lambda r, out: out)),
    # Noise that is not fresh.
    "same noise twice": ("S2", replace(CLEAN, z=lambda r: words_to_normals(r.key, r.step // 2, r.layout.padded))),
    "same noise every 16 steps": ("S2", replace(CLEAN, z=lambda r: words_to_normals(r.key, r.step % 16,
                                                                                     r.layout.padded))),
    "same noise, other sign": ("S2", replace(CLEAN, z=_alternating)),
    "noise repeated per block of 1024": ("S2", replace(CLEAN, z=_repeated(1024))),
    "noise repeated per tensor": ("S2", replace(CLEAN, z=_per_tensor)),
    "both of a pair from the cosine": ("S2", replace(CLEAN, z=_cosine_twice)),
    "step in the block counter": ("S2", replace(CLEAN, z=_next_stream)),
    "noise from the number of samples": ("S4", replace(CLEAN, z=lambda r: words_to_normals(r.key, r.rows,
                                                                                            r.layout.padded))),
    "every micro-batch noised": ("S4", replace(CLEAN, noise=lambda r, noise: noise * math.sqrt(r.micro_batches))),
    "last micro-batch noised twice": ("S4", replace(CLEAN, noise=lambda r, noise: noise * (1 + (r.micro_batches > 1)))),
    # Noise from elsewhere.
    "words of another key": ("S5", replace(CLEAN, z=lambda r: words_to_normals(r.key[::-1], r.step, r.layout.padded))),
    "tail cut where fp32 noise ends": ("S5", replace(CLEAN, z=lambda r: z(r).clamp(-5.768, 5.768))),
    "torch.normal, added in fp32": ("S6", replace(CLEAN, z=_torch_normal, release=_fp32_release)),
    "sum of four Gaussians, added in fp32": ("S6", replace(CLEAN, z=_four, release=_fp32_release)),
    "float64 noise off the grid": ("S6", replace(CLEAN, release=lambda r, total, noise: (total + noise) / r.batch)),
    "noise from torch's generator": ("S1", replace(CLEAN, z=lambda r: torch.randn(r.layout.padded).double())),
    "last value not written": ("S2", replace(CLEAN, mask=lambda r, out: torch.where(
        torch.arange(out.numel()) == out.numel() - 1, math.nan, CLEAN.mask(r, out)))),
    # Clipping.
    "clip x 1.001": ("S1", _clip_by(lambda r, n: torch.full_like(n, 1.001))),
    "clip x 2": ("S1", _clip_by(lambda r, n: torch.full_like(n, 2.0))),
    "clip x 2, seen from outside": ("S3", _clip_by(lambda r, n: torch.full_like(n, 2.0))),
    "clip x (1 + 2^-19)": ("S1", _clip_by(lambda r, n: torch.full_like(n, 1 + 2.0**-19))),
    "no clipping from 1e6 on": ("S1", replace(CLEAN, factors=lambda r, n: torch.where(n < 1e6, factors(r, n), 1.0))),
    "clip of the sum": ("S1", replace(CLEAN, factors=lambda r, n: n.isfinite().double(), total=_clipped_sum)),
    "clip by the largest value": ("S1", replace(CLEAN, norms=lambda r, kept, rows: kept.abs().amax(1))),
    "norm of the first tensor": ("S1", replace(CLEAN, norms=_first_tensor_norm)),
    "every tensor clipped to C": ("S1", replace(CLEAN, add=_each_tensor)),
    "norm squared in fp32": ("S1", replace(CLEAN, norms=lambda r, kept, rows: kept.float().square().sum(1).sqrt())),
    "norm in bf16": ("S1", replace(CLEAN, norms=lambda r, kept, rows: kept.norm(dim=1).bfloat16().double())),
    "mask after clip": ("S1", replace(CLEAN, norms=lambda r, kept, rows: rows.norm(dim=1))),
    "mask by multiplication": ("S1", replace(CLEAN, select=lambda r, rows: rows * r.keep)),
    "NaN sample passes unclipped": ("S1", replace(CLEAN, factors=_nan_passes)),
    "mean loss undone after the clip": ("S1", replace(CLEAN, add=_mean_after_clip)),
    # Sums.
    "first sample dropped": ("S1", _rows_but(lambda rows: rows[1:])),
    "last sample dropped": ("S1", _rows_but(lambda rows: rows[:-1])),
    "last sample counted twice": ("S1", _rows_but(lambda rows: torch.cat([rows, rows[-1:]]))),
    "samples after the 64th unclipped": ("S1", replace(CLEAN, factors=lambda r, n: torch.where(
        torch.arange(n.numel()) < 64, factors(r, n), n.isfinite().double()))),
    "sum in bf16": ("S1", replace(CLEAN, total=lambda r, total: total.bfloat16().double())),
    "sum averaged over micro-batches": ("S1", replace(CLEAN, total=lambda r, total: total / r.micro_batches)),
    # Far from the start.
    "noise repeats from coordinate 131,072 on": ("S5", replace(CLEAN, z=_repeated(131_072))),
    "noise repeats from coordinate 1,048,576 on": ("S5", replace(CLEAN, z=_repeated(2**20))),
    "noise missing on coordinate 200,000": ("S5", _without(lambda r, j: j == 200_000)),
    "noise missing from the 65th tensor on": ("S5", _without(lambda r, j: j >= sum(r.layout.sizes[:64]))),
    "step of 32 bits": ("S5", _at_step(lambda step: step & 0xFFFFFFFF)),
    "step through float64": ("S5", _at_step(lambda step: min(int(float(step)), 2**64 - 1))),
    "step of 63 bits": ("S5", _at_step(lambda step: step & (2**63 - 1))),
    "norm forgets coordinates past 100,000": ("S1", _short_norm(100_000)),
    "norm forgets the last coordinate of a long row": ("S1", replace(CLEAN, norms=lambda r, kept, rows: (
        kept[:, : -1 if kept.shape[1] > 200_000 else None].norm(dim=1)))),
    "norm forgets tensors past the 64th": ("S1", replace(CLEAN, norms=_first_tensors_norm)),
    "rows after the 600th unclipped": ("S1", replace(CLEAN, factors=lambda r, n: torch.where(
        torch.arange(n.numel()) < 600, factors(r, n), n.isfinite().double()))),
    # Options and dtypes.
    "per_layer not clipped": ("S1", _unclipped(lambda r: r.clipping == "per_layer")),
    "per_layer: every tensor clipped to C": ("S1", replace(CLEAN, factors=lambda r, n: factors(
        replace(r, bound=1.0) if r.clipping == "per_layer" else r, n))),
    "bf16 gradients not clipped": ("S1", _unclipped(lambda r: r.dtype == torch.bfloat16)),
    "fp16 gradients not clipped": ("S1", _unclipped(lambda r: r.dtype == torch.float16)),
    "fp64 gradients not clipped": ("S1", _unclipped(lambda r: r.dtype == torch.float64)),
    "no noise in bf16 parameters": ("S1", _silent(lambda r: r.out_dtype == torch.bfloat16)),
    "no mask, batch not empty: noise x 0.9": ("S4", replace(CLEAN, noise=lambda r, noise: (
        noise * 0.9 if r.rows and r.keep.all() else noise))),
    "std never over 2": ("S5", replace(CLEAN, noise=lambda r, noise: noise * min(1.0, 2 / (r.sigma * r.bound)))),
    # How gradients and keys come, and where the release goes.
    "no noise where p.grad was None": ("S4", _silent(lambda r: r.held is None)),
    "p.grad added to": ("S4", replace(CLEAN, mask=_added_to)),
    "no noise when p.grad_sample is one tensor": ("S4", _silent(lambda r: bool(r.source) and not r.accumulated)),
    "no noise from p.grad_batch": ("S4", _silent(lambda r: r.source == "grad_batch")),
    "no noise from a dict": ("S4", _silent(lambda r: r.named)),
    "gradients that are not contiguous read in order": ("S4", replace(CLEAN, rows=lambda r, rows: (
        rows.flip(1) if r.strided else rows))),
    "no noise under a secure key": ("S2", _silent(lambda r: r.secure)),
    "no noise under a secure key, seen by its key": ("S5", _silent(lambda r: r.secure)),
    "one key for all secure sources": ("S2", replace(CLEAN, z=_shared_key)),
}   # fmt: skip
