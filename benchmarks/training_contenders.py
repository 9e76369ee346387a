"""Who races in bench_training_step.py: whole training steps, from a batch to new weights.

A builder takes (model, settings) and returns step(x, y) -> the gradient that SGD was given, one tensor per parameter.
Each cuts the logical batch into micro-batches of settings.micro, as its users would, and none copies the data.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from harness import BOUND, SEED
from names import OURS
from racing import SIGMA
from torch import nn

from dprs_kernels import KeepMask, NoiseSource
from dprs_kernels.grads import StreamingEngine, per_sample

Step = Callable[[torch.Tensor, torch.Tensor], list[torch.Tensor]]
PLAIN, BACKPACK = "non-private SGD", "BackPACK, paper's lines"
OPACUS_HOOKS, OPACUS_FUNCTORCH, OPACUS_GHOST = "Opacus hooks", "Opacus functorch", "Opacus ghost"
OPACUS_EXPANDED = "Opacus ExpandedWeights"
FUNC, FUNC_COMPILED, FASTDP = "torch.func", "torch.compile", "fastDP"
OPACUS_MODES = (OPACUS_HOOKS, OPACUS_FUNCTORCH, OPACUS_GHOST, OPACUS_EXPANDED)
PEERS = (*OPACUS_MODES, FASTDP, FUNC, BACKPACK, FUNC_COMPILED)
FULL_PEERS = (OPACUS_EXPANDED, FUNC_COMPILED)   # --full only; compiling takes half a minute a model
MASKED = (OURS, BACKPACK, FUNC, FUNC_COMPILED)   # Opacus and fastDP have no masks: they do less
RATE = 0.5
ROWS = {f"{OURS}, rows, r = {rate:g}": rate for rate in (0.0, 0.25, 0.5, 0.75, 0.9)}   # of bench_rows.py
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


def mask_for(name: str, model: nn.Module) -> KeepMask:
    """By coordinates, or for those in ROWS by rows at their rate."""
    structure = "row" if name in ROWS else "coordinate"
    rate = ROWS.get(name, RATE)
    return KeepMask.draw(model.named_parameters(), drop_rate=rate, seed=SEED, draw=0, structure=structure)


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in model.parameters() if p.grad is not None]


def plain(model: nn.Module, settings: Settings) -> Step:
    """No privacy: the gradients of micro-batches add up in p.grad."""
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), lr=LR), nn.CrossEntropyLoss(reduction="sum")

    def step(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        optimizer.zero_grad()
        for part, target in settings.parts(x, y):
            (loss_fn(model(part), target) / settings.batch).backward()
        optimizer.step()
        return gradients(model)

    return step


def engine_for(model: nn.Module, settings: Settings) -> StreamingEngine:
    return StreamingEngine(
        per_sample(model), max_grad_norm=settings.bound, noise_multiplier=settings.sigma,
        expected_batch_size=settings.batch, noise=NoiseSource(), max_physical_batch_size=settings.micro,
    )   # fmt: skip


def default_micro(model: nn.Module) -> int:
    """What the engine chooses for the model."""
    return engine_for(model, Settings(None, 1)).micro_batch


def ours(model: nn.Module, settings: Settings, name: str = OURS) -> Step:
    """Our hooks, streamed; masked, clipped, ChaCha20 noise; SGD on p.grad."""
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), lr=LR), nn.CrossEntropyLoss()
    engine = engine_for(model, settings)
    engine.keep = mask_for(name, model)

    def step(x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        optimizer.zero_grad()
        engine.step(loss_fn, x, y)
        optimizer.step()
        return gradients(model)

    return step


def build(name: str, model: nn.Module, settings: Settings) -> Step:
    """ImportError where an optional library is missing; what a library says where it cannot run the model."""
    import training_peers  # which needs what is above

    if name in ROWS:
        return ours(model, settings, name)
    makers = {PLAIN: plain, OURS: ours, **training_peers.MAKERS}
    return makers[name](model, settings)
