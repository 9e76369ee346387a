"""Parameters and per-sample gradients as users hand them over, checked before anything is written.

Accepted: p.grad_sample (a tensor, or a list of them after accumulated backward passes, as Opacus leaves it),
p.grad_batch (BackPACK), or an explicit list or name -> tensor dict, where OuterProducts or RowGrads may stand for a
tensor. Taking p.grad_sample or p.grad_batch consumes it: the attribute becomes None, the memory is freed, and the same
gradients cannot be used twice.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from dprs_kernels.native import DTYPES, MAX_DIMS
from dprs_kernels.outer import Grad, OuterProducts
from dprs_kernels.row_grads import RowGrads

ATTRIBUTES = ("grad_sample", "grad_batch")
MicroBatch = list[Grad]


def named_params(params: Iterable[Any]) -> tuple[list[str], list[torch.Tensor]]:
    """Names (for messages and dicts) and tensors, from tensors or (name, tensor) pairs."""
    if isinstance(params, torch.Tensor):
        raise ValueError("params: got a tensor; expected a list of parameters, e.g. list(model.parameters())")
    items = list(params)
    if {torch.nn.Parameter}.issuperset(map(type, items)):
        names, tensors = list(_numbered(len(items))), items
    else:
        names, tensors = [], []
        for i, item in enumerate(items):
            name, tensor = item if isinstance(item, tuple) and len(item) == 2 else (f"params[{i}]", item)
            if not isinstance(tensor, torch.Tensor):
                raise ValueError(f"params: item {i} is {type(tensor).__name__}; expected a tensor or (name, tensor)")
            names.append(str(name))
            tensors.append(tensor)
    if not DTYPES.keys() >= {tensor.dtype for tensor in tensors}:
        name, tensor = next(pair for pair in zip(names, tensors, strict=True) if pair[1].dtype not in DTYPES)
        raise ValueError(f"{name}: dtype {tensor.dtype} is not supported; expected one of {_dtype_names()}")
    if len({tensor.device for tensor in tensors}) > 1:
        device = tensors[0].device
        name, tensor = next(pair for pair in zip(names, tensors, strict=True) if pair[1].device != device)
        raise ValueError(f"{name}: on {tensor.device}, but {names[0]} is on {device}; use one device")
    if len(set(map(id, tensors))) != len(tensors):
        twice = [n for n, t in zip(names, tensors, strict=True) if sum(t is other for other in tensors) > 1]
        raise ValueError(f"params: {' and '.join(twice)} are the same tensor; list a shared parameter once")
    return names, tensors


@lru_cache(maxsize=64)
def _numbered(count: int) -> tuple[str, ...]:
    return tuple(f"params[{i}]" for i in range(count))


def micro_batches(
    names: Sequence[str], params: Sequence[torch.Tensor], grad_samples: Any
) -> tuple[list[MicroBatch], list[str]]:
    """The gradients as micro-batches (a list of P tensors each), and the attributes they came from ("" for
    explicit ones). Consumes nothing."""
    sources = [""] * len(params)
    if grad_samples is None:
        found = [_attribute(name, param) for name, param in zip(names, params, strict=True)]
        sources, given = [source for source, _ in found], [value for _, value in found]
    elif isinstance(grad_samples, Mapping):
        given = _from_mapping(names, grad_samples)
    elif isinstance(grad_samples, (list, tuple)):
        if len(grad_samples) != len(params):
            raise ValueError(f"grad_samples: got {len(grad_samples)} tensors for {len(params)} parameters")
        given = list(grad_samples)
    else:
        raise ValueError(
            f"grad_samples: got {type(grad_samples).__name__}; expected a list in the order of params, or a "
            "name -> tensor dict together with named params"
        )
    if _plain(params, given):
        return [given], sources
    accumulated = any(isinstance(value, (list, tuple)) for value in given)
    batches = _one_by_one(names, given) if accumulated else [given]
    for batch in batches:
        _check(names, params, batch)
    return batches, sources


def _one_by_one(names: Sequence[str], given: Sequence[Any]) -> list[MicroBatch]:
    """The micro-batches of parameters that have a list of gradients each."""
    parts = [list(value) if isinstance(value, (list, tuple)) else [value] for value in given]
    for name, part in zip(names, parts, strict=True):
        if len(part) != len(parts[0]):
            raise ValueError(
                f"{name}: {len(part)} accumulated micro-batches, but {names[0]} has {len(parts[0])}; was a "
                "parameter skipped in one of the backward passes?"
            )
    return [list(batch) for batch in zip(*parts, strict=True)]


def consume(params: Sequence[torch.Tensor], sources: Sequence[str]) -> None:
    if not any(sources):
        return
    for param, source in zip(params, sources, strict=True):
        if source:
            setattr(param, source, None)


def _from_mapping(names: Sequence[str], grads: Mapping[str, Any]) -> list[Any]:
    missing = [name for name in names if name not in grads]
    if missing:
        raise ValueError(
            f"grad_samples: no entry for {missing[0]!r} ({len(missing)} missing); a dict goes with named params, e.g. "
            "params=list(model.named_parameters())"
        )
    if len(grads) > len(names):
        extra = sorted(set(grads) - set(names))
        raise ValueError(f"grad_samples: {extra[0]!r} is not among params ({len(extra)} unknown entries)")
    return [grads[name] for name in names]


def _attribute(name: str, param: torch.Tensor) -> tuple[str, Any]:
    held = [(attribute, getattr(param, attribute, None)) for attribute in ATTRIBUTES]
    present = [(attribute, value) for attribute, value in held if value is not None]
    if len(present) == 1:
        return present[0]
    if present:
        raise ValueError(f"{name}: has both grad_sample and grad_batch; pass grad_samples= to say which one to use")
    used = any(hasattr(param, attribute) for attribute in ATTRIBUTES)
    cause = (
        "they were already used by an earlier step (a step consumes them): run forward and backward again first"
        if used
        else "no backward pass has filled p.grad_sample (Opacus GradSampleModule) or p.grad_batch (BackPACK "
        "BatchGrad, module extended?), or the parameter took no part in the loss; pass grad_samples= otherwise"
    )
    raise ValueError(f"{name}: no per-sample gradients for this parameter of shape {list(param.shape)}; {cause}")


def _check(names: Sequence[str], params: Sequence[torch.Tensor], batch: MicroBatch) -> None:
    if _plain(params, batch):
        return
    samples: int | None = None
    for name, param, grad in zip(names, params, batch, strict=True):
        if not isinstance(grad, (torch.Tensor, OuterProducts, RowGrads)):
            raise ValueError(f"{name}: per-sample gradients are {type(grad).__name__}; expected a tensor")
        shape = grad.shape   # once: torch makes a tuple of it each time
        if len(shape) < 1 or shape[1:] != param.shape:
            raise ValueError(
                f"{name}: per-sample gradients have shape {list(shape)}; expected [N, "
                f"{', '.join(map(str, param.shape))}], one row per sample"
            )
        if samples is None:
            samples = shape[0]
        if shape[0] != samples:
            raise ValueError(
                f"{name}: not as many samples as {names[0]} has; all parameters need the same samples (how many is "
                "private, and not told here)"
            )
        if grad.dtype not in DTYPES or grad.layout != torch.strided:
            kind = grad.dtype if grad.layout == torch.strided else grad.layout
            raise ValueError(f"{name}: gradients of {kind} are not supported; expected dense {_dtype_names()}")
        if grad.device != param.device:
            raise ValueError(f"{name}: per-sample gradients on {grad.device}, parameter on {param.device}")
        if len(shape) > MAX_DIMS:
            raise ValueError(f"{name}: {len(shape)} dimensions; expected at most {MAX_DIMS}")


def _plain(params: Sequence[torch.Tensor], batch: MicroBatch) -> bool:
    """Is there nothing to complain of? For the usual batch, of dense tensors, in half of the time that it takes to say
    what is wrong: a model may have a thousand of them. False where it has to be looked at."""
    if not batch or not {torch.Tensor}.issuperset(map(type, batch)) or batch[0].dim() < 1:
        return False
    samples, device = batch[0].shape[0], params[0].device
    for param, grad in zip(params, batch, strict=True):
        shape = grad.shape
        if shape != (samples, *param.shape) or len(shape) > MAX_DIMS or grad.dtype not in DTYPES:
            return False
        if grad.device != device or grad.layout != torch.strided:
            return False
    return True


def _dtype_names() -> str:
    return ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)


class UsedOnce:
    """Remembers gradients that went into a sum: the same tensor, unchanged, must not go in again, because its
    samples would count twice and break the bound. Weak, so that freed memory may be reused; by version, so
    that one buffer may be filled again by torch operations."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}

    def add(self, names: Sequence[str], batch: MicroBatch) -> None:
        fresh = {}
        for name, grad in zip(names, batch, strict=True):
            tensor, version = tensor_of(grad), version_of(grad)
            seen, at = self._seen.get(id(tensor), (None, -2))
            if seen is not None and seen() is tensor and at == version and grad.shape[0] > 0:
                raise ValueError(
                    f"{name}: these per-sample gradients were already added to this sum; every sample may enter once"
                )
            fresh[id(tensor)] = (weakref.ref(tensor), version)
        self._seen.update(fresh)


def version_of(grad: Grad) -> int:
    """Changes when torch writes to it; -1 where torch does not count."""
    if isinstance(grad, (OuterProducts, RowGrads)):
        return grad.version()
    return -1 if grad.is_inference() else grad._version


def tensor_of(grad: Grad) -> torch.Tensor:
    """What identifies it."""
    if isinstance(grad, RowGrads):
        return grad.values
    return grad.e if isinstance(grad, OuterProducts) else grad
