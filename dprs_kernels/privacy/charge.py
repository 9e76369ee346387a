"""Charge: one line of a ledger, a release and how its samples were chosen; and which lines are none."""

from __future__ import annotations

import math
import numbers
from dataclasses import dataclass
from typing import Any

from dprs_kernels.plan import StepRecord
from dprs_kernels.privacy.accounting import ADJACENCIES

POISSON = "poisson"
NOMINAL = "shuffled_partition_nominal"
UNKNOWN = "unknown"
SEEDED = "_seeded_for_tests"   # how the name of a seeded sampler ends
LONGEST_NAME = 64


@dataclass(frozen=True)
class Charge:
    """One line: the release, and how its samples were chosen."""

    record: StepRecord
    sampler: str                 # "poisson", "shuffled_partition_nominal", "unknown", or a name of your own
    sample_rate: float | None    # q; None where the sampler does not tell
    adjacency: str | None        # "add_remove", "replace_one"; None: not stated
    skipped_steps: int = 0       # steps of the key just before this one that released nothing
    unused_draws: int = 0        # draws of the sampler before this one that no release is known to have used


def check_run(sampler: str, sample_rate: float | None, adjacency: str | None) -> None:
    if not isinstance(sampler, str) or not 0 < len(sampler) <= LONGEST_NAME:
        raise ValueError(f"sampler: got {sampler!r}; expected its name, 'poisson' for one, of 1 to 64 characters")
    is_rate = isinstance(sample_rate, numbers.Real) and not isinstance(sample_rate, bool) and 0 < sample_rate <= 1
    if not is_rate and (sample_rate is not None or sampler in (POISSON, NOMINAL)):
        raise ValueError(f"sample_rate: got {sample_rate!r} for sampler {sampler!r}; expected a number in (0, 1]")
    if adjacency is not None and adjacency not in ADJACENCIES:
        raise ValueError(f"adjacency: got {adjacency!r}; expected 'add_remove' or 'replace_one'")


def check_count(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 0:
        raise ValueError(f"{name}: got {value!r}; expected an integer of at least 0")


def check_record(record: StepRecord) -> None:
    """What epsilon divides by. Numbers that no step of ours has, but a record made by hand may."""
    c, sigma, sensitivity = record.max_grad_norm, record.noise_multiplier, record.sensitivity
    if not 0 <= sigma < math.inf:
        raise ValueError(f"record: noise_multiplier is {sigma!r}; expected a finite number of at least 0")
    if not c > 0:
        raise ValueError(f"record: max_grad_norm is {c!r}; expected a number above 0, or inf")
    if not sensitivity >= c:
        raise ValueError(
            f"record: sensitivity is {sensitivity!r}; expected at least max_grad_norm = {c!r}: C and the rounding of "
            "the sum, as PrivateSum.record() tells it"
        )


def sampler_refusal(sampler: str, count: int) -> str:
    if sampler == NOMINAL:
        return (
            f"sampler: {count} steps drew shuffled partitions, whose epsilon is larger than Poisson accounting says "
            "(in one example 1.95 there, at least 10.99 in truth); sample with PoissonBatchSampler, or ask for "
            "epsilon(delta, amplification=False), or for the paper's convention, epsilon(delta, "
            "nominal_as_poisson=True)"
        )
    return (
        f"sampler: {count} steps drew from {sampler!r}, which no accountant here knows; sample with "
        "PoissonBatchSampler; or, if no sample is twice in a batch, attach with adjacency='replace_one' and ask for "
        "epsilon(delta, amplification=False)"
    )


def described(sampler: Any) -> tuple[str, float | None]:
    return getattr(sampler, "name", UNKNOWN), getattr(sampler, "sample_rate", None)
