"""How each Triton kernel is launched: its compile-time numbers and warps, once, for the launcher (triton.py) and for
whoever compiles and reads them without a GPU (compiled.py). `shipped` lists every variant that runs in practice.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dprs_kernels.backends.tuning import (
    A100,
    H100,
    NORM_COLUMNS,
    NORM_LANES,
    NORM_ROWS,
    RELEASE_COLUMNS,
    RESIDENT_REGISTERS,
    SUM_COLUMNS,
    SUM_LANES,
    SUM_ROWS,
    VECTOR,
    Config,
    choose,
)
from dprs_kernels.compiled import Shipped

SMALL, WIDE, FLOAT = range(3)   # kernels/sums.py


@dataclass(frozen=True)
class Launch:
    """constants: the kernel's constexpr arguments; columns: of a tile."""

    constants: dict[str, Any]
    warps: int
    columns: int
    max_registers: int = 0   # NVIDIA only; 0: whatever the compiler takes

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the call. No fusion of a product and a sum behind our back: results would depend on
        the compiler's mood, and Triton's default changes between versions."""
        limit = {"maxnreg": self.max_registers} if self.max_registers and torch.version.hip is None else {}
        return {**self.constants, **limit, "num_warps": self.warps, "enable_fp_fusion": False}


def norms(dtype: torch.dtype, has_keep: bool, aligned: bool) -> Launch:
    values = VECTOR // dtype.itemsize
    return Launch(
        dict(DTYPE=tl(dtype), ROWS=NORM_ROWS, L=NORM_LANES, E=values, CHUNKS=NORM_COLUMNS // (NORM_LANES * values),
             HAS_KEEP=has_keep, ALIGNED=aligned),
        warps=4, columns=NORM_COLUMNS,
    )   # fmt: skip


def factors() -> Launch:
    return Launch(dict(BLOCK_N=32, BLOCK_T=32), warps=4, columns=NORM_COLUMNS)


def sums(dtype: torch.dtype, mode: int, has_keep: bool, aligned: bool) -> Launch:
    """fp64 holds as many bytes, not values, in registers: smaller tiles, and always 64-bit integers."""
    values = VECTOR // dtype.itemsize
    if dtype == torch.float64:
        chunks, mode = 2, WIDE if mode == SMALL else mode
    else:
        chunks = SUM_COLUMNS // (SUM_LANES * values)
    return Launch(
        dict(DTYPE=tl(dtype), ROWS=SUM_ROWS, C=chunks, L=SUM_LANES, E=values, MODE=mode, HAS_KEEP=has_keep,
             ALIGNED=aligned),
        warps=4, columns=chunks * SUM_LANES * values,
    )   # fmt: skip


def one_pass(dtype: torch.dtype, config: Config, has_keep: bool, out: torch.dtype | None) -> Launch:
    """out: the dtype of p.grad where the kernel also releases, None where it only accumulates."""
    values = VECTOR // dtype.itemsize
    lanes = min(32 * config.warps, config.columns // values)
    return Launch(
        dict(DTYPE=tl(dtype), GROUP=config.group, C=config.columns // (lanes * values), L=lanes,
             E=values, HAS_KEEP=has_keep, RELEASE=out is not None, OUT=tl(out or torch.float32)),
        warps=config.warps, columns=config.columns, max_registers=RESIDENT_REGISTERS,
    )   # fmt: skip


def release(out: torch.dtype, mode: int, has_keep: bool, has_noise: bool) -> Launch:
    return Launch(
        dict(OUT=tl(out), BLOCKS=RELEASE_COLUMNS // 8, MODE=mode, HAS_KEEP=has_keep, HAS_NOISE=has_noise),
        warps=8, columns=RELEASE_COLUMNS,
    )   # fmt: skip


def tl(dtype: torch.dtype) -> Any:
    """Triton's name of a dtype."""
    import triton.language

    return getattr(triton.language, str(dtype).removeprefix("torch."))


