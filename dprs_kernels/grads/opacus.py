"""Per-sample gradients by Opacus's GradSampleModule (pip install "dprs_kernels[opacus]").

Three modes, as in Opacus: "hooks" (its own rules, torch.func for layers without one), "functorch" (torch.func for
every layer), "ew" (torch's expanded weights). Opacus undoes a mean by multiplying by n; here the loss is multiplied
instead, a number and not [n, D]. Either way rows are each sample's own gradient.
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

MODES = ("hooks", "functorch", "ew")


class OpacusSource:
    """Opacus as a source.

    model: a plain module, which is wrapped (see .module), or a GradSampleModule that you made.
    mode: of the wrapping; of a GradSampleModule it is given by its class.
    loss_reduction: of losses without a .reduction ("mean" if not given, or "sum").

    >>> model = torch.nn.Linear(3, 1)
    >>> source = OpacusSource(model, mode="hooks")
    >>> grads = source.grads(torch.nn.MSELoss(), torch.randn(4, 3), torch.randn(4, 1))
    >>> {name: list(g.shape) for name, g in grads.items()}
    {'weight': [4, 1, 3], 'bias': [4, 1]}
    """

    def __init__(self, model: nn.Module, mode: str = "hooks", *, loss_reduction: str | None = None) -> None:
        library = _library()
        if mode not in MODES:
            raise ValueError(f"mode: got {mode!r}; expected one of {', '.join(MODES)}")
        reduction_of(None, loss_reduction)
        wrapped = isinstance(model, library.AbstractGradSampleModule)
        self.model: nn.Module = model._module if wrapped else model   # type: ignore[assignment]
        check_model(self.model)
        self.params = trainable(self.model)
        self._given = loss_reduction
        self.module: Any = model if wrapped else _wrap(library, model, mode)
        _check_wrapper(library, self.module)
        self._expanded = isinstance(self.module, library.GradSampleModuleExpandedWeights)
        if self._expanded:
            _check_padding(self.model)
        layers = dict(owners(self.model))
        self._loss = BatchLoss(self.model, layers, batch_first=layers)
        self._added_up = False

    def grads(self, loss_fn: LossFn, x: Any, y: Any) -> dict[str, torch.Tensor]:
        n = check_batch(x, y)
        reduction = reduction_of(loss_fn, self._given)
        check_model(self.model)
        check_params(self.model, self.params)
        check_targets(loss_fn, reduction, y)
        self._check_state()
        if n == 0:
            return completed(self.params, {}, 0)
        self._loss.check_model(x)
        inputs = tuple(part.detach() for part in (x if isinstance(x, tuple) else (x,)))
        self._forget()
        try:
            with torch.enable_grad():
                outputs = self.module(*inputs)
                loss, rows = self._loss(loss_fn, reduction, outputs, y, n)
                # A module wrapped by the user may multiply by n on its own.
                undone = self.module.loss_reduction == "mean"
                whole = self._backward(loss / n if undone else loss)
        except RuntimeError as error:
            if self._expanded and "xpanded" in str(error):
                raise ValueError(f"model: expanded weights: {error}; use mode='hooks', or FunctionalSource") from error
            raise
        finally:
            self._forget()
            found = {name: param.grad_sample for name, param in self.params if _held(param)}   # type: ignore[attr-defined]
            self.module.set_grad_sample_to_none()
        self._loss.check_rows(rows, scale=n if undone else 1)
        grads = completed(self.params, found, n, whole)
        if whole is not None and not self._added_up:
            times = n if undone else 1
            check_sum(grads, {name: None if w is None else w * times for name, w in zip(grads, whole, strict=True)})
            self._added_up = True
        return grads

    def take(self) -> list[dict[str, torch.Tensor]]:
        """What your own backward passes left in p.grad_sample, consumed: one dict per accumulated micro-batch, never
        concatenated. A parameter must have been part of all of them or of none."""
        held = {name: param.grad_sample for name, param in self.params if _held(param)}   # type: ignore[attr-defined]
        parts = {name: value if isinstance(value, list) else [value] for name, value in held.items()}
        counts = {len(value) for value in parts.values()}
        if len(counts) > 1:
            fewest = min(parts, key=lambda name: len(parts[name]))
            raise ValueError(
                f"{fewest}: {len(parts[fewest])} accumulated micro-batches, others have {max(counts)}; it took no part "
                "in some of them: take() after each backward"
            )
        batches = []
        for i in range(next(iter(counts), 0)):
            found = {name: value[i] for name, value in parts.items()}
            batches.append(completed(self.params, found, next(iter(found.values())).shape[0]))
        self.module.set_grad_sample_to_none()
        return batches

    def _backward(self, loss: torch.Tensor) -> tuple[torch.Tensor | None, ...] | None:
        """The batch's ordinary gradients, where autograd makes them. p.grad is not written."""
        if self._expanded:   # the graph holds expanded copies: nothing reaches p, and autograd.grad would stop early
            loss.backward()
            return None
        return whole_gradients(loss, self.params)

    def _check_state(self) -> None:
        for name, param in self.params:
            if _held(param):
                raise ValueError(
                    f"{name}: p.grad_sample is held from an earlier backward; use it with take(), or drop it with "
                    ".module.zero_grad()"
                )
        if self._expanded:
            return
        for path, module in self.model.named_modules():
            if not module.training and any(p.requires_grad for p in module.parameters(recurse=False)):
                raise ValueError(
                    f"{path or 'model'} ({type(module).__name__}): in eval mode, where Opacus records nothing; call "
                    "model.train(), or use mode='ew' or FunctionalSource"
                )

    def _forget(self) -> None:
        """Drops what Opacus keeps of a forward that backward did not reach (an unused branch, an evaluation with
        gradients on): its counters would otherwise hold back the next gradients of that layer."""
        for module in self.model.modules():
            if any(p.requires_grad for p in module.parameters(recurse=False)):   # others' attributes are the user's
                for attribute in ("activations", "max_batch_len"):
                    if hasattr(module, attribute):
                        delattr(module, attribute)
        for _, param in self.params:
            param._forward_counter = 0   # type: ignore[attr-defined]
            if hasattr(param, "_current_grad_sample"):
                del param._current_grad_sample


