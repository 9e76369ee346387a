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

What a ledger cannot see it does not take for nothing. A step of a noise key that has no line may be a release that
nobody charged: epsilon() refuses, or charges it where it is told to (uncharged_steps). Explained, and free, are steps
that failed after their claim, and those before the position that a checkpoint was loaded at, which were another key's.
One step, one draw: draws.py.
"""

from __future__ import annotations

import math
import os
import weakref
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from typing import Any

from dprs_kernels.capture import capturing
from dprs_kernels.masked_step import MaskedStep, StepRecord
from dprs_kernels.privacy.accounting import composed_epsilon
from dprs_kernels.privacy.charge import POISSON as POISSON  # for who appends
from dprs_kernels.privacy.charge import Charge, check_count, check_record, check_run, described
from dprs_kernels.privacy.draws import DrawCount
from dprs_kernels.privacy.history import History
from dprs_kernels.privacy.journal import Journal

ATTACHED = "_ledger"   # on an optimizer, and on a sampler


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
        self._history = History()
        self._attached: list[weakref.ref[Any]] = []
        for charge in self.records():
            self._history.add(charge)

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
            yield Charge(
                StepRecord(**values), line["sampler"], line["sample_rate"], line["adjacency"],
                line.get("skipped_steps", 0), line.get("unused_draws", 0),
            )   # fmt: skip

    def attach(self, optimizer: MaskedStep, *, sampler: Any, adjacency: str | None = "add_remove") -> None:
        """Charges every later step of an RSDPOptimizer or RSDPOpacusOptimizer. Attach before the first: a noise source
        that has made steps already is refused, unless they are charged here, or came with a loaded checkpoint.

        sampler: read at each step: .name and .sample_rate, as the samplers of privacy.sampling have. Without a name
            it is "unknown", and epsilon() refuses. It serves one optimizer. One draw, one step: with a sampler that
            counts its .draws, as ours do, a step on several draws, or a second one on the same draw, is refused, p.grad
            is cleared and the parameters are as before. Any other is trusted to draw anew for each step.
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
        if hasattr(sampler, ATTACHED):
            raise ValueError(
                "sampler: serves another optimizer already; two releases of one draw cost more than two steps: make a "
                "sampler for each optimizer"
            )
        self._journal._check_writable()
        check_run(*described(sampler), adjacency)
        missing = self._history.unexplained(optimizer)
        if missing:
            raise ValueError(
                f"optimizer: its noise source made {missing} steps that are not in this ledger; attach before the "
                "first step, or give the optimizer a NoiseSource of its own"
            )
        counted = DrawCount(lambda: sampler.draws) if hasattr(sampler, "draws") else None

        def charge(optimizer: Any, record: StepRecord) -> None:
            try:
                if any(capturing(param.device) for param in optimizer._params()):
                    raise ValueError("ledger: a captured CUDA graph would replay this step uncharged; step eagerly")
                name, rate = described(sampler)
                skipped = self._history.explained(optimizer, record.key_id, record.step)
                unused = 0 if counted is None else counted.release(opened=optimizer._opened)
                self.append(
                    record, sampler=name, sample_rate=rate, adjacency=adjacency, skipped_steps=skipped,
                    unused_draws=unused,
                )   # fmt: skip
            except BaseException:
                optimizer._lost.add((record.key_id, record.step))   # p.grad is cleared: nothing was released
                raise

        optimizer._watch = None if counted is None else counted.total
        if hasattr(optimizer, "last_record"):
            _charge_in_add_noise(optimizer, charge)
        else:
            optimizer.attach_step_hook(charge)   # type: ignore[attr-defined]   # of RSDPOptimizer
        for one in (optimizer, sampler):
            if hasattr(one, "__dict__"):
                setattr(one, ATTACHED, self)
        self._attached.append(weakref.ref(optimizer))

    def append(
        self,
        record: StepRecord,
        *,
        sampler: str,
        sample_rate: float | None,
        adjacency: str | None,
        skipped_steps: int = 0,
        unused_draws: int = 0,
    ) -> None:
        """Charges one release, in a loop of your own PrivateSum.record(); on the disk when it returns. Refuses to
        record a (key, step) of secret noise a second time: two releases with the same noise differ by exact sums, and
        no accountant knows of it.

        skipped_steps: how many steps of the key, just before this one and after the last charged, released nothing.
        unused_draws: how many batches were drawn before this one's, and not used as far as you know.
        """
        if not isinstance(record, StepRecord):
            raise ValueError(f"record: got {type(record).__name__}; expected a StepRecord, as step hooks get it")
        check_record(record)
        check_run(sampler, sample_rate, adjacency)
        sample_rate = None if sample_rate is None else float(sample_rate)
        check_count("skipped_steps", skipped_steps)
        check_count("unused_draws", unused_draws)
        charge = Charge(record, sampler, sample_rate, adjacency, skipped_steps, unused_draws)
        if record.private and record.step <= self._history.newest.get(record.key_id, -1):
            raise ValueError(
                f"record: step {record.step} of noise key {record.key_id} is charged already, or a later one is: the "
                "same noise would be released twice; make a new NoiseSource (a loaded checkpoint has one)"
            )
        between = record.step - self._history.newest.get(record.key_id, -1) - 1
        if skipped_steps > max(between, 0):
            raise ValueError(
                f"skipped_steps: got {skipped_steps}; expected at most {max(between, 0)}, the steps between the last "
                "charged one of this key and this one"
            )
        line = {
            **asdict(record), "sampler": sampler, "sample_rate": sample_rate, "adjacency": adjacency,
            "skipped_steps": skipped_steps, "unused_draws": unused_draws,
        }   # fmt: skip
        self._journal.append({name: _plain(value) for name, value in line.items()})
        self._history.add(charge)

    def epsilon(
        self,
        delta: float,
        accountant: str = "rdp",
        *,
        amplification: bool = True,
        nominal_as_poisson: bool = False,
        adjacency: str | None = None,
        uncharged_steps: int = 0,
        unused_draws: int = 0,
    ) -> float:
        """The epsilon of all steps charged, composed with what each really had: sigma C / sensitivity, q.

        amplification: False forgets q. Each step then counts as if every sample took part, for samplers other than
            Poisson as a substitution (2C). For ShuffledPartitionNominal, whose order is secret and new in each pass, it
            holds under both adjacencies: one sample less moves one other into its place. For any other sampler that has
            a sample in a batch at most once it holds under "replace_one" only, and is refused otherwise: where the
            order can be known (a seed), one sample less may move all others to other batches. Seeded ones are refused.
        nominal_as_poisson: True counts shuffled partitions as if they were Poisson samples, as the paper and most
            published numbers do. It is a figure to compare, and proves nothing: the true one can be many times it.
        adjacency: states it where the ledger does not.
        uncharged_steps: charges so many steps that have no line, at the least noise and the largest q of those that
            have; where they were others than that, append them.
        unused_draws: states that so many draws without a step were thrown away, and in no release.
        Refuses (ValueError) seeded noise, no noise, no bound, unknown samplers, shuffled partitions, a missing
        adjacency, repeated noise, unexplained steps or draws, and an empty ledger.
        """
        live = [optimizer for reference in self._attached if (optimizer := reference()) is not None]
        self._history.refuse_false_claims()
        self._history.refuse_missing(live, uncharged_steps, unused_draws)
        stated = self._history.adjacency(adjacency)
        history = self._history.settings(stated, amplification, nominal_as_poisson, uncharged_steps)
        composed_as = stated if amplification else "add_remove"
        return composed_epsilon(history, delta=delta, accountant=accountant, adjacency=composed_as)

    def close(self) -> None:
        """Lets another writer in; epsilon still answers."""
        self._journal.close()

    def __repr__(self) -> str:
        return f"Ledger({str(self._journal.path or 'in memory')!r}, steps={self.steps}, head={self.head[:16]}...)"



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


def _plain(value: Any) -> Any:
    """For JSON: it has no infinity."""
    return "inf" if value == math.inf else value
