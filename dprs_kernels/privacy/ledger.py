"""Ledger: every release of a run, written down before it can have an effect; epsilon from that alone (PRIVACY.md R8).

    ledger = Ledger("run.ledger")
    ledger.attach(optimizer, sampler=sampler, adjacency="add_remove")
    ...                                           # optimizer.step() as ever
    ledger.epsilon(delta=1e-5)

A step is charged after its noise was added and before any parameter moves: its line is on the disk when the inner
optimizer starts. If the process dies before the line was begun, the sum died with it and nothing was released. If it
dies after, the step stays charged, though its parameters may be lost: a run that is resumed from a checkpoint charges
the steps that it takes again, because the first ones may have been seen. If the line cannot be written (disk full),
step() raises, p.grad is cleared and the parameters are as before.
"""

from __future__ import annotations

import math
import numbers
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, fields
from typing import Any, NamedTuple

from dprs_kernels.capture import capturing
from dprs_kernels.masked_step import MaskedStep, StepRecord
from dprs_kernels.privacy.accounting import ADJACENCIES, composed_epsilon
from dprs_kernels.privacy.journal import Journal

POISSON = "poisson"
NOMINAL = "shuffled_partition_nominal"
UNKNOWN = "unknown"
LONGEST_NAME = 64
ATTACHED = "_ledger"   # on an optimizer


@dataclass(frozen=True)
class Charge:
    """One line: the release, and how its samples were chosen."""

    record: StepRecord
    sampler: str                 # "poisson", "shuffled_partition_nominal", "unknown", or a name of your own
    sample_rate: float | None    # q; None where the sampler does not tell
    adjacency: str | None        # "add_remove", "replace_one"; None: not stated


class _Kind(NamedTuple):
    """What decides about epsilon: equal steps are counted, not kept."""

    private: bool
    noise_multiplier: float
    max_grad_norm: float
    sensitivity: float
    sampler: str
    sample_rate: float | None
    adjacency: str | None


