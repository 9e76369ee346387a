"""PlainTwin: the training loop without privacy, timed beside the private one, step by step on the same batches.

A copy of the model takes ordinary steps (forward, backward, optimizer). Steps alternate between the whole batch at once
and the private loop's micro-batches, and the faster way counts. Only times leave here: the copy, which has no noise, is
thrown away.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional


@dataclass(frozen=True)
class PlainRatio:
    """Seconds for the same images."""

    private: float
    plain: float
    way: str      # which plain way was faster

    @property
    def ratio(self) -> float:
        return self.private / self.plain

    def summary(self) -> str:
        return (
            f"{self.ratio:.2f} x the time of the same loop without privacy ({self.private:.1f} s against "
            f"{self.plain:.1f} s an epoch, {self.way})"
        )


class PlainTwin:
    """model: of its own, without hooks. The first two steps warm up and are not counted."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, batch: int, micro_batch: int) -> None:
        self.model, self.optimizer, self.batch = model, optimizer, batch
        self.sizes = {"whole batches": None, f"micro-batches of {micro_batch}": micro_batch}
        self._plain = {way: [0.0, 0] for way in self.sizes}   # seconds, images
        self._private: list[float] = [0.0, 0]
        self._steps = 0

    def step(self, x: torch.Tensor, y: torch.Tensor, private_seconds: float) -> None:
        way = list(self.sizes)[self._steps % 2]
        size, start = self.sizes[way] or max(len(x), 1), time.perf_counter()
        self.optimizer.zero_grad()
        for part_x, part_y in zip(x.split(size), y.split(size), strict=True):
            (functional.cross_entropy(self.model(part_x), part_y, reduction="sum") / self.batch).backward()
        self.optimizer.step()
        seconds = time.perf_counter() - start
        self._steps += 1
        if self._steps > 2:
            for total, value in ((self._plain[way], seconds), (self._private, private_seconds)):
                total[0] += value
                total[1] += len(x)

    def result(self, images: int) -> PlainRatio | None:
        """For an epoch of `images`; None where too few steps were taken."""
        rates = {way: seconds / n for way, (seconds, n) in self._plain.items() if n}
        if len(rates) < len(self.sizes):
            return None
        way = min(rates, key=lambda name: rates[name])
        return PlainRatio(self._private[0] / self._private[1] * images, rates[way] * images, way)
