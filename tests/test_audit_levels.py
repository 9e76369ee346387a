"""Thresholds of the audit against scipy and by simulation."""

import math

import pytest
import torch

from dprs_kernels.privacy.audit import levels

stats = pytest.importorskip("scipy.stats")


@pytest.mark.parametrize("freedom", [1, 32, 128, 32_768, 8_388_736])
@pytest.mark.parametrize("tests", [1, 65_537])
def test_chi_square(freedom, tests):
    low, high = levels.chi_square(freedom, tests)
    level = levels.ALPHA / 2 / tests
    assert low == pytest.approx(stats.chi2.ppf(level, freedom), rel=1e-6, abs=1e-12)
    assert high == pytest.approx(stats.chi2.isf(level, freedom), rel=1e-6)


@pytest.mark.parametrize("tests", [1, 65_537])
def test_normal(tests):
    assert levels.two_sided(tests) == pytest.approx(stats.norm.isf(levels.ALPHA / 2 / tests), rel=1e-9)
    assert levels.one_sided(tests) == pytest.approx(stats.norm.isf(levels.ALPHA / tests), rel=1e-9)


@pytest.mark.parametrize(("n", "p"), [(10, 0.5), (1000, 0.01), (524_320, 6.334e-5), (8_388_736, 6.334e-5)])
def test_counts(n, p):
    low, high = levels.counts(n, p)
    level = levels.ALPHA / 2
    assert stats.binom.cdf(low - 1, n, p) <= level < stats.binom.cdf(low, n, p)
    assert stats.binom.sf(high, n, p) <= level * (1 + 1e-6)
    assert high == 0 or stats.binom.sf(high - 1, n, p) > level


@pytest.mark.parametrize(("k", "n"), [(0, 50), (50, 50), (3, 100_000), (2980, 131_072), (60_000, 131_072)])
def test_clopper_pearson(k, n):
    low, high = levels.clopper_pearson(k, n, 1e-7)
    assert low == pytest.approx(stats.beta.ppf(1e-7, k, n - k + 1) if k else 0.0, rel=1e-6)
    assert high == pytest.approx(stats.beta.isf(1e-7, k + 1, n - k) if k < n else 1.0, rel=1e-6)


def test_at_most_at_the_ends():
    assert levels.at_most(-1, 5, 0.3) == 0
    assert levels.at_most(5, 5, 0.3) == 1
    assert levels.at_most(0, 5, 0.0) == 1


@pytest.mark.parametrize("mu", [0.01, 0.3, 1.0, 2.0, 7.0])
@pytest.mark.parametrize("delta", [1e-2, 1e-5, 1e-9])
def test_gaussian_epsilon_inverts_the_exact_delta(mu, delta):
    eps = levels.gaussian_epsilon(mu, delta)
    cdf = stats.norm.cdf
    exact = cdf(mu / 2 - eps / mu) - math.exp(eps) * cdf(-mu / 2 - eps / mu)
    assert exact == pytest.approx(delta, rel=1e-6) or (eps == 0 and exact <= delta)


def test_gaussian_epsilon_without_a_shift_is_0():
    assert levels.gaussian_epsilon(0.0, 1e-5) == levels.gaussian_epsilon(-1.0, 1e-5) == 0


@pytest.mark.parametrize("count", [4, 100])
@pytest.mark.parametrize("chained", [False, True])
def test_sums_of_products_stay_below_their_bound(monkeypatch, count, chained):
    """At level 1e-3, where 50,000 simulated sums can say something; a normal threshold would be passed too often."""
    monkeypatch.setattr(levels, "ALPHA", 1e-3)
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(50_000, count + 1, generator=generator)
    y = x[:, 1:] if chained else torch.randn(50_000, count, generator=generator)
    sums = (x[:, :-1] * y).sum(1).double().abs()
    bound = float(levels.products(torch.tensor(count), 1))
    assert (sums > bound).double().mean() <= 1e-3
    if count == 4:
        assert (sums > levels.two_sided() * 2).double().mean() > 1e-3