class Ledger:
    """path: a file, created, or verified and continued; one writer at a time. None keeps the ledger in memory.
    head: the digest of a line that must be in it, as a checkpoint keeps it (journal.py says what is noticed without).

    >>> ledger = Ledger()
    >>> ledger.steps
    0
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, head: str | None = None) -> None:
        self._open(Journal(path, head=head))

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, head: str | None = None) -> Ledger:
        """Verified, and only read: also while a run goes on writing it."""
        ledger = cls.__new__(cls)
        ledger._open(Journal(path, write=False, head=head))
        return ledger

    def _open(self, journal: Journal) -> None:
        self._journal = journal
        self._kinds: Counter[_Kind] = Counter()
        self._newest: dict[str, int] = {}   # key_id -> its newest step
        self._repeated: tuple[str, int] | None = None
        for charge in self.records():
            self._count(charge)

    @property
    def steps(self) -> int:
        """Releases charged."""
        return self._journal.count

    @property
    def head(self) -> str:
        """SHA-256 of the last line, in hex: keep it in a checkpoint, where cutting the file cannot reach it."""
        return self._journal.head

    def steps_since(self, head: str) -> int:
        """Steps charged after `head` was the last line; ValueError where the ledger never held such a line."""
        return self._journal.lines_since(head)

    def records(self) -> Iterator[Charge]:
        """All charges, oldest first."""
        names = [field.name for field in fields(StepRecord)]
        for line in self._journal.contents():
            values = {name: line[name] for name in names}
            values |= {name: float(values[name]) for name in ("max_grad_norm", "sensitivity")}   # "inf" is a string
            yield Charge(StepRecord(**values), line["sampler"], line["sample_rate"], line["adjacency"])

    def attach(self, optimizer: MaskedStep, *, sampler: Any, adjacency: str | None = "add_remove") -> None:
        """Charges every later step of an RSDPOptimizer or RSDPOpacusOptimizer. Attach before the first: what was
        released earlier is not charged.

        sampler: read at each step: .name and .sample_rate, as the samplers of privacy.sampling have. Without a name
            it is "unknown", and epsilon() refuses.
        Opacus's own accountant keeps its step hook. Steps in a captured CUDA graph are refused: a replay runs no
        Python, and would not be charged.
        """
        if not isinstance(optimizer, MaskedStep):
            raise ValueError(
                f"optimizer: got {type(optimizer).__name__}; expected RSDPOptimizer or RSDPOpacusOptimizer; for a loop "
                "of your own call ledger.append(record, ...) before each optimizer.step()"
            )
        if hasattr(optimizer, ATTACHED):
            raise ValueError("optimizer: a ledger is attached already; one release is charged once")
        self._journal._check_writable()
        self._check_run(*_described(sampler), adjacency)

        def charge(optimizer: Any, record: StepRecord) -> None:
            if any(capturing(param.device) for param in optimizer._params()):
                raise ValueError("ledger: a captured CUDA graph would replay this step uncharged; step eagerly")
            name, rate = _described(sampler)
            self.append(record, sampler=name, sample_rate=rate, adjacency=adjacency)

        if hasattr(optimizer, "last_record"):
            _charge_in_add_noise(optimizer, charge)
        else:
            optimizer.attach_step_hook(charge)   # type: ignore[attr-defined]   # of RSDPOptimizer
        setattr(optimizer, ATTACHED, self)

    def append(
        self, record: StepRecord, *, sampler: str, sample_rate: float | None, adjacency: str | None
    ) -> None:
        """Charges one release; on the disk when it returns. Refuses to record a (key, step) of secret noise a second
        time: two releases with the same noise differ by exact sums, and no accountant knows of it."""
        if not isinstance(record, StepRecord):
            raise ValueError(f"record: got {type(record).__name__}; expected a StepRecord, as step hooks get it")
        self._check_run(sampler, sample_rate, adjacency)
        sample_rate = None if sample_rate is None else float(sample_rate)
        charge = Charge(record, sampler, sample_rate, adjacency)
        if record.private and record.step <= self._newest.get(record.key_id, -1):
            raise ValueError(
                f"record: step {record.step} of noise key {record.key_id} is charged already, or a later one is: the "
                "same noise would be released twice; make a new NoiseSource (a loaded checkpoint has one)"
            )
        line = {**asdict(record), "sampler": sampler, "sample_rate": sample_rate, "adjacency": adjacency}
        self._journal.append({name: _plain(value) for name, value in line.items()})
        self._count(charge)

    def epsilon(
        self,
        delta: float,
        accountant: str = "rdp",
        *,
        amplification: bool = True,
        nominal_as_poisson: bool = False,
        adjacency: str | None = None,
    ) -> float:
        """The epsilon of all steps charged, composed with what each really had: sigma C / sensitivity, q.

        amplification: False forgets q. Each step then counts as if every sample took part; for samplers other than
            Poisson also as a substitution (2C), since one sample less moves another one into its place. It holds for
            any sampler that has a sample in a batch at most once.
        nominal_as_poisson: True counts shuffled partitions as if they were Poisson samples, as the paper and most
            published numbers do. It is a figure to compare, and proves nothing: the true one can be many times it.
        adjacency: states it where the ledger does not.
        Refuses (ValueError) seeded noise, no noise, no bound, unknown samplers, shuffled partitions, a missing
        adjacency, repeated noise and an empty ledger.
        """
        self._refuse_false_claims()
        stated = self._adjacency(adjacency)
        history = []
        for kind, count in self._kinds.items():
            sigma = kind.noise_multiplier * kind.max_grad_norm / kind.sensitivity
            if not amplification:
                # q = 1, where a substitution is a shift by 2C: half the noise, whatever accountant.
                substitution = stated == "replace_one" or kind.sampler != POISSON
                history.append((sigma / 2 if substitution else sigma, 1.0, count))
                continue
            if kind.sampler != POISSON and not (kind.sampler == NOMINAL and nominal_as_poisson):
                raise ValueError(_sampler_refusal(kind.sampler, count))
            assert kind.sample_rate is not None   # append saw to it
            history.append((sigma, kind.sample_rate, count))
        composed_as = stated if amplification else "add_remove"
        return composed_epsilon(history, delta=delta, accountant=accountant, adjacency=composed_as)

    def close(self) -> None:
        """Lets another writer in; epsilon still answers."""
        self._journal.close()

    def __repr__(self) -> str:
        return f"Ledger({str(self._journal.path or 'in memory')!r}, steps={self.steps}, head={self.head[:16]}...)"

    def _count(self, charge: Charge) -> None:
        record = charge.record
        key, step = record.key_id, record.step
        if record.private and step <= self._newest.get(key, -1) and self._repeated is None:
            self._repeated = key, step
        self._newest[key] = max(step, self._newest.get(key, -1))
        self._kinds[_Kind(
            record.private, record.noise_multiplier, record.max_grad_norm, record.sensitivity, charge.sampler,
            charge.sample_rate, charge.adjacency,
        )] += 1   # fmt: skip

    def _refuse_false_claims(self) -> None:
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
            raise ValueError(
                f"ledger: {count} of {self.steps} steps were taken {reason}: no epsilon holds; use {remedy}"
            )

    def _adjacency(self, given: str | None) -> str:
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

    def _check_run(self, sampler: str, sample_rate: float | None, adjacency: str | None) -> None:
        if not isinstance(sampler, str) or not 0 < len(sampler) <= LONGEST_NAME:
            raise ValueError(f"sampler: got {sampler!r}; expected its name, 'poisson' for one, of 1 to 64 characters")
        is_rate = isinstance(sample_rate, numbers.Real) and not isinstance(sample_rate, bool) and 0 < sample_rate <= 1
        if not is_rate and (sample_rate is not None or sampler in (POISSON, NOMINAL)):
            raise ValueError(f"sample_rate: got {sample_rate!r} for sampler {sampler!r}; expected a number in (0, 1]")
        if adjacency is not None and adjacency not in ADJACENCIES:
            raise ValueError(f"adjacency: got {adjacency!r}; expected 'add_remove' or 'replace_one'")


def _sampler_refusal(sampler: str, count: int) -> str:
    if sampler == NOMINAL:
        return (
            f"sampler: {count} steps drew shuffled partitions, whose epsilon is larger than Poisson accounting says "
            "(in one example 1.95 there, at least 10.99 in truth); sample with PoissonBatchSampler, or ask for "
            "epsilon(delta, amplification=False), or for the paper's convention, epsilon(delta, "
            "nominal_as_poisson=True)"
        )
    return (
        f"sampler: {count} steps drew from {sampler!r}, which no accountant here knows; sample with "
        "PoissonBatchSampler, or, if no sample is twice in a batch, ask for epsilon(delta, amplification=False)"
    )


def _charge_in_add_noise(optimizer: Any, charge: Callable[[Any, StepRecord], None]) -> None:
    """RSDPOpacusOptimizer's last act before its hook and the inner step. Not attach_step_hook: Opacus keeps one hook
    only, and that is its accountant's."""
    add_noise = optimizer.add_noise

    def charged() -> None:
        add_noise()
        try:
            charge(optimizer, optimizer.last_record)
        except BaseException:
            for param in optimizer._params():
                param.grad = None   # no step can be taken on what was not charged
            raise

    optimizer.add_noise = charged


def _described(sampler: Any) -> tuple[str, float | None]:
    return getattr(sampler, "name", UNKNOWN), getattr(sampler, "sample_rate", None)


def _plain(value: Any) -> Any:
    """For JSON: it has no infinity."""
    return "inf" if value == math.inf else value
