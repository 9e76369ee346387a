"""The Triton backend: launches the kernels of kernels/ on the tables of tables.py, as tuning.py chooses.

Gradients stay where they lie: kernels get addresses and strides, never a copy of [N, D]; only rows that 128-bit loads
cannot read (odd biases) are staged into an aligned scratch. Under a row mask norms and sums are launched on the kept
rows alone, where the gradients are RowGrads whose rows are a multiple of 32 long (row_tiles.py says why, and what
happens to others); the release always covers every coordinate, because the dropped ones get their zeros there.

Contributions are integers: given the factors, sums are the same bits for every design, tile, split and schedule, and
those of the reference and the CPU. Factors come from norms, whose last bits depend on the width of a tile: where
nothing is clipped all agree bit for bit, elsewhere A and B are within 2^-21 of each other, each always the same. So it
is with RowGrads and the same rows inside whole gradients.

Under CUDA-graph capture: noise key and step are read from device memory, where the step advances on the device at each
replay (NoiseSource.claim); sums and counters are zeroed inside the graph; no kernel argument depends on the data,
nothing waits for the host, and what a graph reads again is kept alive (tables.hold). Frozen in a graph are what is
public and fixed for its life: addresses, N, the mask, C, sigma, B. A new mask needs a new capture.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeVar

import torch

from dprs_kernels.backends import launches, row_tiles, tables, tuning
from dprs_kernels.backends.tables import Rows, Tiles
from dprs_kernels.layout import WORD, Layout
from dprs_kernels.plan import StepPlan
from dprs_kernels.row_grads import RowGrads

TAKES = (RowGrads,)
STAGE_SHARE = 1 / 16   # unaligned rows up to this share of D are staged; more are read value by value
LIMIT = 2**31          # of a grid and of the int32 counters
_Kind = TypeVar("_Kind")


@lru_cache(maxsize=1)
def _triton() -> tuple[Any, str]:
    """(kernels, reason why not)."""
    try:
        import triton
    except ImportError as error:
        return None, f"triton cannot be imported ({error}); install it with: pip install 'dprs_kernels[triton]'"
    from dprs_kernels import kernels
    from dprs_kernels.kernels import noise, norms, one_pass, stage, sums  # noqa: F401

    del triton
    return kernels, ""


def interpreted() -> bool:
    """Does this process interpret the kernels (TRITON_INTERPRET=1 when they were first imported)?"""
    kernels, _ = _triton()
    return kernels is not None and bool(kernels.sums.INTERPRETED.value)


def unavailable(device: torch.device) -> str:
    kernels, why = _triton()
    if kernels is None:
        return why
    if interpreted():
        return "" if device.type == "cpu" else f"TRITON_INTERPRET is set, so tensors must be on the CPU, got {device}"
    if device.type != "cuda":
        return (
            f"it needs tensors on a GPU, got {device} (with TRITON_INTERPRET=1 in the environment before the first "
            "import, the kernels run on the CPU, very slowly, for tests)"
        )
    return ""


def accumulate_(
    total: torch.Tensor, grads: Sequence[torch.Tensor | RowGrads], bits: torch.Tensor | None, plan: StepPlan
) -> torch.Tensor:
    """total += S of one micro-batch; returns its norms [N, segments], which are private."""
    with on(total.device):
        return _accumulate(total, _Batch.of(grads, plan), bits, plan)


def release(
    outs: Sequence[torch.Tensor],
    total: torch.Tensor,
    bits: torch.Tensor | None,
    plan: StepPlan,
    key: bytes | torch.Tensor,
    step: int,
) -> None:
    """Same verb as reference.release; outs are contiguous. key: or the device words of a captured stream."""
    kernels, device = _triton()[0], total.device
    with on(device):
        target = _Target.of(outs, plan, key, step, device)
        for dtype, params in _grouped([out.dtype for out in outs], plan.layout.sizes).items():
            launch = launches.release(dtype, bits is not None, plan.grid != 0)
            tiles, keep = tables.tiles_of(plan.layout, params, launch.columns, device), _pointer(bits, total)
            tables.hold(device, tiles.table, keep)
            kernels.noise._release_tile_kernel[(tiles.count,)](
                target.outs, total, tiles.table, keep, target.numbers, target.key, target.step, **launch.options
            )


@torch.no_grad()
def step_(
    outs: Sequence[torch.Tensor],
    total: torch.Tensor,
    grads: Sequence[torch.Tensor | RowGrads],
    bits: torch.Tensor | None,
    plan: StepPlan,
    key: bytes | torch.Tensor,
    step: int,
) -> torch.Tensor:
    """accumulate_ and release of a logical batch that is one micro-batch: one launch where design B serves. Tiles of
    kept rows cannot release, because nobody would write the others: there the release is a launch of its own. Returns
    norms, which the kernels need and which are private; a step leaves them."""
    with on(total.device):
        batch = _Batch.of(grads, plan)
        one_launch = batch.one_pass is not None and batch.samples > 0 and not batch.by_rows
        if not one_launch or plan.grid == 0 or len({out.dtype for out in outs}) > 1:
            norms = _accumulate(total, batch, bits, plan)
            release(outs, total, bits, plan, key, step)
            return norms
        return _one_pass(total, batch, bits, plan, _Target.of(outs, plan, key, step, batch.device))


def _accumulate(total: torch.Tensor, batch: _Batch, bits: torch.Tensor | None, plan: StepPlan) -> torch.Tensor:
    if batch.one_pass is not None:
        return _one_pass(total, batch, bits, plan, None)
    return _two_pass(total, batch, bits, plan)


@dataclass(frozen=True)
class _Batch:
    """A micro-batch as the kernels see it."""

    samples: int
    device: torch.device
    rows: list[Rows]                                              # [P]
    sets: dict[tuple[torch.dtype, bool], tuple[int, ...]]         # (dtype, aligned) -> parameters with values
    one_pass: tuning.Config | None                                # design B, where it serves
    by_rows: bool                                                 # some tiles are of kept rows

    @staticmethod
    def of(grads: Sequence[torch.Tensor | RowGrads], plan: StepPlan) -> _Batch:
        samples, device = grads[0].shape[0], grads[0].device
        rows = _staged([row_tiles.rows_of(grad) for grad in grads])
        sizes = [row.held.shape[1] for row in rows]   # what is held is what is read, and what the L2 has to hold
        sets = _grouped([(row.held.dtype, row.aligned) for row in rows], sizes)
        config = None
        if len(sets) == 1 and len(plan.bounds) == 1 and plan.small:
            (dtype, aligned), _ = next(iter(sets.items()))
            chosen = tuning.config_for(sum(sizes), dtype.itemsize, device)
            if aligned and dtype != torch.float64 and chosen.design == "B" and _tickets(samples, chosen, rows) < LIMIT:
                config = chosen
        return _Batch(samples, device, rows, sets, config, any(row.kept is not None for row in rows))

    def tiles(self, params: tuple[int, ...], columns: int, plan: StepPlan) -> Tiles:
        return row_tiles.tiles_of(plan.layout, self.rows, params, columns, self.device, self.one_pass is not None)


@dataclass(frozen=True)
class _Target:
    """Where a release goes and with which noise, on the device."""

    outs: torch.Tensor      # int64 [P]
    numbers: torch.Tensor   # float64 [3]
    key: torch.Tensor       # int64 [4]
    step: torch.Tensor      # int64 [1]
    dtype: torch.dtype      # of the first output

    @staticmethod
    def of(
        outs: Sequence[torch.Tensor], plan: StepPlan, key: bytes | torch.Tensor, step: int, device: torch.device
    ) -> _Target:
        addresses = [out.data_ptr() for out in outs]
        given = [] if isinstance(key, torch.Tensor) else [tables.signed(step)]
        where, numbers, at = tables.upload(device, addresses, tables.release_words(plan), given)
        secret, at = (key[:4], key[4:]) if isinstance(key, torch.Tensor) else (tables.device_key(key, device), at)
        return _Target(where, numbers.view(torch.float64), secret, at, outs[0].dtype)


def _two_pass(total: torch.Tensor, batch: _Batch, bits: torch.Tensor | None, plan: StepPlan) -> torch.Tensor:
    """Design A: norms of every (tile, rows), factors, sums of every (tile, split of the rows)."""
    kernels, device, samples = _triton()[0], batch.device, batch.samples
    segments, mode, has_keep = len(plan.bounds), _mode(plan), bits is not None
    norms = torch.empty(segments, samples, dtype=torch.float64, device=device)
    if samples == 0:
        return norms.T
    sets = [
        (launches.norms(kind[0], has_keep, kind[1]), batch.tiles(params, tuning.NORM_COLUMNS, plan))
        for kind, params in batch.sets.items()
    ]
    ranges, count = _segment_ranges(plan, [tiles for _, tiles in sets])
    row_table, clip, range_table = tables.upload(
        device, tables.row_words(batch.rows), tables.clip_words(plan, samples), ranges
    )
    clip, keep = clip.view(torch.float64), _pointer(bits, total)
    segment_of = tables.segments_of(plan.segment_of, device)
    tables.hold(device, segment_of, keep, *(tiles.table for _, tiles in sets))
    partials, at = torch.empty(count, samples, dtype=torch.float64, device=device), 0
    for launch, tiles in sets:
        kernels.norms._norms_tile_kernel[(tiles.count * -(-samples // tuning.NORM_ROWS),)](
            partials[at:], tiles.table, row_table, keep, clip, segment_of, samples, tiles.count, **launch.options
        )
        at += tiles.count
    blocks = -(-samples // tuning.SUM_ROWS)
    wide = mode == launches.FLOAT or any(dtype == torch.float64 for dtype, _ in batch.sets)
    factors = torch.empty(
        segments, blocks * tuning.SUM_ROWS, dtype=torch.float64 if wide else torch.float32, device=device
    )
    launch = launches.factors()
    kernels.norms._norms_factor_kernel[(-(-factors.shape[1] // launch.constants["BLOCK_N"]),)](
        norms, factors, partials, range_table, clip, samples, factors.shape[1], segments, **launch.options
    )
    for (dtype, aligned), params in batch.sets.items():
        launch = launches.sums(dtype, mode, has_keep, aligned)
        tiles = batch.tiles(params, launch.columns, plan)
        tables.hold(device, tiles.table)
        # Floats are added in one fixed order: no splits.
        split = 1 if mode == launches.FLOAT else tuning.splits(tiles.count, blocks, tuning.facts(device))
        kernels.sums._sums_tile_kernel[(tiles.count, split)](
            total, tiles.table, row_table, keep, factors, segment_of, blocks, -(-blocks // split), **launch.options
        )
    return norms.T


def _one_pass(
    total: torch.Tensor,
    batch: _Batch,
    bits: torch.Tensor | None,
    plan: StepPlan,
    target: _Target | None,
) -> torch.Tensor:
    """Design B; with a target also the release."""
    kernels, device, samples, config = _triton()[0], batch.device, batch.samples, batch.one_pass
    assert config is not None
    norms = torch.empty(1, samples, dtype=torch.float64, device=device)
    if samples == 0:
        return norms.T
    (((dtype, _), params),) = batch.sets.items()
    launch = launches.one_pass(dtype, config, bits is not None, None if target is None else target.dtype)
    tiles, groups = batch.tiles(params, launch.columns, plan), -(-samples // config.group)
    row_table, clip = tables.upload(device, tables.row_words(batch.rows), tables.clip_words(plan, samples))
    partials = torch.empty(tiles.count, samples, dtype=torch.float64, device=device)
    factors = torch.empty(groups * config.group, dtype=torch.float32, device=device)
    sync = torch.zeros(1 + 2 * groups + tiles.count, dtype=torch.int32, device=device)
    keep = _pointer(bits, total)
    tables.hold(device, tiles.table, keep)
    # Without a release these four pointers are never followed.
    pointers = (total,) * 4 if target is None else (target.outs, target.numbers, target.key, target.step)
    kernels.one_pass._one_pass_kernel[(2 * groups * tiles.count,)](
        total, norms, factors, partials, sync, tiles.table, row_table, keep, clip.view(torch.float64), *pointers,
        samples, groups, min(config.lag, groups), TILES=tiles.count, **launch.options,
    )   # fmt: skip
    return norms.T


def _staged(rows: list[Rows]) -> list[Rows]:
    """Unaligned rows of every dtype copied into one aligned scratch [N, width] each, if they are few."""
    kernels = _triton()[0]
    samples, sizes = rows[0].held.shape[0], [row.held.shape[1] for row in rows]
    odd = [p for p, row in enumerate(rows) if not row.aligned and sizes[p]]
    if not odd or not samples or sum(sizes[p] for p in odd) > STAGE_SHARE * sum(sizes):
        return rows
    rows = list(rows)
    for dtype, params in _grouped([row.held.dtype for row in rows], sizes).items():
        mine = [p for p in params if p in odd]
        if not mine:
            continue
        part = Layout(tuple((sizes[p],) for p in mine))
        device = rows[mine[0]].held.device
        scratch = torch.empty(samples, part.padded, dtype=dtype, device=device)
        words = [w for p, column in zip(mine, part.starts, strict=True)
                 for w in (rows[p].held.data_ptr(), rows[p].stride, sizes[p], column)]   # fmt: skip
        held = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[dtype.itemsize]
        kernels.stage._stage_rows_kernel[(len(mine) * -(-samples // 8),)](
            scratch.view(held), tables.upload_ints(words, device), samples, part.padded,
            ROWS=8, COLUMNS=WORD, HELD=launches.tl(held), num_warps=4, enable_fp_fusion=False,
        )   # fmt: skip
        for p, column in zip(mine, part.starts, strict=True):
            rows[p] = Rows(scratch[:, column : column + sizes[p]], part.padded, True, rows[p].kept)
    return rows


def _segment_ranges(plan: StepPlan, sets: Sequence[Tiles]) -> tuple[list[int], int]:
    """int64 [segments, 2] as words, and the number of tiles, where the sets' tiles lie one after another."""
    count = sum(tiles.count for tiles in sets)
    if len(plan.bounds) == 1:
        return [0, count], count
    ranges, at = [0] * (2 * len(plan.bounds)), 0
    for tiles in sets:
        for p, (first, last) in tiles.ranges.items():
            s = plan.segment_of[p]
            ranges[2 * s], ranges[2 * s + 1] = at + first, at + last
        at += tiles.count
    return ranges, count


def _tickets(samples: int, config: tuning.Config, rows: Sequence[Rows]) -> int:
    """Of design B, at most: 2 groups tiles."""
    return 2 * -(-samples // config.group) * row_tiles.most_tiles(rows, config.columns)


def _grouped(kinds: Sequence[_Kind], sizes: Sequence[int]) -> dict[_Kind, tuple[int, ...]]:
    """Parameters with values, by the kind of each."""
    groups: dict[_Kind, tuple[int, ...]] = {}
    for p, kind in enumerate(kinds):
        if sizes[p]:
            groups[kind] = (*groups.get(kind, ()), p)
    return groups


def _mode(plan: StepPlan) -> int:
    return launches.FLOAT if plan.unit == 0 else launches.SMALL if plan.small else launches.WIDE


def _pointer(bits: torch.Tensor | None, placeholder: torch.Tensor) -> torch.Tensor:
    """Some int32 pointer, where a kernel with HAS_KEEP=False reads none."""
    return placeholder.view(torch.int32) if bits is None else bits


def on(device: torch.device) -> AbstractContextManager[Any]:
    """Launches go to the current device, so make it this one."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
