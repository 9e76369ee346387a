"""What does a private step cost, forward and backward included? benchmarks/bench_training_step.py --benchmark-only

Whole steps: forward, backward, mask, clip, noise, SGD, on one logical batch, r = 0.5. 1.0 is non-private SGD at its own
best micro-batch; everybody else may choose, too. Contenders take turns (harness.race). Peak memory is not in it yet.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from harness import SIGMA, Contender, race
from report import Results
from torch import nn

from dprs_kernels import KeepMask, NoiseSource
from dprs_kernels.grads import OpacusSource, StreamingEngine, per_sample

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")
OURS, PLAIN, OPACUS_HOOKS = "dprs_kernels", "non-private SGD", "Opacus's gradients, our step"
OPACUS_WHOLE = "Opacus, no mask"


def dp_cnn() -> nn.Module:
    """The paper's DP-CNN: D = 550,570."""
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(((3, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128))):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.Tanh(), *([nn.MaxPool2d(2)] if i % 2 else [])]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 128), nn.Tanh(), nn.Linear(128, 10))


def dp_cnn_s() -> nn.Module:
    """The paper's DP-CNN/S: D = 26,010."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=2), nn.Tanh(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2), nn.Tanh(),
        nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10),
    )   # fmt: skip


CASES: dict[str, tuple[Callable[[], nn.Module], int, tuple[int, ...], tuple[int, ...]]] = {
    "DP-CNN": (dp_cnn, 256, (3, 32, 32), (16, 32, 64)),
    "DP-CNN/S": (dp_cnn_s, 2048, (1, 28, 28), (256, 512, 2048)),
}


def plain(model: nn.Module, micro: int, x: torch.Tensor, y: torch.Tensor) -> Callable[[float], list[torch.Tensor]]:
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss(reduction="sum")

    def run(sigma: float) -> list[torch.Tensor]:
        optimizer.zero_grad()
        for rows in torch.arange(len(x)).split(micro):
            (loss_fn(model(x[rows]), y[rows]) / len(x)).backward()
        optimizer.step()
        return []

    return run


def streamed(
    model: nn.Module, source: Any, micro: int, x: torch.Tensor, y: torch.Tensor
) -> Callable[[float], list[torch.Tensor]]:
    optimizer, loss_fn = torch.optim.SGD(model.parameters(), lr=0.1), nn.CrossEntropyLoss()
    engine = StreamingEngine(
        source, max_grad_norm=1.0, noise_multiplier=SIGMA, expected_batch_size=len(x), noise=NoiseSource(),
        max_physical_batch_size=micro,
    )   # fmt: skip
    engine.keep = KeepMask.draw(engine.params, drop_rate=0.5, seed=0, draw=0)

    def run(sigma: float) -> list[torch.Tensor]:
        optimizer.zero_grad()
        engine.step(loss_fn, x, y)
        optimizer.step()
        return []

    return run


def opacus_whole(model: nn.Module, micro: int, x: torch.Tensor, y: torch.Tensor) -> Callable[[float], list[Any]]:
    """Opacus as its users run it: GradSampleModule in hooks mode, DPOptimizer, virtual steps for micro-batches."""
    from opacus import GradSampleModule
    from opacus.optimizers import DPOptimizer

    wrapped, loss_fn = GradSampleModule(model, loss_reduction="sum"), nn.CrossEntropyLoss(reduction="sum")
    optimizer = DPOptimizer(
        torch.optim.SGD(wrapped.parameters(), lr=0.1), noise_multiplier=SIGMA, max_grad_norm=1.0,
        expected_batch_size=len(x), loss_reduction="mean",
    )   # fmt: skip

    def run(sigma: float) -> list[Any]:
        parts = torch.arange(len(x)).split(micro)
        for k, rows in enumerate(parts):
            optimizer.signal_skip_step(do_skip=k + 1 < len(parts))
            loss_fn(wrapped(x[rows]), y[rows]).backward()
            optimizer.step()
            optimizer.zero_grad()
        return []

    return run


@pytest.mark.parametrize("case", CASES)
def test_training_step(case: str, benchmark: Any, results: Results) -> None:
    make, samples, shape, micros = CASES[case]
    torch.manual_seed(0)
    x, y = torch.randn(samples, *shape), torch.randint(0, 10, (samples,))
    entries: list[tuple[str, Contender]] = []
    for micro in micros:
        model = make()
        entries.append((PLAIN, Contender(f"{PLAIN} / {micro}", plain(make(), micro, x, y), peer=False)))
        entries.append((OURS, Contender(f"{OURS} / {micro}", streamed(model, per_sample(model), micro, x, y))))
        model = make()
        entries.append((OPACUS_HOOKS, Contender("", streamed(model, OpacusSource(model), micro, x, y))))
        entries.append((OPACUS_WHOLE, Contender("", opacus_whole(make(), micro, x, y))))
    for _, entry in entries:
        entry.run(SIGMA)   # warm
    with results.watch(f"training {case}"):
        race([entry for _, entry in entries], 5, budget=60)
    best = {name: min(e.best for kind, e in entries if kind == name) for name, _ in entries}
    for name, seconds in best.items():
        results.figures[f"{case}: whole step of {name} over {PLAIN}"] = seconds / best[PLAIN]
    benchmark.extra_info.update(best)
    benchmark.pedantic(entries[1][1].run, args=(SIGMA,), rounds=1, iterations=1)