def _held(param: nn.Parameter) -> bool:
    return getattr(param, "grad_sample", None) is not None


def _check_layers(model: nn.Module) -> None:
    """Layers that Opacus cannot handle, by name (its own messages have none)."""
    from opacus.validators import ModuleValidator

    for path, module in model.named_modules():
        if not any(param.requires_grad for param in module.parameters(recurse=False)):
            continue
        name = f"{path or 'model'} ({type(module).__name__})"
        if type(module) in ModuleValidator.VALIDATORS and ModuleValidator.VALIDATORS[type(module)](module):
            raise ValueError(f"{name}: refused by Opacus; opacus.validators.ModuleValidator.fix(model) replaces it")
        if any(True for _ in module.buffers()):
            raise ValueError(f"{name}: has trainable parameters and buffers, refused by Opacus; use FunctionalSource")


def _check_padding(model: nn.Module) -> None:
    """Expanded weights make no batch gradient to check against, so what they ignore in silence is refused."""
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding) and module.weight.requires_grad and module.padding_idx is not None:
            raise ValueError(
                f"{path or 'model'} (Embedding): expanded weights ignore padding_idx; use padding_idx=None, or "
                "FunctionalSource"
            )


def _wrap(library: Any, model: nn.Module, mode: str) -> Any:
    if hasattr(model, "autograd_grad_sample_hooks"):
        raise ValueError("model: has Opacus hooks already; pass the GradSampleModule that wraps it")
    if mode == "ew":
        return library.GradSampleModuleExpandedWeights(model, loss_reduction="sum")
    _check_layers(model)
    return library.GradSampleModule(model, loss_reduction="sum", force_functorch=mode == "functorch")


def _check_wrapper(library: Any, module: Any) -> None:
    if type(module) not in (library.GradSampleModule, library.GradSampleModuleExpandedWeights):
        raise ValueError(
            f"model: a {type(module).__name__} makes no per-sample gradients; wrap with grad_sample_mode 'hooks', "
            "'functorch' or 'ew'"
        )
    if not module.batch_first:
        raise ValueError("model: wrapped with batch_first=False; expected the batch dimension first")


def _library() -> Any:
    try:
        from opacus import grad_sample
    except ImportError as error:
        raise ImportError(f'OpacusSource needs opacus ({error}): pip install "dprs_kernels[opacus]"') from error
    return grad_sample
