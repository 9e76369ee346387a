"""Part of S1, the clip search: rows made to break a norm, and the largest norm that gets through, over C.

A row's contribution is the difference of two releases under one key, with noise so small (2^-16 C) that rounding to
its grid (2^-36 C) is far below the 2^-20 margin between C' and C. A one-sided test: norm/C - 1 <= 0 in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from dprs_kernels.privacy.audit.report import Finding
from dprs_kernels.privacy.audit.subject import Subject

SIGMA = 2.0**-16
BOUNDS = (1.0, 0.1, 3e-5, 1234.5)
CLIPPING = ("flat", "flat", "automatic")


def adversarial_rows(size: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """fp32 rows [size] whose fp32 norms go wrong: long constant runs, one large value among many small ones, squares
    that need more than 24 bits, falling and alternating magnitudes, a heavy lane, the ends of the range."""
    j = torch.arange(size, dtype=torch.float64)
    normal = torch.randn(size, generator=generator)
    yield normal
    yield torch.ones(size)
    yield torch.where(j == 0, 1.0, 2.0**-12).float()
    yield torch.where(j == size - 1, 4096.0, 2.0**-12).float()
    yield (1 + 2.0**-12 * (j % 7)).float()
    yield torch.exp(-8 * j / size).float()
    yield torch.where(j % 2 == 0, 1.0, 1e-7).float()
    yield torch.where(j % 16 == 15, 1e-3, 3.0).float()
    yield (normal.double() * 1e18).float()
    yield (normal.double() * 1e-17).float()
    yield (torch.rand(size, generator=generator).double() ** 8).clamp_min(1e-37).float()


def searched(size: int, bound: float, generator: torch.Generator) -> Iterator[torch.Tensor]:
    """Each row as it is, and scaled to just above and well above the bound."""
    for row in adversarial_rows(size, generator):
        norm = float(row.double().norm())
        yield row
        for target in (1 + 2.0**-22, 1 + 2.0**-10):
            yield (row.double() * (bound * target / norm)).float()


def run(subject: Subject) -> Iterator[Finding]:
    generator = subject.generator("clip")
    worst, least, tried, rows = -math.inf, math.inf, 0, 0
    size = subject.size.clip_size
    per_bound = math.ceil(subject.size.clip_rows / len(BOUNDS))
    for bound in BOUNDS:
        bases: dict[str, torch.Tensor] = {}
        every = list(searched(size, bound, generator))
        for i in range(per_bound):
            row, clipping = every[(i * len(every)) // per_bound], CLIPPING[(i + i // 3) % len(CLIPPING)]
            if clipping not in bases:
                bases[clipping] = _released(subject, torch.zeros(0, size), bound, clipping)
            norm = float((_released(subject, row[None], bound, clipping) - bases[clipping]).norm())
            worst = max(worst, math.inf if math.isnan(norm) else norm / bound - 1)
            if clipping == "flat" and float(row.double().norm()) > bound:
                least = min(least, norm / bound - 1)
            tried, rows = tried + size, rows + 1
    found, samples = _batch(subject, generator)
    worst, tried, rows = max(worst, found), tried + samples, rows + samples
    yield Finding("S1", f"clip search, {tried:,} values in {rows:,} rows: largest norm/C - 1", f"{worst:+.2g}", "<= 0",
                  worst <= 0)   # fmt: skip
    yield Finding("S1", "clip search, rows over C: smallest norm/C - 1", f"{least:+.2g}", f">= {-(2.0**-18):.2g}",
                  least >= -(2.0**-18))   # fmt: skip


def _released(subject: Subject, rows: torch.Tensor, bound: float, clipping: str) -> torch.Tensor:
    return subject.released([[rows]], noise=subject.source("clip"), max_grad_norm=bound, noise_multiplier=SIGMA,
                            clipping=clipping)   # fmt: skip


def _batch(subject: Subject, generator: torch.Generator) -> tuple[float, int]:
    """One-coordinate samples around the bound, all in one batch, each at its own coordinate."""
    count = min(512, subject.size.clip_size // 16)
    values = 1 + 2.0**-20 * torch.randn(count, generator=generator).double()
    rows = torch.diag(values.float())
    moved = _released(subject, rows, 1.0, "flat") - _released(subject, rows[:0], 1.0, "flat")
    largest = float(moved.abs().max()) - 1
    return math.inf if math.isnan(largest) else largest, count
