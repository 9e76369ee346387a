"""`python -m dprs_kernels account`: which sigma, which epsilon, how many epochs; each by every accountant at once.

    account sigma   --epsilon 3 --delta 1e-5 --samples 60000 --batch 2048 --epochs 40
    account epsilon --sigma 1.93 --delta 1e-5 --samples 60000 --batch 2048 --epochs 40
    account epochs  --sigma 1.93 --epsilon 3 --delta 1e-5 --samples 60000 --batch 2048
    account ledger FILE --delta 1e-5
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from typing import Any

from dprs_kernels.privacy.accounting import ACCOUNTANTS, ADJACENCIES, NOT_COVERED, affordable_steps, calibrate, epsilon

MEANING = {
    "add_remove": "add/remove: epsilon protects against data with one sample more or less",
    "replace_one": "replace-one: epsilon protects against data with one sample in place of another",
}
ABOUT = {"rdp": "the default here, and of published sigmas", "prv": "within 0.02 of the truth", "pld": "tightest"}


def add_parser(commands: Any) -> None:
    """The sub-command, for dprs_kernels.__main__."""
    account = commands.add_parser("account", help="privacy accounting: which sigma, which epsilon, how many epochs")
    questions = account.add_subparsers(required=True, metavar="question")

    def question(name: str, help: str, command: Callable[..., None], *options: str) -> argparse.ArgumentParser:
        parser = questions.add_parser(name, help=help)
        for option in options:
            _OPTIONS[option](parser)
        parser.add_argument("--delta", type=float, required=True, metavar="D", help="below 1 / samples")
        parser.set_defaults(command=command)
        return parser

    sigma = question("sigma", "the smallest noise multiplier for a budget", _sigma, "epsilon", "run", "length")
    of_run = question("epsilon", "what a run costs", _epsilon, "sigma", "run", "length")
    epochs = question("epochs", "how long a budget lasts", _epochs, "sigma", "epsilon", "run")
    for parser in (sigma, of_run, epochs):
        parser.add_argument("--adjacency", choices=ADJACENCIES, default="add_remove", help="default: add_remove")
    ledger = question("ledger", "what the steps in a ledger file cost", _ledger)
    ledger.add_argument("file", metavar="FILE", help="written by privacy.ledger.Ledger(path)")
    ledger.add_argument("--adjacency", choices=ADJACENCIES, help="where the ledger does not state it")
    ledger.add_argument("--no-amplification", dest="amplification", action="store_false",
                        help="count every sample in every step: holds for the secret shuffled partition, too; for "
                        "other samplers under replace_one only")   # fmt: skip
    ledger.add_argument("--nominal-as-poisson", action="store_true",
                        help="count shuffled partitions as Poisson samples: usual, and no proof")   # fmt: skip


_OPTIONS: dict[str, Callable[[argparse.ArgumentParser], object]] = {
    "epsilon": lambda parser: parser.add_argument("--epsilon", type=float, required=True, metavar="EPS", help="budget"),
    "sigma": lambda parser: parser.add_argument(
        "--sigma", type=float, required=True, metavar="S", help="noise multiplier: noise of std S * max_grad_norm"
    ),
    "run": lambda parser: (
        parser.add_argument("--samples", type=int, required=True, metavar="N", help="size of the training data"),
        parser.add_argument("--batch", type=float, required=True, metavar="B", help="expected batch size, q = B / N"),
    ),
    "length": lambda parser: parser.add_argument(
        "--epochs", type=float, required=True, metavar="E", help="of N / B steps; a part of a step counts as one"
    ),
}


def _sigma(epsilon: float, delta: float, samples: int, batch: float, epochs: float, adjacency: str) -> None:
    q, steps = _rate(samples, batch, delta), _steps(samples, batch, epochs)

    def row(accountant: str) -> list[str]:
        found = calibrate(
            target_epsilon=epsilon, target_delta=delta, sample_rate=q, steps=steps, accountant=accountant,
            adjacency=adjacency,
        )   # fmt: skip
        return [f"{found:.3f}"]

    _answer(f"the smallest sigma for epsilon {epsilon:g} at delta {delta:g}; {_run(q, steps)}", ["sigma"], row)
    _print_limits(adjacency)


def _epsilon(sigma: float, delta: float, samples: int, batch: float, epochs: float, adjacency: str) -> None:
    q, steps = _rate(samples, batch, delta), _steps(samples, batch, epochs)

    def row(accountant: str) -> list[str]:
        spent = epsilon(
            noise_multiplier=sigma, sample_rate=q, steps=steps, delta=delta, accountant=accountant, adjacency=adjacency
        )
        return [f"{spent:.3f}"]

    _answer(f"epsilon at delta {delta:g} for sigma {sigma:g}; {_run(q, steps)}", ["epsilon"], row)
    _print_limits(adjacency)


def _epochs(sigma: float, epsilon: float, delta: float, samples: int, batch: float, adjacency: str) -> None:
    q = _rate(samples, batch, delta)

    def row(accountant: str) -> list[str]:
        steps = affordable_steps(
            noise_multiplier=sigma, sample_rate=q, target_epsilon=epsilon, target_delta=delta, accountant=accountant,
            adjacency=adjacency,
        )   # fmt: skip
        return [f"{math.floor(10 * steps * q) / 10:.1f}", str(steps)]

    title = f"what epsilon {epsilon:g} at delta {delta:g} affords with sigma {sigma:g}; q = {q:.6g}"
    _answer(title, ["epochs", "steps"], row)
    _print_limits(adjacency)


def _ledger(
    file: str, delta: float, amplification: bool, nominal_as_poisson: bool, adjacency: str | None
) -> None:
    from dprs_kernels.privacy.ledger import POISSON, Ledger

    ledger = Ledger.read(file)

    def row(accountant: str) -> list[str]:
        spent = ledger.epsilon(
            delta, accountant, amplification=amplification, nominal_as_poisson=nominal_as_poisson, adjacency=adjacency
        )
        return [f"{spent:.3f}"]

    charges = list(ledger.records())
    nominal = nominal_as_poisson and amplification and any(charge.sampler != POISSON for charge in charges)
    how = "" if amplification else ", without amplification"
    title = f"{'NOMINAL ' * nominal}epsilon at delta {delta:g} of the {ledger.steps} steps in {file}{how}"
    _answer(title, ["epsilon"], row)
    if nominal:
        print("nominal     shuffled partitions counted as Poisson samples: the true epsilon is larger, no proof")
    print(f"head        {ledger.head}")
    sizes = [c.record.expected_batch_size / c.sample_rate for c in charges if c.sample_rate]
    if sizes and delta * max(sizes) >= 1:
        print(f"WARNING     delta {delta:g} is not below 1 / samples, about {1 / max(sizes):.1g} by the ledger: at "
              "such a delta a mechanism may publish one sample outright")   # fmt: skip
    _print_limits(adjacency or str(charges[0].adjacency), of_ledger=True)


def _rate(samples: int, batch: float, delta: float) -> float:
    if samples < 1:
        raise ValueError(f"--samples: got {samples}; expected an integer of at least 1, the size of the training data")
    if not 0 < batch <= samples:
        raise ValueError(f"--batch: got {batch:g}; expected a number above 0, at most --samples, {samples}")
    if not 0 < delta < 1:
        raise ValueError(f"--delta: got {delta:g}; expected a number in (0, 1), below 1 / samples")
    if delta * samples >= 1:
        raise ValueError(
            f"--delta: got {delta:g}; expected a number below 1 / samples = {1 / samples:g}: at that delta a mechanism "
            "may publish one sample outright"
        )
    return batch / samples


def _steps(samples: int, batch: float, epochs: float) -> int:
    if not 0 < epochs < math.inf:
        raise ValueError(f"--epochs: got {epochs:g}; expected a positive number")
    return math.ceil(epochs * samples / batch - 1e-9)   # 40 epochs of 0.3 are not 12.000000000000002


def _run(q: float, steps: int) -> str:
    return f"q = {q:.6g}, {steps} steps"


def _answer(title: str, columns: list[str], row: Callable[[str], list[str]]) -> None:
    """One row an accountant; one that is missing or cannot answer says why. Where none can, that is the error."""
    rows, answered, errors = [], False, []
    for accountant in ACCOUNTANTS:
        try:
            cells = "".join(f"{cell:>10}" for cell in row(accountant)) + f"   {ABOUT[accountant]}"
            answered = True
        except (ImportError, ValueError) as error:
            cells = f"   {'not installed' if isinstance(error, ImportError) else 'no answer'}: {error}"
            errors.append(error)
        rows.append(f"{accountant:<10}{cells}")
    if not answered:
        raise errors[0]
    print(title)
    print(f"{'accountant':<10}" + "".join(f"{name:>10}" for name in columns))
    print("\n".join(rows))


def _print_limits(adjacency: str, *, of_ledger: bool = False) -> None:
    print(f"adjacency   {MEANING[adjacency]}")
    if not of_ledger:
        print("assumed     Poisson batches with secret bits (PoissonBatchSampler), noise from NoiseSource()")
        print("left out    rounding to the noise grid, 0.1 % of sigma at a million coordinates; a ledger charges it")
    print("not covered")
    for item in NOT_COVERED:
        print(f"  {item}")
