"""What our hooks do to autograd's graph: taps, hooks that outlive writes in place, leaves that are not ours."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._pytree import tree_leaves


class Tap(torch.autograd.Function):
    """Gives an output that needs no gradient a place in the graph: the first layer has no input to differentiate."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        return None, None


def hooked(output: torch.Tensor, take: Callable[[torch.Tensor], None]) -> torch.Tensor:
    """The output of a layer, its gradient handed to `take`. A view (a Linear with bias makes one of its product) loses
    its hook when it is written to, so that the tensor behind it gets the hook, or the output is copied."""
    if not output._is_view():
        output.register_hook(take)
        return output
    base, shape = output._base, output.shape
    assert base is not None
    same = base.numel() == output.numel() and base.is_contiguous() and output.is_contiguous()
    if base.requires_grad and same:
        base.register_hook(lambda e: take(e.reshape(shape)))
        return output
    output = output.clone()
    output.register_hook(take)
    return output


def versions_of(values: tuple[Any, ...]) -> list[tuple[torch.Tensor, int]]:
    leaves = values if all(isinstance(v, torch.Tensor) for v in values) else tree_leaves(values)   # mostly one tensor
    tensors = (v for v in leaves if isinstance(v, torch.Tensor) and not v.is_inference())
    return [(v.detach(), v._version) for v in tensors]   # one counter for both


def check_versions(path: str, versions: list[tuple[torch.Tensor, int]]) -> None:
    for value, version in versions:
        if value._version != version:
            raise ValueError(
                f"{path}: its input was overwritten after the call, or in it, by an operation in place, and its "
                "gradients need it; write h = h + ... for h += ..., use inplace=False"
            )


def foreign_leaf(loss: torch.Tensor, ours: set[int]) -> torch.Tensor | None:
    """A tensor that backward would reach and that is none of ours."""
    if loss.grad_fn is None:
        return loss
    seen, left = {loss.grad_fn}, [loss.grad_fn]
    while left:
        node = left.pop()
        if type(node).__name__ == "AccumulateGrad" and id(node.variable) not in ours:   # type: ignore[attr-defined]
            leaf: torch.Tensor = node.variable   # type: ignore[attr-defined]
            return leaf
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                left.append(following)
    return None
