"""How each Triton kernel is launched: its compile-time numbers and warps, once, for the launcher (triton.py) and for
whoever compiles and reads them without a GPU (shipped.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from dprs_kernels.backends.tuning import (
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
)

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
    """float64 values, and float64 sums (FLOAT), take twice the registers: smaller tiles. float64 values are always
    summed in 64-bit integers."""
    values = VECTOR // dtype.itemsize
    chunks = SUM_COLUMNS // (SUM_LANES * values)
    if dtype == torch.float64:
        chunks, mode = 2, WIDE if mode == SMALL else mode
    elif mode == FLOAT:
        chunks //= 2
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


def release(out: torch.dtype, has_keep: bool, has_noise: bool) -> Launch:
    return Launch(
        dict(OUT=tl(out), BLOCKS=RELEASE_COLUMNS // 8, HAS_KEEP=has_keep, HAS_NOISE=has_noise),
        warps=8, columns=RELEASE_COLUMNS,
    )   # fmt: skip


def tl(dtype: torch.dtype) -> Any:
    """Triton's name of a dtype."""
    import triton.language

    return getattr(triton.language, str(dtype).removeprefix("torch."))
