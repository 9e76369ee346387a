"""The launches that the paper's networks get, for compiled.py to build and read; and the unusual ones, to build."""

from __future__ import annotations

import torch

from dprs_kernels.backends.launches import FLOAT, SMALL, WIDE, factors, norms, one_pass, release, sums, tl
from dprs_kernels.backends.tuning import (
    A100,
    H100,
    NORM_COLUMNS,
    NORM_LANES,
    NORM_ROWS,
    RELEASE_COLUMNS,
    SUM_COLUMNS,
    SUM_ROWS,
    VECTOR,
    Config,
    choose,
)
from dprs_kernels.compiled import Shipped, triton

_TILES = dict(tile_ptr="*i64", row_ptr="*i64", bits_ptr="*i32")
_RELEASE = dict(out_ptr="*i64", release_ptr="*fp64", key_ptr="*i64", step_ptr="*i64")
_SAMPLES = 256   # a batch, over which sums are added in DRAM once
_NETWORKS = ((26_010, A100, "A100"), (550_570, A100, "A100"), (550_570, H100, "H100"))   # DP-CNN/S and DP-CNN


def shipped() -> list[Shipped]:
    """Every kernel with the configs that `choose` gives for the paper's networks, with a mask and fp32 outputs; B as a
    fused step, and once as the accumulation of a micro-batch, which is the same code without its last arm.

    bytes_per_element is DRAM traffic per value of G in the launch: G once, the bits for the rows that share them,
    partial norms, and reading and writing 8-byte sums once a batch.
    """
    triton()   # ImportError names the extra
    listed = [_factors(), *(_release(out) for out in (torch.float32, torch.bfloat16, torch.float16))]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        listed += [_norms(dtype), _sums(dtype)]
        for size, device, gpu in _NETWORKS:
            listed.append(_one_pass(dtype, choose(size, dtype.itemsize, device), size, gpu, torch.float32))
        listed.append(_one_pass(dtype, choose(_NETWORKS[-1][0], dtype.itemsize, H100), *_NETWORKS[-1][::2], None))
    return listed


def unusual() -> list[Shipped]:
    """What else users can get: no mask, odd rows, tiny or no noise, float64, 16-bit outputs, one segment for all."""
    triton()
    listed = [_norms(d, keep, aligned) for d in (torch.float32, torch.bfloat16, torch.float64)
              for keep, aligned in ((False, True), (True, False))]   # fmt: skip
    listed += [_sums(torch.float32, mode, keep, aligned) for mode in (WIDE, FLOAT)
               for keep, aligned in ((True, True), (True, False), (False, True))]   # fmt: skip
    listed += [_sums(d, SMALL, False, aligned) for d in (torch.bfloat16, torch.float64) for aligned in (True, False)]
    config = choose(_NETWORKS[-1][0], 2, H100)
    listed.append(_one_pass(torch.bfloat16, config, *_NETWORKS[-1][::2], torch.bfloat16, keep=False))
    return [*listed, _release(torch.float64), _stage()]


