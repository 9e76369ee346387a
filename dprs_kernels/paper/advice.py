"""Whether random sparsification is worth a try, before anything is trained: theory.py's figures for a model, a batch
and a budget, the paper's rows that come nearest, and a small grid.

    ratio = sigma^2 d / B^2        the bound's noise term over the part of Delta_C that stays (theory.py)

At a ratio below 1 the bound's best rate is 0, and yet all rows of Table 1 gained, nine of twelve at such ratios: the
bound is not tight, so the verdict goes by those rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from dprs_kernels.layout import Layout
from dprs_kernels.paper import budget, theory
from dprs_kernels.paper.networks import NETWORKS
from dprs_kernels.paper.table1 import RATES, ROWS

SAMPLES = {"fmnist": 60_000, "cifar10": 50_000, "svhn": 73_257}   # of the training sets
# What epsilon asks for with the first baseline setting of each row: RDP, delta 1e-5, Poisson batches, with rounding;
# cifar10-h-cnn pays for its channel statistics, too.
SIGMAS = {
    "fmnist-dp-cnn-s-eps3": 1.921, "fmnist-dp-cnn-s-eps1": 4.815,
    "fmnist-h-cnn-s-eps3": 1.921, "fmnist-h-cnn-s-eps1": 3.479,
    "cifar10-dp-cnn-eps3": 1.543, "cifar10-dp-cnn-eps1": 3.735,
    "cifar10-h-cnn-eps3": 4.948, "cifar10-h-cnn-eps1": 18.187,
    "svhn-dp-cnn-eps3": 1.328, "svhn-dp-cnn-eps1": 3.107,
    "svhn-h-cnn-eps3": 4.019, "svhn-h-cnn-eps1": 10.647,
}   # fmt: skip
# The paper's gains in points by ratio: +0.3 to +0.9 below 0.09, +0.8 to +1.5 from there to 0.95, +1.1 to +3.1 above.
# The limits were drawn afterwards, between rows that gained more and less.
LITTLE, MUCH = 0.09, 0.95
STRETCHES = (1.0, 1.2, 1.5)   # of the epochs, as the paper's grid
MOMENTA = (0.0, 0.5, 0.9)     # C = 1, 0.5, 0.1 by the scaling rule, as the paper's grid


class Plan(NamedTuple):
    """One length of training: its sigma, and what follows from it."""

    epochs: int
    sigma: float
    delta_sigma: float
    ratio: float
    largest_rate: float


class Measured(NamedTuple):
    """A row of Table 1: its ratio, and the paper's gain in points."""

    row: str
    ratio: float
    gain: float


@dataclass(frozen=True)
class Advice:
    """plans: for the epochs asked, 1.2 and 1.5 times as many. pairs: (C, momentum) of the same C / (1 - momentum).
    nearest: rows of Table 1 with the nearest ratios."""

    size: int
    clip: float
    momentum: float
    sample_rate: float
    steps: int
    noise_scale: float
    unscaled_delta_sigma: float   # at C; plans have it at C / (1 - momentum)
    plans: tuple[Plan, ...]
    pairs: tuple[tuple[float, float], ...]
    nearest: tuple[Measured, ...]

    @property
    def verdict(self) -> str:
        """"likely", "possible" or "little"."""
        ratio = self.plans[0].ratio
        return "likely" if ratio >= MUCH else "possible" if ratio >= LITTLE else "little"

    @property
    def rates(self) -> tuple[float, ...]:
        """Final rates to try, the first to begin with: the paper's grid, higher ones first where noise is large."""
        low, middle, high = RATES
        return {"likely": (high, middle, low), "possible": (middle, high, low), "little": (low, middle)}[self.verdict]


def advise(
    *, size: int, dataset_size: int, batch: int, epochs: int, epsilon: float, delta: float, clip: float = 1.0,
    momentum: float = 0.0, smoothness: float = 1.0, accountant: str = "rdp",
    besides: Iterable[tuple[float, float, int]] = (),
) -> Advice:   # fmt: skip
    """size: d, all parameters. dataset_size: N. batch: expected, B, so that q = B / N. clip: C.
    smoothness: G of Delta_sigma; not known in practice. besides: what else the budget pays for
        (accounting.calibrate): channel statistics of CIFAR-10's ScatterNet features.

    Delta_sigma is given for C / (1 - momentum) in the place of C: the Lemma is about SGD without momentum, and the
    scaling rule says that this is the same noise.

    >>> advice = advise(size=26_010, dataset_size=60_000, batch=2048, epochs=1, epsilon=3.0, delta=1e-5)
    >>> advice.plans[0].sigma, advice.verdict, advice.plans[0].largest_rate
    (0.857, 'little', 0.0)
    """
    counts = {"size": size, "dataset_size": dataset_size, "batch": batch, "epochs": epochs}
    for name, value in counts.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ValueError(f"{name}: got {value!r}; expected an integer of at least 1")
    if batch > dataset_size:
        raise ValueError(f"batch: got {batch}; expected at most {dataset_size}, the size of the data")
    besides = list(besides)
    scale = theory.noise_scale(max_grad_norm=clip, momentum=momentum)
    layout, q, steps = Layout.of([(size,)]), batch / dataset_size, round(dataset_size / batch)
    plans = []
    for length in dict.fromkeys(round(stretch * epochs) for stretch in STRETCHES):
        sigma = budget.sigma_for(
            layout, epsilon=epsilon, delta=delta, max_grad_norm=clip, sample_rate=q, steps=steps * length,
            accountant=accountant, besides=besides,
        )   # fmt: skip
        noise = theory.delta_sigma(
            max_grad_norm=scale, noise_multiplier=sigma, size=size, batch_size=batch, smoothness=smoothness
        )
        ratio = theory.noise_over_clipping(noise_multiplier=sigma, size=size, batch_size=batch)
        rate = theory.largest_best_rate(noise_multiplier=sigma, size=size, batch_size=batch)
        plans.append(Plan(length, sigma, noise, ratio, rate))
    pairs = tuple(
        (theory.rescaled_clipping(max_grad_norm=clip, momentum=momentum, new_momentum=other), other)
        for other in MOMENTA
    )   # fmt: skip
    here = plans[0].ratio
    nearest = tuple(sorted(measured(), key=lambda found: abs(math.log(found.ratio / here)))[:3])
    return Advice(
        size=size, clip=clip, momentum=momentum, sample_rate=q, steps=steps * epochs, noise_scale=scale,
        unscaled_delta_sigma=plans[0].delta_sigma * (clip / scale) ** 2, plans=tuple(plans), pairs=pairs,
        nearest=nearest,
    )   # fmt: skip


def measured() -> Iterator[Measured]:
    """The paper's rows, with the first baseline setting of each.

    >>> max(measured(), key=lambda found: found.ratio).row
    'cifar10-dp-cnn-eps1'
    """
    for name, sigma in SIGMAS.items():
        row = ROWS[name]
        ratio = theory.noise_over_clipping(
            noise_multiplier=sigma, size=NETWORKS[row.model].size, batch_size=row.settings["baseline"][0].batch
        )
        yield Measured(name, ratio, row.paper["rs"][0] - row.paper["baseline"][0])
