"""Who races in bench_training_step.py: whole training steps, from a batch to new weights.

A builder takes (model, settings) and returns step(x, y) -> the gradient that SGD was given, one tensor per parameter.
Each cuts the logical batch into micro-batches of settings.micro, as its users would, and none copies the data.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from contenders import OURS
from harness import BOUND, SEED, SIGMA
from torch import nn

from dprs_kernels import KeepMask, NoiseSource
from dprs_kernels.grads import StreamingEngine, per_sample

Step = Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]
PLAIN, BACKPACK = "non-private SGD", "BackPACK, paper's lines"
OPACUS_HOOKS, OPACUS_FUNCTORCH, OPACUS_GHOST = "Opacus hooks", "Opacus functorch", "Opacus ghost"
OPACUS_MODES = (OPACUS_HOOKS, OPACUS_FUNCTORCH, OPACUS_GHOST)
PEERS = (*OPACUS_MODES, BACKPACK)
RATE = 0.5   # of those that mask: ours and the paper's lines
LR = 0.01


@dataclass(frozen=True)
class Settings:
    micro: int | None        # None: ours chooses
    batch: int               # expected_batch_size
    bound: float = BOUND
    sigma: float = SIGMA

    def parts(self, x: torch.Tensor, y: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Micro-batches: views, no copies."""
        size = self.micro or len(x)
        return list(zip(x.split(size), y.split(size), strict=True))


def keep_mask(model: nn.Module) -> KeepMask:
    return KeepMask.draw(list(model.parameters()), drop_rate=RATE, seed=SEED, draw=0)


def _gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def plain(model: nn.Module, settings: Settings) -> Step:
    """No privacy: the gradients of micro-batches add up in p.grad."""
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), lr=LR), nn.CrossEntropyLoss(reduction="sum")

    def step(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        optimizer.zero_grad()
        for part, target in settings.parts(x, y):
            (loss_fn(model(part), target) / settings.batch).backward()
        optimizer.step()
        return _gradients(model)

    return step


def engine_for(model: nn.Module, settings: Settings) -> StreamingEngine:
    return StreamingEngine(
        per_sample(model), max_grad_norm=settings.bound, noise_multiplier=settings.sigma,
        expected_batch_size=settings.batch, noise=NoiseSource(), max_physical_batch_size=settings.micro,
    )   # fmt: skip


def default_micro(model: nn.Module) -> int:
    """What the engine chooses for the model."""
    return engine_for(model, Settings(None, 1)).micro_batch


def ours(model: nn.Module, settings: Settings) -> Step:
    """Our hooks, streamed; masked, clipped, ChaCha20 noise; SGD on p.grad."""
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), lr=LR), nn.CrossEntropyLoss()
    engine = engine_for(model, settings)
    engine.keep = KeepMask.draw(engine.params, drop_rate=RATE, seed=SEED, draw=0)

    def step(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        optimizer.zero_grad()
        engine.step(loss_fn, x, y)
        optimizer.step()
        return _gradients(model)

    return step


def opacus(model: nn.Module, settings: Settings, *, functorch: bool = False) -> Step:
    """Opacus without a mask (it has none), as its users run it: GradSampleModule, DPOptimizer, and virtual steps for
    micro-batches. functorch: torch.func for every layer instead of its own rules."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    wrapped = GradSampleModule(model, loss_reduction="sum", force_functorch=functorch)
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
        grads = _gradients(model)
        for p in model.parameters():
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
    params = list(model.parameters())
    sizes = [p.numel() for p in params]
    optimizer, loss_fn = torch.optim.SGD(params, lr=LR), nn.CrossEntropyLoss(reduction="sum")
    keep = torch.cat([part.reshape(-1) for part in keep_mask(model).dense()])
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
        return _gradients(model)

    return step


def build(name: str, model: nn.Module, settings: Settings) -> Step:
    """ImportError where an optional library is missing; what a library says where it cannot run the model."""
    logging.getLogger("opacus").setLevel(logging.ERROR)
    if name == PLAIN:
        return plain(model, settings)
    if name == OURS:
        return ours(model, settings)
    if name == BACKPACK:
        return backpack_paper(model, settings)
    if name == OPACUS_GHOST:
        return opacus_ghost(model, settings)
    return opacus(model, settings, functorch=name == OPACUS_FUNCTORCH)