def _norms(dtype: torch.dtype, keep: bool = True, aligned: bool = True) -> Shipped:
    from dprs_kernels.kernels.norms import _norms_tile_kernel

    launch = norms(dtype, keep, aligned)
    return Shipped(
        f"A norms {tl(dtype)}{_suffix(keep, aligned)}", _norms_tile_kernel,
        dict(partial_ptr="*fp64", clip_ptr="*fp64", segment_ptr="*i64", samples="i32", tiles="i32", **_TILES),
        launch.constants, launch.warps, kind="gradient",
        loop_elements=NORM_ROWS * NORM_LANES * (VECTOR // dtype.itemsize), elements=NORM_ROWS * NORM_COLUMNS,
        bytes_per_element=dtype.itemsize + 1 / 8 / NORM_ROWS + 8 / NORM_COLUMNS,
    )   # fmt: skip


def _sums(dtype: torch.dtype, mode: int = SMALL, keep: bool = True, aligned: bool = True) -> Shipped:
    from dprs_kernels.kernels.sums import _sums_tile_kernel

    launch = sums(dtype, mode, keep, aligned)
    wide = mode == FLOAT or dtype == torch.float64
    return Shipped(
        f"A sums {tl(dtype)}{('', ' wide', ' float')[mode]}{_suffix(keep, aligned)}", _sums_tile_kernel,
        dict(total_ptr="*fp64" if mode == FLOAT else "*i64", factor_ptr="*fp64" if wide else "*fp32",
             segment_ptr="*i64", blocks="i32", per_split="i32", **_TILES),
        launch.constants, launch.warps, kind="gradient",
        loop_elements=SUM_ROWS * SUM_COLUMNS, elements=_SAMPLES * SUM_COLUMNS,
        bytes_per_element=dtype.itemsize + (16 + 1 / 8) / _SAMPLES,
    )   # fmt: skip


def _one_pass(
    dtype: torch.dtype, config: Config, size: int, gpu: str, out: torch.dtype | None, keep: bool = True
) -> Shipped:
    """Both phases of a value; taking a ticket counts twice, since a program has one phase; making a group's factors
    and the noise, which one program of many does, not at all (the release kernel shows what noise costs)."""
    from dprs_kernels.kernels.one_pass import _one_pass_kernel

    launch = one_pass(dtype, config, keep, out)
    return Shipped(
        f"B {'noised ' if out else ''}{tl(dtype)} D={size} {gpu}{_suffix(keep, True)}", _one_pass_kernel,
        dict(total_ptr="*i64", norm_ptr="*fp64", factor_ptr="*fp32", partial_ptr="*fp64", sync_ptr="*i32",
             clip_ptr="*fp64", samples="i32", groups="i32", lag="i32", **_TILES, **_RELEASE),
        {**launch.constants, "TILES": -(-size // config.columns)}, launch.warps, kind="gradient",
        loop_elements=min(config.group, 4) * launch.constants["L"] * launch.constants["E"],
        elements=config.group * config.columns, bytes_per_element=dtype.itemsize + (16 + 1 / 8) / _SAMPLES,
        max_registers=launch.max_registers, outer_trips=max(config.group // 8, 1),
        rare=("group_factors(", "release_tile("), twice="if phase == 0",
    )   # fmt: skip


def _factors() -> Shipped:
    from dprs_kernels.kernels.norms import _norms_factor_kernel

    launch = factors()
    return Shipped(
        "A factors", _norms_factor_kernel,
        dict(norm_ptr="*fp64", factor_ptr="*fp32", partial_ptr="*fp64", range_ptr="*i64", clip_ptr="*fp64",
             samples="i32", padded_samples="i32", segments="i32"),
        launch.constants, launch.warps, kind="other", loop_elements=0, elements=32 * 32, bytes_per_element=8.0,
    )   # fmt: skip


def _release(out: torch.dtype) -> Shipped:
    from dprs_kernels.kernels.noise import _release_tile_kernel

    launch = release(out, True, True)
    return Shipped(
        f"release {tl(out)}", _release_tile_kernel,
        dict(total_ptr="*i64", tile_ptr="*i64", bits_ptr="*i32", **_RELEASE), launch.constants, launch.warps,
        kind="noise", loop_elements=RELEASE_COLUMNS // 10, elements=RELEASE_COLUMNS,   # the loop: ten double rounds
        bytes_per_element=8 + out.itemsize + 1 / 8,
    )   # fmt: skip


def _stage() -> Shipped:
    from dprs_kernels.kernels.stage import _stage_rows_kernel

    return Shipped(
        "stage", _stage_rows_kernel, dict(scratch_ptr="*i32", stage_ptr="*i64", samples="i32", width="i32"),
        dict(ROWS=8, COLUMNS=32, HELD=tl(torch.int32)), 4, kind="other", loop_elements=0, elements=8 * 32,
        bytes_per_element=8.0,
    )   # fmt: skip


def _suffix(keep: bool, aligned: bool) -> str:
    return ("" if keep else " no mask") + ("" if aligned else " odd rows")
