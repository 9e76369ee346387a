"""Part of S1: canaries under clipping="per_layer", and in bf16, fp16 and fp64.

per_layer: each tensor p of a sample is clipped to C_p on its own, C_p = C/sqrt(P) or as given; a sample with anything
kept that is not finite contributes nothing, in no tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from dprs_kernels.privacy.audit.replay import PLACES, Bench, error_finding, make_canary, or_inf
from dprs_kernels.privacy.audit.report import Finding
from dprs_kernels.privacy.audit.subject import Shapes, Subject, rows_of

DTYPES = (torch.bfloat16, torch.float16, torch.float64)
CASES = (("dense", 1e3), ("dense", 1e-3), ("one-hot", 1e4), ("one-hot", 0.5), ("dense", 0.1))   # fp16 ends at 65,504
ROWS = 7


def run(subject: Subject) -> Iterator[Finding]:
    shapes = subject.replay_shapes
    generator = subject.generator("variants")
    data = torch.randn(ROWS, sum(math.prod(shape) for shape in shapes), generator=generator) * 0.1
    for dtype in DTYPES:
        bench = Bench(subject, shapes, subject.mask(shapes, "variants"), data.to(dtype))
        name = str(dtype).removeprefix("torch.")
        yield error_finding(f"{name} canaries", _worst(bench, generator))
        if dtype != torch.float64:
            yield _parameters(bench, dtype, f"{name} gradients and parameters")
    yield from _per_layer(subject, generator)


def _worst(bench: Bench, generator: torch.Generator) -> float:
    """The largest error of CASES, and of Inf."""
    cases = CASES[:1] if bench.subject.size.few else CASES
    canaries = [make_canary(kind, bench.kept, generator) * scale for kind, scale in cases]
    worst = max(bench.error(canary, PLACES[i % 3]) for i, canary in enumerate(canaries))
    return worst if bench.subject.size.few else max(worst, _not_finite(bench, generator))


def _not_finite(bench: Bench, generator: torch.Generator) -> float:
    """Inf on the last kept coordinate: worth exactly 0, also in the tensors before."""
    canary = make_canary("dense", bench.kept, generator)
    canary[bench.kept.nonzero()[-1]] = math.inf
    return bench.error(canary, "first")


def _parameters(bench: Bench, dtype: torch.dtype, tried: str) -> Finding:
    """The release in the parameters' dtype is the float64 one, rounded: by at most one unit in the last place, since a
    kernel may round to fp32 on the way."""
    got = bench.released(bench.data, dtype=dtype)
    info = torch.finfo(dtype)
    tolerance = info.eps * bench.base.abs() + info.smallest_normal
    worst = or_inf(float(((got - bench.base).abs() / tolerance).max()))
    return error_finding(tried, worst)


def _per_layer(subject: Subject, generator: torch.Generator) -> Iterator[Finding]:
    """Bounds from one C and as a list; besides the canaries above, one of which only one tensor is over its bound."""
    shapes: Shapes = subject.replay_shapes
    if len(shapes) == 1:
        shapes = (*shapes, (5,))
    keep = subject.mask(shapes, "per_layer")
    listed = [0.3 * 2.0**p for p in range(len(shapes))]
    shared = [1 / math.sqrt(len(shapes))] * len(shapes)
    settings: list[tuple[str, list[float], Any]] = [("one C", shared, 1.0), ("a list of C", listed, listed)]
    for tried, bounds, max_grad_norm in settings[:1] if subject.size.few else settings:
        options = {"clipping": "per_layer", "max_grad_norm": max_grad_norm}
        data = torch.randn(ROWS, keep.size, generator=generator)
        bench = Bench(subject, shapes, keep, data, options, bounds)
        lopsided = make_canary("dense", bench.kept, generator)[None] * 1e-3
        rows_of(lopsided, shapes)[0].mul_(1e6)
        worst = max(bench.error(lopsided[0], "last"), _not_finite(bench, generator))
        if not subject.size.few:
            worst = max(worst, _worst(bench, generator))
        yield error_finding(f'canaries under "per_layer", {tried}', worst)
        seen = bench.largest - 1
        yield Finding("S1", f'"per_layer", {tried}: norm of every difference over sensitivity() - 1', f"{seen:+.2g}",
                      "<= 0", seen <= 0)   # fmt: skip
