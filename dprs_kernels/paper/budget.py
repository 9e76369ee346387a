"""How much noise a budget asks for, how many steps it still affords, and what was spent: a run's epsilon.

Each step counts with sigma C / sensitivity, the rounding of the sum included. The claim says what the answer is:
"poisson" (a bound), "nominal" (shuffled partitions counted as Poisson samples, as published numbers are), "none".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from dprs_kernels.layout import Layout
from dprs_kernels.plan import make_plan
from dprs_kernels.privacy.accounting import calibrate, composed_epsilon
from dprs_kernels.privacy.ledger import Ledger


def sigma_for(
    layout: Layout, *, epsilon: float, delta: float, max_grad_norm: float, sample_rate: float, steps: int,
    accountant: str = "rdp", besides: Iterable[tuple[float, float, int]] = (),
) -> float:   # fmt: skip
    """The smallest sigma in thousandths that keeps `steps` steps within epsilon, with all coordinates kept, which is
    the most that rounding costs. The grid grows with sigma, hence the loop of two or three rounds.

    besides: what else the budget pays for (accounting.calibrate).

    >>> sigma_for(Layout.of([(26010,)]), epsilon=3.0, delta=1e-5, max_grad_norm=1.0, sample_rate=0.01, steps=100)
    0.713
    """
    ratio, besides = 1.0, list(besides)
    while True:
        sigma = calibrate(
            target_epsilon=epsilon, target_delta=delta, sample_rate=sample_rate, steps=steps, accountant=accountant,
            sensitivity_ratio=ratio, besides=besides,
        )   # fmt: skip
        needed = sensitivity_ratio(layout, sigma=sigma, max_grad_norm=max_grad_norm)
        if needed <= ratio:
            return sigma
        ratio = needed


def sensitivity_ratio(layout: Layout, *, sigma: float, max_grad_norm: float) -> float:
    """How far one sample can move the rounded sum of all coordinates, over C."""
    plan = make_plan(layout, max_grad_norm=max_grad_norm, noise_multiplier=sigma, expected_batch_size=1)
    return plan.sensitivity(layout.size) / max_grad_norm


def spent(ledger: Ledger, *, claim: str, delta: float, accountant: str = "rdp") -> float | None:
    """The ledger's epsilon under the run's claim; None where there is none, or no step yet."""
    if claim == "none" or ledger.steps == 0:
        return None
    return ledger.epsilon(delta, accountant, nominal_as_poisson=claim == "nominal")


def affordable(
    ledger: Ledger, *, planned: int, sigma: float, ratio: float, sample_rate: float, epsilon: float, delta: float,
    accountant: str = "rdp",
) -> int:   # fmt: skip
    """How many of `planned` further steps stay within epsilon, after all that the ledger holds.

    >>> affordable(Ledger(), planned=100, sigma=0.713, ratio=1.001, sample_rate=0.01, epsilon=2.9, delta=1e-5)
    78
    """
    before = _history(ledger)

    def within(steps: int) -> bool:
        after = [*before, (sigma / ratio, sample_rate, steps)] if steps else before
        return not after or composed_epsilon(after, delta=delta, accountant=accountant) <= epsilon

    if within(planned):
        return planned
    low, high = 0, planned   # not more than; too many
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if within(middle) else (low, middle)
    return low


def check_affordable(
    ledger: Ledger, cost: list[tuple[float, float, int]], *, what: str, epsilon: float, delta: float,
    accountant: str = "rdp",
) -> None:   # fmt: skip
    """ValueError where `cost`, (sigma C / sensitivity, q, releases), comes to more than epsilon after all that the
    ledger holds."""
    spent = composed_epsilon([*_history(ledger), *cost], delta=delta, accountant=accountant)
    if spent > epsilon:
        raise ValueError(
            f"epsilon: {what} would bring it to {spent:.3f}, above the budget of {epsilon:g}, since the ledger holds "
            f"{ledger.steps} releases already; start a new run, or one with a larger budget"
        )


def _history(ledger: Ledger) -> list[tuple[float, float, int]]:
    """(sigma C / sensitivity, q, releases) of all that was charged."""
    history: Counter[tuple[float, float]] = Counter()
    for charge in ledger.records():
        record = charge.record
        assert charge.sample_rate is not None   # our samplers tell
        history[record.noise_multiplier * record.max_grad_norm / record.sensitivity, charge.sample_rate] += 1
    return [(noise, q, count) for (noise, q), count in history.items()]
