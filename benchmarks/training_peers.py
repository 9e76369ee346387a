"""The peers of bench_training_step.py, each as its users run it. Same contract as training_contenders.py."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
from collections.abc import Callable
from typing import Any

import torch
from names import OURS
from torch import nn
from training_contenders import (
    BACKPACK,
    FASTDP,
    FUNC,
    FUNC_COMPILED,
    LR,
    OPACUS_EXPANDED,
    OPACUS_FUNCTORCH,
    OPACUS_GHOST,
    OPACUS_HOOKS,
    Settings,
    Step,
    gradients,
    mask_for,
)

logging.getLogger("opacus").setLevel(logging.ERROR)


def opacus(model: nn.Module, settings: Settings, *, mode: str = "hooks") -> Step:
    """Opacus without a mask (it has none), as its users run it: GradSampleModule, DPOptimizer, and virtual steps for
    micro-batches. functorch: torch.func for every layer instead of its own rules; ew: torch's ExpandedWeights."""
    from opacus.grad_sample import GradSampleModule, GradSampleModuleExpandedWeights
    from opacus.optimizers import DPOptimizer

    if mode == "ew":
        wrapped: Any = GradSampleModuleExpandedWeights(model, loss_reduction="sum")
    else:
        wrapped = GradSampleModule(model, loss_reduction="sum", force_functorch=mode == "functorch")
    optimizer = DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=LR), noise_multiplier=settings.sigma, max_grad_norm=settings.bound,
        expected_batch_size=settings.batch, loss_reduction="mean",
    )   # fmt: skip
    loss_fn = nn.CrossEntropyLoss(reduction="sum")
    return _virtual_steps(model, optimizer, lambda x, y: loss_fn(wrapped(x), y), settings)


def opacus_ghost(model: nn.Module, settings: Settings) -> Step:
    """Opacus's ghost clipping: norms in one backward, the clipped sum in a second; layers without a norm rule
    (convolutions, LayerNorm) still make their per-sample gradients."""
    from opacus.grad_sample import GradSampleModuleFastGradientClipping
    from opacus.optimizers import DPOptimizerFastGradientClipping
    from opacus.utils.fast_gradient_clipping_utils import DPLossFastGradientClipping

    wrapped = GradSampleModuleFastGradientClipping(
        model, max_grad_norm=settings.bound, use_ghost_clipping=True, loss_reduction="mean"
    )
    optimizer = DPOptimizerFastGradientClipping(
        torch.optim.SGD(wrapped.parameters(), lr=LR), noise_multiplier=settings.sigma, max_grad_norm=settings.bound,
        expected_batch_size=settings.batch, loss_reduction="mean",
    )   # fmt: skip
    loss_fn = DPLossFastGradientClipping(wrapped, optimizer, nn.CrossEntropyLoss(), "mean")
    return _virtual_steps(model, optimizer, lambda x, y: loss_fn(wrapped(x), y), settings)


