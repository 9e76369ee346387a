"""The paper's convergence bound as numbers: how large the noise term is, and which drop rate makes the bound least.

    left side <= Delta_C / kappa + (1 - r) / kappa * gamma Delta_sigma         equation 14, eq:dprs
    Delta_sigma = C^2 sigma^2 d G / (2 B^2)                                    Lemma lem:dpsgd
    Delta_C     = Delta_L / (gamma T) + gamma G C^2 / 2 - b                    Appendix app:gradual_cooling

Dropping a share r of the coordinates multiplies the noise term by (1 - r) / kappa < 1 and the rest by 1 / kappa > 1.
With kappa = sqrt(1 - r), which the paper supposes from its ablations, the least bound is at r* = 1 - Delta_C /
Delta_sigma. G (smoothness), Delta_L (loss to gain) and b (bias of clipping) are not known in practice: these are
figures to reason with, and r* from them is a place to start a search from. Equations are numbered as in the paper,
with their labels in its source.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from dprs_kernels.checks import is_number
from dprs_kernels.mask import KeepMask


def delta_sigma(
    *, max_grad_norm: float, noise_multiplier: float, size: int, batch_size: float, smoothness: float = 1.0
) -> float:
    """Delta_sigma = C^2 sigma^2 d G / (2 B^2), the noise term (Lemma lem:dpsgd). size: d, all parameters.

    >>> round(delta_sigma(max_grad_norm=1.0, noise_multiplier=1.66, size=550_570, batch_size=1000), 4)
    0.7586
    """
    c, sigma = _positive("max_grad_norm", max_grad_norm), _positive("noise_multiplier", noise_multiplier, zero=True)
    d, b, g = _positive("size", size), _positive("batch_size", batch_size), _positive("smoothness", smoothness)
    return c**2 * sigma**2 * d * g / (2 * b**2)


def delta_c(
    *,
    loss_gap: float,
    learning_rate: float,
    steps: int,
    max_grad_norm: float,
    smoothness: float = 1.0,
    bias: float = 0.0,
) -> float:
    """Delta_C = Delta_L / (gamma T) + gamma G C^2 / 2 - b: what sparsification enlarges (Appendix app:gradual_cooling).

    loss_gap: Delta_L, the loss at the start over the least possible.
    bias: b, the mean of E[b_t'], 0 where gradients deviate symmetrically.

    >>> delta_c(loss_gap=2.0, learning_rate=1.0, steps=100, max_grad_norm=1.0)
    0.52
    """
    gap, rate = _positive("loss_gap", loss_gap, zero=True), _positive("learning_rate", learning_rate)
    t, c, g = _positive("steps", steps), _positive("max_grad_norm", max_grad_norm), _positive("smoothness", smoothness)
    return gap / (rate * t) + rate * g * c**2 / 2 - bias


def bound(drop_rate: float, *, delta_c: float, delta_sigma: float, kappa: float | None = None) -> float:
    """Delta_C / kappa + (1 - r) / kappa * Delta_sigma: the right side of equation 14 (eq:dprs).

    kappa: in (1 - r, 1), or 1 at r = 0. None supposes sqrt(1 - r), which makes this the U(r) of Appendix
        app:gradual_cooling: Delta_C / sqrt(1 - r) + sqrt(1 - r) Delta_sigma.
    delta_sigma: U leaves out the learning rate that equation 14 has before Delta_sigma; for any gamma but 1 give gamma
        Delta_sigma here and in best_rate.

    >>> bound(0.75, delta_c=1.0, delta_sigma=4.0), bound(0.0, delta_c=1.0, delta_sigma=4.0)
    (4.0, 5.0)
    """
    r, c, sigma = _rate(drop_rate), _positive("delta_c", delta_c), _positive("delta_sigma", delta_sigma, zero=True)
    if kappa is None:
        kappa = math.sqrt(1 - r)
    elif not is_number(kappa) or not (1 - r < kappa < 1 or kappa == 1 == 1 - r):
        raise ValueError(f"kappa: got {kappa!r} at drop_rate {r:g}; expected between {1 - r:g} and 1 (1 at rate 0)")
    return (c + (1 - r) * sigma) / kappa


def best_rate(*, delta_c: float, delta_sigma: float) -> float:
    """r* = 1 - Delta_C / Delta_sigma where that is positive, else 0: the least of U (Appendix app:gradual_cooling).

    >>> best_rate(delta_c=1.0, delta_sigma=4.0), best_rate(delta_c=4.0, delta_sigma=1.0)
    (0.75, 0.0)
    """
    c, sigma = _positive("delta_c", delta_c), _positive("delta_sigma", delta_sigma, zero=True)
    return max(0.0, 1 - c / sigma) if sigma > 0 else 0.0


def noise_over_clipping(*, noise_multiplier: float, size: int, batch_size: float) -> float:
    """sigma^2 d / B^2: gamma Delta_sigma over gamma G C^2 / 2, the part of Delta_C that stays at the end of training.

    Neither C nor G nor the learning rate is in it, so it is known before training. Since Delta_C is never less than
    that part (where b = 0), no rate above 1 - 1 / this can be U's best, and below 1 none but 0 is. From Lemma
    lem:dpsgd and equation 14; the quotient is ours.

    >>> round(noise_over_clipping(noise_multiplier=1.66, size=550_570, batch_size=1000), 3)
    1.517
    """
    sigma = _positive("noise_multiplier", noise_multiplier, zero=True)
    return sigma**2 * _positive("size", size) / _positive("batch_size", batch_size) ** 2


def largest_best_rate(*, noise_multiplier: float, size: int, batch_size: float) -> float:
    """max(0, 1 - B^2 / (sigma^2 d)): r* when no loss is left to gain and b = 0; every other r* of U is below.

    >>> round(largest_best_rate(noise_multiplier=1.66, size=550_570, batch_size=1000), 3)
    0.341
    """
    ratio = noise_over_clipping(noise_multiplier=noise_multiplier, size=size, batch_size=batch_size)
    return max(0.0, 1 - 1 / ratio) if ratio > 0 else 0.0


def noise_scale(*, max_grad_norm: float, momentum: float) -> float:
    """C / (1 - mu), which the scaling rule keeps constant (Appendix app:scaling_rule).

    One step's noise moves the parameters by gamma (1 + mu + mu^2 + ...) = gamma / (1 - mu) of itself in all steps that
    follow. (The noise inside the velocity at one time is less, by independence: C / sqrt(1 - mu^2).) Not for Adam,
    whose velocity has the factor 1 - mu already.

    >>> noise_scale(max_grad_norm=1.0, momentum=0.0) == round(noise_scale(max_grad_norm=0.1, momentum=0.9), 12)
    True
    """
    return _positive("max_grad_norm", max_grad_norm) / (1 - _momentum("momentum", momentum))


def rescaled_clipping(*, max_grad_norm: float, momentum: float, new_momentum: float) -> float:
    """C' = C (1 - mu') / (1 - mu): the clipping bound that keeps C / (1 - mu) at another momentum.

    >>> round(rescaled_clipping(max_grad_norm=0.1, momentum=0.9, new_momentum=0.0), 12)
    1.0
    """
    return noise_scale(max_grad_norm=max_grad_norm, momentum=momentum) * (1 - _momentum("new_momentum", new_momentum))


def noise_norm_ratio(drop_rate: float, size: int | None = None) -> float:
    """Root mean square of the noise's norm with sparsification over without, sqrt(K / d): Figure 1 (c).

    size: d, for K = d - floor(r d) as a mask has it; None is the limit sqrt(1 - r).

    >>> noise_norm_ratio(0.75)
    0.5
    """
    r = _rate(drop_rate)
    if size is None:
        return math.sqrt(1 - r)
    if isinstance(size, bool) or not isinstance(size, int) or size < 1:
        raise ValueError(f"size: got {size!r}; expected an integer of at least 1")
    return math.sqrt((size - math.floor(r * size)) / size)


def gradient_norm_ratio_limit(drop_rate: float) -> float:
    """1 / sqrt(1 - r): gradient_norm_ratio when all samples are clipped in both ways and the mask takes its share of
    every norm; the most to expect of Figure 1 (d) from masks that do not look at gradients.

    >>> gradient_norm_ratio_limit(0.75)
    2.0
    """
    return 1 / math.sqrt(1 - _rate(drop_rate))


@torch.no_grad()
def gradient_norm_ratio(grad_samples: Sequence[torch.Tensor], keep: KeepMask, *, max_grad_norm: float) -> float:
    """Norm of the kept coordinates of the clipped mean gradient with sparsification over without: Figure 1 (d),
    fig:grad_ratio.

        || sum_i keep g_i min(1, C / ||keep g_i||) ||  /  || sum_i keep g_i min(1, C / ||g_i||) ||

    grad_samples: [N, *shape] per parameter, in the order of the mask's. Raw gradients go in, and the result has no
    noise: for data that is not private. At least 1, where the gradients point one way; 1 without clipping.

    >>> keep = KeepMask.from_dense([torch.tensor([True, False])])
    >>> round(gradient_norm_ratio([torch.tensor([[3.0, 4.0]])], keep, max_grad_norm=1.0), 4)
    1.6667
    """
    c = _positive("max_grad_norm", max_grad_norm)
    masks = keep.dense()
    shapes, expected = [tuple(g.shape[1:]) for g in grad_samples], [tuple(mask.shape) for mask in masks]
    if shapes != expected or len({len(g) for g in grad_samples}) != 1:
        raise ValueError(
            f"grad_samples: got shapes {[tuple(g.shape) for g in grad_samples]}; expected [N, *shape] with one N and "
            f"shapes {expected}, as keep was made for"
        )
    kept = [g.double().flatten(1)[:, mask.flatten()] for g, mask in zip(grad_samples, masks, strict=True)]   # [N, K_p]
    whole = sum(g.double().flatten(1).square().sum(1) for g in grad_samples)
    part = sum((g.square().sum(1) for g in kept), torch.zeros(()))
    assert isinstance(whole, torch.Tensor)
    norms = []
    for squares in (part, whole):
        factors = (c / squares.sqrt()).clamp(max=1)   # c / 0 = inf: 1
        norms.append(math.hypot(*(float((factors @ g).norm()) for g in kept)))
    if norms[1] == 0:
        raise ValueError("grad_samples: the kept coordinates sum to 0, no ratio exists; give other samples or a mask")
    return norms[0] / norms[1]


def _positive(name: str, value: float, *, zero: bool = False) -> float:
    if not is_number(value) or not (0 < value < math.inf or (zero and value == 0)):
        raise ValueError(f"{name}: got {value!r}; expected a finite number {'of at least' if zero else 'above'} 0")
    return float(value)


def _rate(value: float) -> float:
    if not is_number(value) or not 0 <= value < 1:
        raise ValueError(f"drop_rate: got {value!r}; expected a number in [0, 1)")
    return float(value)


def _momentum(name: str, value: float) -> float:
    if not is_number(value) or not 0 <= value < 1:
        raise ValueError(f"{name}: got {value!r}; expected a number in [0, 1)")
    return float(value)
