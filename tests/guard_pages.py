"""Kept rows that end right before a page nobody may read, or begin right after one: run as a process of its own.

    python -m tests.guard_pages          exits 0, or dies of the first byte that a kernel reads beyond them
    python -m tests.guard_pages before   reads the byte before them, or after: dies
"""

import ctypes
import mmap
import sys

import torch
from torch import nn

from dprs_kernels import KeepMask, NoiseSource, PrivateSum, native
from dprs_kernels.backends import cpu
from dprs_kernels.row_grads import RowGrads

PAGE = mmap.PAGESIZE
SHAPES = [(12, 64), (12,), (40, 9, 3), (7, 517), (300,), (5, 2048)]
NOTHING = 0   # PROT_NONE
_held = []    # mappings must outlive their tensors


def between(values, *, at_end):
    """The same values in memory of their own, with a page that cannot be read on either side."""
    size = values.numel() * values.element_size()
    inner = -(-size // PAGE) * PAGE
    area = mmap.mmap(-1, inner + 2 * PAGE)
    start = ctypes.addressof(ctypes.c_char.from_buffer(area))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    for page in (start, start + PAGE + inner):
        if protect(page, PAGE, NOTHING):
            raise OSError(ctypes.get_errno(), "mprotect")
    _held.append(area)
    offset = PAGE + (inner - size if at_end else 0)
    found = torch.frombuffer(area, dtype=values.dtype, count=values.numel(), offset=offset).view(values.shape)
    return found.copy_(values)


def sums(grads, keep):
    params = [nn.Parameter(torch.zeros(shape, dtype=torch.float64)) for shape in SHAPES]
    total = PrivateSum(params, keep=keep, noise=NoiseSource.seeded_for_tests(0), backend="cpu", max_grad_norm=1.0,
                       noise_multiplier=1.0, expected_batch_size=8)   # fmt: skip
    total.add(grads)
    total.release()
    return [param.grad for param in params]


def main(touch):
    random = torch.Generator().manual_seed(0)
    for dtype in (torch.float32, torch.float64, torch.bfloat16):
        for rate in (0.3, 0.9):
            keep = KeepMask.draw(SHAPES, drop_rate=rate, seed=0, draw=0, structure="row")
            rows = [keep.kept_rows(p) for p in range(len(SHAPES))]
            kept = [torch.randn(7, len(some.kept), *shape[1:], generator=random).to(dtype)
                    for some, shape in zip(rows, SHAPES, strict=True)]   # fmt: skip
            expected = sums([RowGrads(*pair) for pair in zip(kept, rows, strict=True)], keep)
            for level in range(len(native.levels())):
                native.loaded().dprs_set_level(level)
                for at_end in (False, True):
                    guarded = [between(values, at_end=at_end) for values in kept]
                    if touch and at_end == (touch == "after"):
                        ctypes.string_at(guarded[0].data_ptr() + (guarded[0].nbytes if at_end else -1), 1)
                    for split in cpu.SPLITS:
                        with cpu.order(split):
                            found = sums([RowGrads(*pair) for pair in zip(guarded, rows, strict=True)], keep)
                        assert all(map(torch.equal, found, expected)), (dtype, rate, level, at_end, split)


if __name__ == "__main__":
    main(*sys.argv[1:] or [""])
