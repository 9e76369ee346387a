"""poisson_indices: marginals, independence, the ends of the range, secrecy of the bits, messages."""

import math
import os

import numpy as np
import pytest
import torch

from dprs_kernels.privacy.sampling import poisson_indices

ALPHA = 1e-6


def binomial_bound(n: int, p: float, alpha: float) -> float:
    """|X - np| stays below this with probability 1 - alpha for X ~ Bin(n, p), by Bernstein's inequality."""
    log = math.log(2 / alpha)
    return math.sqrt(2 * n * p * (1 - p) * log + (log / 3) ** 2) + log / 3


@pytest.mark.parametrize("q", [0.01, 0.2, 0.5, 0.9])
def test_total_is_binomial(q: float) -> None:
    n = 1_000_000
    drawn = len(poisson_indices(n, q))
    assert abs(drawn - n * q) <= binomial_bound(n, q, ALPHA)


def test_each_index_has_the_same_marginal() -> None:
    size, draws, q = 64, 4000, 0.3
    counts = torch.zeros(size)
    for _ in range(draws):
        counts[poisson_indices(size, q)] += 1
    assert (counts - draws * q).abs().max() <= binomial_bound(draws, q, ALPHA / size)


def test_indices_and_draws_are_independent() -> None:
    """Neighbours in one draw, and one index in consecutive draws, are both drawn with probability q^2."""
    n, q = 400_000, 0.3
    first, second = torch.zeros(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)
    first[poisson_indices(n, q)] = True
    second[poisson_indices(n, q)] = True
    assert abs(int((first & second).sum()) - n * q * q) <= binomial_bound(n, q * q, ALPHA)
    pairs = int((first[0::2] & first[1::2]).sum())
    assert abs(pairs - n / 2 * q * q) <= binomial_bound(n // 2, q * q, ALPHA)


def test_ascending_distinct_int64_in_range() -> None:
    drawn = poisson_indices(1000, 0.5)
    assert drawn.dtype == torch.int64
    assert drawn.dim() == 1
    assert bool((drawn[1:] > drawn[:-1]).all())
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) < 1000


def test_rate_one_draws_all() -> None:
    assert torch.equal(poisson_indices(1000, 1.0), torch.arange(1000))
    assert torch.equal(poisson_indices(5, 1), torch.arange(5))


@pytest.mark.parametrize(("size", "q"), [(0, 0.5), (0, 1.0), (1000, 1e-30), (1000, 2.0**-60)])
def test_empty_result(size: int, q: float) -> None:
    """2^-60 of 1000 samples is drawn once in 10^15 tests."""
    drawn = poisson_indices(size, q)
    assert drawn.shape == (0,)
    assert drawn.dtype == torch.int64


@pytest.mark.parametrize("q", [2.0**-64, 0.1, 0.5, 1 - 2.0**-53])
def test_threshold_is_floor_of_q_times_2_to_64(q: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The word below floor(q 2^64) is drawn, that word itself is not: integers decide, not rounded floats."""
    threshold = math.floor(q * 2**64)
    words = np.array([0, threshold - 1, threshold, 2**64 - 1], dtype="<u8")
    monkeypatch.setattr(os, "urandom", lambda count: words.tobytes()[:count])
    assert poisson_indices(4, q).tolist() == [0, 1]


def test_torch_generator_plays_no_part() -> None:
    torch.manual_seed(0)
    before, first = torch.get_rng_state(), poisson_indices(1000, 0.5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(0)
    assert not torch.equal(poisson_indices(1000, 0.5), first)


@pytest.mark.parametrize("size", [-1, 1.5, True, "3", None])
def test_bad_size(size: object) -> None:
    with pytest.raises(ValueError, match=r"^size: got .*; expected an integer of at least 0"):
        poisson_indices(size, 0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("q", [0, -0.1, 1.0001, math.nan, math.inf, True, "0.5", None])
def test_bad_sample_rate(q: object) -> None:
    with pytest.raises(ValueError, match=r"^sample_rate: got .*; expected a number in \(0, 1\]"):
        poisson_indices(10, q)  # type: ignore[arg-type]
