"""Memory for the per-sample gradients of a micro-batch: fresh each time, or one arena that is written again and again.

Fresh memory is what a user gets who keeps the gradients. A streaming engine folds a micro-batch before it makes the
next, so that one set of buffers serves all: the system hands out zeroed pages on first touch, which costs three to four
times the arithmetic of a large Linear (csrc/accumulate.h reads at 20 GB/s, first touches run at 2 to 3).
"""

from __future__ import annotations

import torch


class Fresh:
    """Every gradient is a new tensor, and a tensor: the caller may keep it and look at it."""

    outer_products = False

    def empty(self, param: torch.Tensor, samples: int, dtype: torch.dtype) -> torch.Tensor:
        """[samples, *shape] to be written whole."""
        return torch.empty(samples, *param.shape, dtype=dtype, device=param.device)


class Arena(Fresh):
    """Buffers [capacity, *shape], one per parameter that needs one, made at its first use and kept.

    What empty() gave out is valid until recycle(). Rules may answer with OuterProducts: nobody looks at them.
    """

    outer_products = True

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._buffers: dict[torch.Tensor, torch.Tensor] = {}
        self._lent: set[torch.Tensor] = set()

    def empty(self, param: torch.Tensor, samples: int, dtype: torch.dtype) -> torch.Tensor:
        if param in self._lent:   # used twice in one pass (tied weights): the two are added, so both are needed
            return super().empty(param, samples, dtype)
        self._lent.add(param)
        buffer = self._buffers.get(param)
        if buffer is None or buffer.dtype != dtype or buffer.device != param.device or len(buffer) < samples:
            self._buffers.pop(param, None)   # freed before its successor is made
            buffer = self._buffers[param] = super().empty(param, max(samples, self.capacity), dtype)
        return buffer[:samples]

    def recycle(self) -> None:
        """The gradients given out so far are folded: their memory may be written again."""
        self._lent.clear()

    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())
