"""Pictures of runs: test accuracy, epsilon spent and drop rate over epochs. Drawn off screen; no window, no pyplot."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dprs_kernels.paper.run_folder import Metrics

WIDTH, HEIGHT, DPI = 12.0, 3.8, 110


def check() -> None:
    """ImportError, before hours of training, where pictures cannot be drawn."""
    try:
        import matplotlib.figure  # noqa: F401
    except ImportError as error:
        raise ImportError(f'plots need matplotlib ({error}): pip install "dprs_kernels[train]"') from error


def plot(runs: Mapping[str, Sequence[Metrics]], path: str | os.PathLike[str], *, budget: float | None = None) -> None:
    """A PNG of three panels, one line a run. runs: label -> rows. budget: a line at that epsilon."""
    figure(runs, budget=budget).savefig(Path(path), dpi=DPI)


def figure(runs: Mapping[str, Sequence[Metrics]], *, budget: float | None = None) -> Any:
    """The matplotlib Figure behind plot."""
    check()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    if not any(runs.values()):
        raise ValueError("runs: none has a finished epoch; a picture of nothing would say nothing")
    drawing = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    FigureCanvasAgg(drawing)
    accuracy, epsilon, rate = drawing.subplots(1, 3)
    for label, rows in runs.items():
        epochs = [row.epoch for row in rows]
        accuracy.plot(epochs, [100 * row.test_accuracy for row in rows], marker=".", label=label)
        spent = [math.nan if row.epsilon is None else row.epsilon for row in rows]
        epsilon.plot(epochs, spent, marker=".", label=label)
        rate.plot(epochs, [100 * row.drop_rate for row in rows], marker=".", label=label)
    if budget is not None:
        epsilon.axhline(budget, linestyle="--", color="grey", label=f"budget {budget:g}")
    every = [row for rows in runs.values() for row in rows]
    if all(row.epsilon is None for row in every):
        epsilon.text(0.5, 0.5, "no privacy claim", ha="center", va="center", transform=epsilon.transAxes)
    nominal = any(row.claim == "nominal" for row in every)
    accuracy.set(title="test accuracy", xlabel="epoch", ylabel="%")
    epsilon.set(title=f"epsilon spent{' (nominal where shuffled)' if nominal else ''}", xlabel="epoch")
    epsilon.set_ylim(bottom=0)
    rate.set(title="coordinates dropped", xlabel="epoch", ylabel="%", ylim=(-2, 100))
    for axes in (accuracy, epsilon, rate):
        axes.grid(alpha=0.3)
    if len(runs) > 1:
        accuracy.legend(fontsize="x-small")
    return drawing
