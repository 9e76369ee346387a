"""S3: epsilon from outside. Many canaries of norm 10 C, each alone on its coordinate, are put in or left out by a
coin at every step; how well the release tells the two apart bounds epsilon of one step from below.

    in:  x ~ N(C, sigma^2 C^2)        out:  x ~ N(0, sigma^2 C^2)        mu = shift / std = 1 / sigma

Gaussian fit: a lower bound of mu from means and spread, as an epsilon. Clopper-Pearson: no assumption on the noise,
from how often x passes fixed thresholds. Neither may exceed what the accountant certifies. Two-sided: the shift is C.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from dprs_kernels.layout import Layout
from dprs_kernels.plan import make_plan
from dprs_kernels.privacy.audit import levels
from dprs_kernels.privacy.audit.report import Finding
from dprs_kernels.privacy.audit.subject import BATCH, Subject, kept_of

SIGMA = 1.0
DELTA = 1e-5
NORM = 10.0
# Events x > t and x < 1 - t, over C. Far out the ratio of the two probabilities is larger, but seen less often.
THRESHOLDS = (1.5, 2.0, 2.5, 3.0, 3.5)


def run(subject: Subject) -> Iterator[Finding]:
    inside, outside = scores(subject)
    certified = accountant(subject.size.canaries)
    n = inside.numel() + outside.numel()
    fitted = gaussian_fit(inside, outside)
    yield Finding("S3", f"epsilon at delta {DELTA:g} from {n:,} coin flips, Gaussian fit", f">= {fitted:.3f}",
                  f"<= {certified:.3f}", fitted <= certified)   # fmt: skip
    counted = clopper_pearson(inside, outside)
    yield Finding("S3", "the same from counts, Clopper-Pearson", f">= {counted:.3f}", f"<= {certified:.3f}",
                  counted <= certified)   # fmt: skip
    shift = float(inside.mean() - outside.mean())
    error = levels.two_sided() * SIGMA * math.sqrt(1 / inside.numel() + 1 / outside.numel())
    yield Finding("S3", "shift by a canary of norm 10 C, over C", f"{shift:.4f}", f"{1 - error:.4f} .. {1 + error:.4f}",
                  abs(shift - 1) <= error + 2.0**-18)   # fmt: skip


def scores(subject: Subject) -> tuple[torch.Tensor, torch.Tensor]:
    """The release at canaries' coordinates, float64: those that were in, those that were not."""
    count = subject.size.canaries
    keep = subject.mask([(count * 5 // 4,)], "S3", drop_rate=0.2)
    places = kept_of(keep).nonzero().reshape(-1)[:count]
    canaries = torch.zeros(count, keep.size)
    canaries[torch.arange(count), places] = NORM
    noise, generator = subject.source("S3"), subject.generator("S3")
    inside, outside = [], []
    for _ in range(subject.size.canary_steps):
        coins = torch.rand(count, generator=generator) < 0.5
        x = subject.released([[canaries[coins]]], keep=keep, noise=noise, noise_multiplier=SIGMA, dtype=torch.float32,
                             held="none", given="grad_sample")   # as in a training loop   # fmt: skip
        inside.append(x[places[coins]])
        outside.append(x[places[~coins]])
    return torch.cat(inside), torch.cat(outside)


def accountant(kept: int) -> float:
    """What one step certifies: the Gaussian mechanism with the grid's rounding charged."""
    plan = make_plan(Layout.of([(kept,)]), max_grad_norm=1.0, noise_multiplier=SIGMA, expected_batch_size=BATCH)
    return levels.gaussian_epsilon(plan.sensitivity(kept) / plan.noise_std, DELTA)


def gaussian_fit(inside: torch.Tensor, outside: torch.Tensor) -> float:
    """Lower bound of epsilon, wrong with probability ALPHA: mu less z standard errors, where
    var(mu) = 1/n_in + 1/n_out + mu^2 / (2 n)."""
    n_in, n_out = inside.numel(), outside.numel()
    spread = float((inside - inside.mean()).square().sum() + (outside - outside.mean()).square().sum())
    std = math.sqrt(spread / (n_in + n_out - 2))
    if not std > 0:   # no noise, or NaN released
        return math.inf
    mu = float(inside.mean() - outside.mean()) / std
    error = math.sqrt(1 / n_in + 1 / n_out + mu * mu / (2 * (n_in + n_out)))
    return levels.gaussian_epsilon(mu - levels.one_sided() * error, DELTA)


def clopper_pearson(inside: torch.Tensor, outside: torch.Tensor) -> float:
    """Lower bound of epsilon, wrong with probability ALPHA, over all events: log((P(likely) - delta) / P(unlikely))."""
    n_in, n_out, best = inside.numel(), outside.numel(), 0.0
    level = levels.ALPHA / (4 * len(THRESHOLDS))
    for t in THRESHOLDS:
        for likely, unlikely, n_likely, n_unlikely in (
            (inside > t, outside > t, n_in, n_out),
            (outside < 1 - t, inside < 1 - t, n_out, n_in),
        ):
            low = levels.clopper_pearson(int(likely.sum()), n_likely, level)[0]
            high = levels.clopper_pearson(int(unlikely.sum()), n_unlikely, level)[1]
            if low > DELTA:
                best = max(best, math.log((low - DELTA) / high))
    return best
