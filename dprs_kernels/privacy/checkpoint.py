"""The whole private training state in one file, written whole or not at all, and what a resume owes.

A checkpoint holds the model, the optimizer with its schedule position, the position of noise and sampler, the
schedulers, and where the ledger stood: never a key, never a sum that has no noise yet. Steps that the ledger holds
beyond a checkpoint were released, or may have been, before the crash: they stay charged, and a step taken again is
another step, under another key, charged again (PRIVACY.md R2, R8).
"""

from __future__ import annotations

import logging
import os
import pickle
from collections import Counter, OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from dprs_kernels.files import written_whole
from dprs_kernels.masked_step import STATE_KEY, MaskedStep
from dprs_kernels.privacy.ledger import Ledger
from dprs_kernels.privacy.sampling import SecretBatchSampler

FORMAT = "dprs_kernels training state"
PLAIN = (str, bool, int, float, type(None), torch.dtype, torch.device, torch.Size)
MAPPINGS = (dict, OrderedDict, Counter)   # what torch.load(weights_only=True) takes
logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Resumed:
    """What a resume did, in public numbers. Each note is also logged."""

    epoch: int | None         # the sampler's: start the loop over epochs here
    step: int                 # of the noise key: what the next step gets
    rekeyed: bool             # noise and batches to come are others than the interrupted run's; False: seeded
    charged_steps: int        # in the ledger at the checkpoint
    later_steps: int          # in the ledger after it; they stay charged
    notes: tuple[str, ...]


