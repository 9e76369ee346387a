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

    @property
    def options(self) -> dict[str, Any]:
        """Keyword arguments of the call. No fusion of a product and a sum behind our back: results would depend on
        the compiler's mood, and Triton's default changes between versions."""
        return {**self.constants, "num_warps": self.warps, "enable_fp_fusion": False}


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
        dict(DTYPE=tl(dtype), GROUP=config.group, LAG=config.lag, C=config.columns // (lanes * values), L=lanes,
             E=values, HAS_KEEP=has_keep, RELEASE=out is not None, OUT=tl(out or torch.float32)),
        warps=config.warps, columns=config.columns,
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


_TABLES = dict(tile_ptr="*i64", row_ptr="*i64", bits_ptr="*i32", clip_ptr="*fp64")
_SEGMENTS = dict(segment_ptr="*i32")
_RELEASE = dict(out_ptr="*i64", release_ptr="*fp64", stream_ptr="*i64")


def shipped() -> list[Shipped]:
    """Every kernel with the configs that `choose` gives for the paper's networks, N = 256, a mask and fp32 outputs.

    bytes_per_element is DRAM traffic per value of G: G itself, twice for A in all, once for B in its window, and
    what comes with it: bits, partial norms, and 8-byte sums per column for the rows that a program adds.
    """
    from dprs_kernels.compiled import _triton

    _triton()   # ImportError names the extra
    from dprs_kernels.kernels import noise
    from dprs_kernels.kernels import norms as norm_kernels
    from dprs_kernels.kernels import one_pass as one_pass_kernels
    from dprs_kernels.kernels import sums as sum_kernels

    listed = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        name, size, values = str(tl(dtype)), dtype.itemsize, VECTOR // dtype.itemsize
        first, second = norms(dtype, True, True), sums(dtype, SMALL, True, True)
        listed.append(Shipped(
            f"A norms {name}", norm_kernels._norms_tile_kernel,
            dict(partial_ptr="*fp64", samples="i32", **_TABLES, **_SEGMENTS), first.constants, first.warps,
            loop_elements=NORM_ROWS * NORM_LANES * values, elements=NORM_ROWS * NORM_COLUMNS,
            bytes_per_element=size + 1 / 8 / NORM_ROWS + 8 / NORM_COLUMNS, kind="gradient",
        ))   # fmt: skip
        listed.append(Shipped(
            f"A sums {name}", sum_kernels._sums_tile_kernel,
            dict(total_ptr="*i64", factor_ptr="*fp32", blocks="i32", per_split="i32", **_SEGMENTS,
                 **{k: v for k, v in _TABLES.items() if k != "clip_ptr"}), second.constants, second.warps,
            loop_elements=SUM_ROWS * SUM_COLUMNS, elements=256 * SUM_COLUMNS, bytes_per_element=size + (16 + 1 / 8) / 256,
            kind="gradient",
        ))   # fmt: skip
        for coordinates, device, gpu in ((26_010, A100, "A100"), (550_570, A100, "A100"), (550_570, H100, "H100")):
            config = choose(coordinates, size, device)
            for out in (None, torch.float32):
                third = one_pass(dtype, config, True, out)
                part = min(config.group, 4)
                listed.append(Shipped(
                    f"B {'noised ' if out else ''}{name} D={coordinates} {gpu}", one_pass_kernels._one_pass_kernel,
                    dict(total_ptr="*i64", norm_ptr="*fp64", factor_ptr="*fp32", partial_ptr="*fp64", sync_ptr="*i32",
                         samples="i32", groups="i32", **_TABLES, **_RELEASE),
                    {**third.constants, "TILES": -(-coordinates // config.columns)}, third.warps, loop_elements=part * third.constants["L"] * values,
                    elements=config.group * config.columns, bytes_per_element=size + (16 + 1 / 8) / 256, kind="gradient",
                    outer_trips=max(config.group // 8, 1),
                ))   # fmt: skip
    listed.append(Shipped(
        "A factors", norm_kernels._norms_factor_kernel,
        dict(norm_ptr="*fp64", factor_ptr="*fp32", partial_ptr="*fp64", range_ptr="*i64", clip_ptr="*fp64", samples="i32",
             padded_samples="i32", segments="i32"), factors().constants, factors().warps,
        loop_elements=0, elements=32 * 32, bytes_per_element=8.0, kind="other",
    ))   # fmt: skip
    for out in (torch.float32, torch.bfloat16, torch.float16):
        last = release(out, SMALL, True, True)
        listed.append(Shipped(
            f"release {tl(out)}", noise._release_tile_kernel,
            dict(total_ptr="*i64", tile_ptr="*i64", bits_ptr="*i32", **_RELEASE), last.constants, last.warps,
            loop_elements=RELEASE_COLUMNS // 10, elements=RELEASE_COLUMNS,   # ten double rounds
            bytes_per_element=8 + out.itemsize + 1 / 8, kind="noise",
        ))   # fmt: skip
    return listed
