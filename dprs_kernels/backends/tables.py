"""The tables that the Triton kernels read: where rows and outputs lie, which tile belongs to which parameter, and
the public numbers of a step. Formats: kernels/vectors.py, norms.py, noise.py.

Tile tables depend on shapes, and on the rows that a mask keeps (row_tiles.py), and stay on the device. The others
change with every step and travel in one small copy.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from dprs_kernels.backends.tuning import VECTOR
from dprs_kernels.capture import capturing
from dprs_kernels.layout import WORD, Layout
from dprs_kernels.plan import NORM_LIMIT, StepPlan


@dataclass(frozen=True)
class Tiles:
    """Tiles of a set of parameters, those of a parameter one after another."""

    table: torch.Tensor                      # int64 [count, 4]
    count: int
    ranges: dict[int, tuple[int, int]]       # parameter -> its first tile and the one after its last


@lru_cache(maxsize=64)
def tiles_of(layout: Layout, params: tuple[int, ...], columns: int, device: torch.device) -> Tiles:
    rows: list[tuple[int, int, int, int]] = []
    ranges = {}
    for p in params:
        first = len(rows)
        size, start = layout.sizes[p], layout.starts[p]
        for column in range(0, size, columns):
            rows.append((p, column // WORD, min(columns, size - column), (start + column) // WORD))
        ranges[p] = (first, len(rows))
    table = resident_ints([word for row in rows for word in row], device).view(-1, 4)
    return Tiles(table, len(rows), ranges)


@lru_cache(maxsize=64)
def segments_of(segment_of: tuple[int, ...], device: torch.device) -> torch.Tensor:
    """int64 [params]."""
    return resident_ints(segment_of, device)


@lru_cache(maxsize=8)
def device_key(key: bytes, device: torch.device) -> torch.Tensor:
    """int64 [4]: brought to the device once a key, so that steps send nothing secret and wait for nothing."""
    return resident_ints(np.frombuffer(key, dtype="<i8").tolist(), device)


@dataclass(frozen=True)
class Rows:
    """Gradients of one parameter as the kernels see them; `held` keeps the memory alive until they are launched."""

    held: torch.Tensor
    stride: int       # between samples, in values
    aligned: bool     # 128-bit loads
    kept: bytes | None = None   # int64 [k]: which rows of the parameter are held; None: all


def rows_of(grad: torch.Tensor) -> Rows:
    """Where a sample's values lie in row-major order they stay where they are; else (a transposed gradient) they are
    copied: 128-bit loads are worth more than the copy costs."""
    samples, size = grad.shape[0], math.prod(grad.shape[1:])
    flat = grad.reshape(samples, size)   # a view wherever a view is possible
    if samples and size > 1 and flat.stride(1) != 1:
        flat = flat.contiguous()
    stride, values = flat.stride(0), VECTOR // flat.element_size()   # N = 1 is no exception: a split must not change
    aligned = flat.data_ptr() % VECTOR == 0 and stride % values == 0 and size % values == 0   # the design
    return Rows(flat, stride, aligned)


def row_words(rows: Sequence[Rows]) -> list[int]:
    """int64 [params, 2]: address, stride in vectors where aligned, in values where not."""
    words = []
    for row in rows:
        values = VECTOR // row.held.element_size() if row.aligned else 1
        words += [row.held.data_ptr(), row.stride // values]
    return words


def clip_words(plan: StepPlan, samples: int) -> list[int]:
    """float64 [4 + 2 segments] as bits: loss_scale, 1/h, gamma, norm limit, then (bound, scale) of each segment."""
    per_unit = 1 / plan.unit if plan.unit else 1.0
    values = [plan.loss_scale(samples), per_unit, plan.gamma, NORM_LIMIT]
    for bound, scale in zip(plan.bounds, plan.norm_scales(plan.loss_scale(samples)), strict=True):
        values += [bound, scale]
    return float_bits(values)


def release_words(plan: StepPlan) -> list[int]:
    """float64 [3] as bits: h / g, noise_std / g, g / B; h = 1 without a unit, g = 1 without noise."""
    unit, grid = plan.unit or 1.0, plan.grid or 1.0
    return float_bits([unit / grid, plan.noise_std / grid, grid / plan.expected_batch_size])


def signed(word: int) -> int:
    """The bits of an unsigned 64-bit word as an int64."""
    return word - (word >> 63 << 64)


def float_bits(values: Sequence[float]) -> list[int]:
    bits: list[int] = np.asarray(values, dtype=np.float64).view(np.int64).tolist()
    return bits


def upload(device: torch.device, *sections: Sequence[int]) -> list[torch.Tensor]:
    """Sections of int64 words in one copy, each starting at a multiple of 16 bytes (or Triton would compile a
    second variant of the kernel for the odd address)."""
    padded = [[*words, *([0] * (len(words) % 2))] for words in sections]
    table, at, views = upload_ints([word for words in padded for word in words], device), 0, []
    for words, held in zip(sections, padded, strict=True):
        views.append(table[at : at + len(words)])
        at += len(held)
    return views


def resident_ints(words: Sequence[int] | np.ndarray, device: torch.device) -> torch.Tensor:
    """For tables that stay, for every stream: not from inside a capture, whose memory is filled only when the graph
    runs, and with a copy that is complete when it returns."""
    if capturing(device):
        raise RuntimeError(
            f"take one ordinary step of the same shapes and mask on {device} before capturing a CUDA graph"
        )
    host = torch.tensor(words, dtype=torch.int64)
    table = host.to(device, copy=True)
    host.zero_()   # it may have held a key
    return table


_held_by_graphs: list[torch.Tensor] = []


def hold(device: torch.device, *tensors: torch.Tensor) -> None:
    """A captured graph keeps addresses, not tensors: what it will read again must stay, masks and tables too."""
    if capturing(device):
        _held_by_graphs.extend(tensors)


def upload_ints(words: Sequence[int], device: torch.device) -> torch.Tensor:
    """int64 on the device. While a CUDA graph is captured no host memory may be read (it would be read again at
    every replay): each word becomes a fill of its own, frozen in the graph like the addresses it describes."""
    if capturing(device):
        table = torch.empty(len(words), dtype=torch.int64, device=device)
        for i, word in enumerate(words):
            table[i].fill_(word)
        return table
    host = torch.tensor(words, dtype=torch.int64)
    # Pinned, so that the host does not wait for the backward pass that is still running. Nothing in it is secret.
    return host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else host
