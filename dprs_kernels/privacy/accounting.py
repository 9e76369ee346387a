"""What a run costs: (epsilon, delta) of T steps of the Poisson-sampled Gaussian mechanism, and the way back.

Each step releases a sum that one sample moves by at most C (a public keep mask changes nothing: fewer coordinates,
same bound), with noise of std sigma C, over samples drawn with secret bits (privacy.sampling) with probability q.

    epsilon(...)             of a run
    composed_epsilon(...)    of a history whose settings changed on the way; a Ledger asks it
    calibrate(...)           which sigma
    affordable_steps(...)    how many steps

accountant: "rdp", "prv" or "pld" (accountants.py). "rdp" is the default everywhere, whatever is installed, so that a
number never depends on the machine; it is also what the published sigmas were found with. "pld" is tightest.
adjacency: what epsilon protects. "add_remove": data sets that differ by one sample more or less. "replace_one": by one
sample in place of another; the same noise then gives a larger epsilon.

The accountants know Gaussian noise; ours ends at 9.42 sigma (64-bit radius). A value that is within reach with a
sample, and out of reach without, tells of it whatever epsilon is: its probability (cut_tail) is taken off delta, and
where nothing is left epsilon is inf. At sigma = 1 that is 2e-14 a step, at 0.3 it is 9e-9, at 0.2 it is 6e-5.

epsilon covers one run with settings fixed beforehand. NOT_COVERED names what it does not cover.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Iterable

from dprs_kernels.checks import is_number
from dprs_kernels.privacy import accountants
from dprs_kernels.privacy.accountants import Setting

ACCOUNTANTS: dict[str, Callable[[list[Setting], float, str], float]] = {
    "rdp": accountants.rdp, "prv": accountants.prv, "pld": accountants.pld
}   # fmt: skip
ADJACENCIES = ("add_remove", "replace_one")
DECIMALS = 1000           # noise multipliers are answered in thousandths
LARGEST_MULTIPLIER = 1e6
SMALLEST_MULTIPLIER = 1e-6
LARGEST_STEPS = 10**6     # affordable_steps looks no further
RADIUS = math.sqrt(128 * math.log(2))   # 9.419: the largest that exp(-r^2/2) = (w+1) 2^-64 gives
COORDINATES = 2**33       # cut_tail holds for models up to this size
SAME_NOISE = 2.0**-13     # settings this close are composed as one, at the smaller sigma: 1e-4 of epsilon, and quick

NOT_COVERED = (
    "hyper-parameters tried on the same data: each trial costs its own epsilon",
    "several runs on the same data: their epsilons add up",
    "shuffled or fixed batches: q counts only where each sample is drawn by its own secret coin",
    "what is looked at without noise: training loss, norms, clipped fractions, sizes of batches",
    "test or validation data, and statistics of the data used for preparing it",
)


def epsilon(
    *,
    noise_multiplier: float,
    sample_rate: float,
    steps: int,
    delta: float,
    accountant: str = "rdp",
    adjacency: str = "add_remove",
    sensitivity_ratio: float = 1.0,
) -> float:
    """The epsilon of `steps` steps at `delta`: an upper bound for one run; see the module for what it does not cover.

    noise_multiplier: sigma, as given to fused_rs_dp_step. 0 gives inf.
    sensitivity_ratio: how far one sample can really move the sum, over C. Rounding to the noise grid adds
        sqrt(K) (g + h) to C: pass plan.sensitivity(K) / C. It divides the multiplier.

    >>> round(epsilon(noise_multiplier=1.0, sample_rate=0.01, steps=1000, delta=1e-5), 3)
    2.101
    """
    _check_multiplier(noise_multiplier)
    _check_ratio(sensitivity_ratio)
    history = [(noise_multiplier / sensitivity_ratio, sample_rate, steps)]
    return composed_epsilon(history, delta=delta, accountant=accountant, adjacency=adjacency)


def composed_epsilon(
    history: Iterable[tuple[float, float, int]],
    *,
    delta: float,
    accountant: str = "rdp",
    adjacency: str = "add_remove",
) -> float:
    """The epsilon of a run that changed its settings. history: (sigma C / sensitivity, q, steps), in any order.

    The bound holds for settings that were chosen beforehand, or from what was released, and not from the data. Sigmas
    within 2^-13 of each other at the same q are charged as the smallest of them.

    >>> round(composed_epsilon([(1.0, 0.01, 400), (1.2, 0.01, 600)], delta=1e-5), 3)
    1.828
    """
    if accountant not in ACCOUNTANTS:
        raise ValueError(f'accountant: got {accountant!r}; available: "rdp", "prv", "pld"')
    _check_adjacency(adjacency)
    _check_delta("delta", delta)
    settings = list(history)
    for sigma, q, steps in settings:
        _check_multiplier(sigma)
        _check_run(sample_rate=q, steps=steps)
    if not settings:
        raise ValueError(
            "history: got no steps; an empty history is not epsilon 0, it is a run that nobody recorded; charge each "
            "step as it is taken (Ledger.attach)"
        )
    if min(sigma for sigma, _, _ in settings) < SMALLEST_MULTIPLIER:
        return math.inf   # 0 is no noise; next to 0 the series overflow, and inf is a bound, too
    merged = _merged(settings)
    left = delta - sum(steps * cut_tail(sigma, adjacency=adjacency) for sigma, _, steps in merged)
    return ACCOUNTANTS[accountant](merged, float(left), adjacency) if left > 0 else math.inf


def cut_tail(noise_multiplier: float, *, adjacency: str = "add_remove") -> float:
    """An upper bound of the probability that one step's noise, which ends at R = 9.419, gives a value that is
    impossible with one sample more or less. Whatever q: either side may be the one without the sample.

        s = 1/sigma (2/sigma for a replacement, and twice the whole), split over pairs of coordinates as s_p:
        a pair is moved out of reach with probability at most  exp(-(R - s_p)^2 / 2), and  e^(R s_p) s_p R/pi 2^-64
        sum  <=  exp(-(R - s)^2 / 2)  +  (10 R s)^2 2^-64  +  1.11 s sqrt(K/2) R/pi 2^-64

    The first is for the largest part (the exact tail is convex in s_p^2, so one pair with all of it is the worst); the
    second for the at most (10 R s)^2 pairs above 1/(10 R), each at 2^-64 if it did not move; the third for all smaller
    ones, with K = 2^33. Inside, noise is Gaussian, conditioned on an event of probability (1 - 2^-64)^(K/2).

    >>> cut_tail(0.1) == 1.0, cut_tail(1.0) < 2e-14
    (True, True)
    """
    replaced = adjacency == "replace_one"
    s = (2 if replaced else 1) / noise_multiplier
    if s >= RADIUS:
        return 1.0
    pairs = (10 * RADIUS * s) ** 2 + 1.11 * s * math.sqrt(COORDINATES / 2) * RADIUS / math.pi
    return min((2 if replaced else 1) * (math.exp(-((RADIUS - s) ** 2) / 2) + pairs * 2.0**-64), 1.0)


def calibrate(
    *,
    target_epsilon: float,
    target_delta: float,
    sample_rate: float,
    steps: int,
    accountant: str = "rdp",
    adjacency: str = "add_remove",
    sensitivity_ratio: float = 1.0,
    besides: Iterable[tuple[float, float, int]] = (),
) -> float:
    """The smallest sigma in thousandths with epsilon(sigma) <= target_epsilon: rounded up, never above target.

    besides: what else the budget has to pay for, as composed_epsilon's history: (sigma C / sensitivity, q, releases).

    >>> calibrate(target_epsilon=2.2, target_delta=1e-5, sample_rate=0.01, steps=1000)
    0.981
    >>> calibrate(target_epsilon=2.2, target_delta=1e-5, sample_rate=0.01, steps=1000, besides=[(8.0, 1.0, 2)])
    1.006
    """
    _check_targets(target_epsilon, target_delta)
    _check_ratio(sensitivity_ratio)
    others = list(besides)
    if others and composed_epsilon(others, delta=target_delta, accountant=accountant, adjacency=adjacency) >= (
        target_epsilon
    ):
        raise ValueError(f"besides: costs all of target_epsilon={target_epsilon!r}, or more; expected a larger budget")

    def enough(thousandths: int) -> bool:
        history = [*others, (thousandths / DECIMALS / sensitivity_ratio, sample_rate, steps)]
        try:
            return target_epsilon >= composed_epsilon(
                history, delta=target_delta, accountant=accountant, adjacency=adjacency
            )
        except accountants.TooLarge:
            return False   # hundreds: more noise than is asked for, at worst

    low, high = 0, DECIMALS   # not enough, enough
    while not enough(high):
        low, high = high, 2 * high
        if high > LARGEST_MULTIPLIER * DECIMALS:
            raise ValueError(
                f"target_epsilon: got {target_epsilon!r}; the {accountant.upper()} accountant does not certify it at "
                f"target_delta={target_delta!r} for any noise_multiplier up to {LARGEST_MULTIPLIER:g}; expected a "
                "larger one"
            )
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high / DECIMALS


def affordable_steps(
    *,
    noise_multiplier: float,
    sample_rate: float,
    target_epsilon: float,
    target_delta: float,
    accountant: str = "rdp",
    adjacency: str = "add_remove",
    sensitivity_ratio: float = 1.0,
) -> int:
    """The largest T with epsilon(T steps) <= target_epsilon; 0 where one step is too much, 10^6 at most. Times
    sample_rate it is epochs.

    >>> affordable_steps(noise_multiplier=1.0, sample_rate=0.01, target_epsilon=2.2, target_delta=1e-5)
    1118
    """
    _check_targets(target_epsilon, target_delta)

    def within(steps: int) -> bool:
        try:
            return target_epsilon >= epsilon(
                noise_multiplier=noise_multiplier, sample_rate=sample_rate, steps=steps, delta=target_delta,
                accountant=accountant, adjacency=adjacency, sensitivity_ratio=sensitivity_ratio,
            )   # fmt: skip
        except accountants.TooLarge:
            return False   # hundreds: fewer steps than there are, at worst

    low, high = 0, 1   # within, not within
    while within(high):
        if high == LARGEST_STEPS:
            return high
        low, high = high, min(4 * high, LARGEST_STEPS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if within(middle) else (low, middle)
    return low


def _merged(settings: list[tuple[float, float, int]]) -> list[Setting]:
    """Sorted, with steps of the same q and nearly the same sigma counted together, at the smallest of their sigmas.
    The mask's ramp changes K, hence the grid's charge, by less than that in each epoch."""
    merged: list[Setting] = []
    for q, sigma, steps in sorted((float(q), float(sigma), int(steps)) for sigma, q, steps in settings):
        if merged and merged[-1][1] == q and sigma <= merged[-1][0] * (1 + SAME_NOISE):
            merged[-1] = (merged[-1][0], q, merged[-1][2] + steps)
        else:
            merged.append((sigma, q, steps))
    return merged


def _check_multiplier(noise_multiplier: float) -> None:
    if not is_number(noise_multiplier) or not 0 <= noise_multiplier < math.inf:
        raise ValueError(f"noise_multiplier: got {noise_multiplier!r}; expected a finite number of at least 0")


def _check_ratio(sensitivity_ratio: float) -> None:
    if not is_number(sensitivity_ratio) or not 1 <= sensitivity_ratio < math.inf:
        raise ValueError(
            f"sensitivity_ratio: got {sensitivity_ratio!r}; expected a number of at least 1, plan.sensitivity(K) / C"
        )


def _check_run(*, sample_rate: float, steps: int) -> None:
    if not is_number(sample_rate) or not 0 < sample_rate <= 1:
        raise ValueError(
            f"sample_rate: got {sample_rate!r}; expected a number in (0, 1], expected batch size over size of the data"
        )
    if isinstance(steps, bool) or not isinstance(steps, numbers.Integral) or steps < 1:
        raise ValueError(
            f"steps: got {steps!r}; expected an integer of at least 1: an empty history is not epsilon 0, it is a run "
            "that nobody recorded"
        )


def _check_adjacency(adjacency: str) -> None:
    if adjacency not in ADJACENCIES:
        raise ValueError(
            f"adjacency: got {adjacency!r}; expected 'add_remove' (one sample more or less) or 'replace_one' (one in "
            "place of another)"
        )


def _check_delta(name: str, delta: float) -> None:
    if not is_number(delta) or not 0 < delta < 1:
        raise ValueError(f"{name}: got {delta!r}; expected a number in (0, 1), below 1 / samples")


def _check_targets(target_epsilon: float, target_delta: float) -> None:
    if not is_number(target_epsilon) or not 0 < target_epsilon < math.inf:
        raise ValueError(f"target_epsilon: got {target_epsilon!r}; expected a positive, finite number")
    _check_delta("target_delta", target_delta)
