"""Private channel statistics: the equations, the bound on one image, and what the ledger is charged."""

import doctest
import math

import pytest
import torch

from dprs_kernels import NoiseSource
from dprs_kernels.paper import channel_statistics
from dprs_kernels.paper.channel_statistics import Standardise, cost, estimate, public_scales
from dprs_kernels.privacy.accounting import composed_epsilon
from dprs_kernels.privacy.ledger import Ledger

K = 6


@pytest.fixture(autouse=True)
def one_thread():
    """Small pieces of work: a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def made_up(n=400, seed=0):
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.tensor([1.0, 0.1, 0.01] * 2).view(1, K, 1, 1)
    return sizes * (0.5 + 0.4 * torch.randn(n, K, 3, 3, generator=generator)), sizes.flatten()


def run(x, scales, *, noise=None, ledger=None, **settings):
    settings = {"expected_size": len(x), "noise_multiplier": 1e-3} | settings
    return estimate(
        x, scales=scales, noise=noise or NoiseSource.seeded_for_tests(0), ledger=ledger or Ledger(), **settings
    )


def test_without_much_noise_they_are_the_statistics():
    x, scales = made_up()
    found = run(x, scales)
    torch.testing.assert_close(found.mean, x.mean((0, 2, 3)), rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(found.std, x.std((0, 2, 3), correction=0), rtol=1e-3, atol=1e-6)
    layer = Standardise(K)
    layer.fill(found)
    normal = layer(x)
    torch.testing.assert_close(normal.mean((0, 2, 3)), torch.zeros(K), atol=2e-3, rtol=0)
    torch.testing.assert_close(normal.std((0, 2, 3)), torch.ones(K), atol=2e-3, rtol=0)


def test_one_image_moves_the_sums_by_at_most_the_bound():
    """Huge, spread out or negative: with the same noise, the released sums differ by at most 2 sqrt(K)."""
    x, scales = made_up(50)
    for value in (1e30, 10.0, -1e4):
        for where in (slice(None), slice(0, 1)):
            extra = torch.zeros(1, K, 3, 3)
            extra[:, where] = value
            for power in (1, 2):
                sums = []
                for images in (x, torch.cat([x, extra])):
                    noise = NoiseSource.seeded_for_tests(1)
                    record, released = channel_statistics._release(images, scales, power, 1.0, noise, 8.0)
                    sums.append(released.double())
                assert (sums[0] - sums[1]).norm() <= record.sensitivity * (1 + 1e-5)   # fp32 results
                assert record.max_grad_norm == 2 * math.sqrt(K)


def test_an_image_with_nan_counts_for_nothing():
    x, scales = made_up(50)
    bad = torch.cat([x, torch.full((1, K, 3, 3), math.nan)])
    assert torch.equal(run(bad, scales, expected_size=50).mean, run(x, scales, expected_size=50).mean)


def test_noise_has_the_size_that_is_charged():
    """Empty data: only noise, of standard deviation sigma 2 sqrt(K) s / N."""
    noise, values = NoiseSource.seeded_for_tests(3), []
    scales = torch.tensor([1.0, 0.1, 0.01] * 2)
    for _ in range(150):
        found = run(torch.zeros(0, K, 1, 1), scales, noise=noise, expected_size=100, noise_multiplier=8.0)
        values.append(found.mean / scales)
    std = torch.stack(values).std().item()
    expected = 8 * 2 * math.sqrt(K) / 100
    assert abs(std / expected - 1) < 5 / math.sqrt(2 * 150 * K)   # five standard errors


def test_two_mechanisms_are_charged():
    x, scales = made_up()
    ledger, noise = Ledger(), NoiseSource()
    found = run(x, scales, ledger=ledger, noise=noise, noise_multiplier=8.0)
    charges = list(ledger.records())
    assert [charge.record for charge in charges] == list(found.records)
    assert [(c.sampler, c.sample_rate, c.adjacency, c.record.step) for c in charges] == [
        ("poisson", 1.0, "add_remove", 0), ("poisson", 1.0, "add_remove", 1),
    ]   # fmt: skip
    sigma = 8.0 * found.records[0].max_grad_norm / found.records[0].sensitivity
    assert ledger.epsilon(1e-5) == composed_epsilon([(sigma, 1.0, 2)], delta=1e-5)
    assert 0.69 < ledger.epsilon(1e-5) < 0.70   # as the docstring says
    assert cost(K) == [(sigma, 1.0, 2)]


def test_seeded_noise_makes_no_claim():
    x, scales = made_up()
    ledger = Ledger()
    run(x, scales, ledger=ledger)
    with pytest.raises(ValueError, match="seeded noise"):
        ledger.epsilon(1e-5)


def test_the_deviation_has_a_floor():
    """No variance at all, and noise that makes the square less than the mean's: still finite."""
    found = run(torch.full((100, K, 2, 2), 0.3), torch.ones(K), noise_multiplier=1.0)
    assert (found.std >= 0.1 - 1e-6).all()


def test_public_scales_are_public():
    pytest.importorskip("kymatio", reason="needs the extra dprs_kernels[paper]")
    state = torch.get_rng_state()
    first = public_scales((1, 28, 28))
    assert torch.equal(first, public_scales((1, 28, 28)))
    assert torch.equal(torch.get_rng_state(), state)
    assert first.shape == (81,)
    assert first[0] > first[1:17].mean() > first[17:].mean() > 0


def test_wrong_arguments():
    x, scales = made_up(4)
    with pytest.raises(ValueError, match=r"x: got \[4, 6, 3, 3\] with scales \[5\]; expected \[N, K, H, W\] and \[K\]"):
        run(x, scales[:5])
    with pytest.raises(ValueError, match="scales: expected K finite numbers above 0"):
        run(x, scales * 0)
    with pytest.raises(ValueError, match="ledger: got NoneType; expected the run's Ledger"):
        estimate(x, scales=scales, expected_size=4, noise=NoiseSource(), ledger=None)


def test_examples_in_docstrings_run():
    result = doctest.testmod(channel_statistics)
    assert result.failed == 0
    assert result.attempted > 0
