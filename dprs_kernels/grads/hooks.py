"""Our own per-sample gradients: hooks on the layers of an ordinary model, no wrapper around it.

    with per_sample(model) as source:
        grads = source.grads(loss_fn, x, y)          # {name: [n, *shape]}

While grads runs, layers compute with detached weights, so autograd makes no ordinary weight gradients (wasted work
here) and p.grad stays as it was. Each layer's input is kept, the gradient of its output is caught on its way back,
and a rule (rules.py) makes the layer's per-sample gradients at once. Layers without a rule (attention, recurrent
layers, your own) go through torch.func, one vector-Jacobian product per sample. state_dict keys, the model's class
and its ordinary use do not change; remove() leaves nothing behind.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils import hooks as torch_hooks

from dprs_kernels.grads.arena import Arena, Fresh
from dprs_kernels.grads.batch_loss import BatchLoss, check_targets
from dprs_kernels.grads.graph import Tap, check_versions, foreign_leaf, hooked, versions_of
from dprs_kernels.grads.mixing import Call
from dprs_kernels.grads.rules import Rule, rule_for, wants
from dprs_kernels.grads.source import (
    LossFn,
    check_batch,
    check_model,
    check_params,
    completed,
    reduction_of,
    trainable,
)
from dprs_kernels.grads.vjp import WHOLE, Vjp
from dprs_kernels.outer import Grad, OuterProducts


class HookSource:
    """A gradient source (grads/source.py). Make one with per_sample."""

    def __init__(self, model: nn.Module, *, loss_reduction: str | None = None) -> None:
        self.model = model
        self.params = trainable(model)
        reduction_of(None, loss_reduction)
        check_model(model)
        self._names = {id(param): name for name, param in self.params}
        self._given = loss_reduction
        self._grads: dict[str, Grad] | None = None   # of the pass that runs now
        self._memory = Fresh()
        self._samples = 0
        self._forward = False   # the pass is in the model's forward
        self._anchors: dict[torch.device, torch.Tensor] = {}
        self._counts: Counter[str] = Counter()             # calls of layers in this pass
        self._guessed: dict[tuple[str, int], Call] = {}    # those that the check of the model did not see
        self._versions: dict[int, list[Any]] = {}          # id(layer) -> versions of its inputs, for each open call
        self._factors: list[tuple[str, OuterProducts, int]] = []
        self._handles: list[torch_hooks.RemovableHandle] = []
        self._swapped: list[tuple[nn.Module, nn.Module, str, nn.Parameter]] = []   # layer, part of it, name, weight
        layers = dict(_owners(model))
        self._loss = BatchLoss(model, layers, batch_first=[path for path, layer in layers.items() if _rule(layer)])
        for path, module in layers.items():
            # A compiled model does not trace hooks: it calls them between the graphs of what lies between layers.
            # First of all hooks: those of others may change what a layer gives, not what we see of it.
            untraced: Callable[..., Any] = torch.compiler.disable
            before, after = untraced(self._detach_weights), untraced(_with(self._catch, path))
            self._handles += [
                module.register_forward_pre_hook(before, with_kwargs=True),
                module.register_forward_hook(after, with_kwargs=True, prepend=True),
            ]

    def grads(self, loss_fn: LossFn, x: Any, y: Any) -> dict[str, torch.Tensor]:
        """Forward and backward of one micro-batch: name -> [n, *shape], each sample's own gradient.

        A parameter that took no part gets zeros: it is released with noise like all others.
        """
        self._memory = Fresh()
        return self._pass(loss_fn, x, y)   # type: ignore[return-value]   # tensors: fresh memory takes nothing else

    def grads_into(self, arena: Arena, loss_fn: LossFn, x: Any, y: Any) -> dict[str, Grad]:
        """As grads, for a caller that folds them at once: large ones lie in the arena until arena.recycle(), those of a
        Linear with one position per sample stay OuterProducts."""
        self._memory = arena
        try:
            return self._pass(loss_fn, x, y)
        finally:
            self._memory = Fresh()

    def _pass(self, loss_fn: LossFn, x: Any, y: Any) -> dict[str, Grad]:
        if not self._handles:
            raise ValueError("per_sample: these hooks were removed; attach them again with per_sample(model)")
        check_params(self.model, self.params)
        check_model(self.model)
        self._samples = check_batch(x, y)
        reduction = reduction_of(loss_fn, self._given)
        check_targets(loss_fn, reduction, y)
        if self._samples == 0:
            return completed(self.params, {}, 0)
        self._loss.check_model(x)
        try:
            found, outside = self._run(loss_fn, reduction, x, y)
        finally:
            self._close()
        if outside and not found and any(map(_compiled, self.model.modules())):
            raise ValueError(
                "model: the compiled model ran before its hooks were attached, and torch.compile does not look for new "
                "ones; attach first, or call torch.compiler.reset()"
            )
        if outside:
            raise ValueError(
                f"{outside[0]}: used outside of its module's forward, where hooks do not see it; FunctionalSource "
                "takes any use"
            )
        if self._guessed:   # a branch that the check of the model did not take
            self._check_guessed(x)
        return completed(self.params, found, self._samples)

    def _run(self, loss_fn: LossFn, reduction: str, x: Any, y: Any) -> tuple[dict[str, Grad], list[str]]:
        """Gradients by name, and the parameters that were used outside of a layer's forward. p.grad is not written:
        backward goes to the anchors of our taps, and to parameters that it should not reach."""
        self._grads, self._forward, self._guessed = {}, True, {}
        inputs = tuple(part.detach() for part in (x if isinstance(x, tuple) else (x,)))
        with torch.enable_grad():
            outputs = self.model(*inputs)
            loss, rows = self._loss(loss_fn, reduction, outputs, y, self._samples)
        self._forward = False
        if not loss.requires_grad:
            raise ValueError("loss_fn: the loss does not depend on any trainable parameter")
        targets = [*self._anchors.values(), *(param for _, param in self.params)]
        foreign = foreign_leaf(loss, {id(target) for target in targets})
        if foreign is not None:
            raise ValueError(
                f"loss_fn, or model: a tensor of shape {list(foreign.shape)} that requires gradients takes part and is "
                "no parameter of the model: its gradient would have neither clipping nor noise; detach it, or make it "
                "a parameter of the model"
            )
        try:
            ends = torch.autograd.grad(loss, targets, allow_unused=True)[len(self._anchors) :]
        except RuntimeError as error:
            if "use_reentrant" not in str(error):
                raise
            raise ValueError("model: calls checkpoint with use_reentrant=True; use use_reentrant=False") from error
        self._loss.check_rows(rows)
        for path, factors, version in self._factors:
            if factors.version() != version:
                raise ValueError(
                    f"{path}: the gradient of its output was overwritten on the way back; a backward of your own must "
                    "not write to the gradient that it gets"
                )
        return self._grads, [name for (name, _), end in zip(self.params, ends, strict=True) if end is not None]

    def _close(self) -> None:
        """Whatever happened: the layers have their weights again, and nothing of the pass is held."""
        self._restore()
        self._grads, self._forward = None, False
        self._factors, self._versions, self._anchors = [], {}, {}
        self._counts.clear()

    def _check_guessed(self, x: Any) -> None:
        guessed = self._guessed
        self._loss.check_model(x, again=True)
        for (path, i), call in guessed.items():
            seen = self._loss.calls.get(path, [])
            if i < len(seen) and seen[i] != call:
                raise ValueError(f"{path}: in another branch now, where other inputs have the batch; make a new source")

    def remove(self) -> None:
        """Takes all hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def __enter__(self) -> HookSource:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _detach_weights(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Before a layer: its weights as constants. Hooks do nothing outside of grads()."""
        if self._grads is None:
            return
        self._versions.setdefault(id(module), []).append(versions_of((*args, *kwargs.values())))
        parts = module.modules() if isinstance(module, WHOLE) else [module]
        for part in parts:
            for name, param in part._parameters.items():
                if param is not None and param.requires_grad and id(param) in self._names:
                    self._swapped.append((module, part, name, param))
                    part._parameters[name] = param.detach()   # type: ignore[assignment]
            if isinstance(part, nn.RNNBase):   # keeps its weights a second time, in a list
                part._flat_weights = [None if w is None else w.detach() for w in part._flat_weights]

    def _restore(self, layer: nn.Module | None = None) -> None:
        """The weights of one layer, or of all: a layer may contain others, which end first."""
        mine = [entry for entry in self._swapped if layer is None or entry[0] is layer]
        self._swapped = [entry for entry in self._swapped if entry not in mine]
        for _, part, name, param in mine:
            part._parameters[name] = param
            if isinstance(part, nn.RNNBase):
                part._flat_weights = [part._parameters.get(held) for held in part._flat_weights_names]

    def _catch(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
        """After a layer: weights back, and a hook on its output."""
        if self._grads is None:
            return None
        self._restore(module)
        versions = self._versions[id(module)].pop()
        if not torch.is_grad_enabled():   # a constant, to plain autograd too
            return None
        rule = _rule(module)
        if rule is None:
            return self._tap(path, module, args, kwargs, output, versions)
        self._call(path, lambda: Call((0,), (0,)))
        inputs = [a.detach() for a in (*args, *kwargs.values())]

        def take(e: torch.Tensor) -> None:
            self._begin_backward(path)
            if wants(module, "weight") is not None:
                check_versions(path, versions)
            # Under autocast outputs are bf16 and inputs may not be: sums over positions are made in fp32.
            with _no_autocast(e.device.type):
                for param, grad in rule(module, tuple(map(_widened, inputs)), _widened(e), self._memory):
                    if id(param) in self._names:
                        self._put(path, param, grad)
            inputs.clear()     # the graph holds this hook until it is gone itself: activations are let go as backward
            versions.clear()   # goes on, like those of plain autograd

        if not output.requires_grad:   # the first layer
            whole = output.clone() if output._is_view() else output   # a view's hook is lost when it is written to
            output = Tap.apply(whole, self._anchor(output.device))
        return hooked(output, take)

    def _begin_backward(self, path: str) -> None:
        """Of one layer. A checkpoint's recomputation ends by an exception out of its last layer, which then still has
        constants for weights."""
        if self._forward:
            raise ValueError(
                f"{path}: backward ran inside of the model's forward, or of loss_fn: what it finds would be added to "
                "the samples' own gradients; use FunctionalSource"
            )
        self._restore()

    def _tap(self, path: str, module: nn.Module, args: Any, kwargs: Any, output: Any, versions: Any) -> Any:
        def take(param: torch.Tensor, grad: torch.Tensor) -> None:
            if id(param) in self._names:
                self._put(path, param, grad)

        def finish(cotangents: tuple[torch.Tensor, ...]) -> None:
            self._begin_backward(path)
            check_versions(path, versions)
            active, self._grads = self._grads, None   # the hooks sleep while the layer is called again
            try:
                grads = layer.grads(cotangents, call)
            finally:
                self._grads = active
            for param, grad in grads:
                take(param, grad)
            layer.values.clear()   # as in _catch
            versions.clear()

        layer = Vjp(path, module, args, kwargs)
        call = self._call(path, lambda: layer.guess(output, self._samples))
        return layer.tap(output, call, finish, self._anchor)

    def _call(self, path: str, guess: Callable[[], Call]) -> Call:
        """What the check of the model found of this call: which dimensions are the batch."""
        i, seen = self._counts[path], self._loss.calls.get(path, [])
        self._counts[path] += 1
        if i < len(seen):
            return seen[i]
        call = guess()
        if self._forward:   # checkpoints call layers once more, in backward
            self._guessed[path, i] = call
        return call

    def _anchor(self, device: torch.device) -> torch.Tensor:
        if device not in self._anchors:
            self._anchors[device] = torch.zeros((), device=device, requires_grad=True)
        return self._anchors[device]

    def _put(self, path: str, param: torch.Tensor, grad: Grad) -> None:
        """Adds to what the same parameter got in another use: tied weights, a layer that is called twice. Gradients are
        ours to write to: rules make new ones, Vjp copies those that it shares with autograd."""
        assert self._grads is not None
        name = self._names[id(param)]
        if grad.shape[0] != self._samples:
            raise ValueError(
                f"{path}: its batch has {grad.shape[0]} samples, the input has {self._samples}; the batch must be the "
                "first dimension of every layer's input, and no layer may mix or reorder samples"
            )
        if isinstance(grad, OuterProducts):
            self._factors.append((path, grad, grad.version()))
        held = self._grads.get(name)
        self._grads[name] = grad if held is None else _dense(held).add_(_dense(grad))


def per_sample(model: nn.Module, *, loss_reduction: str | None = None) -> HookSource:
    """Attaches hooks to `model`; use as a context manager, or call .remove() when done.

    loss_reduction: "mean" or "sum" of the loss over samples; found from loss_fn.reduction where it has one.
    """
    return HookSource(model, loss_reduction=loss_reduction)


def _owners(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Modules that own trainable parameters, an attention or recurrent module as one."""
    inside: set[int] = set()
    for path, module in model.named_modules():
        if id(module) in inside:
            continue
        whole = isinstance(module, WHOLE)
        if whole:
            inside.update(id(child) for child in module.modules())
        if any(p.requires_grad for p in module.parameters(recurse=whole)):
            yield path or type(module).__name__, module


def _rule(module: nn.Module) -> Rule | None:
    """None as well where parameters are not those of the layer's class (weight_norm)."""
    own = {name for name, param in module._parameters.items() if param is not None}
    return rule_for(module) if own <= {"weight", "bias"} and "weight" in own else None


def _with(method: Callable[..., Any], path: str) -> Callable[..., Any]:
    return lambda *arguments: method(path, *arguments)


def _no_autocast(device_type: str) -> AbstractContextManager[Any]:
    on = torch.is_autocast_enabled(device_type)   # to ask takes 0.1 us, to switch it off 20
    return torch.autocast(device_type, enabled=False) if on else nullcontext()


def _widened(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


def _compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def _dense(grad: Grad) -> torch.Tensor:
    return grad if isinstance(grad, torch.Tensor) else grad.dense()
