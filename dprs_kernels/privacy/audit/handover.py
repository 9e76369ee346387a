"""Part of S4: how gradients are handed over, and what p.grad held before, changes no bit of the release.

Under one key and on the same samples, with and without a mask. The other suites hand a list over to parameters whose
p.grad is NaN; training loops do neither.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dprs_kernels.privacy.audit.replay import GRIDS, RELATIVE
from dprs_kernels.privacy.audit.report import Finding
from dprs_kernels.privacy.audit.subject import Subject, rows_of
from dprs_kernels.privacy.audit.zeros import same

ROWS = 7
WAYS = {
    "p.grad None, as after zero_grad": {"held": "none"},
    "p.grad of the step before": {"held": "numbers"},
    "p.grad not contiguous": {"held": "strided"},
    "p.grad_sample, one tensor": {"given": "grad_sample"},
    "p.grad_batch": {"given": "grad_batch"},
    "a dict, named parameters": {"given": "dict"},
    # A smaller audit ends here: these are like others.
    "p.grad zeros": {"held": "zeros"},
    "p.grad_sample, p.grad None": {"given": "grad_sample", "held": "none"},
}
DISTINCT = 6
GRID = 2.0**-20   # of sigma C = 1


def run(subject: Subject) -> Iterator[Finding]:
    shapes = subject.replay_shapes
    mask = subject.mask(shapes, "handover")
    masks = [mask] if subject.size.few else [mask, None]
    rows = torch.randn(ROWS, mask.size, generator=subject.generator("handover"))

    def released(held: str = "NaN", given: str = "list") -> torch.Tensor:
        """With and without the mask, [2, D]; a smaller audit: with it."""
        parts = [
            subject.released([rows_of(rows, shapes)], keep=keep, noise=subject.source("handover"), held=held,
                             given=given, dtype=torch.float32)
            for keep in masks
        ]   # fmt: skip
        return torch.stack(parts)

    expected = released()
    for tried, way in list(WAYS.items())[: DISTINCT if subject.size.few else None]:
        yield same(f"{ROWS} gradients, {tried}", released(**way), expected)
    # Blocks of another layout add up a norm in another order: the same within rounding.
    worst = float((released(given="strided list") - expected).abs().max())
    allowed = GRIDS * GRID + ROWS * RELATIVE
    yield Finding("S4", f"{ROWS} gradients, not contiguous", f"{worst:.2g} apart", f"<= {allowed:.2g}",
                  worst <= allowed)   # fmt: skip
