"""Layers without a rule (attention, recurrent layers, your own): torch.func's vector-Jacobian product, per sample.

The layer is called again, on each sample as a batch of one, inside vmap. Which dimension of its arguments and outputs
is the batch was found by trying two batch sizes (mixing.py): a [T, T] bias is shared by all samples, also where T = n.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from dprs_kernels.grads.functional import batchable
from dprs_kernels.grads.mixing import Call, tensors

Take = Callable[[tuple[torch.Tensor, ...]], None]
WHOLE = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)   # use their children's weights without calling them


class _Taps(torch.autograd.Function):
    """Passes outputs through and hands all their gradients over at once; zeros for an output that nobody used."""

    @staticmethod
    def forward(ctx: Any, take: Any, anchor: torch.Tensor, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.take = take
        return tuple(output.clone() for output in outputs)   # views could not be written to

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ctx.take(grads)
        return None, None, *grads


class Vjp:
    """One call of a layer."""

    def __init__(self, path: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        self.path, self.module = path, module
        self.names = list(kwargs)
        self.values = [v.detach() if isinstance(v, torch.Tensor) else v for v in (*args, *kwargs.values())]

    def guess(self, output: Any, samples: int) -> Call:
        """For a call that the check did not see: the first dimension that has the batch's size."""
        second = isinstance(self.module, nn.RNNBase)   # of states: their layers come first

        def dim(value: Any, k: int) -> int | None:
            shape = value.shape if isinstance(value, torch.Tensor) else ()
            start = 1 if second and k else 0
            return next((d for d in range(start, len(shape)) if shape[d] == samples), None)

        found = tensors(output)
        return Call(
            tuple(dim(v, k) for k, v in enumerate(self.values)), tuple(dim(v, k) for k, v in enumerate(found))
        )

    def tap(self, output: Any, call: Call, take: Take, anchor: Callable[[torch.device], torch.Tensor]) -> Any:
        """The output, with a place in the graph where all its gradients are handed to `take`."""
        if None in call.outputs:   # a scale that is returned as well
            raise ValueError(
                f"{self.path}: output {call.outputs.index(None)} has no batch dimension, so that the layer's gradients "
                "through it cannot be told apart; use FunctionalSource"
            )
        leaves, tree = tree_flatten(output)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
        if not places:
            return None
        tapped = _Taps.apply(take, anchor(leaves[places[0]].device), *(leaves[i] for i in places))
        for i, leaf in zip(places, tapped, strict=True):
            leaves[i] = leaf
        return tree_unflatten(leaves, tree)

    def grads(self, cotangents: tuple[torch.Tensor, ...], call: Call) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(parameter, G) of its trainable parameters, from the gradients of its outputs. G may be written to."""
        whole = isinstance(self.module, WHOLE)
        wanted = {name: p for name, p in self.module.named_parameters(recurse=whole) if p.requires_grad}
        fixed = {name: p.detach() for name, p in self.module.named_parameters() if name not in wanted}
        fixed.update(self.module.named_buffers())
        out_dims = tuple(dim for dim in call.outputs if dim is not None)   # all: tap() saw to it
        batched = [(i, dim) for i, dim in enumerate(call.inputs) if dim is not None]
        count = len(self.values) - len(self.names)

        def one(cotangents: tuple[torch.Tensor, ...], given: list[torch.Tensor]) -> dict[str, torch.Tensor]:
            values = list(self.values)
            for (i, dim), value in zip(batched, given, strict=True):
                values[i] = value.unsqueeze(dim)

            def forward(weights: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
                out = torch.func.functional_call(
                    self.module, {**fixed, **weights}, tuple(values[:count]),
                    dict(zip(self.names, values[count:], strict=True)),
                )   # fmt: skip
                return tuple(tensors(out))

            pull = torch.func.vjp(forward, {name: p.detach() for name, p in wanted.items()})[1]
            (found,) = pull(tuple(c.unsqueeze(dim) for c, dim in zip(cotangents, out_dims, strict=True)))
            return dict(found)

        given = [self.values[i] for i, _ in batched]
        in_dims = (out_dims, [dim for _, dim in batched])
        try:
            with batchable(self.module, cotangents[0].device):
                found = torch.func.vmap(one, in_dims=in_dims)(tuple(cotangents), given)
        except RuntimeError as error:
            if "andomness" not in str(error):
                raise
            raise ValueError(
                f"{self.path}: {type(self.module).__name__} draws random numbers (dropout) in its forward, and would "
                "draw others when it is called again for per-sample gradients; set its dropout to 0 and put nn.Dropout "
                "after it, or use FunctionalSource"
            ) from error
        return [(wanted[name], _owned(grad, cotangents)) for name, grad in found.items()]


def _owned(grad: torch.Tensor, cotangents: tuple[torch.Tensor, ...]) -> torch.Tensor:
    """A gradient that may be added to: x + p hands autograd's own tensor through, others are expanded."""
    held = {c.untyped_storage().data_ptr() for c in cotangents}
    if grad.untyped_storage().data_ptr() in held or not grad.is_contiguous():
        return grad.clone(memory_format=torch.contiguous_format)
    return grad
