"""S1, replay: under the same key the noise cancels, and f(data + canary) - f(data) must be the canary's clipped part.

    keep o c min(1, C/n),  n = || keep o c ||;   0 where n is not finite

in float64, within the rounding to the grid. Deterministic: no probability of a false alarm. Also: the same call
twice, the same data in micro-batches, a mean loss. Other clippings and dtypes: variants.py; sizes: reach.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

import torch

from dprs_kernels.layout import Layout
from dprs_kernels.mask import KeepMask
from dprs_kernels.plan import make_plan
from dprs_kernels.privacy.audit.report import Finding
from dprs_kernels.privacy.audit.subject import BATCH, Shapes, Subject, kept_of, rows_of

SCALES = (1e-30, 1e-12, 1e-3, 1.0, 1e6, 1e19, 1e25)
KINDS = ("one-hot", "dense", "dropped only")
PLACES = ("first", "middle", "last")
SPECIAL = (math.nan, math.inf, -math.inf)
# Of the grid g, per coordinate: rounding both sums is 1; a sum in fp32, or a mean loss undone twice, some more.
GRIDS = 3.0
# Of the contribution: the 2^-20 margin below C, and the rounding of norm, factor and product.
RELATIVE = 2.0**-19


@dataclass
class Bench:
    """Data, its release, and what a canary does to it. options: of the step (clipping, max_grad_norm)."""

    subject: Subject
    shapes: Shapes
    keep: KeepMask
    data: torch.Tensor   # [N, D]
    options: dict[str, Any] = field(default_factory=dict)
    bounds: Sequence[float] | None = None   # per_layer: of each tensor, said here so that the plan's are not believed

    def __post_init__(self) -> None:
        self.kept = kept_of(self.keep)
        plan = make_plan(Layout.of(self.shapes), **{"max_grad_norm": 1.0, **self.options}, noise_multiplier=1.0,
                         expected_batch_size=BATCH)   # fmt: skip
        self.grid, self.sensitivity = plan.grid, plan.sensitivity(self.keep.count)
        self.bases = {given: self.released(self.data, given=given) for given in self.subject.ways}
        self.base = self.bases["list"]
        self.largest = 0.0   # norm of a difference over the sensitivity

    def released(self, *batches: torch.Tensor, **options: Any) -> torch.Tensor:
        given = [rows_of(rows, self.shapes) for rows in batches]
        options = {**self.options, **options}
        return self.subject.released(given, keep=self.keep, noise=self.subject.source("S1"), **options)

    def error(self, canary: torch.Tensor, place: str) -> float:
        """|difference - expected| over its tolerance, the largest."""
        canary, worst = canary.to(self.data.dtype), 0.0
        for given, base in self.bases.items():
            difference = self.released(self.inserted(canary, place), given=given) - base
            self.largest = max(self.largest, or_inf(float(difference.norm()) / self.sensitivity))
            worst = max(worst, self.distance(difference, self.expected(canary)))
        return worst

    def expected(self, canary: torch.Tensor) -> torch.Tensor:
        """Its contribution: each tensor under its own bound, if there are several; 0 if anything kept is not finite."""
        if self.bounds is None:
            return contribution(canary, self.kept)
        if not torch.where(self.kept, canary, 0.0).isfinite().all():
            return torch.zeros(canary.numel(), dtype=torch.float64)
        sizes = [math.prod(shape) for shape in self.shapes]
        parts = zip(canary.split(sizes), self.kept.split(sizes), self.bounds, strict=True)
        return torch.cat([contribution(*part) for part in parts])

    def distance(self, difference: torch.Tensor, expected: torch.Tensor) -> float:
        tolerance = torch.where(expected.any() & self.kept, GRIDS * self.grid + RELATIVE * expected.abs(), 0.0)
        excess = (difference - expected).abs() / tolerance
        return or_inf(float(torch.where(difference == expected, 0.0, excess).max()))

    def inserted(self, canary: torch.Tensor, place: str) -> torch.Tensor:
        at = {"first": 0, "middle": self.data.shape[0] // 2, "last": self.data.shape[0]}[place]
        return torch.cat([self.data[:at], canary[None], self.data[at:]])


def contribution(canary: torch.Tensor, kept: torch.Tensor, bound: float = 1.0) -> torch.Tensor:
    """keep o c min(1, C'/n) in float64, C' = C (1 - 2^-20); 0 if n is not finite.

    >>> contribution(torch.tensor([3.0, 4.0, 9.0]), torch.tensor([True, True, False])).norm() < 1
    tensor(True)
    """
    selected = torch.where(kept, canary.double(), 0.0)
    largest = float(selected.abs().max())
    if largest == 0 or not math.isfinite(largest):
        return torch.zeros_like(selected)
    norm = largest * float((selected / largest).norm())
    return selected if norm <= bound * (1 - 2.0**-20) else selected * (bound * (1 - 2.0**-20) / norm)


def run(subject: Subject) -> Iterator[Finding]:
    shapes = subject.replay_shapes
    generator = subject.generator("S1")
    size = Layout.of(shapes).size
    # Norms from 0.01 to 100: some rows are clipped, some are not.
    sizes = torch.logspace(-2, 2, subject.size.replay_rows) / math.sqrt(size)
    data = torch.randn(subject.size.replay_rows, size, generator=generator) * sizes[:, None]
    bench = Bench(subject, shapes, subject.mask(shapes, "S1"), data)
    again = bench.released(data)
    yield _exact("the same call twice under one key", torch.equal(again, bench.base), "identical", "different")
    yield _exact("dropped coordinates, with data", not bench.base[~bench.kept].any(), "0", "not 0")
    yield from _canaries(bench, generator)
    yield from _special(bench, generator)
    seen = f"{bench.largest - 1:+.2g}"
    yield Finding("S1", "norm of every difference over sensitivity() - 1", seen, "<= 0", bench.largest <= 1)
    yield _micro_batches(bench)
    yield _mean_loss(bench, generator)


def _canaries(bench: Bench, generator: torch.Generator) -> Iterator[Finding]:
    """Every kind at every scale and row; a smaller audit takes a part that still has each kind, scale and row."""
    count, cases = bench.subject.size.replay_cases, list(product(KINDS, SCALES, PLACES))
    if count < len(cases):
        cases = [(KINDS[i % 3], SCALES[i % 7], PLACES[i // 3 % 3]) for i in range(count)]
    for kind in KINDS:
        tried = [(scale, place) for k, scale, place in cases if k == kind]
        worst = max(bench.error(make_canary(kind, bench.kept, generator) * scale, place) for scale, place in tried)
        scales, rows = [scale for scale, _ in tried], "/".join(dict.fromkeys(place for _, place in tried))
        yield error_finding(f"{len(tried)} {kind} canaries of {min(scales):g} .. {max(scales):g}, {rows} row", worst)


def make_canary(kind: str, kept: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Dense canaries have mass where it is dropped, too."""
    dense = torch.randn(kept.numel(), generator=generator)
    if kind == "dropped only":
        return torch.where(kept, 0.0, dense)
    if kind == "dense":
        return dense
    places = kept.nonzero().reshape(-1)
    at = int(places[int(torch.randint(places.numel(), (), generator=generator))])
    canary = torch.zeros(kept.numel())
    canary[at] = 1.0
    return canary


def _special(bench: Bench, generator: torch.Generator) -> Iterator[Finding]:
    """One value that is not finite: kept, the sample is worth exactly 0; dropped, it was never there."""
    for name, among in (("kept", bench.kept), ("dropped", ~bench.kept)):
        places = among.nonzero().reshape(-1)
        worst = 0.0
        few = bench.subject.size.few
        for i, value in enumerate(SPECIAL):
            for p, place in enumerate(PLACES):
                if few and (i, p) not in ((0, 0), (1, 2)):
                    continue
                canary = make_canary("dense", bench.kept, generator)
                canary[places[int(torch.randint(places.numel(), (), generator=generator))]] = value
                worst = max(worst, bench.error(canary, place))
        tried = "NaN, Inf" if few else "NaN, Inf and -Inf"
        yield error_finding(f"{tried} in a {name} coordinate", worst)


def _micro_batches(bench: Bench) -> Finding:
    """Split, with an empty micro-batch among them; sums of the same contributions."""
    third = bench.data.shape[0] // 3
    split = bench.released(bench.data[:third], bench.data[:0], bench.data[third:])
    tolerance = GRIDS * bench.grid
    worst = or_inf(float((split - bench.base).abs().max()) / tolerance)
    return error_finding("the same data in three micro-batches", worst)


def _mean_loss(bench: Bench, generator: torch.Generator) -> Finding:
    """Gradients over N with loss_reduction="mean": the sample's own size counts, whatever N is."""
    canary = make_canary("dense", bench.kept, generator)
    rows = bench.inserted(canary, "middle")
    with_canary = bench.released(rows / rows.shape[0], loss_reduction="mean")
    without = bench.released(bench.data / bench.data.shape[0], loss_reduction="mean")
    return error_finding('a canary under loss_reduction="mean"',
                  bench.distance(with_canary - without, contribution(canary, bench.kept)))   # fmt: skip


def error_finding(tried: str, worst: float) -> Finding:
    return Finding("S1", tried, f"error {worst:.2g} of tolerance", "<= 1", worst <= 1)


def _exact(tried: str, passed: bool, good: str, bad: str) -> Finding:
    return Finding("S1", tried, good if passed else bad, good, passed)


def or_inf(value: float) -> float:
    return math.inf if math.isnan(value) else value
