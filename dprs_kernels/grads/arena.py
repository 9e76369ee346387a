"""Memory for the per-sample gradients of a micro-batch: fresh each time, or one arena that is written again and again.

Fresh memory is what a user gets who keeps the gradients. A streaming engine folds a micro-batch before it makes the
next, so that one set of buffers serves all: the system hands out zeroed pages on first touch, which costs three to four
times the arithmetic of a large Linear (csrc/accumulate.h reads at 20 GB/s, first touches run at 2 to 3).
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from dprs_kernels.structure import RowSet


class Fresh:
    """Every gradient is a new tensor, and a tensor: the caller may keep it and look at it."""

    outer_products = False

    def rows(self, param: torch.Tensor) -> RowSet | None:
        """The rows of a parameter that are wanted, where that is not all of them."""
        return None

    def empty(self, param: torch.Tensor, samples: int, dtype: torch.dtype, rows: int | None = None) -> torch.Tensor:
        """[samples, *shape] to be written whole; of `rows` rows where that is given."""
        shape = param.shape if rows is None else (rows, *param.shape[1:])
        return torch.empty(samples, *shape, dtype=dtype, device=param.device)


class Arena(Fresh):
    """Buffers for [capacity, *shape], one per parameter that needs one, made at its first use and kept.

    What empty() gave out is valid until recycle(). Rules may answer with OuterProducts, and with RowGrads where keep()
    said which rows are wanted: nobody looks at them.
    """

    outer_products = True

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._buffers: dict[torch.Tensor, torch.Tensor] = {}   # flat
        self._lent: set[torch.Tensor] = set()
        self._rows: dict[torch.Tensor, RowSet] = {}

    def keep(self, rows: Mapping[torch.Tensor, RowSet]) -> None:
        """From now on only these rows are wanted, and all of the parameters that are not named."""
        self._rows = {param: some for param, some in rows.items() if not some.all}

    def rows(self, param: torch.Tensor) -> RowSet | None:
        return self._rows.get(param)

    def empty(self, param: torch.Tensor, samples: int, dtype: torch.dtype, rows: int | None = None) -> torch.Tensor:
        if param in self._lent:   # used twice in one pass (tied weights): the two are added, so both are needed
            return super().empty(param, samples, dtype, rows)
        self._lent.add(param)
        shape = tuple(param.shape) if rows is None else (rows, *param.shape[1:])
        row, buffer = math.prod(shape), self._buffers.get(param)
        needed = max(samples, self.capacity) * row
        fits = buffer is not None and buffer.dtype == dtype and buffer.device == param.device
        # A third empty, it is made anew: memory falls as the rows do. Until then new masks take the pages there are.
        if buffer is None or not fits or not samples * row <= buffer.numel() <= 1.5 * needed:
            self._buffers.pop(param, None)   # freed before its successor is made
            buffer = self._buffers[param] = torch.empty(needed, dtype=dtype, device=param.device)
        return buffer[: samples * row].view(samples, *shape)

    def recycle(self) -> None:
        """The gradients given out so far are folded: their memory may be written again."""
        self._lent.clear()

    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())
