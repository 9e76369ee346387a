"""Masked norms of Linear layers on the device without their per-sample gradients (kernels/linear.py).

Launch geometry depends on the layer's shape only, never on the number of samples: a sample's result has the same
bits in every micro-batch, and on every run.
"""

from __future__ import annotations

import torch

from dprs_kernels.backends.triton import on, unavailable
from dprs_kernels.kernels.linear import (
    _linear_finish_kernel,
    _linear_positions_kernel,
    _linear_scale_kernel,
    _linear_squares_kernel,
)
from dprs_kernels.layout import WORD

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TILE = 64       # samples, rows and columns of a tile
DEPTH = 16      # positions at a time: 64-74 registers; with 32, sm_80 spills one of them for bf16 and fp16
WARPS = 8       # 4 need 255 registers, and sm_80 spills
STAGES = 1      # of the one-position GEMM: 128 registers, two programs a multiprocessor; more stages take bf16 to 243
SPLIT = 256     # columns a program of the one-position GEMM adds up: 512 x 512 and 1000 samples make 256 programs


def linear_squares(
    activations: torch.Tensor, errors: torch.Tensor, bits: torch.Tensor | None, *, start: int = 0
) -> torch.Tensor:
    """q_i = || keep o (e_i a_i^T) ||^2 = sum_o e_io^2 sum_c keep_oc a_ic^2. float64 [N]

    activations [N, in] and errors [N, out], fp32, bf16 or fp16, any strides; one position per sample. bits: packed
    keep bits of the whole layout, or None if all are kept; the weight [out, in] begins at padded coordinate
    `start`, so (o, c) has bit start + o in + c.
    Within 2^-19 of the exact value; where a kept value is below 2^-63 of its sample's largest activation, q may be
    too large, never too small. inf if a kept coordinate of e_i a_i^T is not finite, and only then. Deterministic,
    independent of N.

    >>> linear_squares(torch.ones(2, 3).cuda(), torch.ones(2, 4).cuda(), None).tolist()   # doctest: +SKIP
    [12.0, 12.0]
    """
    _check(activations, errors, 2)
    return _one_position(activations, errors, _weight_bits(activations, errors, bits, start))


