"""Random sparsification and secure noise inside Opacus: one line after make_private.

    model, optimizer, loader = privacy_engine.make_private(...)
    RSDPOpacusOptimizer.from_opacus(optimizer, schedule=GradualCooling(0.9, epochs), steps_per_epoch=len(loader))

PrivacyEngine, accountant, data loader, BatchMemoryManager and schedulers stay as they are. Opacus's epsilon holds
unchanged: a public mask costs nothing, and the rounding of the sum (PRIVACY.md R4) is taken out of the bound that
samples are clipped to, so that their sensitivity is at most the max_grad_norm that the accountant knows.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from typing import Any

import torch
from torch.optim import Optimizer

try:
    from opacus.optimizers import DPOptimizer, DPPerLayerOptimizer
    from opacus.optimizers.optimizer import _check_processed_flag, _mark_as_processed
except ImportError as error:
    raise ImportError(f'RSDPOpacusOptimizer needs opacus ({error}): pip install "dprs_kernels[opacus]"') from error

from dprs_kernels.layout import Layout
from dprs_kernels.masked_step import MaskedStep, StepRecord
from dprs_kernels.noise import NoiseSource
from dprs_kernels.plan import make_plan
from dprs_kernels.schedule import CustomRate
from dprs_kernels.step import PrivateSum


class RSDPOpacusOptimizer(MaskedStep, DPOptimizer):   # type: ignore[misc]   # opacus has no types
    """Opacus's DPOptimizer with our step in the place of its clipping, noise and scaling.

    Arguments of DPOptimizer, and schedule, seed, noise, backend of RSDPOptimizer. steps_per_epoch: counts epochs from
    the logical steps taken; without it call set_epoch(epoch) in each epoch, as for a DistributedSampler.
    last_record: the StepRecord of the last release, there when a step hook runs.
    p.summed_grad stays None: the sum of a logical batch is in our own accumulator.
    """

    last_record: StepRecord | None = None
    _divisor = 1.0

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        noise_multiplier: float,
        max_grad_norm: float,
        expected_batch_size: float | None,
        loss_reduction: str = "mean",
        generator: torch.Generator | None = None,
        secure_mode: bool = False,
        schedule: CustomRate | None = None,
        seed: int = 0,
        noise: NoiseSource | None = None,
        steps_per_epoch: int | None = None,
        backend: str = "auto",
    ) -> None:
        super().__init__(
            optimizer, noise_multiplier=noise_multiplier, max_grad_norm=max_grad_norm,
            expected_batch_size=expected_batch_size, loss_reduction=loss_reduction, generator=generator,
            secure_mode=secure_mode,
        )   # fmt: skip
        self._convert(schedule, seed, noise, steps_per_epoch, backend)

    @classmethod
    def from_opacus(
        cls,
        optimizer: Any,
        *,
        schedule: CustomRate | None = None,
        seed: int = 0,
        noise: NoiseSource | None = None,
        steps_per_epoch: int | None = None,
        backend: str = "auto",
    ) -> RSDPOpacusOptimizer:
        """Converts the optimizer that make_private returned, in place, so that whatever already holds it (learning
        rate and noise schedulers, the accountant's hook, a BatchMemoryManager) goes on working. Returns it."""
        if type(optimizer) not in (DPOptimizer, DPPerLayerOptimizer):
            raise ValueError(
                f"optimizer: got {type(optimizer).__name__}; expected the DPOptimizer or DPPerLayerOptimizer that "
                "make_private returns without DDP, with clipping='flat' or 'per_layer' and any grad_sample_mode but "
                "'ghost' (a ghost never has the gradients that a mask applies to)"
            )
        if optimizer._is_last_step_skipped or any(p.summed_grad is not None for p in optimizer.params):
            raise ValueError("optimizer: inside a logical batch; convert it after make_private, or after zero_grad")
        before, optimizer.__class__ = type(optimizer), cls
        try:
            optimizer._convert(schedule, seed, noise, steps_per_epoch, backend)
        except BaseException:
            optimizer.__class__ = before
            raise
        return optimizer

    def _convert(
        self,
        schedule: CustomRate | None,
        seed: int,
        noise: NoiseSource | None,
        steps_per_epoch: int | None,
        backend: str,
    ) -> None:
        if noise is None and self.generator is not None and not self.secure_mode:
            raise ValueError(
                "noise_generator: got a torch.Generator, which our noise does not use; leave it out, or pass "
                "noise=NoiseSource.seeded_for_tests(seed) for repeatable noise without a privacy claim"
            )
        if steps_per_epoch is not None and (not isinstance(steps_per_epoch, int) or steps_per_epoch < 1):
            raise ValueError(f"steps_per_epoch: got {steps_per_epoch!r}; expected an integer of at least 1, or None")
        self._start(schedule, seed, noise)
        if not self.noise.private:
            warnings.warn("noise: seeded for tests; the accountant's epsilon does not hold", UserWarning, stacklevel=3)
        self.steps_per_epoch, self.backend, self._steps = steps_per_epoch, backend, 0
        settings = self._to_core(self._opacus_settings())
        PrivateSum(self._trainable(), noise=self.noise, **settings)   # wrong numbers raise here

    def clip_and_accumulate(self) -> None:
        """Adds p.grad_sample of all parameters to the sum, masked and clipped."""
        for param in self.params:
            _check_processed_flag(param.grad_sample)
        if self._total is None:
            self._follow_steps()
            self._divisor = self._opacus_divisor()
        total = self._begin(self._opacus_settings())
        self._add(total, self._take(total, [param.grad_sample for param in self.params]))
        for param in self.params:
            _mark_as_processed(param.grad_sample)

    def add_noise(self) -> None:
        """Releases the sum: p.grad, with noise, divided by the expected batch size."""
        if self._total is None:
            raise ValueError("add_noise: nothing was accumulated; noise is added once per clip_and_accumulate")
        total = self._begin(self._opacus_settings())
        try:
            record, bound = self._release(total), float(self.max_grad_norm)
            self.last_record = dataclasses.replace(   # in Opacus's numbers: rounding is inside the bound (_to_core)
                record, noise_multiplier=float(self.noise_multiplier), max_grad_norm=bound,
                sensitivity=max(record.sensitivity, bound),
            )   # fmt: skip
        except BaseException:
            self._give_up(total)
            raise
        self._steps += 1

    def scale_grad(self) -> None:
        """The release has divided already. Opacus counts the backward passes of the last physical batch only; where
        that differs from the first, follow it."""
        ratio = self._divisor / self._opacus_divisor()
        if ratio != 1:
            for param in self.params:
                param.grad.mul_(ratio)

    def zero_grad(self, set_to_none: bool = False) -> None:
        """As in Opacus: p.grad and p.grad_sample, and the open sum unless the last step was a skipped one."""
        if not self._is_last_step_skipped:
            self._total = None
        super().zero_grad(set_to_none)

    def discard(self) -> None:
        """Also forgets signals of a memory manager whose loop was left."""
        self._step_skip_queue.clear()
        self._is_last_step_skipped = False
        super().discard()

    def set_epoch(self, epoch: int, tick: int = 0) -> None:
        if self.steps_per_epoch is not None:
            raise ValueError("set_epoch: with steps_per_epoch= epochs are counted from the steps; give one of the two")
        super().set_epoch(epoch, tick)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "dprs_kernels_steps": self._steps}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        self._steps = state_dict.get("dprs_kernels_steps", self._steps)

    def __repr__(self) -> str:
        return f"RSDPOpacusOptimizer(schedule={self.schedule!r}, noise={self.noise!r}) of {self.original_optimizer!r}"

    def _follow_steps(self) -> None:
        if self.steps_per_epoch is not None and self.schedule is not None:
            epoch, step = divmod(self._steps, self.steps_per_epoch)
            super().set_epoch(epoch, self.schedule.tick(step, self.steps_per_epoch))

    def _opacus_divisor(self) -> float:
        return self.expected_batch_size * self.accumulated_iterations if self.loss_reduction == "mean" else 1.0

    def _opacus_settings(self) -> dict[str, Any]:
        """Opacus's numbers under our names. Its modules undo the mean of the loss: gradients are each sample's own."""
        bounds = getattr(self, "max_grad_norms", None)   # of DPPerLayerOptimizer
        return dict(
            max_grad_norm=self.max_grad_norm if bounds is None else [float(c) for c in bounds],
            noise_multiplier=self.noise_multiplier, expected_batch_size=self._divisor, loss_reduction="sum",
            clipping="flat" if bounds is None else "per_layer", backend=self.backend,
        )   # fmt: skip

    def _to_core(self, settings: dict[str, Any]) -> dict[str, Any]:
        """The clipping bound is lowered from C to C' with C' + sqrt(K) (g + h) <= C (plan.sensitivity); the noise stays
        sigma C. For a million coordinates and sigma = 1 that is 0.2 % at most; without noise, nothing."""
        layout = Layout.of(self._trainable())
        plan = make_plan(layout, **{name: value for name, value in settings.items() if name != "backend"})
        bound, given = plan.max_grad_norm, settings["max_grad_norm"]
        room = plan.sensitivity(layout.size) - bound if math.isfinite(bound) else 0.0
        if room <= 0:
            return settings
        ratio = 1 - 2 * room / bound   # twice: sigma' C' may round up to the next grid
        if ratio <= 0.5:
            raise ValueError(
                f"noise_multiplier: got {self.noise_multiplier} for {layout.size} coordinates: rounding would take "
                "half of max_grad_norm; lower it, or train fewer parameters"
            )
        lowered = [c * ratio for c in given] if isinstance(given, list) else given * ratio
        sigma = math.nextafter(plan.noise_std / (bound * ratio), math.inf)
        return {**settings, "max_grad_norm": lowered, "noise_multiplier": sigma}
