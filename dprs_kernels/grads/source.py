"""The contract of a gradient source, and the checks that all of them share.

    source = FunctionalSource(model)
    total = PrivateSum(source.params, loss_reduction=source.loss_reduction, ...)
    total.add(source.grads(loss_fn, x, y))          # once per micro-batch
    total.release()

Row i of a gradient is the gradient of loss_fn on sample i alone: what a batch of one gives, for a mean and for a sum.
A parameter that took no part in the loss gets zeros, and so noise like all others: whether a branch was used may
depend on the data.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from dprs_kernels.grads.arena import Arena
from dprs_kernels.outer import Grad

LossFn = Callable[[Any, Any], torch.Tensor]
Named = list[tuple[str, nn.Parameter]]
REDUCTIONS = ("mean", "sum")


class Source(Protocol):
    """Makes per-sample gradients of a loss.

    params: named, trainable, in the model's order: what PrivateSum gets.
    loss_reduction: what PrivateSum must be told: "sum" if rows are each sample's own gradient, "mean" if they are
        divided by the micro-batch's n.
    """

    params: Named
    loss_reduction: str

    def grads(self, loss_fn: LossFn, x: Any, y: Any) -> dict[str, torch.Tensor]:
        """Forward and backward of one micro-batch: name -> [n, *shape]. The caller owns them; p.grad is left as it was.

        loss_fn(outputs, targets): a mean or a sum over samples. x, y: tensors, or tuples of them (several inputs),
        batch dimension first. n = 0 gives [0, *shape] and does not run the model.
        """
        ...


@runtime_checkable
class StreamingSource(Source, Protocol):
    """A source that writes into an engine's arena, and may leave gradients as factors."""

    def grads_into(self, arena: Arena, loss_fn: LossFn, x: Any, y: Any) -> Mapping[str, Grad]:
        """As grads; what it returns is valid until arena.recycle()."""
        ...


def trainable(model: nn.Module) -> Named:
    """(name, parameter) pairs that require gradients; a shared parameter once, under its first name."""
    found = [(name, param) for name, param in model.named_parameters() if param.requires_grad]
    if not found:
        raise ValueError(
            f"model: {type(model).__name__} has no trainable parameter; call requires_grad_(True) on those to train"
        )
    return found


def check_params(params: Named) -> None:
    for name, param in params:
        if not param.requires_grad:
            raise ValueError(f"{name}: frozen since the source was made; make a new source after (un)freezing")


