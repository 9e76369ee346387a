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

from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils import hooks as torch_hooks

from dprs_kernels.grads.arena import Arena, Fresh
from dprs_kernels.grads.functional import batchable
from dprs_kernels.grads.rules import rule_for
from dprs_kernels.grads.source import (
    BatchLoss,
    LossFn,
    check_batch,
    check_model,
    check_params,
    check_targets,
    completed,
    reduction_of,
    trainable,
)
from dprs_kernels.outer import Grad, OuterProducts

WHOLE = (nn.MultiheadAttention, nn.RNNBase, nn.RNNCellBase)   # use their children's weights without calling them


class _Tap(torch.autograd.Function):
    """Gives an output that needs no gradient a place in the graph: the first layer has no input to differentiate."""

    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(output)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None]:
        return None, None


class HookSource:
    """A gradient source (grads/source.py). Make one with per_sample."""

    def __init__(self, model: nn.Module, *, loss_reduction: str | None = None) -> None:
        self.model = model
        self.params = trainable(model)
        check_model(model)
        self._names = {id(param): name for name, param in self.params}
        self._given = loss_reduction
        self.loss_reduction = loss_reduction or "mean"
        self._grads: dict[str, Grad] | None = None   # of the pass that runs now
        self._memory = Fresh()
        self._samples = 0
        self._loss = BatchLoss(model)
        self._handles: list[torch_hooks.RemovableHandle] = []
        self._swapped: list[tuple[nn.Module, nn.Module, str, nn.Parameter]] = []   # layer, part of it, name, weight
        for path, module in _owners(model):
            if not getattr(module, "batch_first", True):
                raise ValueError(
                    f"{path}: {type(module).__name__} has batch_first=False; per-sample gradients need the batch as "
                    "the first dimension: make it with batch_first=True, or use FunctionalSource"
                )
            # A compiled model does not trace hooks: it calls them between the graphs of what lies between layers.
            untraced: Callable[..., Any] = torch.compiler.disable
            self._handles += [
                module.register_forward_pre_hook(untraced(self._detach_weights), with_kwargs=True),
                module.register_forward_hook(untraced(_with(self._catch, path)), with_kwargs=True),
            ]

    def grads(self, loss_fn: LossFn, x: Any, y: Any) -> dict[str, torch.Tensor]:
        """Forward and backward of one micro-batch: name -> [n, *shape], divided by n under a mean loss.

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
        check_params(self.params)
        check_model(self.model)
        self._samples = check_batch(x, y)
        self.loss_reduction = reduction_of(loss_fn, self._given)
        check_targets(loss_fn, self.loss_reduction, y)
        found: dict[str, Grad] = {}
        if self._samples == 0:
            return completed(self.params, found, 0)
        self._loss.check_model(x, self._samples)
        before = [param.grad for _, param in self.params]
        for _, param in self.params:
            param.grad = None   # so that a use outside of a layer's forward shows
        self._grads = found
        try:
            with torch.enable_grad():
                outputs = self.model(*(x if isinstance(x, tuple) else (x,)))
                loss = self._loss(loss_fn, self.loss_reduction, outputs, y, self._samples)
                if not loss.requires_grad:
                    raise ValueError("loss_fn: the loss does not depend on any trainable parameter")
                loss.backward()
            outside = [name for name, param in self.params if param.grad is not None]
        finally:
            self._restore()
            self._grads = None
            for (_, param), grad in zip(self.params, before, strict=True):
                param.grad = grad
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
        return completed(self.params, found, self._samples)

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
        rule = rule_for(module)
        if rule is None:
            return _Vjp(self, path, module, args, kwargs).tap(output)
        inputs = tuple(a.detach() for a in (*args, *kwargs.values()))

        def take(e: torch.Tensor) -> None:
            # Under autocast outputs are bf16 and inputs may not be: sums over positions are made in fp32.
            with torch.autocast(e.device.type, enabled=False):
                for param, grad in rule(module, tuple(map(_widened, inputs)), _widened(e), self._memory):
                    if id(param) in self._names:
                        self._put(path, param, grad)

        if not output.requires_grad:   # the first layer
            whole = output.clone() if output._is_view() else output   # a view's hook is lost when it is written to
            output = _Tap.apply(whole, _anchor(output.device))
        output.register_hook(take)
        return output

    def _put(self, path: str, param: torch.Tensor, grad: Grad) -> None:
        """Adds to what the same parameter got in another use: tied weights, a layer that is called twice."""
        assert self._grads is not None
        name = self._names[id(param)]
        if grad.shape[0] != self._samples:
            raise ValueError(
                f"{path}: its batch has {grad.shape[0]} samples, the input has {self._samples}; the batch must be the "
                "first dimension of every layer's input, and no layer may mix or reorder samples"
            )
        held = self._grads.get(name)
        self._grads[name] = grad if held is None else _dense(held).add_(_dense(grad))


class _Taps(torch.autograd.Function):
    """Passes outputs through and hands all their gradients over at once; zeros for an output that nobody used."""

    @staticmethod
    def forward(ctx: Any, take: Any, anchor: torch.Tensor, *outputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.take = take
        return tuple(output.view_as(output) for output in outputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        ctx.take(grads)
        return None, None, *grads


class _Vjp:
    """One call of a layer without a rule: torch.func's vector-Jacobian product, sample by sample."""

    def __init__(self, source: HookSource, path: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        self.source, self.path, self.module = source, path, module
        values = [*args, *kwargs.values()]
        self.names = list(kwargs)
        self.values = [v.detach() if isinstance(v, torch.Tensor) else v for v in values]
        # A mask over positions is shared by all samples, even where there are as many positions.
        shared = {len(args) + i for i, name in enumerate(self.names) if name == "attn_mask"}
        n = source._samples
        self.batched = [i for i, v in enumerate(self.values) if _batched(v, n) and i not in shared]

    def tap(self, output: Any) -> Any:
        tensors = [t for t in _tensors(output) if t.is_floating_point()]
        tapped = iter(_Taps.apply(self.finish, _anchor(tensors[0].device), *tensors))
        return _rebuilt(output, tapped)

    def finish(self, cotangents: tuple[torch.Tensor, ...]) -> None:
        whole = isinstance(self.module, WHOLE)
        wanted = {
            name: p for name, p in self.module.named_parameters(recurse=whole) if id(p) in self.source._names
        }
        fixed = {name: p.detach() for name, p in self.module.named_parameters() if name not in wanted}
        fixed.update(self.module.named_buffers())
        # The state of a recurrent layer has its layers first, the batch second.
        dims = [1 if isinstance(self.module, nn.RNNBase) and k else 0 for k in range(len(cotangents))]

        def one(cotangents: tuple[torch.Tensor, ...], given: list[torch.Tensor]) -> dict[str, torch.Tensor]:
            values = list(self.values)
            for i, value in zip(self.batched, given, strict=True):
                values[i] = value.unsqueeze(0)
            count = len(values) - len(self.names)

            def forward(weights: dict[str, torch.Tensor]) -> tuple[torch.Tensor, ...]:
                out = torch.func.functional_call(
                    self.module, {**fixed, **weights}, tuple(values[:count]),
                    dict(zip(self.names, values[count:], strict=True)),
                )   # fmt: skip
                return tuple(t for t in _tensors(out) if t.is_floating_point())

            pull = torch.func.vjp(forward, {name: p.detach() for name, p in wanted.items()})[1]
            (found,) = pull(tuple(c.unsqueeze(d) for c, d in zip(cotangents, dims, strict=True)))
            return dict(found)

        given = [self.values[i] for i in self.batched]
        active, self.source._grads = self.source._grads, None   # the hooks sleep while the layer is called again
        try:
            with batchable(self.module, given[0].device):
                found = torch.func.vmap(one, in_dims=(tuple(dims), 0))(tuple(cotangents), given)
        finally:
            self.source._grads = active
        for name, grad in found.items():
            self.source._put(self.path, wanted[name], grad)


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


def _with(method: Callable[..., Any], path: str) -> Callable[..., Any]:
    return lambda *arguments: method(path, *arguments)


def _widened(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


def _compiled(module: nn.Module) -> bool:
    return module._compiled_call_impl is not None or hasattr(module, "_orig_mod")


def _dense(grad: Grad) -> torch.Tensor:
    return grad.dense() if isinstance(grad, OuterProducts) else grad


def _anchor(device: torch.device) -> torch.Tensor:
    return torch.zeros((), device=device, requires_grad=True)


def _batched(value: Any, samples: int) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() > 0 and value.shape[0] == samples


def _tensors(output: Any) -> list[torch.Tensor]:
    if isinstance(output, torch.Tensor):
        return [output]
    if isinstance(output, (tuple, list)):
        return [t for item in output for t in _tensors(item)]
    return []


def _rebuilt(output: Any, tapped: Iterator[torch.Tensor]) -> Any:
    """`output` with its floating tensors replaced, in the order of _tensors."""
    if isinstance(output, torch.Tensor):
        return next(tapped) if output.is_floating_point() else output
    if isinstance(output, (tuple, list)):
        return type(output)(_rebuilt(item, tapped) for item in output)
    return output
