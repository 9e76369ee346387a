"""The loss of a whole batch, for sources that need one number to start backward from, and the checks around it.

    batch = BatchLoss(model, layers)
    batch.check_model(x)                                   # before the pass (mixing.py)
    loss, rows = batch(loss_fn, reduction, outputs, y, n)  # of the sum: backward from here
    batch.check_rows(rows)                                 # after it

Is the loss a mean, or a sum, over samples? Its gradient by the outputs says so: row i must be the gradient of
loss_fn on sample i alone. One sample is asked for in every micro-batch, another one each time, eight in the first: a
weighted mean shows in any sample whose weight is not the mean one. Values would not do: where all samples lose the
same, any weighted mean has that value too.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from dprs_kernels.grads.mixing import Call, check_batch_first, check_independent, tensors, tolerance
from dprs_kernels.grads.source import REDUCTIONS, LossFn, check_scalar, option_of

FIRST_SAMPLES = 8
IGNORED = -100   # torch's default ignore_index


def check_targets(loss_fn: LossFn, reduction: str, y: Any) -> None:
    """For sources that call loss_fn on a whole batch: no ignored targets under a mean. Of a function that does not say,
    -100 is taken for ignored, as torch's losses do."""
    if reduction == "sum":
        return
    given = option_of(loss_fn, "ignore_index")
    ignored = IGNORED if given is None else given
    for part in y if isinstance(y, tuple) else (y,):
        if not part.is_floating_point() and part.dtype != torch.bool and bool((part == ignored).any()):
            raise ValueError(
                f"loss_fn: a mean divides by the number of targets that are not ignore_index ({ignored}), which mixes "
                "samples; use reduction='sum', or FunctionalSource (a mean over each sample's own targets)"
            )


