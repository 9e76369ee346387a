"""S2, the noise field: many empty steps, and every way in which their noise could be less than fresh N(0, sigma^2 C^2)
noise on every kept coordinate and exactly 0 on the others.

Half of the steps keep a random half of the coordinates, half the other half, so that every coordinate is seen.
x_tj = release / (sigma C), for kept (t, j):
    scale       mean of x, std of x, sum_t x_tj^2 of each coordinate, sum_j x_tj^2 of each step
    shape       kurtosis, how many |x| > 4
    freshness   <x_t, x_u> of all pairs of steps; sum_t x_tj x_t,j+lag and sum_t x_tj x_t+1,j+lag at every lag
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from dprs_kernels.mask import KeepMask
from dprs_kernels.privacy.audit import levels
from dprs_kernels.privacy.audit.report import Finding
from dprs_kernels.privacy.audit.subject import Subject, kept_of

SIGMA, BOUND = 1.5, 0.7   # neither is 1, so that one in the place of the other shows
TAIL = 4.0


@dataclass
class _Field:
    """Steps under one mask, over sigma C."""

    rows: torch.Tensor     # [T, D] fp32, as released; 0 where dropped
    kept: torch.Tensor     # bool [D]

    def __post_init__(self) -> None:
        self.values = self.rows[:, self.kept]   # [T, K]


def run(subject: Subject) -> Iterator[Finding]:
    shapes, steps = subject.field_shapes, subject.size.field_steps
    first = subject.mask(shapes, "S2")
    second = KeepMask.from_dense([~part for part in first.dense()])
    noise = subject.source("S2")
    empty = [torch.zeros(0, *shape) for shape in shapes]
    fields, dropped, unfinished = [], 0, 0
    for keep in (first, second):
        kept = kept_of(keep)
        rows = torch.empty(steps // 2, first.size)
        for row in rows:
            x = subject.released([empty], keep=keep, noise=noise, max_grad_norm=BOUND, noise_multiplier=SIGMA,
                                 dtype=torch.float32)   # fmt: skip
            dropped += int((x[~kept] != 0).sum())
            unfinished += int((~x.isfinite()).sum())
            row.copy_(torch.where(kept & x.isfinite(), x / (SIGMA * BOUND), 0.0))
        fields.append(_Field(rows, kept))
    yield _at_most("dropped coordinates that are not 0", dropped, 0)
    yield _at_most("released values that are not finite", unfinished, 0)
    yield from _moments(fields)
    yield _pairs(fields)
    yield from _lags(fields)


def _at_most(tried: str, count: int, allowed: int) -> Finding:
    return Finding("S2", tried, str(count), str(allowed), count <= allowed)


def _within(tried: str, worst: tuple[float, float], allowed: tuple[float, float]) -> Finding:
    """Lowest and highest seen, lowest and highest allowed."""
    ends = [f"{value:.5g}" for value in worst]
    seen = ends[0] if ends[0] == ends[1] else " .. ".join(ends)
    passed = allowed[0] <= worst[0] and worst[1] <= allowed[1]   # False for NaN
    return Finding("S2", tried, seen, f"{allowed[0]:.5g} .. {allowed[1]:.5g}", passed)


def _moments(fields: list[_Field]) -> Iterator[Finding]:
    """Scale and shape, from sums of x, x^2 and x^4."""
    n = sum(field.values.numel() for field in fields)
    squares = [field.values.double().square() for field in fields]
    mean = sum(float(field.values.sum(dtype=torch.float64)) for field in fields) / n
    second = sum(float(square.sum()) for square in squares) / n
    fourth = sum(float(torch.dot(square.reshape(-1), square.reshape(-1))) for square in squares) / n
    z = levels.two_sided() / math.sqrt(n)
    yield _within(f"mean of {n:,} noise values, in sigma C", (mean, mean), (-z, z))
    low, high = levels.chi_square(n)
    std = math.sqrt(second)
    yield _within("pooled std, in sigma C", (std, std), (math.sqrt(low / n), math.sqrt(high / n)))
    yield _chi_squares("coordinate", [square.sum(0) for square in squares], [len(square) for square in squares])
    yield _chi_squares("step", [square.sum(1) for square in squares], [square.shape[1] for square in squares])
    kurtosis = fourth / second**2 if second else math.nan
    z = levels.two_sided() * math.sqrt(24 / n)
    yield _within("kurtosis", (kurtosis, kurtosis), (3 - z, 3 + z))
    beyond = sum(int((field.values.abs() > TAIL).sum()) for field in fields)
    yield _within(f"values beyond {TAIL:g} sigma", (beyond, beyond), levels.counts(n, math.erfc(TAIL / math.sqrt(2))))


def _chi_squares(name: str, sums: list[torch.Tensor], freedoms: list[int]) -> Finding:
    """As mean squares: the two halves of an odd D differ by one in size, and so in range."""
    tests = sum(part.numel() for part in sums)
    lowest = min(float(part.min()) / freedom for part, freedom in zip(sums, freedoms, strict=True))
    highest = max(float(part.max()) / freedom for part, freedom in zip(sums, freedoms, strict=True))
    ranges = [(levels.chi_square(freedom, tests), freedom) for freedom in freedoms]
    allowed = max(low / freedom for (low, _), freedom in ranges), min(high / freedom for (_, high), freedom in ranges)
    return _within(f"chi-square of each {name} over its mean, {tests:,}", (lowest, highest), allowed)


def _pairs(fields: list[_Field]) -> Finding:
    """Correlation in units of its threshold, the largest."""
    tests = sum(len(field.rows) * (len(field.rows) - 1) // 2 for field in fields)
    worst = 0.0
    for field in fields:
        products = (field.values @ field.values.T).double().abs().triu(1)
        worst = max(worst, float((products / levels.products(field.kept.sum(), tests)).max()))
    return Finding("S2", f"correlation of {tests:,} pairs of steps", _share(worst), "1 threshold", worst <= 1)


def _lags(fields: list[_Field]) -> Iterator[Finding]:
    """By FFT over twice the length: no wrap. The masks' own correlations count the products of each lag. Spectra in
    fp32 put an error of about 1e-6 of all products on a lag, 1/1000 of its threshold."""
    size = fields[0].kept.numel()
    length = _fast_length(2 * size - 1)
    same = torch.zeros(length // 2 + 1, dtype=torch.complex128)
    next_ = torch.zeros_like(same)
    same_count, next_count = torch.zeros_like(same), torch.zeros_like(same)
    for field in fields:
        mask = torch.fft.rfft(field.kept.double(), length).abs().square()
        same_count += mask * len(field.rows)
        next_count += mask * (len(field.rows) - 1)
        last = None
        for row in field.rows:
            spectrum = torch.fft.rfft(row, length)
            same += spectrum.real.square() + spectrum.imag.square()
            if last is not None:
                next_ += spectrum * last.conj()
            last = spectrum
    ahead, behind = torch.arange(size), torch.arange(length - size + 1, length)
    for name, spectrum, count, lags in (
        ("one step", same, same_count, ahead[1:]),
        ("steps t and t + 1", next_, next_count, torch.cat([ahead, behind])),
    ):
        sums = torch.fft.irfft(spectrum, length)[lags].abs()
        limits = levels.products(torch.fft.irfft(count, length)[lags].clamp_min(0).round(), sums.numel())
        worst = float((sums / limits).max())
        yield Finding("S2", f"correlation at {sums.numel():,} lags within {name}", _share(worst), "1 threshold",
                      worst <= 1)   # fmt: skip


def _fast_length(least: int) -> int:
    """The next small multiple of a power of two: 65,537 coordinates need 131,073, and 147,456 is 9 * 2^14."""
    return min(m << max(math.ceil(math.log2(least / m)), 0) for m in (1, 3, 5, 9))


def _share(worst: float) -> str:
    return f"{worst:.3g} thresholds"
