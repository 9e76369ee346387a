"""Part of S1: clipping reaches every sample of a large batch, every coordinate of a long row, every one of many
tensors. A bound that stops at the 600th sample, the 100,000th coordinate or the 64th tensor is none."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from dprs_kernels.mask import KeepMask
from dprs_kernels.privacy.audit.replay import GRIDS, RELATIVE, Bench, error_finding, or_inf
from dprs_kernels.privacy.audit.report import Finding
from dprs_kernels.privacy.audit.subject import Shapes, Subject

TENSORS: Shapes = ((3,), (2, 5), (1,), (), (4, 2, 2), (33,))


def long_shapes(size: int) -> Shapes:
    """Two tensors of about size/2.

    >>> long_shapes(2**21 + 5)
    ((32, 32768), (1048581,))
    """
    half = size // 64
    return (32, half), (size - 32 * half,)


def many_shapes(count: int) -> Shapes:
    return tuple(TENSORS[i % len(TENSORS)] for i in range(count))


def run(subject: Subject) -> Iterator[Finding]:
    generator = subject.generator("reach")
    yield _many_rows(subject, generator)
    yield _long_row(subject, generator)
    yield from _many_tensors(subject, generator)


def _many_rows(subject: Subject, generator: torch.Generator) -> Finding:
    """One batch, each sample alone on its coordinate: the difference shows all contributions, min(|c|, C') each. The
    coordinates between them are dropped, and full of 1e6."""
    count = subject.size.many_rows
    shapes = [(count * 5 // 4,)]
    keep = subject.mask(shapes, "reach", drop_rate=0.2)
    bench = Bench(subject, shapes, keep, torch.zeros(0, keep.size))
    places = bench.kept.nonzero().reshape(-1)
    values = torch.logspace(-3, 6, count)[torch.randperm(count, generator=generator)]
    rows = torch.where(bench.kept, 0.0, 1e6).repeat(count, 1)
    rows[torch.arange(count), places] = values
    expected = torch.zeros(keep.size, dtype=torch.float64)
    expected[places] = values.double().clamp(max=1 - 2.0**-20)
    return error_finding(f"a batch of {count:,}: every contribution", bench.distance(bench.released(rows) - bench.base,
                                                                                      expected))   # fmt: skip


def _long_row(subject: Subject, generator: torch.Generator) -> Finding:
    """Half of the squared norm of 100 is spread over the row, half lies on its last coordinate. Per coordinate
    the grid hides much, so also along the contribution: <difference, expected> / <expected, expected> = 1, where
    roundings cancel."""
    shapes = long_shapes(subject.size.long_row)
    keep = _with_the_last(subject.mask(shapes, "reach"))
    bench = Bench(subject, shapes, keep, torch.zeros(0, keep.size))
    canary = torch.randn(keep.size, generator=generator) * math.sqrt(100 / keep.size)   # half of it is dropped
    canary[-1] = math.sqrt(50)
    expected = bench.expected(canary)
    difference = bench.released(canary[None]) - bench.base
    along = float(difference @ expected / (expected @ expected)) - 1
    worst = max(bench.distance(difference, expected), or_inf(abs(along)) / (RELATIVE + GRIDS * bench.grid))
    return error_finding(f"a canary of {keep.size:,} coordinates", worst)


def _many_tensors(subject: Subject, generator: torch.Generator) -> Iterator[Finding]:
    """A canary in all tensors, most of it in the last; flat, and, in larger audits, each tensor under C/sqrt(P)."""
    shapes = many_shapes(subject.size.many_tensors)
    keep = _with_the_last(subject.mask(shapes, "reach"))
    data = torch.randn(3, keep.size, generator=generator)
    share = [1 / math.sqrt(len(shapes))] * len(shapes)
    clippings = (("flat", None), ("per_layer", share))
    for clipping, bounds in clippings[:1] if subject.size.few else clippings:
        bench = Bench(subject, shapes, keep, data, {"clipping": clipping}, bounds)
        canary = torch.randn(keep.size, generator=generator)
        canary[-1] = 100.0
        yield error_finding(f"a canary in {len(shapes)} tensors, {clipping}", bench.error(canary, "middle"))


def _with_the_last(keep: KeepMask) -> KeepMask:
    """The mask, but the last coordinate is kept: what stops one short must not go unseen."""
    dense = [part.clone() for part in keep.dense()]
    dense[-1].view(-1)[-1] = True
    return KeepMask.from_dense(dense)
