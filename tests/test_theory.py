"""The paper's bound: values by hand, by search and by Monte Carlo; what grows and what falls."""

import doctest
import math

import pytest
import torch

from dprs_kernels import KeepMask
from dprs_kernels.paper import theory
from dprs_kernels.paper.networks import NETWORKS
from dprs_kernels.paper.theory import (
    best_rate,
    bound,
    delta_c,
    delta_sigma,
    gradient_norm_ratio,
    gradient_norm_ratio_limit,
    largest_best_rate,
    noise_norm_ratio,
    noise_over_clipping,
    noise_scale,
    rescaled_clipping,
)

NOISE = dict(max_grad_norm=1.0, noise_multiplier=2.0, size=1000, batch_size=100.0, smoothness=1.0)
REST = dict(loss_gap=2.0, learning_rate=0.5, steps=100, max_grad_norm=1.0, smoothness=1.0)


def normals(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_delta_sigma_by_hand():
    assert delta_sigma(**NOISE) == 0.2                                         # 1 * 4 * 1000 / 20000
    assert delta_sigma(**NOISE | {"max_grad_norm": 0.1}) == pytest.approx(0.002)
    assert delta_sigma(**NOISE | {"smoothness": 3.0}) == pytest.approx(0.6)
    assert delta_sigma(**NOISE | {"noise_multiplier": 0.0}) == 0.0


def test_delta_sigma_is_what_noise_adds_to_a_quadratic_loss():
    """L(w) = G ||w||^2 / 2 at 0: a step of gamma = 1 along the noise alone raises it by Delta_sigma on average."""
    size, sigma, c, batch, smoothness, draws = 50, 2.0, 0.7, 10.0, 3.0, 20_000
    step = normals(draws, size) * sigma * c / batch
    raised = smoothness * step.square().sum(1) / 2
    expected = delta_sigma(
        max_grad_norm=c, noise_multiplier=sigma, size=size, batch_size=batch, smoothness=smoothness
    )
    assert abs(raised.mean() - expected) < 5 * raised.std() / math.sqrt(draws)


@pytest.mark.parametrize(
    ("name", "grows"),
    [("max_grad_norm", 1), ("noise_multiplier", 1), ("size", 1), ("smoothness", 1), ("batch_size", -1)],
)
def test_delta_sigma_is_monotone(name, grows):
    values = [delta_sigma(**NOISE | {name: NOISE[name] * factor}) for factor in (1, 2, 3)]
    assert values == sorted(values, reverse=grows < 0)
    assert len(set(values)) == 3


def test_delta_c_by_hand():
    assert delta_c(**REST) == 0.04 + 0.25                                      # 2 / 50 + 0.5 / 2
    assert delta_c(**REST, bias=0.1) == pytest.approx(0.19)
    assert delta_c(**REST | {"smoothness": 2.0, "max_grad_norm": 2.0}) == pytest.approx(0.04 + 2.0)


def test_delta_c_falls_as_training_goes_on():
    values = [delta_c(**REST | {"steps": steps}) for steps in (1, 10, 100, 10**6)]
    assert values == sorted(values, reverse=True)
    assert values[-1] == pytest.approx(0.25, abs=1e-5)


def test_bound_by_hand():
    assert bound(0.0, delta_c=0.3, delta_sigma=0.5) == pytest.approx(0.8)      # equation 15: no sparsification
    assert bound(0.75, delta_c=0.3, delta_sigma=0.5) == pytest.approx(0.3 / 0.5 + 0.5 * 0.5)
    assert bound(0.5, delta_c=0.3, delta_sigma=0.5, kappa=0.8) == pytest.approx((0.3 + 0.25) / 0.8)
    assert bound(0.0, delta_c=0.3, delta_sigma=0.5, kappa=1) == pytest.approx(0.8)


def test_bound_of_any_kappa_lies_between_its_ends():
    """kappa = 1 - r is the worst, 1 the best; the noise term never grows, the other never falls."""
    for kappa in (0.31, 0.5, 0.99):
        value = bound(0.7, delta_c=0.4, delta_sigma=0.6, kappa=kappa)
        assert 0.4 + 0.3 * 0.6 < value < 0.4 / 0.3 + 0.6


@pytest.mark.parametrize("ratio", [1.01, 2.0, 10.0, 100.0])
def test_best_rate_is_the_least_of_the_bound(ratio):
    """Against a fine search."""
    rates = [i / 10_000 for i in range(10_000)]
    values = [bound(rate, delta_c=0.3, delta_sigma=0.3 * ratio) for rate in rates]
    found = rates[values.index(min(values))]
    assert best_rate(delta_c=0.3, delta_sigma=0.3 * ratio) == pytest.approx(1 - 1 / ratio)
    assert abs(found - (1 - 1 / ratio)) <= 1e-4


@pytest.mark.parametrize("sigma", [0.0, 0.1, 0.3])
def test_no_sparsification_where_noise_is_small(sigma):
    assert best_rate(delta_c=0.3, delta_sigma=sigma) == 0.0
    values = [bound(rate, delta_c=0.3, delta_sigma=sigma) for rate in (0.0, 0.1, 0.5, 0.9)]
    assert values == sorted(values)


def test_best_rate_grows_with_noise_and_falls_with_the_rest():
    by_noise = [best_rate(delta_c=0.3, delta_sigma=sigma) for sigma in (0.4, 0.6, 3.0)]
    by_rest = [best_rate(delta_c=rest, delta_sigma=1.0) for rest in (0.1, 0.5, 0.9)]
    assert by_noise == sorted(by_noise)
    assert by_rest == sorted(by_rest, reverse=True)


def test_noise_over_clipping_is_the_quotient():
    """For any C, G and learning rate."""
    for c, smoothness, rate in ((1.0, 1.0, 1.0), (0.1, 7.0, 4.0)):
        noise = rate * delta_sigma(**NOISE | {"max_grad_norm": c, "smoothness": smoothness})
        rest = delta_c(loss_gap=0.0, learning_rate=rate, steps=1, max_grad_norm=c, smoothness=smoothness)
        ratio = noise_over_clipping(noise_multiplier=2.0, size=1000, batch_size=100.0)
        assert noise / rest == pytest.approx(ratio)
        assert best_rate(delta_c=max(rest, 1e-9), delta_sigma=noise) == pytest.approx(
            largest_best_rate(noise_multiplier=2.0, size=1000, batch_size=100.0)
        )


def test_what_the_bound_says_of_the_papers_settings():
    """CIFAR-10's DP-CNN at epsilon 3 gains a little; Fashion-MNIST's DP-CNN/S has too little noise for U to fall."""
    large, small = NETWORKS["dp-cnn"].size, NETWORKS["dp-cnn-s"].size
    assert largest_best_rate(noise_multiplier=1.66, size=large, batch_size=1000) == pytest.approx(0.341, abs=1e-3)
    assert largest_best_rate(noise_multiplier=3.729, size=large, batch_size=1000) == pytest.approx(0.869, abs=1e-3)
    assert largest_best_rate(noise_multiplier=1.929, size=small, batch_size=2048) == 0.0
    assert largest_best_rate(noise_multiplier=0.0, size=small, batch_size=2048) == 0.0


def test_scaling_rule_by_hand():
    assert noise_scale(max_grad_norm=1.0, momentum=0.0) == 1.0
    assert noise_scale(max_grad_norm=0.1, momentum=0.9) == pytest.approx(1.0)
    assert rescaled_clipping(max_grad_norm=0.1, momentum=0.9, new_momentum=0.5) == pytest.approx(0.5)
    assert rescaled_clipping(max_grad_norm=0.3, momentum=0.4, new_momentum=0.4) == pytest.approx(0.3)


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_scaling_rule_is_how_far_noise_moves_the_parameters(momentum):
    """v = mu v + z, w = w - v with noise of deviation C alone: after T steps w has moved by C sqrt(T) / (1 - mu)
    (less a part of order 1 / (T (1 - mu))), while v stays at C / sqrt(1 - mu^2)."""
    c, steps, walks = 0.3, 2000, 2000
    v = w = torch.zeros(walks, dtype=torch.float64)
    noise = normals(steps, walks) * c
    for z in noise:
        v = momentum * v + z
        w = w - v
    error = 5 / math.sqrt(2 * walks) + 2 / (steps * (1 - momentum))   # five standard errors, and the part left out
    assert abs(w.std() / (noise_scale(max_grad_norm=c, momentum=momentum) * math.sqrt(steps)) - 1) < error
    assert abs(v.std() / (c / math.sqrt(1 - momentum**2)) - 1) < 5 / math.sqrt(2 * walks)


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.9])
def test_noise_norm_ratio(rate):
    """By Monte Carlo with our masks; at the paper's d the ratio of single draws is as good as its mean."""
    size = 55_057
    keep = KeepMask.draw([(size,)], drop_rate=rate, seed=0, draw=0)
    noise = normals(size)
    found = float((noise * keep.dense()[0]).norm() / noise.norm())
    assert abs(found - noise_norm_ratio(rate, size)) < 5 / math.sqrt(size)
    assert noise_norm_ratio(rate, size) == math.sqrt(keep.count / size)
    assert abs(noise_norm_ratio(rate) - noise_norm_ratio(rate, size)) < 1e-4


