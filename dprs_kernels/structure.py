"""Which coordinates drop together, and how a structured mask is drawn.

"coordinate"   each by itself (the paper's).
"row"          whole output units: row j of a weight together with entry j of its bias.
"mixed"        rows where a group has at least WIDE of them, coordinates in the others: an output layer of ten classes
               would keep one row at r = 0.9, and learn of that class only.

The privacy of a step asks of a mask only that it does not depend on the data, and the paper's utility bound only that
each coordinate is kept with probability 1 - r (paper/STRUCTURE.md, equation by equation). Which drop together is free,
and what drops as a whole row need not be computed at all.

Groups. A group is what shares its rows: a tensor of two or more dimensions opens one, with shape[0] rows; a vector
joins the last group of its module if it has as many entries as that has rows, else it opens a group whose rows are its
entries. So a Linear's or a convolution's rows are output units, an Embedding's the entries of its vocabulary, a norm's
weight and bias drop channel by channel. Modules are told apart by the names of (name, parameter) pairs, wherever they
stand; without names a vector can only join what stands right before it. A group with a single row (Linear(n, 1), a
number) has no rows to choose among: there coordinates drop one by one, as in the narrow groups of a mixed mask.

Counts. Of R rows (or coordinates) floor(r R) drop, and one more with probability the fractional part, so that
E[m_i] = 1 - r for each coordinate; at least one is kept, so for r above 1 - 1/R it is kept with probability 1/R.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch

from dprs_kernels import native, reference
from dprs_kernels.capture import capturing
from dprs_kernels.layout import Layout

STRUCTURES = ("coordinate", "row", "mixed")
WIDE = 32   # rows: at r = 0.9 three of them are kept. All layers of DP-CNN but the last have as many
Groups = tuple[int, ...]   # of each parameter, the number of its group


@dataclass(frozen=True, eq=False)
class RowSet:
    """The rows of a parameter that a mask keeps, each whole, while no other has a kept coordinate.

    kept: int64 [k], ascending. count: how many rows the parameter has.

    >>> RowSet(torch.tensor([1, 3]), 4).places
    tensor([-1,  0, -1,  1])
    """

    kept: torch.Tensor
    count: int

    def __post_init__(self) -> None:
        inside = bool((self.kept >= 0).all() and (self.kept < self.count).all() and (self.kept.diff() > 0).all())
        if self.kept.dtype != torch.int64 or self.kept.dim() != 1 or not inside:
            got = f"{self.kept.dtype} {self.kept.tolist()}"
            raise ValueError(f"kept: got {got}; expected int64, ascending, each row once, in [0, {self.count})")

    @cached_property
    def places(self) -> torch.Tensor:
        """int64 [count]: which of the kept rows a row is, -1 for the others."""
        places = torch.full((self.count,), -1, dtype=torch.int64)
        places[self.kept] = torch.arange(len(self.kept))
        return places

    @property
    def all(self) -> bool:
        return len(self.kept) == self.count

    def kept_on(self, device: torch.device) -> torch.Tensor:
        """kept on that device, copied there once."""
        if device not in self._copies:
            if capturing(device):
                raise RuntimeError(f"keep: take one ordinary step with it on {device} before capturing a CUDA graph")
            self._copies[device] = self.kept.to(device)
        return self._copies[device]

    @cached_property
    def _copies(self) -> dict[torch.device, torch.Tensor]:
        return {self.kept.device: self.kept}


def groups_of(items: Sequence[Any]) -> Groups:
    """From (name, tensor) pairs, tensors or shapes.

    >>> groups_of([(8, 3, 3, 3), (8,), (8,), (8,), (10, 8), (10,)])   # a convolution, a norm, a Linear
    (0, 0, 1, 1, 2, 2)
    """
    shapes = Layout.of(items).shapes
    groups: list[int] = []
    last: dict[str | None, tuple[int, int]] = {}   # of each module: its last group, and how many rows that has
    for shape, module in zip(shapes, map(_module, items), strict=True):
        group, rows = last.get(module, (-1, -1))
        joins = len(shape) == 1 and shape[0] == rows
        if module is None and joins and groups.count(group) == 2:   # nameless: a weight has one bias
            joins = False
        if not joins:
            group, rows = max(groups, default=-1) + 1, shape[0] if shape else 1
        last[module] = group, rows
        groups.append(group)
    return tuple(groups)


def draw_bits(layout: Layout, dropped: int, key: Sequence[int]) -> torch.Tensor:
    """Packed bits of a mask by coordinates, made on the CPU: by the kernel, which is ten times as fast, or by the
    reference, with the same bits."""
    draw = reference.draw_mask if native.library() is None else native.draw_mask
    return draw(layout, dropped, key)[0]


def draw_rows(
    layout: Layout, groups: Groups, drop_rate: float, key: Sequence[int], structure: str
) -> list[torch.Tensor]:
    """Bool tensors [P]: of each parameter which rows are kept, [shape[0]]; [*shape] where coordinates drop."""
    least = WIDE if structure == "mixed" else 2
    kept: dict[int, torch.Tensor] = {}
    for group in range(max(groups) + 1):
        members = [p for p, g in enumerate(groups) if g == group]
        first = layout.shapes[members[0]]
        rows = first[0] if first else 1
        stream = _stream(key, group)
        if rows >= least:
            chosen = _kept(rows, drop_rate, stream)
            kept.update(dict.fromkeys(members, chosen))
        else:
            sizes = [layout.sizes[p] for p in members]
            parts = _kept(sum(sizes), drop_rate, stream).split(sizes)
            kept.update({p: part.view(layout.shapes[p]) for p, part in zip(members, parts, strict=True)})
    return [kept[p] for p in range(len(groups))]


def expanded(layout: Layout, kept: Sequence[torch.Tensor]) -> torch.Tensor:
    """Packed bits of what draw_rows drew."""
    dense = [
        part if part.shape == shape else part.view(-1, *[1] * (len(shape) - 1)).expand(shape)
        for part, shape in zip(kept, layout.shapes, strict=True)
    ]
    return reference.pack_bits(layout, dense)


def _kept(rows: int, drop_rate: float, stream: np.ndarray) -> torch.Tensor:
    """Bool [rows]. stream: five 64-bit words, one to round the count, four to choose."""
    if rows == 0:
        return torch.zeros(0, dtype=torch.bool)
    wanted = drop_rate * rows
    dropped = math.floor(wanted)
    dropped += int(stream[0]) < int((wanted - dropped) * 2.0**64)
    layout, dropped = Layout(((rows,),)), min(dropped, rows - 1)
    return reference.unpack_bits(layout, draw_bits(layout, dropped, stream[1:].tolist()))[0]


def _stream(key: Sequence[int], group: int) -> np.ndarray:
    """Words of the mask's key for one group: hashed, so that groups are unrelated."""
    text = b"dprs_kernels rows" + np.asarray([*key, group], dtype="<u8").tobytes()
    return np.frombuffer(hashlib.sha512(text).digest(), dtype="<u8")[:5]


def _module(item: Any) -> str | None:
    """layers.0 of layers.0.weight; None without a name."""
    if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
        return item[0].rpartition(".")[0]
    return None
