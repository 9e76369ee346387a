"""Gradients of kept rows on the Triton backend: how they are read, and tiles that hold no other row.

RowGrads are read where they lie where a row is a multiple of 32 coordinates. A tile names its first column and its
first padded coordinate in words of 32, one for the values and one for keep bits and sums; kept rows of other lengths
start inside words, at other bits than they have among the values, so these (biases too, with rows of one coordinate)
are stored whole, zeros where a row was dropped, and cost what the whole gradient costs.

Kept rows that are neighbours make a run, which is in one piece both in memory and among the coordinates; runs are cut
into tiles. A dropped row has no tile: no program asks for it, sums it or counts it. Whole gradients [n, *shape] keep
the tiles of all rows: the verbs of a backend see bits, on the device, and reading rows out of them would wait for it.
There a dropped row's programs look at its bits and request nothing.

Tables of the last few masks stay on the device (32 bytes a tile, one to four tables a mask); older ones are freed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from weakref import WeakKeyDictionary

import numpy as np
import torch

from dprs_kernels.backends import tables
from dprs_kernels.backends.tables import Rows, Tiles
from dprs_kernels.layout import WORD, Layout
from dprs_kernels.row_grads import RowGrads
from dprs_kernels.structure import RowSet

_words: WeakKeyDictionary[RowSet, bytes] = WeakKeyDictionary()


def rows_of(grad: torch.Tensor | RowGrads) -> Rows:
    """tables.rows_of for both: kept rows as they lie, or the whole gradient.

    >>> rows = RowSet(torch.tensor([1, 3]), 4)
    >>> [rows_of(RowGrads(torch.ones(5, 2, length), rows)).held.shape[1] for length in (64, 27)]
    [128, 108]
    """
    if not isinstance(grad, RowGrads):
        return tables.rows_of(grad)
    if grad.rows.all:   # rows in their order: the gradient itself, with the tiles of every other
        return tables.rows_of(grad.values)
    if math.prod(grad.shape[2:]) % WORD:
        tables.hold(grad.device, grad.rows.kept_on(grad.device))   # a replay places rows by it
        return tables.rows_of(grad.dense())
    return replace(tables.rows_of(grad.values), kept=_kept(grad.rows))


def tiles_of(
    layout: Layout, rows: Sequence[Rows], params: tuple[int, ...], columns: int, device: torch.device,
    rounded: bool = False,
) -> Tiles:   # fmt: skip
    """Tiles of these parameters, of at most `columns`: of the rows that are held. rounded: with empty tiles at the end
    of a table made for rows, so that few counts occur (see _rounded)."""
    kept = tuple(rows[p].kept for p in params)
    if not any(part is not None for part in kept):
        return tables.tiles_of(layout, params, columns, device)
    return _row_tiles(layout, params, kept, columns, device, rounded)


def most_tiles(rows: Sequence[Rows], columns: int) -> int:
    """No table of tiles_of is longer: a parameter has a tile to itself, however small, and a run one more at most."""
    whole = sum(-(-row.held.shape[1] // columns) for row in rows)
    runs = sum(len(row.kept) // 8 for row in rows if row.kept is not None)
    return _rounded(whole + runs) if runs else whole


@lru_cache(maxsize=16)
def _row_tiles(
    layout: Layout, params: tuple[int, ...], kept: tuple[bytes | None, ...], columns: int, device: torch.device,
    rounded: bool,
) -> Tiles:   # fmt: skip
    parts, ranges, count = [], {}, 0
    for p, words in zip(params, kept, strict=True):
        part = _cut(*_runs(layout, p, words), columns)
        parts.append(np.column_stack([np.full(len(part), p), part]))
        ranges[p] = (count, count + len(part))
        count += len(part)
    if rounded:
        parts.append(np.tile([params[0], 0, 0, 0], (_rounded(count) - count, 1)))   # no columns: nothing is requested
    table = np.concatenate(parts).astype(np.int64)
    return Tiles(tables.resident_ints(table.reshape(-1), device).view(-1, 4), len(table), ranges)


def _runs(layout: Layout, p: int, kept: bytes | None) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int64 [runs] each: first column, first padded coordinate, number of columns."""
    start, size = layout.starts[p], layout.sizes[p]
    if kept is None:
        return np.array([0]), np.array([start]), np.array([size])
    rows, length = np.frombuffer(kept, dtype=np.int64), math.prod(layout.shapes[p][1:])
    first = np.flatnonzero(np.diff(rows, prepend=-2) != 1)   # places where a run begins; -2 has no neighbour
    return first * length, start + rows[first] * length, np.diff(first, append=len(rows)) * length


def _cut(column: np.ndarray, coordinate: np.ndarray, size: np.ndarray, columns: int) -> np.ndarray:
    """Runs into tiles: int64 [tiles, 3], first column / 32, columns, first padded coordinate / 32."""
    pieces = -(-size // columns)
    run = np.repeat(np.arange(len(pieces)), pieces)                                   # [tiles]
    offset = (np.arange(len(run)) - np.repeat(np.cumsum(pieces) - pieces, pieces)) * columns
    return np.column_stack([
        (column[run] + offset) // WORD, np.minimum(columns, size[run] - offset), (coordinate[run] + offset) // WORD
    ])   # fmt: skip


def _rounded(count: int) -> int:
    """Up to four significant bits. Design B is compiled for its number of tiles, and every mask has another: so there
    are 8 kernels between a number and its double, for at most an eighth of the programs with nothing to do.

    >>> [_rounded(count) for count in (7, 16, 17, 1000)]
    [7, 16, 18, 1024]
    """
    step = 1 << max(0, count.bit_length() - 4)
    return -(-count // step) * step


def _kept(rows: RowSet) -> bytes:
    """The kept rows as a key for tables: equal sets have equal ones, and those of one set are the same object, whose
    hash is computed once."""
    if rows not in _words:
        _words[rows] = rows.kept.numpy().astype(np.int64).tobytes()
    return _words[rows]
