"""epsilon and noise_multiplier_for: known values, order, the grid's charge, refusals."""

import math
import sys
from typing import Any

import pytest

from dprs_kernels.layout import Layout
from dprs_kernels.plan import make_plan
from dprs_kernels.privacy import accounting
from dprs_kernels.privacy.accounting import epsilon, noise_multiplier_for

pytest.importorskip("opacus")
RUN: dict[str, Any] = {"noise_multiplier": 1.0, "sample_rate": 0.01, "steps": 1000, "delta": 1e-5}
CIFAR: dict[str, Any] = {"target_epsilon": 3.0, "target_delta": 1e-5, "sample_rate": 1000 / 50_000}


@pytest.fixture
def uncached(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that change Opacus: answers from before would hide the change."""
    monkeypatch.setattr(accounting, "_rdp_epsilon", accounting._rdp_epsilon.__wrapped__)


def test_known_value() -> None:
    assert epsilon(**RUN) == pytest.approx(2.101, abs=5e-4)


def test_one_full_batch_step_by_hand() -> None:
    """q = 1: rdp_alpha = alpha / (2 sigma^2), converted at the listed orders (Balle et al., Theorem 21)."""
    sigma, delta = 4.0, 1e-5
    orders = [1 + x / 10 for x in range(1, 100)] + list(range(12, 64))
    expected = min(
        a / (2 * sigma**2) + math.log((a - 1) / a) - (math.log(delta) + math.log(a)) / (a - 1) for a in orders
    )
    got = epsilon(noise_multiplier=sigma, sample_rate=1.0, steps=1, delta=delta)
    assert got == pytest.approx(expected, rel=1e-9)


def test_agrees_with_opacus_fed_step_by_step() -> None:
    """The merged history is what .step leaves behind; an unfed accountant would answer 0."""
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    for _ in range(300):
        accountant.step(noise_multiplier=1.3, sample_rate=0.05)
    got = epsilon(noise_multiplier=1.3, sample_rate=0.05, steps=300, delta=1e-6)
    assert got == accountant.get_epsilon(delta=1e-6) > 0


@pytest.mark.usefixtures("uncached")
def test_unmerged_history_is_fed_step_by_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """An Opacus that stores steps in another form still gets all of them."""
    from opacus.accountants import RDPAccountant

    def step(self: Any, *, noise_multiplier: float, sample_rate: float) -> None:
        self.history.append([noise_multiplier, sample_rate, 1])

    expected = epsilon(**{**RUN, "steps": 20})
    monkeypatch.setattr(RDPAccountant, "step", step)
    assert epsilon(**{**RUN, "steps": 20}) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("change", "larger"),
    [
        ({"noise_multiplier": 0.9}, True),
        ({"noise_multiplier": 1.1}, False),
        ({"sample_rate": 0.012}, True),
        ({"sample_rate": 0.008}, False),
        ({"steps": 1001}, True),
        ({"delta": 1e-6}, True),
        ({"delta": 1e-4}, False),
        ({"sensitivity_ratio": 1.01}, True),
    ],
)
def test_monotone(change: dict[str, Any], larger: bool) -> None:
    assert (epsilon(**{**RUN, **change}) > epsilon(**RUN)) is larger


def test_sensitivity_ratio_divides_the_multiplier() -> None:
    assert epsilon(**RUN, sensitivity_ratio=1.25) == epsilon(**{**RUN, "noise_multiplier": 0.8})


def test_charge_of_the_grid_is_small_but_there() -> None:
    size, c = 550_000, 0.5
    plan = make_plan(Layout.of([(size,)]), max_grad_norm=c, noise_multiplier=1.0, expected_batch_size=100)
    charged = epsilon(**RUN, sensitivity_ratio=plan.sensitivity(size) / c)
    assert epsilon(**RUN) < charged < 1.01 * epsilon(**RUN)


@pytest.mark.parametrize("sigma", [0, 0.0, 1e-9, 1e-300])
def test_no_noise_is_infinite(sigma: float) -> None:
    assert epsilon(**{**RUN, "noise_multiplier": sigma}) == math.inf


def test_large_noise_gets_below_the_last_order_of_opacus() -> None:
    """Orders up to 63 alone cannot go below 0.11 at delta 1e-5; no warning about orders gets out either."""
    assert 0 < epsilon(**{**RUN, "noise_multiplier": 1000.0}) < 0.02


def test_never_negative() -> None:
    assert epsilon(noise_multiplier=1e6, sample_rate=1.0, steps=1, delta=0.5) == 0.0


# CIFAR-10 at B = 1000, epsilon 3, delta 1e-5, 40 and 48 epochs. `settings`: what the paper's recipes use, found by a
# coarser search; it must stay within the budget, too.
@pytest.mark.parametrize(("epochs", "smallest", "settings"), [(40, 1.541, 1.542), (48, 1.654, 1.660)])
def test_noise_multiplier_for_cifar10(epochs: int, smallest: float, settings: float) -> None:
    steps = epochs * 50
    assert noise_multiplier_for(**CIFAR, steps=steps) == smallest
    spent = [
        epsilon(noise_multiplier=sigma, sample_rate=CIFAR["sample_rate"], steps=steps, delta=1e-5)
        for sigma in (smallest - 0.001, smallest, settings)
    ]
    assert spent[0] > 3.0 >= spent[1] >= spent[2]


def test_noise_multiplier_pays_for_the_ratio() -> None:
    plain = noise_multiplier_for(**CIFAR, steps=100)
    charged = noise_multiplier_for(**CIFAR, steps=100, sensitivity_ratio=1.1)
    assert charged == pytest.approx(1.1 * plain, abs=2.2e-3)
    spent = epsilon(
        noise_multiplier=charged, sample_rate=CIFAR["sample_rate"], steps=100, delta=1e-5, sensitivity_ratio=1.1
    )
    assert 2.9 < spent <= 3.0


@pytest.mark.parametrize("target", [0.05, 50.0])
def test_noise_multiplier_far_from_one(target: float) -> None:
    run: dict[str, Any] = {"sample_rate": 1.0, "steps": 1}   # q = 1 is the cheap case
    sigma = noise_multiplier_for(target_epsilon=target, target_delta=1e-5, **run)
    assert epsilon(noise_multiplier=sigma, delta=1e-5, **run) <= target
    assert epsilon(noise_multiplier=sigma - 0.001, delta=1e-5, **run) > target


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"steps": 0}, r"^steps: got 0; expected an integer of at least 1: an empty history is not epsilon 0"),
        ({"steps": -3}, r"^steps: got -3; expected"),
        ({"steps": 10.0}, r"^steps: got 10.0; expected an integer"),
        ({"steps": True}, r"^steps: got True; expected an integer"),
        ({"noise_multiplier": -1.0}, r"^noise_multiplier: got -1.0; expected a finite number of at least 0"),
        ({"noise_multiplier": math.nan}, r"^noise_multiplier: got nan; expected"),
        ({"noise_multiplier": math.inf}, r"^noise_multiplier: got inf; expected"),
        ({"sample_rate": 0.0}, r"^sample_rate: got 0.0; expected a number in \(0, 1\]"),
        ({"sample_rate": 1.5}, r"^sample_rate: got 1.5; expected"),
        ({"delta": 0.0}, r"^delta: got 0.0; expected a number in \(0, 1\)"),
        ({"delta": 1.0}, r"^delta: got 1.0; expected"),
        ({"sensitivity_ratio": 0.99}, r"^sensitivity_ratio: got 0.99; expected a number of at least 1"),
        ({"sensitivity_ratio": math.inf}, r"^sensitivity_ratio: got inf; expected"),
        ({"accountant": "gdp"}, r"^accountant: got 'gdp'; available: \"rdp\""),
    ],
)
def test_epsilon_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        epsilon(**{**RUN, **change})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"target_epsilon": 0}, r"^target_epsilon: got 0; expected a positive, finite number"),
        ({"target_epsilon": math.inf}, r"^target_epsilon: got inf; expected"),
        ({"target_delta": 0}, r"^target_delta: got 0; expected a number in \(0, 1\)"),
        ({"steps": 0}, r"^steps: got 0; expected"),
        ({"sample_rate": 2}, r"^sample_rate: got 2; expected"),
        ({"target_epsilon": 1e-4, "sample_rate": 1.0}, r"^target_epsilon: got 0.0001; the RDP accountant does not"),
    ],
)
def test_noise_multiplier_for_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        noise_multiplier_for(**{**CIFAR, "steps": 10, **change})


@pytest.mark.usefixtures("uncached")
def test_missing_opacus_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    with pytest.raises(ImportError, match=r'opacus .*: pip install "dprs_kernels\[train\]"'):
        epsilon(**RUN)
