"""The contract of a gradient source, and the checks that all of them share.

    source = FunctionalSource(model)
    total = PrivateSum(source.params, ...)
    total.add(source.grads(loss_fn, x, y))          # once per micro-batch
    total.release()

Row i of a gradient is the gradient of loss_fn on sample i alone: what a batch of one gives, for a mean and for a sum.
A mean is multiplied by n before backward: rows divided by n would be rounded in another way for n and for n - 1, so
that one sample could move the others' (in 16 bits also on the way: there a loss with reduction="sum" is the exact one).
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
from dprs_kernels.grads.mixing import tolerance
from dprs_kernels.outer import Grad

LossFn = Callable[[Any, Any], torch.Tensor]
Named = list[tuple[str, nn.Parameter]]
REDUCTIONS = ("mean", "sum")
CLASS_LOSSES = (nn.functional.cross_entropy, nn.functional.nll_loss)   # a mean divides by the weights of the classes


class Source(Protocol):
    """Makes per-sample gradients of a loss.

    params: named, trainable, in the model's order: what PrivateSum gets.
    """

    params: Named

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


def owners(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Modules with trainable parameters of their own."""
    return [
        (path or "model", module)
        for path, module in model.named_modules()
        if any(param.requires_grad for param in module.parameters(recurse=False))
    ]


def check_params(model: nn.Module, params: Named) -> None:
    """Trained are those that were trainable when the source was made: no others, whose gradients would be raw."""
    known = {id(param) for _, param in params}
    for name, param in model.named_parameters():
        if param.requires_grad != (id(param) in known):
            raise ValueError(
                f"{name}: {'unfrozen, or added,' if param.requires_grad else 'frozen'} since the source was made; "
                "make a new source after (un)freezing"
            )


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


def option_of(loss_fn: Any, name: str) -> Any:
    """An attribute of a loss module, or a keyword bound by functools.partial; None where there is neither."""
    return loss_fn.keywords.get(name) if isinstance(loss_fn, partial) else getattr(loss_fn, name, None)


def reduction_of(loss_fn: Any, given: str | None = None) -> str:
    """How loss_fn joins samples: its .reduction (or the one bound by functools.partial), else `given`, else "mean"."""
    bound = option_of(loss_fn, "reduction")
    if given not in (None, *REDUCTIONS):
        raise ValueError(f"loss_reduction: got {given!r}; expected 'mean' or 'sum'")
    if bound is not None and bound not in REDUCTIONS:
        raise ValueError(f"loss_fn: reduction {bound!r}; expected 'mean' or 'sum': backward starts from one number")
    if bound and given and bound != given:
        raise ValueError(f"loss_reduction: got {given!r}, but loss_fn.reduction is {bound!r}; leave one out")
    reduction = bound or given or "mean"
    by_class = isinstance(loss_fn, (nn.CrossEntropyLoss, nn.NLLLoss)) or getattr(loss_fn, "func", None) in CLASS_LOSSES
    if by_class and reduction == "mean" and option_of(loss_fn, "weight") is not None:
        raise ValueError(
            "loss_fn: a mean with class weights divides by the weights of the other samples too, so that a sample's "
            "influence has no bound; use reduction='sum'"
        )
    return reduction


def check_scalar(loss: torch.Tensor) -> None:
    if not isinstance(loss, torch.Tensor) or loss.dim():
        got = f"shape {list(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ValueError(f"loss_fn: returned {got}; expected one number, the mean or the sum over samples")


def completed(
    params: Named, found: Mapping[str, Grad], n: int, whole: Sequence[torch.Tensor | None] | None = None
) -> dict[str, Any]:
    """All of params, zeros [n, *shape] for those that took no part. Others must have n rows.

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
        if grads[name].shape[0] != n:
            raise ValueError(
                f"{name}: gradients with other rows than samples: the batch must be the first dimension of every "
                "layer's input, and no layer may mix or reorder samples"
            )
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
        if bool(off > tolerance(rows) * rows.norm(dim=1).sum()):   # False for NaN
            raise ValueError(
                f"{name}: the per-sample gradients do not add up to the batch's: its module is used in a way that the "
                "library does not support (called twice, an option it ignores); FunctionalSource takes any use"
            )