def test_gradient_norm_ratio_by_hand():
    """One sample (3, 4): kept (3,) is clipped to 1 with the mask, to 3/5 without."""
    keep = KeepMask.from_dense([torch.tensor([True, False])])
    sample = [torch.tensor([[3.0, 4.0]])]
    assert gradient_norm_ratio(sample, keep, max_grad_norm=1.0) == pytest.approx(5 / 3)
    assert gradient_norm_ratio(sample, keep, max_grad_norm=4.0) == pytest.approx(3 / (3 * 4 / 5))
    assert gradient_norm_ratio(sample, keep, max_grad_norm=9.0) == 1.0


@pytest.mark.parametrize("clip", [0.01, 1.0, 3.0, 1e6])
def test_gradient_norm_ratio_against_a_loop(clip):
    grads = [normals(7, 4, 3, seed=1), normals(7, 5, seed=2)]
    keep = KeepMask.draw([(4, 3), (5,)], drop_rate=0.4, seed=3, draw=0)
    mask = torch.cat([m.flatten() for m in keep.dense()])
    with_rs, without = torch.zeros(17, dtype=torch.float64), torch.zeros(17, dtype=torch.float64)
    for i in range(7):
        g = torch.cat([grad[i].flatten() for grad in grads])
        with_rs += mask * g * min(1.0, clip / float((mask * g).norm()))
        without += mask * (g * min(1.0, clip / float(g.norm())))
    expected = float(with_rs.norm() / without.norm())
    assert gradient_norm_ratio(grads, keep, max_grad_norm=clip) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.9])