class BatchLoss:
    """layers: path -> module, those with trainable parameters. batch_first: of which of them the first input must have
    the batch as its first dimension."""

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module], batch_first: Collection[str]) -> None:
        check_batch_first(model)
        self.calls: dict[str, list[Call]] = {}   # of layers, by path, as seen in the last check of the model
        self._model, self._layers, self._batch_first = model, layers, batch_first
        self._dims: tuple[int | None, ...] = ()
        self._modes: set[tuple[bool, ...]] = set()   # in which the model was found independent
        self._passed: LossFn | None = None
        self._turn = 0

    def check_model(self, x: Any, *, again: bool = False) -> None:
        """Before the pass itself: it runs the model. Again where a module went from eval to train, or back."""
        mode = tuple(module.training for module in self._model.modules())
        if again or mode not in self._modes:
            found = check_independent(self._model, self._layers, x)
            for path in self._batch_first:
                if any(call.inputs[0] != 0 for call in found.calls.get(path, [])):
                    raise ValueError(
                        f"{path}: the batch is not the first dimension of its input, which per-sample gradients need; "
                        "transpose after the layer, or use FunctionalSource"
                    )
            self.calls.update(found.calls)
            self._dims = found.outputs
            if found.conclusive:
                self._modes.add(mode)

    def __call__(self, loss_fn: LossFn, reduction: str, outputs: Any, y: Any, n: int) -> tuple[torch.Tensor, Rows]:
        """loss_fn of the batch, times n if it is a mean: rows are then each sample's own gradient."""
        if isinstance(outputs, torch.Tensor) and (outputs.dim() == 0 or outputs.shape[0] != n):
            raise ValueError(f"model: outputs have shape {list(outputs.shape)}; expected {n} samples, batch first")
        tensors(outputs)   # of kinds that we know
        leaves, tree = tree_flatten(outputs)
        rows = Rows(loss_fn, reduction, leaves, tree, y, n)
        loss = loss_fn(tree_unflatten(rows.leaves, tree), y)
        check_scalar(loss)
        return loss * n if reduction == "mean" else loss, rows

    def check_rows(self, rows: Rows, scale: float = 1.0) -> None:
        """After backward: rows of the loss's gradient against those of samples alone. scale: of what backward started
        from, where the caller divided the loss by it."""
        self._turn += 1
        asked = {self._turn % rows.n}
        if rows.loss_fn is not self._passed:
            asked |= {i * rows.n // FIRST_SAMPLES for i in range(FIRST_SAMPLES)}
        if rows.n > 1:
            for i in sorted(asked):
                rows.check(i, self._dims, scale)
            self._passed = rows.loss_fn


class Rows:
    """The gradient of one batch's loss by the model's outputs, caught on its way back."""

    def __init__(self, loss_fn: LossFn, reduction: str, leaves: list[Any], tree: Any, y: Any, n: int) -> None:
        self.loss_fn, self.reduction, self.n = loss_fn, reduction, n
        self._tree, self._y = tree, y
        self._caught: dict[int, tuple[torch.Tensor, int]] = {}   # gradient, its version
        # Views: the gradient of an output by the loss alone, where the model uses it elsewhere as well.
        self.leaves = [self._view(i, leaf) for i, leaf in enumerate(leaves)] if n > 1 else leaves

    def _view(self, place: int, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.requires_grad:
            return leaf
        view, caught = leaf.view_as(leaf), self._caught   # a hook that held self would hold the graph, in a circle

        def keep(grad: torch.Tensor) -> None:
            caught[place] = grad, grad._version

        view.register_hook(keep)
        return view

    def check(self, i: int, dims: tuple[int | None, ...], scale: float) -> None:
        """Sample i. dims: the batch dimension of each floating-point output."""
        known, given, alone = iter(dims), [], []
        for place, leaf in enumerate(self.leaves):
            part = leaf
            if isinstance(leaf, torch.Tensor):
                guess = 0 if leaf.dim() and leaf.shape[0] == self.n else None
                dim = next(known, guess) if leaf.is_floating_point() else guess
                part = leaf.detach() if dim is None else leaf.detach().narrow(dim, i, 1)
                if leaf.requires_grad and dim is not None:
                    part = part.clone().requires_grad_()
                    alone.append((part, place, dim))
            given.append(part)
        targets = tuple(part[i : i + 1] for part in self._y) if isinstance(self._y, tuple) else self._y[i : i + 1]
        with torch.enable_grad():
            loss = self.loss_fn(tree_unflatten(given, self._tree), targets)
        if not alone or not loss.requires_grad:
            return
        own = torch.autograd.grad(loss, [part for part, _, _ in alone], allow_unused=True)
        pairs = []
        for (part, place, dim), mine in zip(alone, own, strict=True):
            whole, version = self._caught.get(place, (None, 0))
            if whole is not None and whole._version != version:
                raise ValueError(
                    "model: the gradient of its output was overwritten on the way back; a backward of your own must "
                    "not write to the gradient that it gets"
                )
            a = torch.zeros_like(part) if whole is None else whole.narrow(dim, i, 1)
            pairs.append((a * scale if scale != 1 else a, torch.zeros_like(part) if mine is None else mine))
        if _apart(pairs, 1.0):
            other = next(name for name in REDUCTIONS if name != self.reduction)
            times = self.n if self.reduction == "mean" else 1 / self.n   # what a row is of its own under the other one
            raise ValueError(
                f"loss_fn: a sample's gradient in a batch is not that of its own loss, as in a {self.reduction}; it "
                "mixes samples, so they have no gradients of their own"
                if _apart(pairs, times)
                else f"loss_fn: taken as a {self.reduction} over samples, but it is a {other}; pass "
                f"loss_reduction={other!r}"
            )


def _apart(pairs: list[tuple[torch.Tensor, torch.Tensor]], times: float) -> bool:
    """a is not times * b, beyond rounding. False for NaN: a diverged model is not a wrong loss."""
    allowed = tolerance(pairs[0][0])
    for a, b in pairs:
        expected = b if times == 1 else b.double() * times
        if bool(torch.dist(a.to(expected), expected) > allowed * (expected.norm() + a.norm()) + 1e-30):
            return True
    return False
