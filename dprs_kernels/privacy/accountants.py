"""Three accountants behind one signature: a history of Gaussian steps and delta in, an upper bound on epsilon out.

    history    [(sigma, q, steps)]: steps of the Poisson-sampled Gaussian mechanism, composed
    rdp        Renyi differential privacy (Opacus). Always quick; 5 to 30 % above the truth, more at small epsilon
    prv        privacy random variables (Opacus): a discretised convolution; at most 0.02 above the truth
    pld        privacy loss distributions (Google's dp-accounting): tightest, an upper bound at every rounding

All three charge add/remove adjacency: a sample that is in or out moves the sum by C, and sigma is in units of C.
Replace-one adjacency: a sample becomes another one. Where q = 1 that is the Gaussian mechanism at 2C, for every
accountant. Where q < 1, pld takes dp-accounting's own analysis of replacement; rdp takes out one sample and puts in
another, two steps of add/remove, (2 eps, (1 + e^eps) delta), which holds for every mechanism and is loose; prv
refuses, because that bound asks for deltas that its convolution cannot resolve.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np

Setting = tuple[float, float, int]   # sigma in units of the sensitivity, q, steps

# Opacus's orders end at 63; small epsilons have their best order above. More orders only tighten the bound.
HIGH_ORDERS = (64, 80, 96, 128, 192, 256, 384, 512)
PRV_ERROR = 0.01          # Opacus's default: the answer is its estimate plus this, so 0.02 above the truth at most
PRV_CEILING = 400         # a rough bound: 10 s below it, minutes above, or no end
PLD_WIDEST = 1e-3         # a bin, unless epsilon is so large that there would be too many
PLD_FRACTION = 32         # a bin is a step's own standard deviation over this: 0.1 % of epsilon, measured
PLD_STEP_BINS = 1e5       # at most, about: of one step, a second to make,
PLD_BINS = 1e6            # and of the composed distribution
PLD_CEILING = 1e6         # an epsilon above needs no tight answer


class TooLarge(ValueError):
    """epsilon is in the hundreds, and this accountant does not go there."""


def rdp(history: Sequence[Setting], delta: float, adjacency: str) -> float:
    """min over alpha of  sum_i T_i rdp_alpha(q_i, sigma_i) + conversion(alpha, delta)."""
    settings = _as_one_sample(history, adjacency)
    if settings is not None:
        return _rdp(settings, delta)

    def group(log_delta: float) -> tuple[float, float]:
        """Two samples at exp(log_delta) each: epsilon, and the log of delta."""
        each = _rdp(tuple(history), math.exp(log_delta))
        return 2 * each, log_delta + max(each, 0.0) + math.log1p(math.exp(-each))

    best, low, high = math.inf, -690.0, math.log(delta / 2)   # exp(-690): the last ordinary float64
    for _ in range(30):   # any delta' whose group delta is at most delta will do; the largest is the tightest
        middle = (low + high) / 2
        answer, reached = group(middle)
        if reached <= math.log(delta):
            best, low = min(best, answer), middle
        else:
            high = middle
    return best


def prv(history: Sequence[Setting], delta: float, adjacency: str) -> float:
    """Opacus's PRVAccountant, its upper bound at eps_error 0.01 and delta_error delta/1000."""
    settings = _as_one_sample(history, adjacency)
    if settings is None:
        raise ValueError(
            "adjacency: got 'replace_one' with accountant='prv' and sample_rate below 1, which it has no analysis of; "
            "use accountant='pld' (tight) or 'rdp'"
        )
    rough = _rough(settings, "add_remove")
    if rough > PRV_CEILING:
        raise TooLarge(
            f"accountant: 'prv' does not end at large epsilons, and here it may be {rough:.0f} ({_told(settings)}); "
            "expected more noise or fewer steps; 'rdp' and 'pld' answer"
        )
    return _prv(settings, delta)


def pld(history: Sequence[Setting], delta: float, adjacency: str) -> float:
    """dp-accounting's connect-the-dots distributions, pessimistic, composed by FFT."""
    rough = _rough(history, adjacency)
    if rough > PLD_CEILING:
        return _unsampled(history, adjacency, delta)
    spread = min(q * math.sqrt(math.expm1(min(1 / sigma**2, 700.0))) for sigma, q, _ in history)
    reach = max(_reach(sigma, q) for sigma, q, _ in history)
    interval = max(min(spread / PLD_FRACTION, PLD_WIDEST), reach / PLD_STEP_BINS, rough / PLD_BINS)
    # A power of two, so that neighbours share bins and single steps are found in the cache.
    return _pld(tuple(history), adjacency, 2.0 ** math.floor(math.log2(interval)))(delta)


@lru_cache(maxsize=256)   # takes up to 1 s, and a run asks for the same numbers again
def _rdp_curve(history: tuple[Setting, ...]) -> tuple[list[float], Any]:
    """Orders, and the history's RDP at each: what RDPAccountant.get_epsilon makes, kept for other deltas."""
    spent = _fed(_opacus().RDPAccountant(), history)
    orders = [*spent.DEFAULT_ALPHAS, *HIGH_ORDERS]
    compute = _opacus().analysis.rdp.compute_rdp
    parts = [compute(q=q, noise_multiplier=sigma, steps=steps, orders=orders) for sigma, q, steps in spent.history]
    return orders, sum(parts)


