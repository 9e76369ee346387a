"""What a run costs: (epsilon, delta) of T steps of the Poisson-sampled Gaussian mechanism.

Adjacency is add/remove: data sets that differ in one sample. Each step releases a sum that one sample moves by at
most C (a public keep mask changes nothing: fewer coordinates, same bound), with noise of std sigma C, over samples
drawn by privacy.sampling.poisson_indices with probability q.

epsilon covers one run with settings fixed beforehand. It does not cover trying hyper-parameters on the same data,
several runs (each costs its own), shuffled batches instead of Poisson sampling, or seeded noise.
"""

from __future__ import annotations

import math
import numbers
import warnings
from functools import lru_cache
from typing import Any

# Opacus's orders end at 63; small epsilons have their best order above. More orders only tighten the bound.
HIGH_ORDERS = (64, 80, 96, 128, 192, 256, 384, 512)
DECIMALS = 1000           # noise multipliers are answered in thousandths
LARGEST_MULTIPLIER = 1e6
SMALLEST_MULTIPLIER = 1e-6


def epsilon(
    *,
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    delta: float,
    accountant: str = "rdp",
    sensitivity_ratio: float = 1.0,
) -> float:
    """The epsilon of `steps` steps at `delta`, by Renyi differential privacy (Opacus's RDPAccountant):

        epsilon = min over alpha of  T rdp_alpha(q, sigma / ratio) + conversion(alpha, delta)

    noise_multiplier: sigma, as given to fused_rs_dp_step. 0 gives inf.
    sensitivity_ratio: how far one sample can really move the sum, over C. Rounding to the noise grid adds
        sqrt(K) (g + h) to C: pass plan.sensitivity(K) / C. It divides the multiplier.

    An upper bound for one run; see the module for what it does not cover.

    >>> round(epsilon(noise_multiplier=1.0, sample_rate=0.01, steps=1000, delta=1e-5), 3)
    2.101
    """
    _check_run(sample_rate=sample_rate, steps=steps, delta=delta, sensitivity_ratio=sensitivity_ratio)
    if accountant != "rdp":
        raise ValueError(f'accountant: got {accountant!r}; available: "rdp"')
    if not _is_number(noise_multiplier) or not 0 <= noise_multiplier < math.inf:
        raise ValueError(f"noise_multiplier: got {noise_multiplier!r}; expected a finite number of at least 0")
    effective = float(noise_multiplier) / float(sensitivity_ratio)
    if effective < SMALLEST_MULTIPLIER:
        return math.inf   # 0 is no noise; next to 0 the series overflow, and inf is a bound, too
    return _rdp_epsilon(effective, float(sample_rate), int(steps), float(delta))


def noise_multiplier_for(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    sensitivity_ratio: float = 1.0,
) -> float:
    """The smallest sigma in thousandths with epsilon(sigma) <= target_epsilon: rounded up, never above target.

    >>> noise_multiplier_for(target_epsilon=2.2, target_delta=1e-5, sample_rate=0.01, steps=1000)
    0.981
    """
    if not _is_number(target_epsilon) or not 0 < target_epsilon < math.inf:
        raise ValueError(f"target_epsilon: got {target_epsilon!r}; expected a positive, finite number")
    if not _is_number(target_delta) or not 0 < target_delta < 1:
        raise ValueError(f"target_delta: got {target_delta!r}; expected a number in (0, 1), below 1 / samples")

    def enough(thousandths: int) -> bool:
        return target_epsilon >= epsilon(
            noise_multiplier=thousandths / DECIMALS, sample_rate=sample_rate, steps=steps, delta=target_delta,
            sensitivity_ratio=sensitivity_ratio,
        )   # fmt: skip

    low, high = 0, DECIMALS   # not enough, enough
    while not enough(high):
        low, high = high, 2 * high
        if high > LARGEST_MULTIPLIER * DECIMALS:
            raise ValueError(
                f"target_epsilon: got {target_epsilon!r}; the RDP accountant does not certify it at target_delta="
                f"{target_delta!r} for any noise_multiplier up to {LARGEST_MULTIPLIER:g}; expected a larger one"
            )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high / DECIMALS


@lru_cache(maxsize=4096)   # one evaluation takes up to 0.3 s, and a run asks for the same numbers again
def _rdp_epsilon(sigma: float, q: float, steps: int, delta: float) -> float:
    spent = _history(_new_accountant(), sigma, q, steps)
    with warnings.catch_warnings():
        # "Optimal order is the largest alpha": the bound holds, a longer list of orders would tighten it.
        warnings.filterwarnings("ignore", message="Optimal order is")
        answer = float(spent.get_epsilon(delta=delta, alphas=[*spent.DEFAULT_ALPHAS, *HIGH_ORDERS]))
    if math.isnan(answer):
        raise ArithmeticError(f"the RDP accountant answers NaN at q={q}, sigma={sigma}, T={steps}")
    return max(answer, 0.0)   # (negative, delta) implies (0, delta)


def _new_accountant() -> Any:
    try:
        from opacus.accountants import RDPAccountant
    except ImportError as error:
        raise ImportError(f'accounting needs opacus ({error}): pip install "dprs_kernels[train]"') from error
    return RDPAccountant()


def _history(accountant: Any, sigma: float, q: float, steps: int) -> Any:
    """The accountant after `steps` calls of .step (a few microseconds each: equal steps are merged), checked: an
    accountant that recorded nothing would answer epsilon 0."""
    for _ in range(steps):
        accountant.step(noise_multiplier=sigma, sample_rate=q)
    recorded = sum(count for _, _, count in accountant.history)
    if recorded != steps:
        raise RuntimeError(f"the accountant recorded {recorded} of {steps} steps; is this version of opacus supported?")
    return accountant


def _is_number(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def _check_run(*, sample_rate: float, steps: int, delta: float, sensitivity_ratio: float) -> None:
    if not _is_number(sample_rate) or not 0 < sample_rate <= 1:
        raise ValueError(
            f"sample_rate: got {sample_rate!r}; expected a number in (0, 1], expected batch size over size of the data"
        )
    if isinstance(steps, bool) or not isinstance(steps, numbers.Integral) or steps < 1:
        raise ValueError(
            f"steps: got {steps!r}; expected an integer of at least 1: an empty history is not epsilon 0, it is a run "
            "that nobody recorded"
        )
    if not _is_number(delta) or not 0 < delta < 1:
        raise ValueError(f"delta: got {delta!r}; expected a number in (0, 1), below 1 / samples")
    if not _is_number(sensitivity_ratio) or not 1 <= sensitivity_ratio < math.inf:
        raise ValueError(
            f"sensitivity_ratio: got {sensitivity_ratio!r}; expected a number of at least 1, plan.sensitivity(K) / C"
        )