def test_gradient_norm_ratio_reaches_its_limit(rate):
    """Clipped everywhere, energy spread evenly over many coordinates."""
    size = 40_000
    keep = KeepMask.draw([(size,)], drop_rate=rate, seed=0, draw=0)
    found = gradient_norm_ratio([normals(4, size)], keep, max_grad_norm=1.0)
    assert found == pytest.approx(gradient_norm_ratio_limit(rate), rel=5 / math.sqrt(keep.count))


def test_a_sample_of_zeros_is_no_trouble():
    keep = KeepMask.from_dense([torch.tensor([True, False])])
    grads = [torch.tensor([[3.0, 4.0], [0.0, 0.0], [0.0, 9.0]])]
    assert gradient_norm_ratio(grads, keep, max_grad_norm=1.0) == pytest.approx(5 / 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: delta_sigma(**NOISE | {"batch_size": 0}), "batch_size: got 0; expected a finite number above 0"),
        (lambda: delta_sigma(**NOISE | {"max_grad_norm": math.inf}), "max_grad_norm: got inf"),
        (lambda: delta_sigma(**NOISE | {"noise_multiplier": -1}), "noise_multiplier: got -1; expected .* at least 0"),
        (lambda: delta_sigma(**NOISE | {"size": True}), "size: got True"),
        (lambda: delta_c(**REST | {"steps": 0}), "steps: got 0"),
        (lambda: bound(1.0, delta_c=1.0, delta_sigma=1.0), r"drop_rate: got 1.0; expected a number in \[0, 1\)"),
        (lambda: bound(0.5, delta_c=1.0, delta_sigma=1.0, kappa=0.5), "kappa: got 0.5 .* between 0.5 and 1"),
        (lambda: bound(0.5, delta_c=1.0, delta_sigma=1.0, kappa=1), "kappa: got 1 at drop_rate 0.5"),
        (lambda: bound(0.0, delta_c=1.0, delta_sigma=1.0, kappa=0.9), "kappa: got 0.9 at drop_rate 0"),
        (lambda: best_rate(delta_c=0.0, delta_sigma=1.0), "delta_c: got 0.0; expected a finite number above 0"),
        (lambda: noise_scale(max_grad_norm=1.0, momentum=1.0), r"momentum: got 1.0; expected a number in \[0, 1\)"),
        (lambda: rescaled_clipping(max_grad_norm=1.0, momentum=0.0, new_momentum=-1), "new_momentum: got -1"),
        (lambda: noise_norm_ratio(0.5, 0), "size: got 0; expected an integer of at least 1"),
        (lambda: gradient_norm_ratio_limit(-0.1), "drop_rate: got -0.1"),
    ],
)
def test_wrong_arguments(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_wrong_gradients():
    keep = KeepMask.from_dense([torch.tensor([True, False]), torch.tensor([True])])
    with pytest.raises(ValueError, match=r"grad_samples: got shapes \[\(4, 2\)\]; expected .*\[\(2,\), \(1,\)\]"):
        gradient_norm_ratio([torch.ones(4, 2)], keep, max_grad_norm=1.0)
    with pytest.raises(ValueError, match=r"got shapes \[\(4, 2\), \(3, 1\)\]; expected \[N, .shape\] with one N"):
        gradient_norm_ratio([torch.ones(4, 2), torch.ones(3, 1)], keep, max_grad_norm=1.0)
    with pytest.raises(ValueError, match="the kept coordinates sum to 0, no ratio exists"):
        gradient_norm_ratio([torch.zeros(4, 2), torch.zeros(4, 1)], keep, max_grad_norm=1.0)


def test_examples_in_docstrings_run():
    result = doctest.testmod(theory)
    assert result.failed == 0
    assert result.attempted > 0
