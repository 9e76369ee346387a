"""The CPU backend: builds the tables that csrc/ reads, and calls it.

Gradients stay where they lie: the kernels get addresses and strides, never a copy of [N, D]. Results do not
depend on the number of threads, on the order of the work or on the split into micro-batches.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch

from dprs_kernels import native
from dprs_kernels.layout import Layout
from dprs_kernels.native import DTYPES, MAX_DIMS, int64s
from dprs_kernels.outer import Grad, OuterProducts
from dprs_kernels.plan import NORM_LIMIT, StepPlan
from dprs_kernels.row_grads import RowGrads

TAKES = OuterProducts, RowGrads
NEEDS_TOTAL = False   # step_ has sums of its own
NO_MEMORY, OTHER_KEEP, NO_NOISE = -1, -2, -3   # dprs_failure
SPLITS = ("tiles", "samples", "twice")   # dprs_split
_order: native.Order | None = None       # None: csrc/order.h chooses


@contextmanager
def order(
    split: str = "tiles", *, group: int = 4, at_once: int = 4, ahead: int = 4096, early: int = 8192,
    cache: int = 1,
) -> Iterator[None]:
    """For tests: another way through samples and coordinates (csrc/order.h). Results must not change."""
    global _order
    if split not in SPLITS or group < 1 or at_once not in (1, 2, 4) or min(ahead, early) < 0 or cache not in (1, 2):
        got = f"{split!r}, {group}, {at_once}, {ahead}, {early}, {cache}"
        wanted = f"one of {SPLITS}, at least 1, 1, 2 or 4, bytes of at least 0, and 1 or 2"
        raise ValueError(f"split, group, at_once, ahead, early, cache: got {got}; expected {wanted}")
    before, _order = _order, native.Order(SPLITS.index(split), group, at_once, ahead, early, cache)
    try:
        yield
    finally:
        _order = before


def unavailable(device: torch.device) -> str:
    if device.type != "cpu":
        return f"it needs tensors on the CPU, got {device}"
    return "" if native.library() is not None else native.reason()


def sums(layout: Layout, bits: torch.Tensor | None) -> int:
    """Values of a total: those of kept coordinates, tile by tile (csrc/tiles.h)."""
    return int(native.loaded().dprs_sums(int64s(layout.sizes), len(layout.sizes), _address(bits)))


def accumulate_(
    total: torch.Tensor, grads: Sequence[Grad], bits: torch.Tensor | None, plan: StepPlan
) -> torch.Tensor:
    """total += S of one micro-batch; returns its norms [N, segments], which are private."""
    batch = _Batch(grads, plan)
    norms = torch.empty(batch.grads.samples, len(plan.bounds), dtype=torch.float64)
    failed = native.loaded().dprs_accumulate(
        batch.grads, _address(bits), batch.clip, plan.unit, plan.small, total.data_ptr(), total.numel(),
        norms.data_ptr(), _chosen_order(), native.threads(),
    )   # fmt: skip
    _check(failed, plan)
    return norms


def release(
    outs: Sequence[torch.Tensor],
    total: torch.Tensor,
    bits: torch.Tensor | None,
    plan: StepPlan,
    key: bytes,
    step: int,
) -> None:
    """Same verb as reference.release; outs are contiguous."""
    job, held = _release_of(outs, plan, key, step)
    failed = native.loaded().dprs_release_noised(
        job, _address(bits), total.data_ptr(), total.numel(), native.threads()
    )
    del held   # until here
    _check(failed, plan)


def step_(
    outs: Sequence[torch.Tensor],
    total: None,
    grads: Sequence[Grad],
    bits: torch.Tensor | None,
    plan: StepPlan,
    key: bytes,
    step: int,
) -> None:
    """accumulate_ and release of a logical batch that is one micro-batch, the same bits; the kernels hold the sums, and
    write no norms."""
    batch = _Batch(grads, plan)
    job, held = _release_of(outs, plan, key, step)
    failed = native.loaded().dprs_step(
        batch.grads, _address(bits), batch.clip, plan.small, None, job, _chosen_order(), native.threads()
    )
    del held   # until here
    _check(failed, plan)


class _Batch:
    """A micro-batch and its clipping as the kernels read them. Holds what they point to."""

    def __init__(self, grads: Sequence[Grad], plan: StepPlan) -> None:
        samples = grads[0].shape[0]
        whole = [grad for grad in grads if isinstance(grad, torch.Tensor) and grad.is_contiguous()]
        tables, held = _in_order(whole, plan.layout) if len(whole) == len(grads) else _described(grads, plan)
        self.grads = native.Grads(len(grads), samples, *tables)
        self.clip, numbers = _clip_of(plan, plan.loss_scale(samples))
        self._held = held, numbers


@lru_cache(maxsize=64)
def _clip_of(plan: StepPlan, loss_scale: float) -> tuple[native.Clip, object]:
    """The clipping of a plan, and what must live as long."""
    segment_of = native.Tables(plan.segment_of)
    numbers = native.Tables(plan.bounds, plan.norm_scales(loss_scale), kind="d")
    clip = native.Clip(
        len(plan.bounds), *segment_of.addresses, *numbers.addresses, NORM_LIMIT, plan.gamma, loss_scale
    )
    return clip, (segment_of, numbers)


@lru_cache(maxsize=64)
def _constant(layout: Layout, dtypes: tuple[torch.dtype, ...]) -> native.Tables:
    """Sizes, dtypes and zeros: what tensors of a kind have in common in every step."""
    return native.Tables(layout.sizes, [DTYPES[dtype] for dtype in dtypes], (0,) * len(dtypes))


def _in_order(grads: list[torch.Tensor], layout: Layout) -> tuple[Sequence[int], object]:
    """Where the tables of native.Grads begin, and what must live as long, of gradients that are contiguous: a row is as
    far from the next one as it is long, and there is nothing else to say. Most batches are like that, of many tensors
    some: 0.3 of the time of _described."""
    constant = _constant(layout, tuple([grad.dtype for grad in grads]))
    data = native.Tables([grad.data_ptr() for grad in grads])
    size, dtype, none = constant.addresses
    return (size, *data.addresses, dtype, size, none, none, none, none, none, none), (constant, data, grads)


def _described(grads: Sequence[Grad], plan: StepPlan) -> tuple[Sequence[int], object]:
    """As _in_order, of gradients of any kind."""
    parts = len(grads)
    dims, shapes, strides = [0] * parts, [0] * (parts * MAX_DIMS), [0] * (parts * MAX_DIMS)
    stored: list[torch.Tensor] = []   # the gradients, or left factors
    right: list[torch.Tensor | None] = [None] * parts
    held: list[torch.Tensor | None] = [None] * parts   # places of the kept rows
    row_sizes = [0] * parts
    for p, grad in enumerate(grads):
        at = p * MAX_DIMS
        if isinstance(grad, OuterProducts):
            left, factor = map(_factor, (grad.e, grad.a))
            right[p], shapes[at], strides[at] = factor, factor.shape[1], factor.stride(0)
            stored.append(left)
            continue
        if isinstance(grad, RowGrads):
            held[p], row_sizes[p] = grad.rows.places, math.prod(grad.shape[2:])
            grad = grad.values if _rows_contiguous(grad.values) else grad.values.contiguous()
        stored.append(grad)
        if not _rows_contiguous(grad):
            dims[p] = grad.dim() - 1
            shapes[at : at + dims[p]], strides[at : at + dims[p]] = grad.shape[1:], grad.stride()[1:]
    tables = native.Tables(
        plan.layout.sizes,
        [grad.data_ptr() for grad in stored],
        [DTYPES[grad.dtype] for grad in stored],
        [grad.stride(0) for grad in stored],
        dims,
        shapes,
        strides,
        [0 if factor is None else factor.data_ptr() for factor in right],
        [0 if places is None else places.data_ptr() for places in held],
        row_sizes,
    )
    return tables.addresses, (tables, stored, right, held)


def _release_of(
    outs: Sequence[torch.Tensor], plan: StepPlan, key: bytes, step: int
) -> tuple[native.Release, object]:
    """What the kernels read of a release, and what must live as long. The key is read where it is: the
    struct has no copy, which would stay behind in memory that Python frees."""
    constant = _constant(plan.layout, tuple([out.dtype for out in outs]))
    places = native.Tables([out.data_ptr() for out in outs])
    size, dtype, _ = constant.addresses
    job = native.Release(
        len(outs), size, *places.addresses, dtype, plan.unit, plan.grid, plan.noise_std, plan.expected_batch_size,
        key, step,
    )   # fmt: skip
    return job, (constant, places)


def _chosen_order() -> Any:
    return None if _order is None else ctypes.byref(_order)


def _check(failed: int, plan: StepPlan) -> None:
    """A total has a place for each kept coordinate: with another mask, kernels would write beside it. Noise has a
    range: beyond it, it would be a constant."""
    if failed == NO_MEMORY:
        raise MemoryError(f"no memory for kept values of a few samples, {plan.layout.size} coordinates each, and sums")
    if failed == NO_NOISE:
        raise ValueError(
            f"noise_std: got {plan.noise_std!r} with a grid of {plan.grid!r}; expected up to 2^27 of the grid, as "
            "plan.make_plan has it; nothing was released"
        )
    if failed == OTHER_KEEP:
        raise ValueError("keep: not the mask that this sum was begun with; were its bits written to since?")


def _address(bits: torch.Tensor | None) -> int | None:
    return None if bits is None else bits.data_ptr()


def _factor(factor: torch.Tensor) -> torch.Tensor:
    """[n, length] of fp32 or fp64, each row contiguous. 16 bits are widened: their products have more."""
    if factor.dtype in (torch.bfloat16, torch.float16):
        factor = factor.float()
    return factor if factor.stride(1) == 1 or factor.shape[1] <= 1 else factor.contiguous()


def _rows_contiguous(grad: torch.Tensor) -> bool:
    """Are one sample's values contiguous in row-major order? (Samples may be any distance apart.)"""
    if grad.is_contiguous():
        return True
    expected = 1
    for size, stride in zip(reversed(grad.shape[1:]), reversed(grad.stride()[1:]), strict=True):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True
