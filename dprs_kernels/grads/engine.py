"""A logical batch of any size through a source, a micro-batch at a time: memory for one, the result of all.

    engine = StreamingEngine(per_sample(model), max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=1000,
                             noise=NoiseSource())
    engine.keep = KeepMask.draw(engine.params, drop_rate=0.5, seed=0, draw=0)
    engine.step(loss_fn, x, y)          # writes p.grad; then optimizer.step()
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from dprs_kernels import allocator
from dprs_kernels.grads.arena import Arena
from dprs_kernels.grads.source import LossFn, Named, Source, StreamingSource, check_batch
from dprs_kernels.mask import KeepMask
from dprs_kernels.noise import NoiseSource
from dprs_kernels.outer import Grad
from dprs_kernels.step import PrivateSum
from dprs_kernels.structure import RowSet

# Of per-sample gradients, if all were stored. Less starves the matrix products of small layers and pays more often for
# what a micro-batch costs by itself (hooks and checks, 2 ms); more has larger activations, whose pages the system hands
# out anew for each unless it was told not to (allocator.py). DP-CNN by rows at r = 0.9, over plain SGD at its best, at
# 16, 32 and 64 samples: 0.98, 0.90, 1.01 in time. Where freed memory is kept, at 32, 44, 64 and 128: 0.87, 0.86, 0.84,
# 0.85, and a step of 68 has 2.3 times the memory of plain SGD's, one of 44 has 1.5.
MICRO_BATCH_BYTES, WITH_KEPT_MEMORY = 72 * 2**20, 96 * 2**20
ROWS_AT_ONCE = 4   # that the kernels take together (csrc/sums.h)


def micro_batch_size(params: Named) -> int:
    """Samples whose gradients take at most MICRO_BATCH_BYTES, in fours: 32 for DP-CNN, 724 for DP-CNN/S; or
    WITH_KEPT_MEMORY: 44, 964."""
    row = sum(param.numel() * param.element_size() for _, param in params)
    kept = allocator.kept() >= WITH_KEPT_MEMORY and all(param.device.type == "cpu" for _, param in params)
    samples = max((WITH_KEPT_MEMORY if kept else MICRO_BATCH_BYTES) // row, 1)
    return samples if samples < ROWS_AT_ONCE else samples // ROWS_AT_ONCE * ROWS_AT_ONCE


class Stream:
    """A source, a micro-batch at a time: iterate, and fold each before the next is made.

    for grads in Stream(per_sample(model))(loss_fn, x, y):
        optimizer.accumulate(grads)
    """

    def __init__(self, source: Source, *, max_physical_batch_size: int | None = None) -> None:
        if max_physical_batch_size is not None and max_physical_batch_size < 1:
            raise ValueError(f"max_physical_batch_size: got {max_physical_batch_size}; expected at least 1")
        self.source = source
        self.micro_batch = max_physical_batch_size or micro_batch_size(source.params)
        self._arena = Arena(self.micro_batch)
        self._told = False

    def __call__(
        self, loss_fn: LossFn, x: Any, y: Any, *, rows: Mapping[torch.Tensor, RowSet] | None = None
    ) -> Iterator[Mapping[str, Grad]]:
        """name -> [n, *shape], valid until the next one is asked for, and emptied then: their memory is written again.
        An empty batch is one empty micro-batch. rows: of the parameters that a row mask keeps some rows of: a source
        that can, makes no others."""
        n = check_batch(x, y)
        self._arena.keep(rows or {})
        source = self.source
        into = source.grads_into if isinstance(source, StreamingSource) else None
        if rows and into is None:
            self._say_whole()
        # Not n in equal parts, 1.6 % quicker for 64 samples of a transformer: n is private, and how a product is
        # rounded may go by its size, so that one sample more would move all others' gradients (SECURITY.md).
        for start in range(0, max(n, 1), self.micro_batch):
            some = slice(start, start + self.micro_batch)
            part = loss_fn, _rows(x, some), _rows(y, some)
            self._arena.recycle()   # what lies there was folded
            found: Mapping[str, Grad] = source.grads(*part) if into is None else into(self._arena, *part)
            grads: dict[str, Grad] = dict(found)
            del found
            yield grads
            grads.clear()   # a kept one says "no entry"; it would hold the next one's values

    def _say_whole(self) -> None:
        if not self._told:
            warnings.warn(
                f"structure: {type(self.source).__name__} makes whole gradients: a row mask is right with it and saves "
                "no work before the sum; per_sample(model) leaves dropped rows out",
                UserWarning, stacklevel=5,
            )   # fmt: skip
        self._told = True


class StreamingEngine:
    """accumulate as often as you like, release once; step does both. Settings are PrivateSum's."""

    def __init__(
        self,
        source: Source,
        *,
        max_grad_norm: float | Sequence[float],
        noise_multiplier: float,
        expected_batch_size: float,
        noise: NoiseSource,
        keep: KeepMask | None = None,
        clipping: str = "flat",
        backend: str = "auto",
        max_physical_batch_size: int | None = None,
    ) -> None:
        self.source = source
        self.noise = noise
        self._stream = Stream(source, max_physical_batch_size=max_physical_batch_size)
        self._settings: dict[str, Any] = dict(
            max_grad_norm=max_grad_norm, noise_multiplier=noise_multiplier, expected_batch_size=expected_batch_size,
            clipping=clipping, backend=backend,
        )   # fmt: skip
        self._keep = keep
        self._sum: PrivateSum | None = None
        self._make()   # bad settings are refused here, before any work

    @property
    def micro_batch(self) -> int:
        return self._stream.micro_batch

    @property
    def params(self) -> Named:
        return self.source.params

    @property
    def keep(self) -> KeepMask | None:
        return self._keep

    @keep.setter
    def keep(self, keep: KeepMask | None) -> None:
        if self._sum is not None:
            raise ValueError("keep: fixed while samples are accumulated; change it after release")
        before, self._keep = self._keep, keep
        try:
            self._make()
        except ValueError:
            self._keep = before
            raise

    def accumulate(self, loss_fn: LossFn, x: Any, y: Any) -> None:
        """Adds samples to the sum, in micro-batches. An empty batch is an ordinary one. All or nothing: after an error
        the whole logical batch is given up, since a retry would count the samples before it twice."""
        try:
            for grads in self._stream(loss_fn, x, y, rows=kept_rows(self._keep, [p for _, p in self.params])):
                if self._sum is None:
                    self._sum = self._make()
                self._sum.add(grads)
                del grads   # before the next are made: memory for one micro-batch
        except BaseException:
            self.discard()
            raise

    def discard(self) -> None:
        """Gives up what was accumulated: nothing of it was released."""
        self._sum = None

    def release(self) -> None:
        """Adds the noise, once, and writes p.grad."""
        if self._sum is None:
            raise ValueError("release: nothing was accumulated; an empty batch is accumulate(loss_fn, x[:0], y[:0])")
        total, self._sum = self._sum, None   # an error below never leads to a second release
        total.release()

    def step(self, loss_fn: LossFn, x: Any, y: Any) -> None:
        """accumulate and release: a whole logical batch."""
        self.accumulate(loss_fn, x, y)
        self.release()

    def _make(self) -> PrivateSum:
        return PrivateSum(self.source.params, keep=self._keep, noise=self.noise, **self._settings)


def kept_rows(keep: KeepMask | None, params: Sequence[torch.Tensor]) -> dict[torch.Tensor, RowSet]:
    """By parameter, where a mask of these parameters was drawn by rows."""
    sets = {} if keep is None else {param: keep.kept_rows(p) for p, param in enumerate(params)}
    return {param: rows for param, rows in sets.items() if rows is not None}


def _rows(value: Any, rows: slice) -> Any:
    if isinstance(value, tuple):
        return tuple(part[rows] for part in value)
    part: torch.Tensor = value[rows]
    return part
