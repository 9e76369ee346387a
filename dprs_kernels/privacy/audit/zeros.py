"""S4: zero gradients are worth nothing, however many there are. Under one key N = 0, 1, 7 and 64 of them, whole or in
micro-batches, release the same bits: noise depends on no private number, and enters once."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dprs_kernels.privacy.audit.report import Finding
from dprs_kernels.privacy.audit.subject import Subject, kept_of, rows_of

COUNTS = (0, 1, 7, 64)


def run(subject: Subject) -> Iterator[Finding]:
    shapes = subject.size.replay_shapes
    keep = subject.mask(shapes, "S4")
    kept = kept_of(keep)

    def released(*batches: torch.Tensor) -> torch.Tensor:
        given = [rows_of(rows, shapes) for rows in batches]
        return subject.released(given, keep=keep, noise=subject.source("S4"), dtype=torch.float32)

    zeros = torch.zeros(max(COUNTS), kept.numel())
    empty = released(zeros[:0])
    noised = bool(empty[kept].any()) and bool(empty.isfinite().all())
    yield Finding("S4", "an empty batch", "noise" if noised else "no noise", "noise", noised)
    for count in COUNTS[1:]:
        yield _same(f"{count} zero gradients against none", released(zeros[:count]), empty)
    split = released(zeros[:7], zeros[:0], zeros[:3])
    yield _same("zero gradients in micro-batches of 7, 0 and 3", split, empty)
    outside = torch.where(kept, 0.0, torch.randn(7, kept.numel(), generator=subject.generator("S4")))
    yield _same("7 gradients, all where it is dropped", released(outside), empty)


def _same(tried: str, got: torch.Tensor, expected: torch.Tensor) -> Finding:
    differ = int((got != expected).sum())   # NaN differs
    return Finding("S4", tried, "identical" if not differ else f"{differ} values differ", "identical", not differ)
