"""Where each coordinate lies: parameters in order, row-major, each padded to a multiple of 32.

The unpadded coordinate numbers the D values (it decides the mask); the padded coordinate numbers words and
lanes (it decides the noise and indexes packed bits and accumulators). 32 is a word of keep bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

WORD = 32


@dataclass(frozen=True)
class Layout:
    """Shapes of the parameters and what follows from them.

    >>> layout = Layout.of([(2, 3), (40,)])
    >>> layout.size, layout.padded, layout.starts
    (46, 96, (0, 32))
    """

    shapes: tuple[tuple[int, ...], ...]

    def __hash__(self) -> int:
        return self._hash   # plans and tables are looked up by it in every step

    @cached_property
    def _hash(self) -> int:
        return hash(self.shapes)

    @staticmethod
    def of(params_or_shapes: Iterable[Any]) -> Layout:
        """From tensors, (name, tensor) pairs or shapes."""
        items = list(params_or_shapes)
        return _layout(tuple([item.shape if isinstance(item, torch.Tensor) else _shape(item, i)
                              for i, item in enumerate(items)]))   # fmt: skip

    @cached_property
    def sizes(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for shape in self.shapes)

    @cached_property
    def size(self) -> int:
        """D, the number of coordinates."""
        return sum(self.sizes)

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Padded coordinate of each parameter's first value."""
        starts, at = [], 0
        for size in self.sizes:
            starts.append(at)
            at += -(-size // WORD) * WORD
        return tuple(starts)

    @cached_property
    def padded(self) -> int:
        return sum(-(-size // WORD) * WORD for size in self.sizes)

    def split(self, flat: torch.Tensor) -> list[torch.Tensor]:
        """Views of a padded vector [padded], one per parameter, in its shape."""
        return [
            flat[start : start + size].view(shape)
            for start, size, shape in zip(self.starts, self.sizes, self.shapes, strict=True)
        ]


@lru_cache(maxsize=64)
def _layout(shapes: tuple[tuple[int, ...], ...]) -> Layout:
    layout = Layout(tuple(map(tuple, shapes)))   # tensors have torch.Size, a tuple that is equal to its tuple
    if layout.size == 0:
        raise ValueError(
            f"params: got {len(shapes)} parameters with 0 values in all; expected at least one value. "
            "Was an exhausted generator passed, or is nothing trainable?"
        )
    return layout


def _shape(item: Any, index: int) -> tuple[int, ...]:
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[1], torch.Tensor):
        return tuple(item[1].shape)
    if isinstance(item, (tuple, list)) and all(isinstance(n, int) and n >= 0 for n in item):
        return tuple(item)
    raise ValueError(
        f"params: item {index} is {type(item).__name__}; expected a tensor, a (name, tensor) pair or a shape"
    )
