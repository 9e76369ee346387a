"""S4: zero gradients are worth nothing, however many there are. Under one key N = 0, 1, 7 and 64 of them, whole or in
micro-batches, with and without a mask, release the same bits: noise depends on no private number, and enters once."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from dprs_kernels.layout import Layout
from dprs_kernels.mask import KeepMask
from dprs_kernels.privacy.audit.report import Finding
from dprs_kernels.privacy.audit.subject import Subject, kept_of, rows_of

COUNTS = (0, 1, 7, 64)


def run(subject: Subject) -> Iterator[Finding]:
    mask = subject.mask(subject.replay_shapes, "S4")
    yield from _under(subject, mask, "a mask")
    yield from _under(subject, None, "no mask")


def _under(subject: Subject, keep: KeepMask | None, name: str) -> Iterator[Finding]:
    shapes = subject.replay_shapes

    def released(*batches: torch.Tensor, given: str = "list") -> torch.Tensor:
        grads = [rows_of(rows, shapes) for rows in batches]
        return subject.released(grads, keep=keep, noise=subject.source("S4"), dtype=torch.float32, given=given)

    zeros = torch.zeros(max(COUNTS), Layout.of(shapes).size)
    empty = released(zeros[:0])
    noised = bool(empty.any()) and bool(empty.isfinite().all())
    yield Finding("S4", f"an empty batch, {name}", "noise" if noised else "no noise", "noise", noised)
    counts = (7,) if subject.size.few and keep is None else COUNTS[1:]
    for count in counts:
        yield same(f"{count} zero gradients against none, {name}", released(zeros[:count]), empty)
    if keep is None and subject.size.few:
        return
    split = released(zeros[:7], zeros[:0], zeros[:3])
    yield same(f"zero gradients in micro-batches of 7, 0 and 3, {name}", split, empty)
    if keep is not None:
        dense = torch.randn(7, keep.size, generator=subject.generator("S4"))
        dropped = torch.where(kept_of(keep), 0.0, dense)
        for given in subject.ways:
            whole = "" if given == "list" else ", rows given whole"
            yield same(f"7 gradients, all where it is dropped{whole}", released(dropped, given=given), empty)


def same(tried: str, got: torch.Tensor, expected: torch.Tensor) -> Finding:
    differ = int((got != expected).sum())   # NaN differs
    return Finding("S4", tried, "identical" if not differ else f"{differ} values differ", "identical", not differ)