def _rdp(history: tuple[Setting, ...], delta: float) -> float:
    orders, curve = _rdp_curve(history)
    with warnings.catch_warnings():
        # "Optimal order is the largest alpha": the bound holds, a longer list of orders would tighten it.
        warnings.filterwarnings("ignore", message="Optimal order is")
        answer, _ = _opacus().analysis.rdp.get_privacy_spent(orders=orders, rdp=curve, delta=delta)
    return _checked(float(answer), "RDP", history)


@lru_cache(maxsize=4096)
def _prv(history: tuple[Setting, ...], delta: float) -> float:
    spent = _fed(_opacus().PRVAccountant(), history)
    with warnings.catch_warnings(), np.errstate(all="ignore"):   # it takes logs of 0 on its way, answers are checked
        warnings.filterwarnings("ignore", message="Optimal order is")   # only sizes its domain
        try:
            answer = float(spent.get_epsilon(delta=delta, eps_error=PRV_ERROR))
        except (RuntimeError, ValueError, ArithmeticError, MemoryError) as error:
            raise ValueError(
                f"accountant: 'prv' fails at delta={delta:g} on {_told(history)} ({error}); use 'pld' or 'rdp'"
            ) from error
    return _checked(answer, "PRV", history)


@lru_cache(maxsize=64)
def _pld(history: tuple[Setting, ...], adjacency: str, interval: float) -> Any:
    """delta -> epsilon, of the composed distribution."""
    composed = None
    for sigma, q, steps in history:
        part = _pld_step(sigma, q, adjacency, interval).self_compose(steps)
        composed = part if composed is None else composed.compose(part)
    assert composed is not None

    def epsilon(delta: float) -> float:
        return _checked(float(composed.get_epsilon_for_delta(delta)), "PLD", history)

    return epsilon


@lru_cache(maxsize=32)   # of up to 10 MB each; a search over T composes the same step again
def _pld_step(sigma: float, q: float, adjacency: str, interval: float) -> Any:
    try:
        from dp_accounting import NeighboringRelation
        from dp_accounting.pld import privacy_loss_distribution
    except ImportError as error:
        raise ImportError(
            f'accountant="pld" needs dp-accounting ({error}): pip install "dprs_kernels[accounting]"'
        ) from error
    relation = {
        "add_remove": NeighboringRelation.ADD_OR_REMOVE_ONE, "replace_one": NeighboringRelation.REPLACE_ONE
    }[adjacency]   # fmt: skip
    return privacy_loss_distribution.from_gaussian_mechanism(
        sigma, sampling_prob=q, value_discretization_interval=interval, neighboring_relation=relation
    )


def _as_one_sample(history: Sequence[Setting], adjacency: str) -> tuple[Setting, ...] | None:
    """The history whose add/remove epsilon is the one asked for: itself, or at half the noise where every sample is
    in every batch, so that replacing one is a shift by 2C. None where there is no such history."""
    if adjacency == "add_remove":
        return tuple(history)
    if all(q == 1 for _, q, _ in history):
        return tuple((sigma / 2, q, steps) for sigma, q, steps in history)
    return None


def _unsampled(history: Sequence[Setting], adjacency: str, delta: float) -> float:
    """epsilon with every sample in every batch, by RDP at its best order: above all others, in closed form."""
    shift = 2 if adjacency == "replace_one" else 1
    squares = sum(steps * (shift / sigma) ** 2 for sigma, _, steps in history)
    return squares / 2 + math.sqrt(2 * squares * math.log(1 / delta))


def _rough(history: Sequence[Setting], adjacency: str) -> float:
    """How far epsilon reaches, at delta 1e-10; for sizing only. Order 2 of RDP, T log(1 + q^2 (e^(1/sigma^2) - 1)), or
    no sampling, whichever is less."""
    second = sum(
        steps * (math.log1p(q**2 * math.expm1(1 / sigma**2)) if sigma > 0.04 else 1 / sigma**2)
        for sigma, q, steps in history
    )
    return min(second + math.log(1e10), _unsampled(history, adjacency, 1e-10))


def _reach(sigma: float, q: float) -> float:
    """The privacy loss of one step at 10 sigma."""
    whole = 0.5 / sigma**2 + 10 / sigma
    return math.log1p(q * math.expm1(whole)) if whole < 700 else whole


def _opacus() -> Any:
    try:
        import opacus.accountants as accountants
    except ImportError as error:
        raise ImportError(f'accounting needs opacus ({error}): pip install "dprs_kernels[train]"') from error
    return accountants


def _fed(accountant: Any, history: Sequence[Setting]) -> Any:
    """The accountant after a call of .step for each step (a few microseconds: equal steps are merged), checked: an
    accountant that recorded nothing would answer epsilon 0."""
    for sigma, q, steps in history:
        for _ in range(steps):
            accountant.step(noise_multiplier=sigma, sample_rate=q)
    expected, recorded = sum(steps for _, _, steps in history), sum(count for _, _, count in accountant.history)
    if recorded != expected:
        raise RuntimeError(
            f"the accountant recorded {recorded} of {expected} steps; is this version of opacus supported?"
        )
    return accountant


def _checked(answer: float, name: str, history: Sequence[Setting]) -> float:
    if math.isnan(answer):
        raise ArithmeticError(f"the {name} accountant answers NaN at {_told(history)}")
    return max(answer, 0.0)   # (negative, delta) implies (0, delta)


def _told(history: Sequence[Setting]) -> str:
    sigma, q, _ = min(history)
    more = f" and {len(history) - 1} other settings" if len(history) > 1 else ""
    return f"q={q:g}, sigma={sigma:g}{more}, T={sum(steps for _, _, steps in history)}"
