"""RSDPOptimizer: any torch optimizer, stepping on private gradients.

MaskedStep, shared with opacus_optimizer.py, holds what must stay fixed from the first micro-batch of a logical batch
to its release: mask, bounds, noise (PRIVACY.md R7).
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary

from dprs_kernels import inputs
from dprs_kernels.layout import Layout
from dprs_kernels.mask import KeepMask
from dprs_kernels.noise import NoiseSource
from dprs_kernels.schedule import CustomRate
from dprs_kernels.step import PrivateSum

STATE_KEY = "dprs_kernels"   # beside "state" and "param_groups" in a checkpoint; torch's loaders skip it
SETTINGS = ("max_grad_norm", "noise_multiplier", "expected_batch_size", "loss_reduction", "clipping", "backend")


@dataclass(frozen=True)
class StepRecord:
    """One release, in public numbers: what a ledger needs."""

    step: int                    # of the noise key; a step that failed after its claim leaves a gap
    key_id: str
    private: bool                # False: seeded noise, no noise, or no bound; no epsilon holds
    noise_multiplier: float      # sigma, in units of max_grad_norm
    max_grad_norm: float         # C, of all parameters together
    expected_batch_size: float
    sensitivity: float           # C and the rounding of the sum (plan.sensitivity)
    drop_rate: float
    kept: int                    # K coordinates
    keep_digest: str


class MaskedStep:
    """The mask's life, and the sum that is open between the first micro-batch and the release."""

    original_optimizer: Optimizer
    _step_supports_amp_scaling = True   # makes GradScaler hand over grad_scale, where it is refused

    def _start(self, schedule: CustomRate | None, seed: int, noise: NoiseSource | None) -> None:
        if schedule is not None and not isinstance(schedule, CustomRate):
            raise ValueError(
                f"schedule: got {type(schedule).__name__}; expected GradualCooling, ConstantRate, CustomRate(function, "
                "epochs), or None to keep everything"
            )
        self.schedule, self.seed = schedule, seed
        self.noise = NoiseSource() if noise is None else noise
        self._total: PrivateSum | None = None   # open: samples were added and not released
        self._settings: dict[str, Any] = {}     # of the open sum
        self._at = (0, 0)                       # epoch, tick
        self._drawn: tuple[Any, KeepMask] | None = None
        self._used: Any = WeakTensorKeyDictionary()   # gradients that went into any sum -> their version

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
            self._drawn = place, KeepMask.draw(params, drop_rate=rate, seed=self.seed, draw=draw)
        return self._drawn[1]

    def discard(self) -> None:
        """Gives up the open logical batch and its gradients: nothing of it was released."""
        self._total = None
        self.original_optimizer.zero_grad()
        _clear_samples(self._params())

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._refuse_if_open("add_param_group", "its mask does not cover new parameters")
        self.original_optimizer.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's, and under "dprs_kernels" the epoch, the seed and the noise position: never a key,
        never a sum that has no noise yet."""
        ours = {"version": 1, "epoch": self._at[0], "tick": self._at[1], "seed": self.seed}
        return {**self.original_optimizer.state_dict(), STATE_KEY: {**ours, "noise": self.noise.state_dict()}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continues at the saved position, under a fresh noise key. A plain optimizer's state leaves both alone."""
        self._refuse_if_open("load_state_dict", "would mix with the loaded state")
        ours = state_dict.get(STATE_KEY)
        if ours is not None:
            if ours["seed"] != self.seed:
                raise ValueError(f"seed: saved with {ours['seed']}, got {self.seed}; construct with the saved seed")
            if self.schedule is not None:
                self.schedule(ours["epoch"], ours["tick"])
            self.noise.load_state_dict(ours["noise"])
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

    def _take(self, total: PrivateSum, grad_samples: Any) -> list[list[torch.Tensor]]:
        """Gradients, checked and new to us: P lists of micro-batches [N, *shape]."""
        batches, _ = inputs.micro_batches(total.names, total.params, grad_samples)
        fresh: set[int] = set()
        for batch in batches:
            for name, grad in zip(total.names, batch, strict=True):
                if grad.shape[0] and (id(grad) in fresh or self._used.get(grad) == _version(grad)):
                    raise ValueError(
                        f"{name}: these per-sample gradients were already used by an earlier step or accumulate; run "
                        "forward and backward again first"
                    )
            fresh.update(id(grad) for grad in batch)
        return [list(parts) for parts in zip(*batches, strict=True)]

    def _add(self, total: PrivateSum, grads: list[list[torch.Tensor]]) -> None:
        with self._all_or_nothing(total, grads):
            self._total = total
            total.add(grads)

    def _release(self, total: PrivateSum, grads: list[list[torch.Tensor]] | None = None) -> StepRecord:
        """Adds what is given, then noise, once; writes p.grad. The sum is closed whatever happens."""
        with self._all_or_nothing(total, grads or []):
            if grads is None:
                total.release()
            else:
                total.step(grads)
        self._total = None
        for param in self._params():
            if not param.requires_grad:
                param.grad = None   # frozen after backward: its gradient is raw
        plan, keep = total.plan, total.keep
        assert keep is not None
        return StepRecord(
            step=self.noise.step - 1, key_id=self.noise.key_id,   # after the claim: a forked child re-keys in it
            private=self.noise.private and plan.noise_std > 0 and math.isfinite(plan.max_grad_norm),
            noise_multiplier=plan.noise_multiplier, max_grad_norm=plan.max_grad_norm,
            expected_batch_size=plan.expected_batch_size, sensitivity=plan.sensitivity(keep.count),
            drop_rate=keep.drop_rate, kept=keep.count, keep_digest=keep.digest(),
        )   # fmt: skip

    @contextmanager
    def _all_or_nothing(self, total: PrivateSum, grads: list[list[torch.Tensor]]) -> Iterator[None]:
        """Where something fails past the checks the batch is lost: half a sum is not added to, a claimed step is not
        claimed again, and p.grad does not keep what was written so far without a record."""
        for grad in (grad for parts in grads for grad in parts):
            self._used[grad] = _version(grad)
        try:
            yield
        except BaseException:
            self._total = None
            for param in total.params:
                param.grad = None
            raise

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