class TrainingState:
    """Everything that a private run continues from.

    optimizer: RSDPOptimizer or RSDPOpacusOptimizer, which hold epoch, tick, mask seed and noise position.
    sampler: PoissonBatchSampler or ShuffledPartitionNominal. From here on its position follows the optimizer's steps,
        so that batches which loader workers drew ahead are not lost.
    ledger: attached to the optimizer by you (ledger.attach). A rank that does not write it gives Ledger.read(path).
    schedulers: of the learning rate, or anything with a state_dict of plain values and tensors.

    Resuming: build everything as at first (a Ledger on the same file), then load; go on at `Resumed.epoch`, whose
    first pass is the rest of the one that was saved. After the last step of a pass that is the next pass: save behind
    what you do at the end of an epoch. A logical batch that is open is not saved: it is drawn again.

    >>> import tempfile
    >>> from dprs_kernels.optimizer import RSDPOptimizer
    >>> from dprs_kernels.privacy.sampling import PoissonBatchSampler
    >>> model = nn.Linear(3, 1)
    >>> optimizer = RSDPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), max_grad_norm=1.0,
    ...                           noise_multiplier=1.0, expected_batch_size=4)
    >>> state = TrainingState(model, optimizer, sampler=PoissonBatchSampler(40, sample_rate=0.1, steps=10))
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     state.save(f"{folder}/run.pt")
    ...     state.load(f"{folder}/run.pt").rekeyed
    True
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Any,
        *,
        sampler: SecretBatchSampler | None = None,
        ledger: Ledger | None = None,
        schedulers: Sequence[Any] = (),
    ) -> None:
        for name, value, kind, expected in (
            ("model", model, nn.Module, "a torch.nn.Module"),
            ("optimizer", optimizer, MaskedStep, "an RSDPOptimizer or RSDPOpacusOptimizer, which knows its noise"),
            ("sampler", sampler, (SecretBatchSampler, type(None)), "a PoissonBatchSampler, or None"),
            ("ledger", ledger, (Ledger, type(None)), "a Ledger, or None"),
        ):
            if not isinstance(value, kind):
                raise ValueError(f"{name}: got {type(value).__name__}; expected {expected}")
        for i, scheduler in enumerate(schedulers):
            if not hasattr(scheduler, "state_dict") or not hasattr(scheduler, "load_state_dict"):
                raise ValueError(f"schedulers[{i}]: got {type(scheduler).__name__}; expected one with a state_dict")
        self.model, self.optimizer, self.sampler, self.ledger = model, optimizer, sampler, ledger
        self.schedulers = list(schedulers)
        if sampler is not None:
            sampler.follow(optimizer.noise)
        self._begin()

    def _begin(self) -> None:
        self._noise_began = self.optimizer.noise.step
        self._ledger_began = 0 if self.ledger is None else self.ledger.steps

    def state_dict(self) -> dict[str, Any]:
        """Plain values and tensors. Tensors are the live ones, as in torch; save() writes them at once."""
        if self.ledger is not None and self.ledger.steps == self._ledger_began:
            steps = self.optimizer.noise.step - self._noise_began
            if steps > 0:
                raise ValueError(
                    f"ledger: holds none of the {steps} steps taken since it was given; call ledger.attach(optimizer, "
                    "...) before the first step: steps that nobody recorded cannot be charged"
                )
        return {
            "format": FORMAT,
            "version": 1,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "schedulers": [scheduler.state_dict() for scheduler in self.schedulers],
            "sampler": None if self.sampler is None else self.sampler.state_dict(),
            "ledger": None if self.ledger is None else {"steps": self.ledger.steps, "head": self.ledger.head},
        }

    def load_state_dict(self, state: dict[str, Any]) -> Resumed:
        """Refuses a ledger that is not the saved one or a continuation of it, before anything is loaded. After an
        error later on (another model, another schedule) build the objects anew."""
        if state.get("format") != FORMAT or state.get("version") != 1:
            got = f"{state.get('format')!r} version {state.get('version')!r}"
            raise ValueError(f"state: got {got}; expected {FORMAT!r} version 1, as TrainingState.save writes it")
        later = self._later_steps(state["ledger"])
        if (state["sampler"] is None) != (self.sampler is None):
            was, here = ("without", "with") if state["sampler"] is None else ("with", "without")
            raise ValueError(f"sampler: saved {was} one, got a training state {here}; construct it as it was saved")
        if len(state["schedulers"]) != len(self.schedulers):
            raise ValueError(f"schedulers: saved {len(state['schedulers'])}, got {len(self.schedulers)}")
        if STATE_KEY not in state["optimizer"]:
            raise ValueError("state: the optimizer's part has no noise position; it was not saved by this optimizer")
        self.optimizer.load_state_dict(state["optimizer"])
        if self.sampler is not None:
            self.sampler.load_state_dict(state["sampler"])
        for scheduler, saved in zip(self.schedulers, state["schedulers"], strict=True):
            scheduler.load_state_dict(saved)
        self.model.load_state_dict(state["model"])
        self._begin()
        return self._report(later)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Atomic and durable (files.py): killed at any moment, `path` is the old checkpoint or the new one."""
        state = _plain(self.state_dict(), "state")
        with written_whole(Path(path)) as file:
            torch.save(state, file)

    def load(self, path: str | os.PathLike[str]) -> Resumed:
        """load_state_dict of a file that save wrote; nothing in the file is executed (weights_only)."""
        try:
            state = torch.load(path, map_location="cpu", weights_only=True)
        except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
            raise ValueError(f"path: {path} is no checkpoint of TrainingState.save, or damaged: {error}") from error
        if not isinstance(state, dict):
            raise ValueError(f"path: {path} holds a {type(state).__name__}; expected a file of TrainingState.save")
        return self.load_state_dict(state)

    def _later_steps(self, saved: dict[str, Any] | None) -> int:
        """How many steps the ledger holds beyond the saved ones, which must be its beginning."""
        if saved is None and self.ledger is None:
            return 0
        if saved is None or self.ledger is None:
            was, here = ("without", "with") if saved is None else ("with", "without")
            raise ValueError(
                f"ledger: the state was saved {was} one, got a training state {here}; all steps of a run belong in one "
                "ledger: construct both with ledger=Ledger(path)"
            )
        steps, head = saved["steps"], saved["head"]
        if self.ledger.steps < steps:
            raise ValueError(
                f"ledger: has {self.ledger.steps} steps, the checkpoint was taken at {steps}; it was cut, or is the "
                "ledger of another run: give the file that this run wrote, or start a new run"
            )
        try:
            return self.ledger.steps_since(head)
        except ValueError as error:
            raise ValueError(
                f"ledger: never had the head {head[:16]} that the checkpoint was taken at ({steps} steps); it is the "
                "ledger of another run, or was rewritten: give the file that this run wrote, or start a new run"
            ) from error

    def _report(self, later: int) -> Resumed:
        noise, sampler, notes = self.optimizer.noise, self.sampler, []
        rekeyed = noise.private or (sampler is not None and sampler.private)
        if rekeyed:
            keys = [f"noise goes on at step {noise.step} under key {noise.key_id}"] if noise.private else []
            if sampler is not None and sampler.private:
                keys.append(f"batches are drawn under key {sampler.key_id}")
            notes.append(f"re-keyed: {', '.join(keys)}; the distribution is the interrupted run's, the bits are not")
        else:
            notes.append("seeded for tests: noise and batches go on bit for bit; no privacy claim")
        logger.info(notes[0])
        if later:
            notes.append(
                f"{later} steps in the ledger came after the checkpoint: they were released, or may have been, and "
                "stay charged; steps taken again are charged again"
            )
            logger.warning(notes[1])
        epoch = None if sampler is None else sampler.epoch
        charged = 0 if self.ledger is None else self.ledger.steps - later
        return Resumed(epoch, noise.step, rekeyed, charged, later, tuple(notes))


def _plain(value: Any, where: str) -> Any:
    """The same, or ValueError where torch.load(weights_only=True) would refuse it. A tensor that is part of a larger
    storage is copied: torch would write the whole storage, and who knows what lies beside it."""
    if isinstance(value, torch.Tensor):
        whole = value.untyped_storage().nbytes() == value.numel() * value.element_size()
        return value.detach() if whole else value.detach().clone()
    if type(value) in MAPPINGS:
        copied = type(value)({_plain(k, where): _plain(v, f"{where}[{k!r}]") for k, v in value.items()})
        if hasattr(value, "_metadata"):   # versions of the modules, in a model's state
            copied._metadata = value._metadata
        return copied
    if type(value) in (list, tuple):
        return type(value)(_plain(v, f"{where}[{i}]") for i, v in enumerate(value))
    if type(value) not in PLAIN:
        raise ValueError(
            f"{where}: got {type(value).__name__}; expected numbers, strings, tensors, lists and dicts, all that a "
            "checkpoint can be loaded with safely"
        )
    return value
