"""What the Triton tests share: settings of the launcher, and sums without noise (noise is most of a step's time in
the interpreter)."""

import math

import torch

from dprs_kernels import KeepMask, reference
from dprs_kernels.backends import triton as backend
from dprs_kernels.backends.tuning import Config
from dprs_kernels.layout import Layout
from tests.oracle import Setting
from tests.triton.conftest import DEVICE

A = Config("A")
B = Config("B", columns=512, warps=4, group=2, lag=1)
DESIGNS = [A, B, Config("B", columns=1024, warps=8, group=4, lag=2)]
HALVES = [torch.float32, torch.bfloat16, torch.float16]


def design_id(config):
    return config.design + (f"-{config.columns}-{config.group}-{config.lag}" if config.design == "B" else "")


def units(grads, keep, setting=None, verbs=backend):
    """(S in units, norms) of one micro-batch by these verbs, and the plan."""
    setting = setting or Setting()
    plan = setting.plan(Layout.of([grad.shape[1:] for grad in grads]))
    device = DEVICE if verbs is backend else torch.device("cpu")
    total = torch.zeros(plan.layout.padded, dtype=reference.total_dtype(plan), device=device)
    bits = None if keep is None else keep.bits.to(device)
    norms = verbs.accumulate_(total, [grad.to(device) for grad in grads], bits, plan)
    return total.cpu(), norms.cpu(), plan


def true_units(grads, keep, setting=None):
    """S in float64 and how far honest rounding may lead: N/2 units, 2^-19 of sum |f g| (tests/oracle.py)."""
    _, norms, plan = units(grads, keep, setting, reference)
    dense = None if keep is None else keep.dense()
    bound = torch.tensor(plan.bounds, dtype=torch.float64)
    f = torch.where(norms <= bound, 1.0, bound / norms)
    if plan.gamma > 0:
        f = bound / (norms + plan.gamma)
    f = torch.where(norms.isfinite().all(1, keepdim=True), f, 0.0) * plan.loss_scale(grads[0].shape[0])
    total = torch.zeros(plan.layout.padded, dtype=torch.float64)
    size = torch.zeros_like(total)
    for p, (grad, start) in enumerate(zip(grads, plan.layout.starts, strict=True)):
        fp = f[:, plan.segment_of[p]].unsqueeze(1)
        rows = reference.kept(grad, None if dense is None else dense[p]).double()
        rows = rows.reshape(grad.shape[0], plan.layout.sizes[p])
        part = torch.where(fp != 0, rows, 0.0) * fp
        total[start : start + part.shape[1]] = part.sum(0)
        size[start : start + part.shape[1]] = part.abs().sum(0)
    unit = plan.unit or 1.0
    tolerance = 2.0**-19 * size / unit + (grads[0].shape[0] / 2 + 1 if plan.unit else 2.0**-40 * size)
    return total / unit, tolerance, norms


def assert_units(grads, keep, setting=None):
    got, norms, plan = units(grads, keep, setting)
    expected, tolerance, true_norms = true_units(grads, keep, setting)
    worst = ((got.double() - expected).abs() - tolerance).max()
    assert worst <= 0, f"over the tolerance by {worst:.3g} units"
    finite = true_norms.isfinite()
    assert torch.equal(finite, norms.isfinite())
    # A norm far below its bound may lose its last bits, or all of them: it only says "not clipped".
    bound = torch.tensor([b if b < math.inf else 0.0 for b in plan.bounds], dtype=torch.float64)
    close = (norms - true_norms).abs() <= 2.0**-21 * true_norms + 2.0**-24 * bound
    assert close[finite].all()
    if keep is not None:
        layout = keep.layout
        for part, kept in zip(layout.split(got), keep.dense(), strict=True):
            assert (part[~kept] == 0).all()


def drawn(shapes, drop_rate):
    return None if drop_rate is None else KeepMask.draw(shapes, drop_rate=drop_rate, seed=0, draw=0)
