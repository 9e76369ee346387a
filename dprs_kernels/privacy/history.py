"""History: what a ledger's lines add up to, and why they may have no epsilon."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from typing import Any, NamedTuple

from dprs_kernels.privacy.accounting import ADJACENCIES
from dprs_kernels.privacy.charge import NOMINAL, POISSON, SEEDED, Charge, check_count, sampler_refusal


class _Kind(NamedTuple):
    """What decides about epsilon: equal steps are counted, not kept."""

    private: bool
    noise_multiplier: float
    max_grad_norm: float
    sensitivity: float
    sampler: str
    sample_rate: float | None
    adjacency: str | None


class History:
    """Equal steps are counted together: a million of them are a few kinds.

    >>> History().newest
    {}
    """

    def __init__(self) -> None:
        self._kinds: Counter[_Kind] = Counter()
        self.newest: dict[str, int] = {}    # key_id -> its newest step
        self._repeated: tuple[str, int] | None = None
        self._uncharged = 0                 # steps of secret keys between the charged ones, unexplained
        self._unused = 0                    # draws that no release is known to have used

    def add(self, charge: Charge) -> None:
        record = charge.record
        key, step = record.key_id, record.step
        if record.private and step <= self.newest.get(key, -1) and self._repeated is None:
            self._repeated = key, step
        if record.private:
            self._uncharged += max(step - self.newest.get(key, -1) - 1 - charge.skipped_steps, 0)
        self._unused += charge.unused_draws
        self.newest[key] = max(step, self.newest.get(key, -1))
        self._kinds[_Kind(
            record.private, record.noise_multiplier, record.max_grad_norm, record.sensitivity, charge.sampler,
            charge.sample_rate, charge.adjacency,
        )] += 1   # fmt: skip

    def settings(
        self, adjacency: str, amplification: bool, nominal_as_poisson: bool, uncharged_steps: int
    ) -> list[tuple[float, float, int]]:
        """(sigma C / sensitivity, q, steps) for composed_epsilon; ValueError where the samplers do not allow it."""
        history = []
        for kind, count in self._kinds.items():
            sigma = kind.noise_multiplier * kind.max_grad_norm / kind.sensitivity
            if kind.sampler.endswith(SEEDED):
                raise ValueError(
                    f"sampler: {count} steps drew from {kind.sampler!r}: who knows the seed knows the batches, and one "
                    "sample less may move all others; no epsilon holds; make the sampler without a seed"
                )
            if not amplification:
                if adjacency == "add_remove" and kind.sampler not in (POISSON, NOMINAL):
                    raise ValueError(sampler_refusal(kind.sampler, count))
                # q = 1, where a substitution is a shift by 2C: half the noise, whatever accountant.
                substitution = adjacency == "replace_one" or kind.sampler != POISSON
                history.append((sigma / 2 if substitution else sigma, 1.0, count))
                continue
            if kind.sampler != POISSON and not (kind.sampler == NOMINAL and nominal_as_poisson):
                raise ValueError(sampler_refusal(kind.sampler, count))
            assert kind.sample_rate is not None   # append saw to it
            history.append((sigma, kind.sample_rate, count))
        if uncharged_steps:
            history.append((min(s for s, _, _ in history), max(q for _, q, _ in history), uncharged_steps))
        return history

    def refuse_false_claims(self) -> None:
        if not self._kinds:
            raise ValueError(
                "ledger: holds no steps; an empty history is not epsilon 0, it is a run that nobody recorded; attach "
                "the ledger before the first step"
            )
        if self._repeated is not None:
            key, step = self._repeated
            raise ValueError(
                f"ledger: step {step} of noise key {key} was released twice: the difference of the two has no noise, "
                "no epsilon holds; train anew with a fresh NoiseSource"
            )
        for kind, count in self._kinds.items():
            if kind.noise_multiplier == 0:
                reason, remedy = "without noise (noise_multiplier = 0)", "noise_multiplier above 0"
            elif not math.isfinite(kind.max_grad_norm):
                reason, remedy = "without a bound (max_grad_norm = inf)", "a finite max_grad_norm"
            elif not kind.private:
                reason, remedy = "with seeded noise, which whoever guesses the seed subtracts", "NoiseSource()"
            else:
                continue
            total = sum(self._kinds.values())
            raise ValueError(
                f"ledger: {count} of {total} steps were taken {reason}: no epsilon holds; use {remedy}"
            )

    def explained(self, optimizer: Any, key_id: str, step: int) -> int:
        """Steps of the key, from the last charged one up to `step`, that failed or were another key's."""
        first = self.newest.get(key_id, -1) + 1
        key, at = optimizer._resumed or ("", 0)
        before = max(min(at, step) - first, 0) if key == key_id else 0
        return before + sum(key == key_id and first + before <= at < step for key, at in optimizer._lost)

    def unexplained(self, optimizer: Any) -> int:
        """Steps that the optimizer's noise source made, and that neither this ledger nor anything else explains."""
        noise = optimizer.noise
        if not noise.private:
            return 0
        made = noise.step - self.newest.get(noise.key_id, -1) - 1
        return made - self.explained(optimizer, noise.key_id, noise.step)

    def refuse_missing(self, live: Iterable[Any], uncharged_steps: int, unused_draws: int) -> None:
        for name, value in (("uncharged_steps", uncharged_steps), ("unused_draws", unused_draws)):
            check_count(name, value)
        uncharged = self._uncharged + sum(map(self.unexplained, live))
        if uncharged > uncharged_steps:
            raise ValueError(
                f"ledger: {uncharged} steps of its noise keys have no line: releases that nobody charged, by "
                "fused_rs_dp_step, PrivateSum or another optimizer; append their records as they are made, or have "
                f"them charged like the others: epsilon(delta, uncharged_steps={uncharged})"
            )
        if self._unused > unused_draws:
            raise ValueError(
                f"ledger: {self._unused} batches were drawn and have no step of their own; samples of theirs in "
                "another batch's step would cost more than it is charged; take one step for each draw, empty ones "
                f"too; if they were thrown away say so: epsilon(delta, unused_draws={self._unused})"
            )

    def adjacency(self, given: str | None) -> str:
        if given is not None and given not in ADJACENCIES:
            raise ValueError(f"adjacency: got {given!r}; expected 'add_remove' or 'replace_one'")
        found = {given if kind.adjacency is None else kind.adjacency for kind in self._kinds} | ({given} - {None})
        if None in found:
            raise ValueError(
                "adjacency: some steps do not state it, and epsilon means nothing without; attach with "
                "adjacency='add_remove' (one sample more or less), or state it here: epsilon(delta, adjacency=...)"
            )
        if len(found) > 1:
            raise ValueError(
                f"adjacency: {' and '.join(sorted(map(str, found)))} cannot be composed; give the one that the ledger "
                "states, and use one for the whole run"
            )
        return str(found.pop())
