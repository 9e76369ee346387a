"""The step in plain torch, float64 and flat, stage by stage, so that a fault can be planted in any stage.

CLEAN has no fault and passes every suite of the audit. Stages get the run `r` (public numbers of the step) and what
the stage before made:

    rows      [n, D] of a micro-batch -> [n, D]
    select    [n, D] rows -> [n, D] kept rows
    norms     [n, D] kept rows, [n, D] rows -> [n]
    factors   [n] -> [n]
    add       [n, D] kept rows, [n] factors -> [D]
    total     [D] sum over micro-batches -> [D]
    z         -> [padded] normals
    noise     [D] noise, also where it is dropped -> [D]
    release   [D] sum, [D] noise -> [D]
    mask      [D] -> [D]

clipping="per_layer" runs norms, factors and add on each tensor by itself, as if it were all there is.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from dprs_kernels import KeepMask, NoiseSource, inputs, native, reference
from dprs_kernels.layout import Layout
from dprs_kernels.noise import grid_of
from dprs_kernels.plan import MARGIN


@dataclass
class Run:
    """One step's public numbers; from `rows` on what only faults look at."""

    layout: Layout
    keep: torch.Tensor   # bool [D]
    bound: float
    sigma: float
    batch: float
    mean: bool
    gamma: float
    key: bytes
    step: int
    rows: int = 0
    micro_batches: int = 1
    norms: list[torch.Tensor] = field(default_factory=list)
    clipping: str = "flat"
    secure: bool = False
    dtype: torch.dtype = torch.float32         # of gradients
    out_dtype: torch.dtype = torch.float32     # of parameters
    source: str = ""                           # "" for explicit gradients, or the attribute
    accumulated: bool = False                  # the attribute held a list
    named: bool = False                        # a dict
    strided: bool = False                      # gradients not contiguous
    held: torch.Tensor | None = None           # [D] what p.grad was

    @property
    def grid(self) -> float:
        return grid_of(self.sigma * self.bound)

    def flat(self, padded: torch.Tensor) -> torch.Tensor:
        return torch.cat([part.reshape(-1) for part in self.layout.split(padded)])


