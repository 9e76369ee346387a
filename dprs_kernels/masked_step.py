"""MaskedStep: what must stay fixed from the first micro-batch of a logical batch to its release: mask, bounds, noise
(PRIVACY.md R7). Shared by optimizer.py and opacus_optimizer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from dprs_kernels import inputs
from dprs_kernels.inputs import tensor_of, version_of
from dprs_kernels.layout import Layout
from dprs_kernels.mask import KeepMask
from dprs_kernels.noise import NoiseSource
from dprs_kernels.outer import Grad
from dprs_kernels.plan import StepRecord as StepRecord  # for hooks
from dprs_kernels.schedule import CustomRate
from dprs_kernels.step import PrivateSum
from dprs_kernels.structure import STRUCTURES

STATE_KEY = "dprs_kernels"   # beside "state" and "param_groups" in a checkpoint; torch's loaders skip it
SETTINGS = ("max_grad_norm", "noise_multiplier", "expected_batch_size", "loss_reduction", "clipping", "backend")


class MaskedStep:
    """The mask's life, and the sum that is open between the first micro-batch and the release."""

    original_optimizer: Optimizer
    _step_supports_amp_scaling = True   # makes GradScaler hand over grad_scale, where it is refused

    def _start(
        self, schedule: CustomRate | None, seed: int, noise: NoiseSource | None, structure: str = "coordinate"
    ) -> None:
        if structure not in STRUCTURES:
            raise ValueError(f"structure: got {structure!r}; expected one of {', '.join(map(repr, STRUCTURES))}")
        if schedule is not None and not isinstance(schedule, CustomRate):
            raise ValueError(
                f"schedule: got {type(schedule).__name__}; expected GradualCooling, ConstantRate, CustomRate(function, "
                "epochs), or None to keep everything"
            )
        self.schedule, self.seed, self.structure = schedule, seed, structure
        self.noise = NoiseSource() if noise is None else noise
        self._total: PrivateSum | None = None   # open: samples were added and not released
        self._settings: dict[str, Any] = {}     # of the open sum
        self._at = (0, 0)                       # epoch, tick
        self._drawn: tuple[Any, KeepMask] | None = None
        self._used: Any = WeakTensorKeyDictionary()   # gradients that went into any sum -> their version
        self._lost: set[tuple[str, int]] = set()      # (key_id, step) claimed for a release that failed
        self._resumed: tuple[str, int] | None = None  # (key_id, step) that a loaded state goes on with
        self._watch: Callable[[], int] | None = None  # batches drawn so far, of an attached ledger's sampler
        self._opened = 0                              # as many when the open sum got its first samples

    def set_epoch(self, epoch: int, tick: int = 0) -> None:
        """Puts the mask of (epoch, tick) in force: drop rate schedule(epoch, tick), drawn from the public seed. Epoch
        0 holds before the first call. Refused between accumulate and step."""
        for name, value in (("epoch", epoch), ("tick", tick)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"{name}: got {value!r}; expected an integer of at least 0")
        if self.schedule is not None:
            self.schedule(epoch, tick)   # in range, and a rate
        if (epoch, tick) != self._at:
            self._refuse_if_open("set_epoch", "the mask may not change inside it")
            self._at = (epoch, tick)

    @property
    def keep(self) -> KeepMask:
        """The mask in force, drawn once for an epoch; for other trainable parameters, drawn anew."""
        params = self._trainable()
        place = (self.schedule and self._at, Layout.of(params))   # without a schedule one mask serves every epoch
        if self._drawn is None or self._drawn[0] != place:
            rate, draw = 0.0, 0
            if self.schedule is not None:
                rate, draw = self.schedule(*self._at), self.schedule.draw_index(*self._at)
            named: list[Any] = params   # torch's names, or none: ours tell no modules apart
            if not all("param_names" in group for group in self.original_optimizer.param_groups):
                named = [param for _, param in params]
            self._drawn = place, KeepMask.draw(
                named, drop_rate=rate, seed=self.seed, draw=draw, structure=self.structure
            )
        return self._drawn[1]

    def discard(self) -> None:
        """Gives up the open logical batch and its gradients: nothing of it was released."""
        self._total = None
        self.original_optimizer.zero_grad()
        clear_samples(self._params())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._refuse_if_open("add_param_group", "its mask does not cover new parameters")
        self.original_optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and under "dprs_kernels" the epoch, the seed and the noise position: never a key,
        never a sum that has no noise yet."""
        ours = {"version": 1, "epoch": self._at[0], "tick": self._at[1], "seed": self.seed, "structure": self.structure}
        return {**self.original_optimizer.state_dict(), STATE_KEY: {**ours, "noise": self.noise.state_dict()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues at the saved position, under a fresh noise key. A plain optimizer's state leaves both alone."""
        self._refuse_if_open("load_state_dict", "would mix with the loaded state")
        ours = state_dict.get(STATE_KEY)
        if ours is not None:
            if ours["seed"] != self.seed:
                raise ValueError(f"seed: saved with {ours['seed']}, got {self.seed}; construct with the saved seed")
            saved = ours.get("structure", "coordinate")   # not there before there were others
            if saved != self.structure:
                raise ValueError(f"structure: saved with {saved!r}, got {self.structure!r}; construct with the saved")
            if self.schedule is not None:
                self.schedule(ours["epoch"], ours["tick"])
            self.noise.load_state_dict(ours["noise"])
            self._resumed = self.noise.key_id, self.noise.step
            self._at = ours["epoch"], ours["tick"]
        self.original_optimizer.load_state_dict({k: v for k, v in state_dict.items() if k != STATE_KEY})

    def _begin(self, settings: dict[str, Any]) -> PrivateSum:
        """The open sum, or a new one, which is open from its first gradients on. Nothing may have changed since."""
        params = self._trainable()
        if self._total is None:
            self._settings = settings
            return PrivateSum(params, keep=self.keep, noise=self.noise, **self._to_core(settings))
        if [id(p) for _, p in params] != [id(p) for p in self._total.params]:
            self._refuse_if_open("params", "other parameters are trainable now; freeze and unfreeze between steps")
        for name, value in settings.items():
            if value != self._settings[name]:
                self._refuse_if_open(name, f"began with {self._settings[name]!r}, now {value!r}; change between steps")
        return self._total

    def _to_core(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The user's settings as PrivateSum's."""
        return settings

    def _take(self, total: PrivateSum, grad_samples: Any) -> list[list[Grad]]:
        """Gradients, checked and new to us: P lists of micro-batches [N, *shape]."""
        batches, _ = inputs.micro_batches(total.names, total.params, grad_samples)
        fresh: set[int] = set()
        for batch in batches:
            for name, grad in zip(total.names, batch, strict=True):
                tensor = tensor_of(grad)
                if grad.shape[0] and (id(tensor) in fresh or self._used.get(tensor) == version_of(grad)):
                    raise ValueError(
                        f"{name}: these per-sample gradients were already used by an earlier step or accumulate; run "
                        "forward and backward again first"
                    )
            fresh.update(id(tensor_of(grad)) for grad in batch)
        return [list(parts) for parts in zip(*batches, strict=True)]

    def _add(self, total: PrivateSum, grads: list[list[Grad]]) -> None:
        self._open()
        with self._all_or_nothing(total, grads):
            self._total = total
            total.add(grads)

    def _open(self) -> None:
        """Notes how many batches were drawn before the first samples of a logical batch."""
        if self._total is None and self._watch is not None:
            self._opened = self._watch()

    def _release(self, total: PrivateSum, grads: list[list[Grad]] | None = None) -> StepRecord:
        """Adds what is given, then noise, once; writes p.grad. The sum is closed whatever happens."""
        self._open()
        with self._all_or_nothing(total, grads or []):
            if grads is None:
                total.release()
            else:
                total.step(grads)
        self._total = None
        for param in self._params():
            if not param.requires_grad:
                param.grad = None   # frozen after backward: its gradient is raw
        return total.record()   # of the noise that it took, whatever self.noise is by now

    @contextmanager
    def _all_or_nothing(self, total: PrivateSum, grads: list[list[Grad]]) -> Iterator[None]:
        """Where something fails past the checks the batch is lost: half a sum is not added to, a claimed step is not
        claimed again, and p.grad does not keep what was written so far without a record."""
        for grad in (grad for parts in grads for grad in parts):
            self._used[tensor_of(grad)] = version_of(grad)
        try:
            yield
        except BaseException:
            self._give_up(total)
            raise

    def _give_up(self, total: PrivateSum) -> None:
        """No record, no use. A step that was claimed and released nothing is noted: a ledger can explain the gap."""
        self._total = None
        for param in total.params:
            param.grad = None
        if total.claimed is not None:
            self._lost.add(total.claimed)

    def _refuse_if_open(self, name: str, reason: str) -> None:
        if self._total is not None:
            raise ValueError(f"{name}: a logical batch is open, {reason}; call step(), or discard() to give it up")

    def _params(self) -> list[torch.Tensor]:
        return [param for group in self.original_optimizer.param_groups for param in group["params"]]

    def _trainable(self) -> list[tuple[str, torch.Tensor]]:
        """All that require grad, in order, by torch's param_names where the optimizer was given them."""
        names = [
            group["param_names"][i] if "param_names" in group else f"param_groups[{g}]['params'][{i}]"
            for g, group in enumerate(self.original_optimizer.param_groups)
            for i in range(len(group["params"]))
        ]
        return [(name, param) for name, param in zip(names, self._params(), strict=True) if param.requires_grad]

    def _refuse_scaling(self, scale: Any) -> None:
        raise ValueError(
            "GradScaler: dynamic loss scaling is refused: the scale reacts to the data and is not accounted for, and "
            "scaled gradients are all clipped; train in bf16 without a scaler, or unscale the per-sample gradients "
            "first and call optimizer.step() yourself"
        )

    grad_scale = property(None, _refuse_scaling)

    def __getstate__(self) -> dict[str, Any]:
        raise ValueError(f"{type(self).__name__}: cannot be pickled or copied, it holds a noise key; use state_dict()")


def clear_samples(params: Sequence[torch.Tensor]) -> None:
    for param in params:
        for attribute in inputs.ATTRIBUTES:
            if hasattr(param, attribute):
                setattr(param, attribute, None)
