"""RSDPOptimizer: any torch optimizer, stepping on private gradients."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim import Optimizer

from dprs_kernels import inputs
from dprs_kernels.grads.engine import Stream, kept_rows
from dprs_kernels.grads.source import LossFn, Source
from dprs_kernels.masked_step import SETTINGS, MaskedStep, StepRecord, clear_samples
from dprs_kernels.noise import NoiseSource
from dprs_kernels.outer import Grad
from dprs_kernels.schedule import CustomRate
from dprs_kernels.step import PrivateSum


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
    schedule, seed, structure: of the mask (set_epoch). None keeps everything: plain DP-SGD. structure="row" drops whole
        output rows, "mixed" does where there are many; backward(per_sample(model), ...) does not even make those of
        Linear, Embedding and ungrouped convolutions. Give the inner optimizer model.named_parameters() (torch 2.6 on),
        so that modules are known by their names.
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
        structure: str = "coordinate",
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
        self._start(schedule, seed, noise, structure)
        self._stream: Stream | None = None
        self._hooks: list[Callable[[RSDPOptimizer, StepRecord], None]] = []
        self._optimizer_step_pre_hooks: Any = OrderedDict()
        self._optimizer_step_post_hooks: Any = OrderedDict()
        for kind in ("state_dict_pre", "state_dict_post", "load_state_dict_pre", "load_state_dict_post"):
            setattr(self, f"_optimizer_{kind}_hooks", getattr(optimizer, f"_optimizer_{kind}_hooks"))
        self._patch_step_function()   # what Optimizer.__init__ does for profiling and torch's own step hooks
        self._sum()                   # wrong numbers raise here, not in the first step

    def accumulate(self, grad_samples: Any = None) -> None:
        """Adds a micro-batch to the logical batch: grad_samples as in fused_rs_dp_step, or p.grad_sample /
        p.grad_batch, which are consumed. Micro-batches are parts of one draw of a sampler, each sample once: several
        draws in one step are more than one step's epsilon, and an attached ledger refuses them."""
        total = self._sum()
        self._add(total, self._gradients(total, grad_samples))

    def backward(
        self, source: Source, loss_fn: LossFn, x: Any, y: Any, *, max_physical_batch_size: int | None = None
    ) -> None:
        """In the place of loss.backward(): per-sample gradients through `source` (per_sample(model), ...), added to the
        logical batch a micro-batch at a time, in memory for one. An empty batch is an ordinary one.

        loss_fn(outputs, y): a mean or a sum over samples; either way rows are each sample's own gradient, so that the
        optimizer's loss_reduction must be "sum". All or nothing: after an error the open logical batch is given up,
        since a retry would count the samples before it twice.
        """
        if self.loss_reduction != "sum":
            raise ValueError(
                f"loss_reduction: got {self.loss_reduction!r}; backward makes each sample's own gradient, whatever the "
                "loss's reduction is, and needs loss_reduction='sum', the default"
            )
        names, stream = self._names_in(source), self._stream
        if stream is None or stream.source is not source or max_physical_batch_size not in (None, stream.micro_batch):
            stream = self._stream = Stream(source, max_physical_batch_size=max_physical_batch_size)
        try:
            rows = kept_rows(self.keep, [param for _, param in self._trainable()])
            for grads in stream(loss_fn, x, y, rows=rows):
                self.accumulate([grads[name] for name in names])
                del grads   # before the next are made: memory for one micro-batch
        except BaseException:
            self.discard()
            raise

    def accumulate_empty(self) -> None:
        """A batch that Poisson sampling left empty: step() then releases full noise, and it counts as a step."""
        self.accumulate([param.new_empty(0, *param.shape) for _, param in self._trainable()])

    def step(self, closure: Callable[[], Any] | None = None, *, grad_samples: Any = None) -> Any:
        """Adds the gradients that are there, releases with noise, calls the hooks, steps the inner optimizer.

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
        try:
            record = self._release(total, grads)
            with ExitStack() as hooks:   # every hook runs, whatever another does: a ledger must not miss a release
                for hook in reversed(self._hooks):
                    hooks.callback(hook, self, record)
        except BaseException:
            self._give_up(total)
            raise
        self.original_optimizer.step()
        return loss

    def attach_step_hook(self, fn: Callable[[RSDPOptimizer, StepRecord], None]) -> None:
        """fn(optimizer, record) after each release and before its use, in the order attached: a ledger's line is there
        before parameters change. Where one raises, p.grad is cleared and the inner optimizer does not step."""
        self._hooks.append(fn)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears p.grad, p.grad_sample and p.grad_batch. Refused while a logical batch is open: forgetting it would
        lose samples, keeping it would count them twice where the batch is run again."""
        self._refuse_if_open("zero_grad", "neither released nor given up")
        clear_samples(self._params())
        self.original_optimizer.zero_grad(set_to_none)

    def _names_in(self, source: Source) -> list[str]:
        """What the source calls our parameters, in our order."""
        theirs = {id(param): name for name, param in source.params}
        ours = self._trainable()
        for name, param in ours:
            if id(param) not in theirs:
                raise ValueError(f"source: has no gradients for {name}; make it from the model that it trains")
        names = [theirs[id(param)] for _, param in ours]
        left = sorted(set(theirs.values()) - set(names))
        if left:
            raise ValueError(f"{left[0]}: not among the optimizer's parameters; add it there, or requires_grad_(False)")
        return names

    def _sum(self) -> PrivateSum:
        return self._begin({name: getattr(self, name) for name in SETTINGS})

    def _gradients(self, total: PrivateSum, grad_samples: Any) -> list[list[Grad]]:
        """Checked, and off the parameters: whatever happens next, no later step finds them."""
        if grad_samples is None and self.unused_params == "zero":
            _fill_unused(total.params)
        grads = self._take(total, grad_samples)
        if grad_samples is None:
            clear_samples(total.params)
        return grads

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={getattr(self, name)!r}" for name in (*SETTINGS[:3], "schedule", "noise"))
        return f"RSDPOptimizer({settings}) of {self.original_optimizer!r}"


def _holds_samples(param: torch.Tensor) -> bool:
    return any(getattr(param, attribute, None) is not None for attribute in inputs.ATTRIBUTES)


def _fill_unused(params: Sequence[Any]) -> None:
    """Zeros [N, *shape] (one value, expanded: no memory) where other parameters have gradients."""
    for held in (value for p in params for a in inputs.ATTRIBUTES if (value := getattr(p, a, None)) is not None):
        sizes = [part.shape[0] for part in (held if isinstance(held, list) else [held])]
        for param in params:
            if not _holds_samples(param):
                param.grad_sample = [param.detach().new_zeros(()).expand(n, *param.shape) for n in sizes]
        return