def words_to_normals(key: bytes, step: int, padded: int) -> torch.Tensor:
    """z [padded], by the native kernel where there is one: the reference takes 20 times as long."""
    if native.library() is None:
        return torch.from_numpy(reference.normals(reference.words(key, step, 0, padded // 8)))
    out = np.empty(padded)
    native.loaded().dprs_normals(key, step, 0, padded // 8, out.ctypes.data_as(ctypes.c_void_p))
    return torch.from_numpy(out)


def norms(r: Run, kept: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return kept.norm(dim=1)


def factors(r: Run, n: torch.Tensor) -> torch.Tensor:
    c = r.bound * (1 - MARGIN)
    f = c / (n + r.gamma) if r.gamma else torch.where(n <= c, 1.0, c / n)
    return torch.where(n.isfinite(), f, 0.0)


def add(r: Run, kept: torch.Tensor, f: torch.Tensor) -> torch.Tensor:
    return (torch.where(f[:, None] != 0, kept, 0.0) * f[:, None]).sum(0)


def z(r: Run) -> torch.Tensor:
    return words_to_normals(r.key, r.step, r.layout.padded)


def release(r: Run, total: torch.Tensor, noise: torch.Tensor) -> torch.Tensor:
    return ((total / r.grid).round() + (noise / r.grid).round()) * (r.grid / r.batch)


@dataclass(frozen=True)
class Stages:
    rows: Callable[..., Any] = lambda r, rows: rows
    select: Callable[..., Any] = lambda r, rows: torch.where(r.keep, rows, 0.0)
    norms: Callable[..., Any] = norms
    factors: Callable[..., Any] = factors
    add: Callable[..., Any] = add
    total: Callable[..., Any] = lambda r, total: total
    z: Callable[..., Any] = z
    noise: Callable[..., Any] = lambda r, noise: noise
    release: Callable[..., Any] = release
    mask: Callable[..., Any] = lambda r, out: torch.where(r.keep, out, 0.0)


CLEAN = Stages()


def _bounds(max_grad_norm: Any, clipping: str, tensors: int) -> list[float]:
    """C of each norm: one, or one per tensor."""
    if clipping != "per_layer":
        return [max_grad_norm]
    return list(max_grad_norm) if isinstance(max_grad_norm, list) else [max_grad_norm / math.sqrt(tensors)] * tensors


def _summed(stages: Stages, r: Run, rows: torch.Tensor, bounds: list[float]) -> torch.Tensor:
    """The clipped sum of one micro-batch, [D]."""
    selected = stages.select(r, rows)
    if r.clipping != "per_layer":
        r.norms.append(stages.norms(r, selected, rows))
        return stages.add(r, selected, stages.factors(r, r.norms[-1]))
    sizes, shapes = r.layout.sizes, r.layout.shapes
    runs = [replace(r, layout=Layout.of([shape]), keep=keep, bound=bound)
            for shape, keep, bound in zip(shapes, r.keep.split(sizes), bounds, strict=True)]   # fmt: skip
    parts = list(zip(runs, selected.split(sizes, 1), rows.split(sizes, 1), strict=True))
    norms = [stages.norms(*part) for part in parts]
    finite = torch.stack(norms, 1).isfinite().all(1)
    r.norms.extend(norms)
    return torch.cat([stages.add(part[0], part[1], stages.factors(part[0], torch.where(finite, n, math.inf)))
                      for part, n in zip(parts, norms, strict=True)])   # fmt: skip


def planted(stages: Stages, name: str = "planted") -> Callable[..., None]:
    """A step function with fused_rs_dp_step's signature."""

    @torch.no_grad()
    def step(
        params: Iterable[Any],
        *,
        keep: KeepMask | None = None,
        max_grad_norm: float,
        noise_multiplier: float,
        expected_batch_size: float,
        noise: NoiseSource,
        grad_samples: Any = None,
        loss_reduction: str = "sum",
        clipping: str = "flat",
        backend: str = "auto",
    ) -> None:
        names, tensors = inputs.named_params(params)
        batches, sources = inputs.micro_batches(names, tensors, grad_samples)
        batches = [[grad if isinstance(grad, torch.Tensor) else grad.dense() for grad in batch] for batch in batches]
        layout, stream = Layout.of(tensors), noise.claim()
        kept = KeepMask.full(tensors) if keep is None else keep
        dense = torch.cat([part.reshape(-1) for part in kept.dense()])
        bounds = _bounds(max_grad_norm, clipping, len(tensors))
        held = [param.grad for param in tensors]
        first = batches[0][0]
        r = Run(layout, dense, math.hypot(*bounds), noise_multiplier, expected_batch_size, loss_reduction == "mean",
                0.01 if clipping == "automatic" else 0.0, stream.key, stream.step,
                sum(batch[0].shape[0] for batch in batches), len(batches),
                clipping=clipping, secure=noise.private, dtype=first.dtype, out_dtype=tensors[0].dtype,
                source=sources[0], accumulated=isinstance(getattr(tensors[0], sources[0] or "grad"), list),
                named=isinstance(grad_samples, dict), strided=not first.is_contiguous(),
                held=None if held[0] is None else torch.cat([grad.reshape(-1).double() for grad in held]))   # fmt: skip
        total = torch.zeros(layout.size, dtype=torch.float64)
        for batch in batches:
            n = batch[0].shape[0]
            parts = [grad.reshape(n, size).double() for grad, size in zip(batch, layout.sizes, strict=True)]
            rows = torch.cat(parts, 1)
            rows = stages.rows(r, rows * n if r.mean else rows)
            total = total + _summed(stages, r, rows, bounds)
        made = stages.noise(r, r.flat(stages.z(r)) * (r.sigma * r.bound))
        out = stages.mask(r, stages.release(r, stages.total(r, total), made))
        inputs.consume(tensors, sources)
        for param, part in zip(tensors, out.split(layout.sizes), strict=True):
            param.grad = part.reshape(param.shape).to(param.dtype)

    step.__name__ = name
    return step