def _virtual_steps(model: nn.Module, optimizer: Any, loss: Callable[..., Any], settings: Settings) -> Step:
    """What Opacus's BatchMemoryManager does: every micro-batch is clipped and added, the last one steps."""

    def step(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        parts = settings.parts(x, y)
        for k, (part, target) in enumerate(parts):
            optimizer.zero_grad(set_to_none=True)
            optimizer.signal_skip_step(do_skip=k + 1 < len(parts))
            loss(part, target).backward()
            optimizer.step()
        grads = gradients(model)
        params: list[Any] = list(model.parameters())
        for p in params:
            p.grad_sample = p.summed_grad = None   # nothing of it outlives the step
        return grads

    return step


def backpack_paper(model: nn.Module, settings: Settings) -> Step:
    """BackPACK's BatchGrad, then Algorithm 1 in the lines of contenders.paper, for each micro-batch: concatenate, zero
    by index, norm, scale, sum; noise once, zeroed at the same indices."""
    from backpack import backpack, extend
    from backpack.extensions import BatchGrad

    for module in model.modules():
        if any(True for _ in module.parameters(recurse=False)):   # BatchGrad needs no others, and containers warn
            extend(module)
    params: list[Any] = list(model.parameters())
    sizes = [p.numel() for p in params]
    optimizer, loss_fn = torch.optim.SGD(params, lr=LR), nn.CrossEntropyLoss(reduction="sum")
    keep = torch.cat([part.reshape(-1) for part in mask_for(OURS, model).dense()])
    dropped = (~keep).nonzero().reshape(-1)
    dropped = dropped[torch.randperm(dropped.numel())]   # in the order of the permutation they are drawn by

    def clipped_sum(part: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        with backpack(BatchGrad()):
            loss_fn(model(part), target).backward()
        for name, p in model.named_parameters():
            if not hasattr(p, "grad_batch"):   # BackPACK itself says nothing
                raise NotImplementedError(f"BatchGrad makes no gradient of {name}")
        flat = torch.cat([p.grad_batch.reshape(len(part), -1) for p in params], 1)
        for p in params:
            del p.grad_batch
        for row in flat:
            row[dropped] = 0
        flat *= (settings.bound / flat.norm(dim=1)).clamp(max=1).unsqueeze(1)
        return flat.sum(0)

    def step(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        total = torch.zeros(sum(sizes))
        for part, target in settings.parts(x, y):
            optimizer.zero_grad()
            total += clipped_sum(part, target)
        noise = torch.normal(0.0, settings.sigma * settings.bound, total.shape)
        noise[dropped] = 0
        for p, grad in zip(params, ((total + noise) / settings.batch).split(sizes), strict=True):
            p.grad = grad.view(p.shape)
        optimizer.step()
        return gradients(model)

    return step


def functional(model: nn.Module, settings: Settings, *, compiled: bool = False) -> Step:
    """torch.func: vmap of grad, then mask, norm, clip, sum and randn in plain torch, spelled as contenders.compiled has
    it. compiled: torch.compile of all that, for one size of micro-batch and for the rest of a batch."""
    params = dict(model.named_parameters())
    optimizer, loss_fn = torch.optim.SGD(params.values(), lr=LR), nn.CrossEntropyLoss()
    keep = {name: part.float() for name, part in zip(params, mask_for(OURS, model).dense(), strict=True)}

    def loss_of_one(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_fn(torch.func.functional_call(model, weights, (x.unsqueeze(0),)), y.unsqueeze(0))

    per_sample = torch.func.vmap(torch.func.grad(loss_of_one), in_dims=(None, 0, 0))

    def clipped_sums(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        rows = [(grad.flatten(1), keep[name].flatten()) for name, grad in per_sample(weights, x, y).items()]
        squares = torch.stack([(grad * part).square().sum(1) for grad, part in rows]).sum(0)
        factors = (settings.bound / squares.sqrt()).clamp(max=1)
        return [factors @ grad * part for grad, part in rows]

    fast = torch.compile(clipped_sums, dynamic=False) if compiled else clipped_sums

    def step(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        weights = {name: p.detach() for name, p in params.items()}
        totals = [torch.zeros(p.numel()) for p in params.values()]
        for part, target in settings.parts(x, y):
            for total, add in zip(totals, fast(weights, part, target), strict=True):
                total += add
        for (name, p), total in zip(params.items(), totals, strict=True):
            noise = torch.randn_like(p) * (settings.sigma * settings.bound)
            p.grad = (total.view(p.shape) + noise * keep[name]) / settings.batch
        optimizer.step()
        return gradients(model)

    return step


def fastdp(model: nn.Module, settings: Settings) -> Step:
    """fastDP's book-keeping in its mode MixOpt, without a mask (it has none); micro-batches add up before one step."""
    from fastDP import PrivacyEngine  # type: ignore[import-not-found]

    optimizer, loss_fn = torch.optim.SGD(model.parameters(), lr=LR), nn.CrossEntropyLoss()
    with contextlib.redirect_stdout(io.StringIO()):   # it prints what it found
        engine = PrivacyEngine(
            model, batch_size=settings.batch, sample_size=100 * settings.batch, epochs=1, max_grad_norm=settings.bound,
            noise_multiplier=settings.sigma, clipping_fn="Abadi", clipping_mode="MixOpt", loss_reduction="mean",
        )   # fmt: skip
        engine.attach(optimizer)

    def step(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        for part, target in settings.parts(x, y):
            loss_fn(model(part), target).backward()
        for name, p in model.named_parameters():
            if not hasattr(p, "private_grad"):   # it would leave the parameter as it is
                raise NotImplementedError(f"fastDP makes no gradient of {name}")
        optimizer.step()
        return gradients(model)

    return step


MAKERS: dict[str, Callable[[nn.Module, Settings], Step]] = {
    OPACUS_HOOKS: opacus,
    OPACUS_FUNCTORCH: functools.partial(opacus, mode="functorch"),
    OPACUS_EXPANDED: functools.partial(opacus, mode="ew"),
    OPACUS_GHOST: opacus_ghost,
    FASTDP: fastdp,
    FUNC: functional,
    FUNC_COMPILED: functools.partial(functional, compiled=True),
    BACKPACK: backpack_paper,
}
