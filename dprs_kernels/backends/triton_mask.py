"""Draws keep masks on the device: the same bits as reference.draw_mask, and nothing but a key crosses the bus."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import torch

from dprs_kernels.backends import tables
from dprs_kernels.backends.triton import on
from dprs_kernels.capture import capturing
from dprs_kernels.kernels.mask import BINS, DIGIT, _mask_count_kernel, _mask_narrow_kernel, _mask_pack_kernel
from dprs_kernels.layout import WORD, Layout

BLOCK = 1024          # coordinates a program counts at a time, 8 for each of 128 threads
MAX_PROGRAMS = 2048   # of a count: fills any device; beyond 2 million coordinates they take several blocks
WORDS = 64            # a packed tile: 2048 coordinates, 16 for each of 128 threads
PASSES = -(-64 // DIGIT.value)


@lru_cache(maxsize=16)
def tile_table(layout: Layout, device: torch.device) -> torch.Tensor:
    """int64 [tiles, 3] of kernels/mask.py: 24 bytes per 2048 coordinates, made once a layout, and waited for, since
    later draws may run on other streams."""
    parts, first = [], 0
    for start, size in zip(layout.starts, layout.sizes, strict=True):
        column = np.arange(0, size, WORDS * WORD, dtype=np.int64)
        left = np.minimum(size - column, WORDS * WORD)
        parts.append(np.stack([(start + column) // WORD, first + column, left], axis=1))
        first += size
    return torch.from_numpy(np.concatenate(parts)).to(device)


def draw_mask(
    layout: Layout, dropped: int, key: Sequence[int], device: torch.device, *, base: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """reference.draw_mask on `device`: int32 bits [padded / 32] and tau, an int64 scalar with the uint64's bits.

    Both stay on the device: after the first draw of a layout nothing is waited for, and nothing ever comes back to
    the host. Not for a captured graph, which would repeat one key. `base` is the unpadded coordinate of the
    layout's first value: a part of a larger model, ranked by itself.

    >>> bits, tau = draw_mask(Layout.of([(3, 4)]), 6, mask_key(0, 0), torch.device("cuda"))   # doctest: +SKIP
    """
    if not 0 <= dropped < layout.size:
        raise ValueError(f"dropped: got {dropped}; expected 0 .. {layout.size - 1}, at least one coordinate is kept")
    if len(key) != 4 or not all(0 <= word < 2**64 for word in key):
        raise ValueError(f"key: got {list(key)}; expected four integers in [0, 2^64)")
    if not 0 <= base < 2**63 - layout.size:
        raise ValueError(f"base: got {base}; expected a coordinate in [0, 2^63 - {layout.size})")
    if capturing(device):
        raise RuntimeError("draw masks outside of a CUDA graph: it would read the key again from memory since reused")
    draw = tables.upload_ints([tables.signed(word) for word in (0, dropped, *key, base, layout.size)], device)
    table = tile_table(layout, device)
    bits = torch.empty(layout.padded // WORD, dtype=torch.int32, device=device)
    with on(device):
        if dropped:
            count = torch.zeros(BINS.value, dtype=torch.int64, device=device)
            programs = min(-(-layout.size // BLOCK), MAX_PROGRAMS)
            for step in range(PASSES):
                _mask_count_kernel[(programs,)](count, draw, step, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False)
                _mask_narrow_kernel[(1,)](count, draw, step, num_warps=4, enable_fp_fusion=False)
        _mask_pack_kernel[(len(table),)](bits, draw, table, WORDS=WORDS, num_warps=4, enable_fp_fusion=False)
    return bits, draw[0]
