"""Per-sample gradients by BackPACK's BatchGrad (pip install "dprs_kernels[backpack]").

BackPACK returns g_i/n under a mean loss. The loss is multiplied by n before backward instead of the gradients after
it: rows are each sample's own gradient, without a pass over [n, D].

Only modules that own trainable parameters are extended: BatchGrad needs neither the others nor the loss, and
extended containers warn. Each module's gradients are taken from p.grad_batch by the extension hook, right after that
module's backward, and the attribute is deleted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from dprs_kernels.grads.batch_loss import BatchLoss, check_targets
from dprs_kernels.grads.source import (
    LossFn,
    check_batch,
    check_model,
    check_params,
    check_sum,
    completed,
    owners,
    reduction_of,
    trainable,
    whole_gradients,
)


class BackpackSource:
    """BackPACK as a source: Linear, Conv and ConvTranspose 1d to 3d, Embedding, BatchNorm in eval mode, and anything
    without trainable parameters between them. Other modules are refused by name.

    loss_reduction: of losses without a .reduction ("mean" if not given, or "sum"). loss_fn may be any function.

    Extends the model in place, for good (BackPACK keeps the inputs of extended modules while gradients are enabled:
    evaluate under torch.no_grad()).

    >>> model = torch.nn.Linear(3, 1)
    >>> source = BackpackSource(model)
    >>> grads = source.grads(torch.nn.MSELoss(), torch.randn(4, 3), torch.randn(4, 1))
    >>> {name: list(g.shape) for name, g in grads.items()}
    {'weight': [4, 1, 3], 'bias': [4, 1]}
    """

    def __init__(self, model: nn.Module, *, loss_reduction: str | None = None) -> None:
        self._library = _library()
        reduction_of(None, loss_reduction)
        check_model(model)
        self.model = model
        self.params = trainable(model)
        self._given = loss_reduction
        self._names = {id(param): name for name, param in self.params}
        self._owners = owners(model)
        for path, module in self._owners:
            self._check_supported(path, module)
        self._calls: dict[int, int] = {}
        for _, module in self._owners:
            self._library.extend(module)
            module.register_forward_pre_hook(self._count)
        self._loss = BatchLoss(model, dict(self._owners), batch_first=dict(self._owners))
        self._added_up = False

    def grads(self, loss_fn: LossFn, x: Any, y: Any) -> dict[str, torch.Tensor]:
        n = check_batch(x, y)
        reduction = reduction_of(loss_fn, self._given)
        check_model(self.model)
        check_params(self.model, self.params)
        check_targets(loss_fn, reduction, y)
        if n == 0:
            return completed(self.params, {}, 0)
        self._loss.check_model(x)
        inputs = tuple(part.detach() for part in (x if isinstance(x, tuple) else (x,)))
        found: dict[str, torch.Tensor] = {}
        self._calls = {}
        try:
            with torch.enable_grad():
                outputs = self.model(*inputs)
                self._check_calls()
                loss, rows = self._loss(loss_fn, reduction, outputs, y, n)
                with self._library.backpack(
                    self._library.extensions.BatchGrad(), extension_hook=lambda module: self._take(module, found)
                ):
                    whole = whole_gradients(loss, self.params)
        finally:
            for _, module in self._owners:
                self._library.memory_cleanup(module)   # inputs of modules that backward did not reach
        self._loss.check_rows(rows)
        grads = completed(self.params, found, n, whole)
        if not self._added_up:
            check_sum(grads, dict(zip(grads, whole, strict=True)))
            self._added_up = True
        return grads

    def _take(self, module: nn.Module, found: dict[str, torch.Tensor]) -> None:
        """Runs after each module's backward. A weight shared by two modules gets the sum of both."""
        for param in module.parameters(recurse=False):
            grad = getattr(param, "grad_batch", None)
            if grad is None:
                continue
            del param.grad_batch   # type: ignore[attr-defined]
            name = self._names[id(param)]
            found[name] = found[name] + grad if name in found else grad

    def _count(self, module: nn.Module, inputs: Any) -> None:
        self._calls[id(module)] = self._calls.get(id(module), 0) + 1

    def _check_calls(self) -> None:
        for path, module in self._owners:
            times = self._calls.get(id(module), 0)
            if times > 1:
                raise ValueError(
                    f"{path} ({type(module).__name__}): called {times} times in one forward; BackPACK keeps the last "
                    "call's input only; use FunctionalSource"
                )

    def _check_supported(self, path: str, module: nn.Module) -> None:
        name = f"{path} ({type(module).__name__})"
        # BatchGrad has no public list of its modules; registering a known one raises ValueError.
        try:
            self._library.extensions.BatchGrad().set_module_extension(type(module), None)
        except ValueError:
            if isinstance(module, nn.RNNBase):
                reason = "gradients through its final states would be lost"
            elif isinstance(module, nn.Embedding) and (
                module.padding_idx is not None or module.scale_grad_by_freq or module.sparse
            ):
                reason = "padding_idx, scale_grad_by_freq and sparse are not supported"
            elif isinstance(module, nn.Embedding) and module.weight.dtype != torch.float32:
                reason = f"float32 only, got {module.weight.dtype}"
            elif getattr(module, "padding_mode", "zeros") != "zeros":
                reason = f"padding_mode={module.padding_mode!r} is not supported"
            else:
                return
        else:
            reason = "BatchGrad knows no such module (it goes by the exact class)"
        raise ValueError(f"{name}: BackPACK cannot make its per-sample gradients: {reason}; use FunctionalSource")


def _library() -> Any:
    try:
        import backpack
        import backpack.extensions
    except ImportError as error:
        raise ImportError(f'BackpackSource needs BackPACK ({error}): pip install "dprs_kernels[backpack]"') from error
    return backpack