def linear_position_squares(
    activations: torch.Tensor, errors: torch.Tensor, bits: torch.Tensor | None, *, start: int = 0
) -> torch.Tensor:
    """q_i = || keep o sum_t e_it a_it^T ||^2 = sum_oc keep_oc (sum_t e_ito a_itc)^2. float64 [N]

    activations [N, T, in], errors [N, T, out]; otherwise as linear_squares, which does it if T = 1. Each coordinate
    of the gradient is an fp32 sum: |error| <= T 2^-24 sum_t |e_ito a_itc|, as in any fp32 weight gradient, so where
    positions cancel q is as uncertain as the gradient. Squares and their sums are float64.

    >>> linear_position_squares(torch.ones(2, 5, 3).cuda(), torch.ones(2, 5, 4).cuda(), None)   # doctest: +SKIP
    """
    _check(activations, errors, 3)
    words = _weight_bits(activations, errors, bits, start)
    samples, positions, columns = activations.shape
    outs = errors.shape[2]
    if positions == 1:
        return _one_position(activations[:, 0], errors[:, 0], words)
    tiles = -(-outs // TILE) * -(-columns // TILE)
    if samples * tiles >= 2**31:
        raise ValueError(
            f"activations: {samples} samples of a [{outs}, {columns}] weight are {samples * tiles} tiles, a launch "
            "takes fewer than 2^31; give fewer samples at a time"
        )
    if samples * tiles * positions == 0:
        return torch.zeros(samples, dtype=torch.float64, device=activations.device)
    exponents = torch.empty(2, samples, dtype=torch.int32, device=activations.device)
    partial = torch.empty(tiles, samples, dtype=torch.float64, device=activations.device)
    with on(activations.device):
        _scale(exponents[0], activations)
        _scale(exponents[1], errors)
        _linear_positions_kernel[(samples * tiles,)](
            partial, activations, errors, exponents, words, samples, positions, outs, columns,
            *activations.stride(), *errors.stride(),
            BLOCK_O=TILE, BLOCK_C=TILE, BLOCK_T=DEPTH, HAS_KEEP=bits is not None,
            num_warps=WARPS, enable_fp_fusion=False,
        )   # fmt: skip
        return _finished(partial, exponents)


def _one_position(activations: torch.Tensor, errors: torch.Tensor, words: torch.Tensor | None) -> torch.Tensor:
    samples, columns = activations.shape
    outs = errors.shape[1]
    if samples * outs * columns == 0:
        return torch.zeros(samples, dtype=torch.float64, device=activations.device)
    grid = -(-samples // TILE), -(-outs // TILE), -(-columns // SPLIT)
    exponents = torch.empty(1, samples, dtype=torch.int32, device=activations.device)
    partial = torch.empty(grid[1] * grid[2], samples, dtype=torch.float64, device=activations.device)
    with on(activations.device):
        _scale(exponents[0], activations.unsqueeze(1))
        _linear_squares_kernel[grid](
            partial, activations, errors, exponents, words, samples, outs, columns,
            *activations.stride(), *errors.stride(),
            BLOCK_N=TILE, BLOCK_O=TILE, SPLIT=SPLIT, HAS_KEEP=words is not None,
            num_warps=WARPS, num_stages=STAGES, enable_fp_fusion=False,
        )   # fmt: skip
        return _finished(partial, exponents)


def _scale(exponents: torch.Tensor, values: torch.Tensor) -> None:
    samples, positions, columns = values.shape
    block_t = 1 if positions == 1 else 16
    _linear_scale_kernel[(samples,)](
        exponents, values, positions, columns, *values.stride(), BLOCK_T=block_t, BLOCK_C=1024 // block_t,
        num_warps=4, enable_fp_fusion=False,
    )   # fmt: skip


def _finished(partial: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    slots, samples = partial.shape
    out = torch.empty(samples, dtype=torch.float64, device=partial.device)
    _linear_finish_kernel[(-(-samples // 128),)](
        out, partial, exponents, samples, slots, OPERANDS=exponents.shape[0], BLOCK_N=128,
        num_warps=4, enable_fp_fusion=False,
    )   # fmt: skip
    return out


def _check(activations: torch.Tensor, errors: torch.Tensor, dims: int) -> None:
    shape = "[N, in]" if dims == 2 else "[N, T, in]"
    if activations.dim() != dims or errors.dim() != dims or activations.shape[:-1] != errors.shape[:-1]:
        raise ValueError(
            f"errors: got {list(errors.shape)} with activations {list(activations.shape)}; expected "
            f"{shape.replace('in', 'out')} with {shape}"
        )
    for name, values in (("activations", activations), ("errors", errors)):
        if values.dtype not in DTYPES:
            raise ValueError(f"{name}: got {values.dtype}; expected float32, bfloat16 or float16")
    if errors.device != activations.device:
        raise ValueError(f"errors: on {errors.device}, activations on {activations.device}; expected one device")
    if why := unavailable(activations.device):
        raise ValueError(f"activations: the triton backend cannot run on {activations.device}: {why}")


def _weight_bits(
    activations: torch.Tensor, errors: torch.Tensor, bits: torch.Tensor | None, start: int
) -> torch.Tensor | None:
    """The words from the weight's first on."""
    if bits is None:
        return None
    size = errors.shape[-1] * activations.shape[-1]
    if bits.dtype != torch.int32 or bits.dim() != 1 or not bits.is_contiguous() or bits.device != activations.device:
        raise ValueError(
            f"bits: got {bits.dtype} {list(bits.shape)} on {bits.device}; expected contiguous int32 words on "
            f"{activations.device}, as KeepMask.bits"
        )
    if start < 0 or start % WORD or start + size > bits.numel() * WORD:
        raise ValueError(
            f"start: got {start} for {size} coordinates in {bits.numel()} words; expected a multiple of {WORD} with "
            "all of them inside, as Layout.starts"
        )
    return bits[start // WORD :]