def _of_inner(name: str) -> Any:
    """An attribute that lives in the wrapped optimizer."""
    return property(
        lambda self: getattr(self.original_optimizer, name),
        lambda self, value: setattr(self.original_optimizer, name, value),
    )


class RSDPOptimizer(MaskedStep, Optimizer):
    """Wraps a torch optimizer: step() masks, clips, sums and noises per-sample gradients, then steps on the result.

    optimizer: SGD, Adam, ...; its parameters that require grad, in order, are the private ones. They may change
        between steps (add_param_group, requires_grad_): the mask is then drawn anew, from the same seed and epoch.
    max_grad_norm, noise_multiplier, expected_batch_size, loss_reduction, clipping, backend: of fused_rs_dp_step. They
        may be assigned between steps, not inside a logical batch.
    noise: a NoiseSource; None makes one with a fresh key.
    schedule, seed: of the mask (set_epoch). None keeps everything: plain DP-SGD.
    unused_params: a parameter without per-sample gradients, while others have them, is mostly a mistake: "error".
        "zero": it took no part in the loss; its gradient is 0, and its kept coordinates get noise like all others.

    >>> model = torch.nn.Linear(3, 1)
    >>> inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    >>> optimizer = RSDPOptimizer(inner, max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=4)
    >>> optimizer.step(grad_samples=[torch.randn(4, 1, 3), torch.randn(4, 1)])
    """

    param_groups, state, defaults = _of_inner("param_groups"), _of_inner("state"), _of_inner("defaults")

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        max_grad_norm: float | Sequence[float],
        noise_multiplier: float,
        expected_batch_size: float,
        noise: NoiseSource | None = None,
        schedule: CustomRate | None = None,
        seed: int = 0,
        loss_reduction: str = "sum",
        clipping: str = "flat",
        backend: str = "auto",
        unused_params: str = "error",
    ) -> None:
        # Not Optimizer.__init__: param_groups, state and defaults are the inner optimizer's own.
        if not isinstance(optimizer, Optimizer) or isinstance(optimizer, (MaskedStep, torch.optim.LBFGS)):
            raise ValueError(
                f"optimizer: got {type(optimizer).__name__}; expected a plain torch optimizer that takes one gradient "
                "a step, e.g. torch.optim.SGD(model.parameters(), lr=0.1)"
            )
        if unused_params not in ("error", "zero"):
            raise ValueError(f"unused_params: got {unused_params!r}; expected 'error' or 'zero'")
        self.original_optimizer, self.unused_params = optimizer, unused_params
        self.max_grad_norm, self.noise_multiplier = max_grad_norm, noise_multiplier
        self.expected_batch_size, self.loss_reduction = expected_batch_size, loss_reduction
        self.clipping, self.backend = clipping, backend
        self._start(schedule, seed, noise)
        self._hooks: list[Callable[[RSDPOptimizer, StepRecord], None]] = []
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        for kind in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
            setattr(self, f"_optimizer_{kind}_hooks", getattr(optimizer, f"_optimizer_{kind}_hooks"))
        self._patch_step_function()   # what Optimizer.__init__ does for profiling and torch's own step hooks
        self._sum()                   # wrong numbers raise here, not in the first step

    def accumulate(self, grad_samples: Any = None) -> None:
        """Adds a micro-batch to the logical batch: grad_samples as in fused_rs_dp_step, or p.grad_sample /
        p.grad_batch, which are consumed."""
        total = self._sum()
        self._add(total, self._gradients(total, grad_samples))

    def accumulate_empty(self) -> None:
        """A batch that Poisson sampling left empty: step() then releases full noise, and it counts as a step."""
        self.accumulate([param.new_empty(0, *param.shape) for _, param in self._trainable()])

    def step(self, closure: Callable[[], Any] | None = None, *, grad_samples: Any = None) -> Any:
        """Adds the gradients that are there, releases with noise, steps the inner optimizer, calls the hooks.

        closure: run once, before; it calls backward. Its result is returned. Without gradients, and without an
        accumulated batch, raises; a second step on the same gradients raises.
        """
        if closure is not None and not callable(closure):
            raise ValueError(f"closure: got {type(closure).__name__}; expected a function, or grad_samples=tensors")
        with torch.enable_grad():
            loss = None if closure is None else closure()
        total, grads = self._sum(), None
        if grad_samples is not None or self._total is None or any(map(_holds_samples, total.params)):
            grads = self._gradients(total, grad_samples)
        record = self._release(total, grads)
        with ExitStack() as after:  # every hook runs, whatever fails: a ledger must not miss a release
            for hook in reversed(self._hooks):
                after.callback(hook, self, record)
            self.original_optimizer.step()
        return loss

    def attach_step_hook(self, fn: Callable[[RSDPOptimizer, StepRecord], None]) -> None:
        """fn(optimizer, record) after each step, in the order attached."""
        self._hooks.append(fn)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears p.grad, p.grad_sample and p.grad_batch. Refused while a logical batch is open: forgetting it would
        lose samples, keeping it would count them twice where the batch is run again."""
        self._refuse_if_open("zero_grad", "neither released nor given up")
        _clear_samples(self._params())
        self.original_optimizer.zero_grad(set_to_none)

    def _sum(self) -> PrivateSum:
        return self._begin({name: getattr(self, name) for name in SETTINGS})

    def _gradients(self, total: PrivateSum, grad_samples: Any) -> list[list[torch.Tensor]]:
        """Checked, and off the parameters: whatever happens next, no later step finds them."""
        if grad_samples is None and self.unused_params == "zero":
            _fill_unused(total.params)
        grads = self._take(total, grad_samples)
        if grad_samples is None:
            _clear_samples(total.params)
        return grads

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in (*SETTINGS[:3], "schedule", "noise"))
        return f"RSDPOptimizer({settings}) of {self.original_optimizer!r}"


def _version(grad: torch.Tensor) -> int:
    return -1 if grad.is_inference() else grad._version


def _holds_samples(param: torch.Tensor) -> bool:
    return any(getattr(param, attribute, None) is not None for attribute in inputs.ATTRIBUTES)


def _clear_samples(params: Sequence[torch.Tensor]) -> None:
    for param in params:
        for attribute in inputs.ATTRIBUTES:
            if hasattr(param, attribute):
                setattr(param, attribute, None)


def _fill_unused(params: Sequence[Any]) -> None:
    """Zeros [N, *shape] (one value, expanded: no memory) where other parameters have gradients."""
    for held in (value for p in params for a in inputs.ATTRIBUTES if (value := getattr(p, a, None)) is not None):
        sizes = [part.shape[0] for part in (held if isinstance(held, list) else [held])]
        for param in params:
            if not _holds_samples(param):
                param.grad_sample = [param.detach().new_zeros(()).expand(n, *param.shape) for n in sizes]
        return
