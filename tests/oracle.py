"""The truth in float64, written from the equations and independent of reference.py, and the tolerances: once.

Tolerance of a released value, against exact arithmetic on the same inputs and the same normals z:
    g/2      rounding the sum to the grid
    N h/2    rounding N contributions to the unit
    2^-19    of sum_i |f_i g_ij|: norms (2^-20), the truncated factor (2^-23), the fp32 product (2^-24)
all over the expected batch size, plus one rounding to the output's dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch

from dprs_kernels import KeepMask, NoiseSource, fused_rs_dp_step, reference
from dprs_kernels.backends import cpu, unavailable
from dprs_kernels.layout import Layout
from dprs_kernels.plan import StepPlan, make_plan

BACKENDS = [name for name in ("reference", "cpu") if not unavailable(name, torch.device("cpu"))]
DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]
# Ways through samples and coordinates that the CPU kernels know (csrc/order.h), the chosen one first: contexts to make.
ORDERS: list[Callable[[], AbstractContextManager[None]]] = [
    nullcontext,
    *(partial(cpu.order, split, group=group, at_once=at_once)
      for split, group, at_once in (("tiles", 1, 1), ("tiles", 3, 2), ("tiles", 64, 4), ("samples", 2, 1),
                                    ("samples", 5, 4), ("samples", 4, 2), ("twice", 4, 4), ("twice", 13, 2))),
    # As many at once as in a group: sums beside norms (csrc/tile_sums.h). And other distances ahead (csrc/ask.h).
    *(partial(cpu.order, split, group=group, at_once=at_once, ahead=ahead, early=early)
      for split, group, at_once, ahead, early in (("samples", 2, 2, 4096, 4096), ("samples", 4, 4, 1024, 0),
                                                  ("tiles", 2, 2, 3072, 4096), ("tiles", 2, 4, 0, 0),
                                                  ("tiles", 4, 4, 2**40, 0))),
    *(partial(cpu.order, split, group=group, at_once=group, ahead=ahead, early=10240, cache=2)   # into the second cache
      for split, group, ahead in (("samples", 2, 8192), ("samples", 4, 4096), ("tiles", 4, 3072), ("twice", 1, 4096))),
]   # fmt: skip
MARGIN = 2.0**-20
SMALLEST = {torch.float32: 2.0**-149, torch.float64: 0.0, torch.bfloat16: 2.0**-133, torch.float16: 2.0**-24}


@dataclass
class Setting:
    """Arguments of a step other than tensors."""

    max_grad_norm: float | Sequence[float] = 1.0
    noise_multiplier: float = 1.0
    expected_batch_size: float = 16
    loss_reduction: str = "sum"
    clipping: str = "flat"

    def plan(self, layout: Layout) -> StepPlan:
        return make_plan(layout, **vars(self))


@dataclass
class Truth:
    outs: list[torch.Tensor]        # float64
    tolerances: list[torch.Tensor]
    clipped_norms: torch.Tensor     # [N] float64 norm of each contribution


def true_step(grads: Sequence[torch.Tensor], keep: KeepMask | None, setting: Setting, key: bytes, step: int) -> Truth:
    layout = Layout.of([grad[0] if grad.shape[0] else grad.sum(0) for grad in grads])
    plan = setting.plan(layout)
    samples = grads[0].shape[0]
    scale = float(max(samples, 1)) if setting.loss_reduction == "mean" else 1.0
    dense = [torch.ones(s, dtype=torch.bool) for s in layout.shapes] if keep is None else keep.dense()
    rows = [torch.where(k, g.double() * scale, 0.0) for g, k in zip(grads, dense, strict=True)]
    flat = [row.reshape(samples, n) for row, n in zip(rows, layout.sizes, strict=True)]
    squares = torch.stack([row.square().sum(1) for row in flat], 1)   # [N, P]
    total = setting.max_grad_norm if not isinstance(setting.max_grad_norm, (list, tuple)) else None
    if setting.clipping == "per_layer":
        each = [total / math.sqrt(len(rows))] * len(rows) if total is not None else list(setting.max_grad_norm)
        norms, bounds = squares.sqrt(), torch.tensor(each, dtype=torch.float64)
    else:
        norms = squares.sum(1, keepdim=True).sqrt().expand(samples, len(rows))
        bounds = torch.full((len(rows),), float(total), dtype=torch.float64)
    bounds = bounds * (1 - MARGIN)
    if setting.clipping == "automatic":
        f = bounds / (norms + 0.01)
    else:
        f = torch.where(norms <= bounds, 1.0, bounds / norms)
    f = torch.where(norms.isfinite().all(1, keepdim=True), f, 0.0)
    z = torch.from_numpy(reference.normals(reference.words(key, step, 0, layout.padded // 8)))
    outs, tolerances, contributions = [], [], []
    for p, (row, noise) in enumerate(zip(rows, layout.split(z), strict=True)):
        fp = f[:, p].reshape(-1, *[1] * (row.dim() - 1))
        part = torch.where(fp != 0, row, 0.0) * fp
        contributions.append(part.reshape(samples, layout.sizes[p]))
        out = (part.sum(0) + plan.noise_std * noise) / setting.expected_batch_size
        outs.append(torch.where(dense[p], out, 0.0))
        spread = 1.5 * plan.grid + samples * plan.unit / 2 + 2.0**-19 * part.abs().sum(0)
        eps = torch.finfo(grads[p].dtype).eps
        tolerances.append(spread / setting.expected_batch_size + eps * out.abs() + SMALLEST[grads[p].dtype])
    return Truth(outs, tolerances, torch.cat(contributions, 1).norm(dim=1))


def run(
    backend: str, grads: Sequence[torch.Tensor], keep: KeepMask | None, setting: Setting, seed: int = 0
) -> list[torch.Tensor]:
    """One step on poisoned parameters: p.grad holds NaN before, so that whatever is not written shows."""
    params = [torch.nn.Parameter(torch.zeros(grad.shape[1:], dtype=grad.dtype)) for grad in grads]
    for param in params:
        param.grad = torch.full_like(param, math.nan)
    noise = NoiseSource.seeded_for_tests(seed)
    fused_rs_dp_step(params, keep=keep, noise=noise, grad_samples=list(grads), backend=backend, **vars(setting))
    return [param.grad for param in params]


def key_of(seed: int) -> bytes:
    return NoiseSource.seeded_for_tests(seed).claim().key


def assert_true(backend: str, grads: Sequence[torch.Tensor], keep: KeepMask | None, setting: Setting) -> None:
    """The backend's step is the truth within tolerance, and dropped coordinates are exactly +0."""
    outs = run(backend, grads, keep, setting)
    truth = true_step(grads, keep, setting, key_of(0), 0)
    for p, (out, expected, tolerance) in enumerate(zip(outs, truth.outs, truth.tolerances, strict=True)):
        error = (out.double() - expected).abs()
        worst = (error - tolerance).max() if error.numel() else torch.tensor(-1.0)
        assert worst <= 0, f"parameter {p}: over the tolerance by {worst:.3g}"
    if keep is not None:
        for out, kept in zip(outs, keep.dense(), strict=True):
            assert torch.equal(torch.where(kept, 0.0, out.double()), torch.zeros(out.shape, dtype=torch.float64))
            assert not out[~kept].signbit().any()


def random_grads(
    shapes: Sequence[tuple[int, ...]],
    samples: int,
    dtype: torch.dtype = torch.float32,
    scale: float = 0.3,
    seed: int = 0,
) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(samples, *s, generator=generator, dtype=torch.float64) * scale).to(dtype) for s in shapes]
