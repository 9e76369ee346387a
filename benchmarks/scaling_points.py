"""The points of bench_scaling.py: one thing grows, the rest stays. Shared with memory.py.

All points of an axis look at the same buffer, from its start: an axis costs the memory of its largest point.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

import torch
from harness import SHAPES
from limit import fastest_read
from names import LIMIT, OURS
from racing import SIGMA, Contender

from dprs_kernels import KeepMask, NoiseSource, fused_rs_dp_step

T = TypeVar("T")

PERIOD = 2**20 + 7   # normals that repeat: fresh ones for a gigabyte would take longer than the race
TOLERANCE = 5e-6     # as harness.OURS_TOLERANCE


@dataclass(frozen=True)
class Point:
    setting: str
    samples: int
    shapes: tuple[tuple[int, ...], ...]
    rate: float = 0.5
    threads: int = 0     # 0: as many as the session has

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    @property
    def bytes(self) -> int:
        return 4 * self.samples * self.size


def _split(size: int, tensors: int) -> tuple[tuple[int, ...], ...]:
    return ((size // tensors,),) * (tensors - 1) + ((size - size // tensors * (tensors - 1),),)


def axes(full: bool) -> dict[str, list[Point]]:
    """N: DP-CNN. D: one tensor, 16 samples, rows up to 128 MB, four times an L3. r, threads: DP-CNN with N = 128.
    tensors: 2^20 coordinates cut into that many."""
    cnn = SHAPES["DP-CNN"].shapes
    counts = (16, 32, 64, 128, 256, 512, 1024, 2048) if full else (128, 256, 512, 1024)
    powers = range(16, 26) if full else range(21, 26)
    rates = (0.0, 0.25, 0.5, 0.75, 0.9, 0.99) if full else (0.0, 0.5, 0.9)
    pieces = (1, 3, 10, 30, 100, 300, 1000) if full else (1, 32, 1000)
    threads = [k for k in (1, 2, 4, 8, 16, 32, 64) if k <= torch.get_num_threads()]
    return {
        "N": [Point(f"N = {n}", n, cnn) for n in counts],
        "D": [Point(f"D = {2**k}", 16, ((2**k,),)) for k in powers],
        "r": [Point(f"r = {r:g}", 128, cnn, rate=r) for r in rates],
        "threads": [Point(f"threads = {k}", 128, cnn, threads=k) for k in threads],
        "tensors": [Point(f"tensors = {k}", 64, _split(2**20, k)) for k in pieces],
    }


def buffer_for(points: list[Point]) -> torch.Tensor:
    base = torch.empty(PERIOD).normal_(generator=torch.Generator().manual_seed(0))
    buffer = torch.empty(max(point.bytes for point in points) // 4)
    for part in buffer.split(PERIOD):
        part.copy_(base[: len(part)])
    return buffer


class Work:
    """One point's tensors, all of them views of the buffer. C is the median norm: about half is clipped."""

    def __init__(self, point: Point, buffer: torch.Tensor) -> None:
        self.point, self.grads, at = point, [], 0
        for shape in point.shapes:
            numbers = point.samples * math.prod(shape)
            self.grads.append(buffer[at : at + numbers].view(point.samples, *shape))
            at += numbers
        self.keep = KeepMask.draw(point.shapes, drop_rate=point.rate, seed=0, draw=0)
        self.bound = math.sqrt(point.size * (1 - point.rate))
        self.params = [torch.nn.Parameter(torch.zeros(shape)) for shape in point.shapes]

    def _with_threads(self, call: Callable[[], T]) -> T:
        before = torch.get_num_threads()
        if self.point.threads:
            torch.set_num_threads(self.point.threads)
        try:
            return call()
        finally:
            if self.point.threads:
                torch.set_num_threads(before)

    def ours(self) -> Contender:
        noise, n = NoiseSource(), self.point.samples

        def run(sigma: float) -> list[torch.Tensor | None]:
            self._with_threads(lambda: fused_rs_dp_step(
                self.params, keep=self.keep, max_grad_norm=self.bound, noise_multiplier=sigma, expected_batch_size=n,
                noise=noise, grad_samples=self.grads,
            ))   # fmt: skip
            return [p.grad for p in self.params]

        return self._contender(OURS, run)

    def limit(self) -> Contender:
        read = self._with_threads(lambda: fastest_read(self.grads))
        return self._contender(LIMIT, lambda sigma: self._with_threads(read))

    def _contender(self, name: str, run: Callable[[float], object]) -> Contender:
        p = self.point
        columns = dict(N=p.samples, D=p.size, tensors=len(p.shapes), bytes=p.bytes, rate=p.rate,
                       threads=p.threads or torch.get_num_threads())   # fmt: skip
        return Contender(name, run, peer=False, setting=p.setting, point=columns)

    def wrong(self, contender: Contender) -> str:
        """Why, or "": without noise, against float64, some rows at a time."""
        rows = [grad.view(self.point.samples, -1) for grad in self.grads]
        keeps = [keep.reshape(-1).double() for keep in self.keep.dense()]
        squares = torch.zeros(self.point.samples, dtype=torch.float64)
        for row, keep in zip(rows, keeps, strict=True):
            for part, out in zip(row.split(16), squares.split(16), strict=True):
                out += part.double().square_() @ keep
        factors = (self.bound / squares.sqrt()).clamp(max=1) / self.point.samples
        found = contender.run(0.0)
        for grad, row, keep in zip(found, rows, keeps, strict=True):
            parts = zip(row.split(16), factors.split(16), strict=True)
            truth = sum(f @ part.double() for part, f in parts) * keep
            worst = float((grad.reshape(-1).double() - truth).abs().max())
            allowed = TOLERANCE * float(truth.abs().max())
            if not worst <= allowed:   # NaN is not <=
                return f"off by {worst:.3e}, allowed {allowed:.3e}"
        return ""


def for_memory(point: Point) -> Callable[[], object]:
    """For memory.py: the point's step, p.grad not there yet, and code paid for by a tiny step."""
    Work(Point("tiny", 4, ((100,),)), torch.ones(400)).ours().run(SIGMA)
    return functools.partial(Work(point, buffer_for([point])).ours().run, SIGMA)
