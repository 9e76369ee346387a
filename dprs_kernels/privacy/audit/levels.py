"""When is a figure too far off to be chance? Thresholds at level ALPHA per test, and the two epsilons of S3.

A statistical test fails on a sound step with probability at most ALPHA; a test over m coordinates, pairs or lags is
one test and gives each ALPHA/m. Only the kurtosis is taken as normal, which makes its level 1.1 ALPHA at full size, and
up to 3 ALPHA at the smallest. An audit makes 17 such tests: a false alarm in 55,000 audits.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import NormalDist

import torch

ALPHA = 1e-6


def two_sided(tests: int = 1) -> float:
    """z with P(|N(0,1)| > z) = ALPHA/tests.

    >>> round(two_sided(), 3)
    4.892
    """
    return -NormalDist().inv_cdf(ALPHA / (2 * tests))


def one_sided(tests: int = 1) -> float:
    return -NormalDist().inv_cdf(ALPHA / tests)


def products(count: torch.Tensor, tests: int) -> torch.Tensor:
    """a with P(|sum of `count` products of two independent normals| > a) <= ALPHA/tests, also where neighbouring
    products share a factor: such sums are sub-gamma with variance n and scale 2 (log E e^{sX} <= n s^2/(2 (1 - 2s)))
    so P(X > sqrt(2 n t) + 2 t) <= e^-t."""
    t = math.log(2 * tests / ALPHA)
    return (2 * t * count.double()).sqrt() + 2 * t


def chi_square(freedom: int, tests: int = 1) -> tuple[float, float]:
    """(low, high): a chi-square variable lies outside with probability ALPHA/tests, half on each side.

    >>> low, high = chi_square(256)
    >>> low < 256 - 4 * 512**0.5 and high > 256 + 4 * 512**0.5
    True
    """
    half = torch.tensor(freedom / 2, dtype=torch.float64)
    level, spread = ALPHA / (2 * tests), 20 * math.sqrt(2 * freedom) + 200

    def tail(function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], x: float) -> float:
        return float(function(half, torch.tensor(x / 2, dtype=torch.float64)))

    low = _root(lambda x: tail(torch.special.gammainc, x) - level, 0.0, float(freedom))
    high = _root(lambda x: level - tail(torch.special.gammaincc, x), float(freedom), freedom + spread)
    return low, high


def counts(trials: int, probability: float) -> tuple[int, int]:
    """(low, high): a binomial count lies outside with probability at most ALPHA.

    >>> counts(10, 0.5)
    (0, 10)
    """
    level = ALPHA / 2
    low = _first(0, trials, lambda k: at_most(k, trials, probability) > level)
    high = _first(0, trials, lambda k: 1 - at_most(k, trials, probability) <= level)
    return low, high


def at_most(k: int, trials: int, p: float) -> float:
    """P(Binomial(trials, p) <= k) = I_{1-p}(trials - k, k + 1)."""
    if k >= trials:
        return 1.0
    return 0.0 if k < 0 else _beta(trials - k, k + 1, 1 - p)


def clopper_pearson(k: int, trials: int, level: float) -> tuple[float, float]:
    """Bounds of a probability after k successes, each wrong with probability at most `level`.

    >>> low, high = clopper_pearson(0, 100, 0.05)
    >>> low, round(high, 4)
    (0.0, 0.0295)
    """
    low = 0.0 if k == 0 else _root(lambda p: 1 - at_most(k - 1, trials, p) - level, 0.0, 1.0)
    high = 1.0 if k == trials else _root(lambda p: level - at_most(k, trials, p), 0.0, 1.0)
    return low, high


def gaussian_epsilon(mu: float, delta: float) -> float:
    """The epsilon of one Gaussian mechanism with sensitivity/std = mu (Balle and Wang 2018), exactly:

        delta = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu)

    >>> round(gaussian_epsilon(1.0, 1e-5), 3)
    4.377
    """
    if mu <= 0:
        return 0.0

    def missing(eps: float) -> float:
        return delta - (_phi(mu / 2 - eps / mu) - math.exp(eps) * _phi(-mu / 2 - eps / mu))

    return 0.0 if missing(0.0) >= 0 else _root(missing, 0.0, min(mu * mu / 2 + 40 * mu, 700.0))


def _phi(x: float) -> float:
    return math.erfc(-x / math.sqrt(2)) / 2


def _root(f: Callable[[float], float], low: float, high: float) -> float:
    """The zero of an f that rises from negative to positive."""
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (low, middle) if f(middle) > 0 else (middle, high)
    return (low + high) / 2


def _first(low: int, high: int, holds: Callable[[int], bool]) -> int:
    """The smallest k in [low, high] from which `holds` holds."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle + 1, high)
    return low


def _beta(a: float, b: float, x: float) -> float:
    """The regularised incomplete beta function I_x(a, b), by its continued fraction (Lentz's evaluation)."""
    if x <= 0 or x >= 1:
        return float(x >= 1)
    if x > (a + 1) / (a + b + 2):
        return 1 - _beta(b, a, 1 - x)
    c, d = 1.0, 1 / (1 - (a + b) * x / (a + 1))
    fraction = d
    for m in range(1, 100_000):
        for up in (
            m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m)),
            -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1)),
        ):
            d, c = 1 / (1 + up * d), 1 + up / c
            fraction *= c * d
        if abs(c * d - 1) < 1e-15:
            break
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    return math.exp(front) * fraction / a