_TILES = dict(tile_ptr="*i64", row_ptr="*i64", bits_ptr="*i32")
_RELEASE = dict(out_ptr="*i64", release_ptr="*fp64", stream_ptr="*i64")
_SAMPLES = 256   # a batch, over which sums are added in DRAM once
_NETWORKS = ((26_010, A100, "A100"), (550_570, A100, "A100"), (550_570, H100, "H100"))   # DP-CNN/S and DP-CNN


def shipped() -> list[Shipped]:
    """Every kernel with the configs that `choose` gives for the paper's networks, with a mask and fp32 outputs; B as a
    fused step, and once as the accumulation of a micro-batch, which is the same code without its last arm.

    bytes_per_element is DRAM traffic per value of G in the launch: G once, the bits for the rows that share them,
    partial norms, and reading and writing 8-byte sums once a batch.
    """
    from dprs_kernels.compiled import triton

    triton()   # ImportError names the extra
    listed = [_factors(), *(_release(out) for out in (torch.float32, torch.bfloat16, torch.float16))]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        listed += [_norms(dtype), _sums(dtype)]
        for size, device, gpu in _NETWORKS:
            listed.append(_one_pass(dtype, choose(size, dtype.itemsize, device), size, gpu, torch.float32))
        listed.append(_one_pass(dtype, choose(_NETWORKS[-1][0], dtype.itemsize, H100), *_NETWORKS[-1][::2], None))
    return listed


def _norms(dtype: torch.dtype) -> Shipped:
    from dprs_kernels.kernels.norms import _norms_tile_kernel

    launch = norms(dtype, True, True)
    return Shipped(
        f"A norms {tl(dtype)}", _norms_tile_kernel,
        dict(partial_ptr="*fp64", clip_ptr="*fp64", segment_ptr="*i32", samples="i32", tiles="i32", **_TILES),
        launch.constants, launch.warps, kind="gradient",
        loop_elements=NORM_ROWS * NORM_LANES * (VECTOR // dtype.itemsize), elements=NORM_ROWS * NORM_COLUMNS,
        bytes_per_element=dtype.itemsize + 1 / 8 / NORM_ROWS + 8 / NORM_COLUMNS,
    )   # fmt: skip


def _sums(dtype: torch.dtype) -> Shipped:
    from dprs_kernels.kernels.sums import _sums_tile_kernel

    launch = sums(dtype, SMALL, True, True)
    return Shipped(
        f"A sums {tl(dtype)}", _sums_tile_kernel,
        dict(total_ptr="*i64", factor_ptr="*fp32", segment_ptr="*i32", blocks="i32", per_split="i32", **_TILES),
        launch.constants, launch.warps, kind="gradient",
        loop_elements=SUM_ROWS * SUM_COLUMNS, elements=_SAMPLES * SUM_COLUMNS,
        bytes_per_element=dtype.itemsize + (16 + 1 / 8) / _SAMPLES,
    )   # fmt: skip


def _one_pass(dtype: torch.dtype, config: Config, size: int, gpu: str, out: torch.dtype | None) -> Shipped:
    """Both phases of a value; taking a ticket counts twice, since a program has one phase; making a group's factors
    and the noise, which one program of many does, not at all (the release kernel shows what noise costs)."""
    from dprs_kernels.kernels.one_pass import _one_pass_kernel

    launch = one_pass(dtype, config, True, out)
    return Shipped(
        f"B {'noised ' if out else ''}{tl(dtype)} D={size} {gpu}", _one_pass_kernel,
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

    launch = release(out, SMALL, True, True)
    return Shipped(
        f"release {tl(out)}", _release_tile_kernel,
        dict(total_ptr="*i64", tile_ptr="*i64", bits_ptr="*i32", **_RELEASE), launch.constants, launch.warps,
        kind="noise", loop_elements=RELEASE_COLUMNS // 10, elements=RELEASE_COLUMNS,   # the loop: ten double rounds
        bytes_per_element=8 + out.itemsize + 1 / 8,
    )   # fmt: skip