def check_model(model: nn.Module) -> None:
    """Refuses modules through which one sample acts on another's gradient, or on buffers that get no noise."""
    for path, module in model.named_modules():
        name = f"{path or 'model'} ({type(module).__name__})"
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and (module.training or module.running_mean is None):
            raise ValueError(
                f"{name}: normalises with the statistics of the batch, so samples have no gradients of their own; "
                "replace it by nn.GroupNorm, or freeze its statistics: .eval() on this module (it needs running "
                "statistics from public data)"
            )
        if isinstance(module, nn.modules.instancenorm._InstanceNorm) and module.training and module.track_running_stats:
            raise ValueError(
                f"{name}: updates running statistics from private samples, without noise; use "
                "track_running_stats=False, or .eval() on this module"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.max_norm is not None:
            raise ValueError(f"{name}: max_norm rescales the rows that samples use, without noise; use max_norm=None")


def check_batch(x: Any, y: Any) -> int:
    """n, the number of samples: the first dimension of every tensor of x and y."""
    sizes: dict[str, int] = {}
    for name, value in (("x", x), ("y", y)):
        parts = value if isinstance(value, tuple) else (value,)
        for i, part in enumerate(parts):
            label = f"{name}[{i}]" if isinstance(value, tuple) else name
            if not isinstance(part, torch.Tensor):
                raise ValueError(f"{label}: got {type(part).__name__}; expected a tensor, or a tuple of tensors")
            if part.dim() == 0:
                raise ValueError(f"{label}: has no dimensions; expected [n, ...], the batch dimension first")
            sizes[label] = part.shape[0]
    if not sizes:
        raise ValueError("x and y: no tensors; expected [n, ...] each")
    first, n = next(iter(sizes.items()))
    for label, size in sizes.items():
        if size != n:
            raise ValueError(f"{label}: {size} samples, but {first} has {n}; the batch dimension comes first in all")
    return n


def reduction_of(loss_fn: Any, given: str | None = None) -> str:
    """How loss_fn joins samples: its .reduction (or the one bound by functools.partial), else `given`, else "mean"."""
    bound = loss_fn.keywords.get("reduction") if isinstance(loss_fn, partial) else getattr(loss_fn, "reduction", None)
    if given not in (None, *REDUCTIONS):
        raise ValueError(f"loss_reduction: got {given!r}; expected 'mean' or 'sum'")
    if bound is not None and bound not in REDUCTIONS:
        raise ValueError(f"loss_fn: reduction {bound!r}; expected 'mean' or 'sum': backward starts from one number")
    if bound and given and bound != given:
        raise ValueError(f"loss_reduction: got {given!r}, but loss_fn.reduction is {bound!r}; leave one out")
    reduction = bound or given or "mean"
    weighted = isinstance(loss_fn, (nn.CrossEntropyLoss, nn.NLLLoss)) and loss_fn.weight is not None
    if weighted and reduction == "mean":
        raise ValueError(
            "loss_fn: a mean with class weights divides by the weights of the other samples too, so that a sample's "
            "influence has no bound; use reduction='sum'"
        )
    return reduction


def check_scalar(loss: torch.Tensor) -> None:
    if not isinstance(loss, torch.Tensor) or loss.dim():
        got = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(f"loss_fn: returned {got}; expected one number, the mean or the sum over samples")


def check_targets(loss_fn: LossFn, reduction: str, y: Any) -> None:
    """For sources that call loss_fn on a whole batch."""
    ignored = getattr(loss_fn, "ignore_index", None)
    if ignored is None or reduction == "sum" or not isinstance(y, torch.Tensor) or y.is_floating_point():
        return
    if bool((y == ignored).any()):
        raise ValueError(
            f"loss_fn: a mean divides by the number of targets that are not ignore_index ({ignored}), which mixes "
            "samples; use reduction='sum', or FunctionalSource (a mean over each sample's own targets)"
        )


@torch.no_grad()
def check_loss(loss_fn: LossFn, reduction: str, outputs: Any, y: Any, n: int) -> None:
    """For sources that call loss_fn on a whole batch: is it the mean (or sum) of the samples' own losses?

    Asks it about the first two samples, together and apart. A loss that mixes samples, or a wrong reduction, would
    scale gradients by other samples' data or by n.
    """
    if not isinstance(outputs, torch.Tensor):
        return
    if outputs.dim() == 0 or outputs.shape[0] != n:
        raise ValueError(f"model: outputs have shape {list(outputs.shape)}; expected {n} samples, batch first")
    if n < 2:
        return

    def loss_of(rows: slice) -> torch.Tensor:
        targets = tuple(part[rows] for part in y) if isinstance(y, tuple) else y[rows]
        return loss_fn(outputs.detach()[rows], targets).double()

    both, first, second = torch.stack([loss_of(slice(0, 2)), loss_of(slice(0, 1)), loss_of(slice(1, 2))]).tolist()
    tolerance = _tolerance(outputs) * (abs(first) + abs(second)) + 1e-30
    means = {"mean": (first + second) / 2, "sum": first + second}
    off = {name: abs(both - value) for name, value in means.items()}
    if off[reduction] > tolerance:   # False for NaN: a diverged model is not a wrong loss
        other = next(name for name in REDUCTIONS if name != reduction)
        raise ValueError(
            f"loss_fn: taken as a {reduction} over samples, but it is a {other}; pass loss_reduction={other!r}"
            if off[other] <= tolerance
            else f"loss_fn: of two samples together it is not the {reduction} of each one's loss; it mixes samples, so "
            "they have no gradients of their own"
        )


@torch.no_grad()
def check_independent(model: nn.Module, x: Any) -> None:
    """For sources that run the model on a whole batch: is a sample's output its own?

    Runs the first two samples, then again with other values in the second one and the same random numbers (dropout):
    the first one's output must stay. Two samples, twice, once per source.
    """
    parts = [part.detach()[:2] for part in (x if isinstance(x, tuple) else (x,))]
    # Another second sample: for indices (words) the first one again, which is in range; for numbers a new one.
    others = [torch.stack([p[0], 1 - p[1] if p.is_floating_point() else p[0]]) for p in parts]
    devices = sorted({part.device.index for part in parts if part.device.type == "cuda"})
    outputs = []
    for given in (parts, others):
        with torch.random.fork_rng(devices=devices):
            found = getattr(model, "_orig_mod", model)(*given)   # a compiled one would compile again for two samples
        outputs.append(found if isinstance(found, torch.Tensor) else None)
    first, again = outputs
    if first is None or again is None or first.dim() == 0 or first.shape[0] != 2:
        return   # check_loss asks for samples first
    tolerance = _tolerance(first) / 64 * first[0].abs().max()
    if bool(((first[0] - again[0]).abs() > tolerance).any()):   # False for NaN
        raise ValueError(
            f"model: {type(model).__name__} mixes samples: the output of one changes with the values of another, so "
            "they have no gradients of their own; look for statistics over the batch dimension, or a batch dimension "
            "that is not the first"
        )


class BatchLoss:
    """loss_fn of a whole batch, one number. check_independent has its say once, check_loss once per loss function (it
    calls it three times), at the first batch that has two samples to compare."""

    def __init__(self, model: nn.Module) -> None:
        self._model: nn.Module | None = model   # None: found independent
        self._passed: LossFn | None = None

    def check_model(self, x: Any, n: int) -> None:
        """Before the pass itself: it runs the model."""
        if self._model is not None and n > 1:
            check_independent(self._model, x)
            self._model = None

    def __call__(self, loss_fn: LossFn, reduction: str, outputs: Any, y: Any, n: int) -> torch.Tensor:
        if self._passed is not loss_fn:
            check_loss(loss_fn, reduction, outputs, y, n)
            self._passed = loss_fn if n > 1 else None
        loss = loss_fn(outputs, y)
        check_scalar(loss)
        return loss


def completed(
    params: Named, found: Mapping[str, Grad], n: int, whole: Sequence[torch.Tensor | None] | None = None
) -> dict[str, Any]:
    """All of params, zeros [n, *shape] for those that took no part.

    whole: the batch's ordinary gradients where autograd made them, None where a parameter took no part. A parameter
    that took part must have been found: otherwise it was used in a way that the library does not see.
    """
    grads: dict[str, Grad] = {}
    for i, (name, param) in enumerate(params):
        if name not in found and whole is not None and whole[i] is not None:
            raise ValueError(
                f"{name}: took part in the loss, but got no per-sample gradients; is it used outside of its module's "
                "forward? FunctionalSource takes any use"
            )
        grads[name] = found[name] if name in found else param.detach().new_zeros(n, *param.shape)
    return grads


def whole_gradients(loss: torch.Tensor, params: Named) -> tuple[torch.Tensor | None, ...]:
    """The batch's ordinary gradients, which also makes module hooks run; unlike loss.backward() it leaves p.grad."""
    with warnings.catch_warnings():
        # torch warns of every first layer: its input, the data, requires no gradient.
        warnings.filterwarnings("ignore", message="Full backward hook is firing", category=UserWarning)
        return torch.autograd.grad(loss, [param for _, param in params], allow_unused=True)


def check_sum(grads: Mapping[str, torch.Tensor], whole: Mapping[str, torch.Tensor | None]) -> None:
    """Per-sample gradients add up to the batch's. One pass over [n, D]: meant for a source's first micro-batch, where
    it finds modules called twice, padding modes and other options that a library ignores in silence."""
    for name, total in whole.items():
        if total is None:
            continue
        rows = grads[name].flatten(1)
        off = (rows.sum(0) - total.flatten()).norm()
        if bool(off > _tolerance(rows) * rows.norm(dim=1).sum()):   # False for NaN
            raise ValueError(
                f"{name}: the per-sample gradients do not add up to the batch's: its module is used in a way that the "
                "library does not support (called twice, an option it ignores); FunctionalSource takes any use"
            )


def _tolerance(values: torch.Tensor) -> float:
    """Of the sum of magnitudes: rounding stays far below, a missing term far above."""
    low = torch.is_autocast_enabled(values.device.type) or values.dtype in (torch.bfloat16, torch.float16)
    return 2.0**-5 if low else 1e-3
