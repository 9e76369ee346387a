"""The C interface of csrc/ through ctypes: finding the library, its structs, its functions.

`library()` is the loaded library or None, `reason()` says why None. Mirrors csrc/dprs.h; ABI guards against a
library left over from another version. torch is imported first on purpose: its OpenMP runtime is then the one
that this library shares.
"""

from __future__ import annotations

import ctypes
import os
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import chain
from pathlib import Path

import torch

from dprs_kernels.layout import WORD, Layout

ABI = 11
MAX_DIMS = 16
PATH = Path(__file__).with_name("_cpu_kernels.so")
DTYPES = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}

_i64, _u64, _f64, _ptr = ctypes.c_int64, ctypes.c_uint64, ctypes.c_double, ctypes.c_void_p


class Grads(ctypes.Structure):
    """dprs_grads"""

    _fields_ = [("params", _i64), ("samples", _i64), ("sizes", _ptr), ("data", _ptr), ("dtypes", _ptr),
                ("row_strides", _ptr), ("dims", _ptr), ("shapes", _ptr), ("strides", _ptr),
                ("right", _ptr), ("held", _ptr), ("row_sizes", _ptr)]   # fmt: skip


class Clip(ctypes.Structure):
    """dprs_clip"""

    _fields_ = [("segments", _i64), ("segment_of", _ptr), ("bounds", _ptr), ("scales", _ptr), ("limit", _f64),
                ("gamma", _f64), ("scale", _f64)]   # fmt: skip


class Order(ctypes.Structure):
    """dprs_order"""

    _fields_ = [("split", _i64), ("group", _i64), ("at_once", _i64), ("ahead", _i64), ("early", _i64),
                ("cache", _i64)]


class Release(ctypes.Structure):
    """dprs_release"""

    _fields_ = [("params", _i64), ("sizes", _ptr), ("out", _ptr), ("dtypes", _ptr), ("unit", _f64), ("grid", _f64),
                ("noise_std", _f64), ("divisor", _f64), ("key", ctypes.c_char_p), ("step", _u64)]   # fmt: skip


class Conv(ctypes.Structure):
    """dprs_conv"""

    _fields_ = [("samples", _i64), ("groups", _i64), ("channels", _i64 * 2), ("inputs", _i64 * 2),
                ("outputs", _i64 * 2), ("kernel", _i64 * 2), ("stride", _i64 * 2), ("padding", _i64 * 2),
                ("dilation", _i64 * 2)]   # fmt: skip


_grads, _clip, _release = map(ctypes.POINTER, (Grads, Clip, Release))   # which take a struct itself, too
_SIGNATURES = {
    "dprs_abi": (_i64, []),
    "dprs_sums": (_i64, [_ptr, _i64, _ptr]),
    "dprs_accumulate": (_i64, [_grads, _ptr, _clip, _f64, _i64, _ptr, _i64, _ptr, _ptr, _i64]),
    "dprs_choose_order": (Order, [_i64] * 9),
    "dprs_step": (_i64, [_grads, _ptr, _clip, _i64, _ptr, _release, _ptr, _i64]),
    "dprs_release_noised": (_i64, [_release, _ptr, _ptr, _i64, _i64]),
    "dprs_normals": (None, [_ptr, _u64, _u64, _i64, _ptr]),
    "dprs_normals_from_words": (None, [_ptr, _i64, _ptr]),
    "dprs_words": (None, [_ptr, _u64, _u64, _i64, _ptr]),
    "dprs_draw_mask": (_u64, [_ptr, _ptr, _i64, _i64, _ptr, _i64]),
    "dprs_conv_weight_grads": (_i64, [_ptr, _ptr, _ptr, _ptr, _i64, _i64, _i64]),
    "dprs_read_once": (_u64, [_ptr, _ptr, _i64, _i64, _i64]),
    "dprs_levels": (_i64, []),
    "dprs_level": (_i64, []),
    "dprs_set_level": (_i64, [_i64]),
    "dprs_level_name": (ctypes.c_char_p, [_i64]),
    "dprs_has_openmp": (_i64, []),
}


@lru_cache(maxsize=1)
def _load() -> tuple[ctypes.CDLL | None, str]:
    remedy = "build it with: pip install --force-reinstall --no-deps . (needs g++ or clang++ with C++17)"
    if not PATH.exists():
        return None, f"{PATH.name} is not built, no C++ compiler at installation? {remedy}"
    try:
        library = ctypes.CDLL(os.fspath(PATH))
    except OSError as error:
        return None, f"{PATH.name} does not load: {error}; {remedy}"
    library.dprs_abi.restype = _i64
    if library.dprs_abi() != ABI:
        return None, f"{PATH.name} has interface {library.dprs_abi()}, expected {ABI}; {remedy}"
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
    return library, "available"


def library() -> ctypes.CDLL | None:
    return _load()[0]


def reason() -> str:
    """Why library() is None, or "available"."""
    return _load()[1]


def loaded() -> ctypes.CDLL:
    """The library, or RuntimeError with the reason."""
    found = library()
    if found is None:
        raise RuntimeError(f"the CPU kernels cannot run: {reason()}")
    return found


def levels() -> list[str]:
    """Instruction sets that this build has and this CPU runs, lowest first."""
    lib = loaded()
    return [lib.dprs_level_name(level).decode() for level in range(8) if lib.dprs_levels() >> level & 1]


def int64s(values: Sequence[int]) -> ctypes.Array[ctypes.c_int64]:
    """Through array, which packs five times as fast as ctypes: a model of 1000 tensors has 20,000 numbers a step."""
    return (_i64 * len(values)).from_buffer(array("q", values))


class Tables:
    """Tables of numbers, one behind another, and where each begins: valid while this lives.

    kind: as for array, "q" int64 or "d" float64.

    >>> tables = Tables([1, 2], [3])
    >>> tables.addresses[1] - tables.addresses[0]
    16
    """

    def __init__(self, *tables: Sequence[float], kind: str = "q") -> None:
        self._numbers = array(kind, tables[0] if len(tables) == 1 else chain.from_iterable(tables))
        self.addresses = [self._numbers.buffer_info()[0]]
        for table in tables[:-1]:
            self.addresses.append(self.addresses[-1] + 8 * len(table))


def threads() -> int:
    return torch.get_num_threads()


def draw_mask(layout: Layout, dropped: int, key: Sequence[int]) -> tuple[torch.Tensor, int]:
    """Same verb as reference.draw_mask."""
    bits = torch.empty(layout.padded // WORD, dtype=torch.int32)
    tau = loaded().dprs_draw_mask(
        (_u64 * 4)(*key), int64s(layout.sizes), len(layout.sizes), dropped, bits.data_ptr(), threads()
    )
    return bits, tau


def read_once(tensors: Sequence[torch.Tensor], *, places: int = 4) -> int:
    """Reads every contiguous CPU tensor once with all threads, each at 1, 2, 4 or 8 places at the same time: which is
    fastest goes by the CPU. benchmarks/limit.py takes the fastest for the limit that ours is compared with."""
    if places not in (1, 2, 4, 8):
        raise ValueError(f"places: got {places!r}; expected 1, 2, 4 or 8")
    if not all(t.is_contiguous() and t.device.type == "cpu" for t in tensors):
        raise ValueError("tensors: expected contiguous tensors on the CPU")
    addresses = (_ptr * len(tensors))(*(t.data_ptr() for t in tensors))
    sizes = int64s([t.numel() * t.element_size() for t in tensors])
    return int(loaded().dprs_read_once(addresses, sizes, len(tensors), places, threads()))


def conv_weight_grads(
    x: torch.Tensor,
    e: torch.Tensor,
    out: torch.Tensor,
    *,
    kernel: tuple[int, int],
    stride: tuple[int, int] = (1, 1),
    padding: tuple[int, int] = (0, 0),
    dilation: tuple[int, int] = (1, 1),
    groups: int = 1,
    accumulate: bool = False,
) -> None:
    """out[i] = (accumulate: +=) the gradient of a Conv2d's weight for sample i.

    x [n, Cin, H, W] the input, e [n, Cout, Ho, Wo] the loss's gradient by the output, both fp32 and contiguous; out
    [n, Cout, Cin/groups, kh, kw] fp32 whose rows out[i] are contiguous, for example a part of each row of an arena.
    |error| <= 2^-18 sum |e x|; the same bits for any number of threads. Conv1d: H = 1; Conv3d is left to torch.

    >>> x, e, arena = torch.ones(2, 1, 4, 4), torch.ones(2, 3, 2, 2), torch.zeros(2, 30)
    >>> conv_weight_grads(x, e, arena[:, 3:].view(2, 3, 1, 3, 3), kernel=(3, 3))
    >>> arena[1, :6]
    tensor([0., 0., 0., 4., 4., 4.])
    """
    x, e = x.resolve_neg(), e.resolve_neg()   # what is in memory is read: no sign that torch has only noted
    for name, tensor, dims in (("x", x, 4), ("e", e, 4), ("out", out, 5)):
        if tensor.device.type != "cpu" or tensor.dtype != torch.float32 or tensor.dim() != dims:
            got = f"{tensor.dim()} dimensions, {tensor.dtype} on {tensor.device}"
            raise ValueError(f"{name}: expected {dims} dimensions, torch.float32 on the CPU, got {got}")
    for name, tensor in (("x", x), ("e", e)):
        if not tensor.is_contiguous():
            raise ValueError(f"{name}: expected a contiguous tensor, got strides {tensor.stride()}; use .contiguous()")
    pairs = {"kernel": (kernel, 1), "stride": (stride, 1), "padding": (padding, 0), "dilation": (dilation, 1)}
    for name, (pair, least) in pairs.items():
        if len(pair) != 2 or min(pair) < least:
            raise ValueError(f"{name}: expected two integers of at least {least}, got {pair}")
    n, inputs, outputs = x.shape[0], x.shape[1], e.shape[1]
    if groups < 1 or inputs % groups or outputs % groups:
        raise ValueError(f"groups: expected a divisor of {inputs} input and {outputs} output channels, got {groups}")
    size = [(x.shape[2 + d] + 2 * padding[d] - dilation[d] * (kernel[d] - 1) - 1) // stride[d] + 1 for d in (0, 1)]
    if min(size) < 1:
        raise ValueError(f"kernel: {kernel} with dilation {dilation} does not fit {tuple(x.shape[2:])} and its padding")
    if e.shape != (n, outputs, *size):
        raise ValueError(f"e: expected shape {(n, outputs, *size)} for x of {tuple(x.shape)}, got {tuple(e.shape)}")
    shape = (outputs, inputs // groups, *kernel)
    if out.shape != (n, *shape):
        raise ValueError(f"out: expected shape {(n, *shape)}, got {tuple(out.shape)}")
    if out.numel() == 0:
        return
    if not out[0].is_contiguous() or (n > 1 and out.stride(0) < out[0].numel()):
        raise ValueError(f"out: expected contiguous rows that do not overlap, got strides {out.stride()}")
    conv = Conv(n, groups, (inputs, outputs), tuple(x.shape[2:]), tuple(size), kernel, stride, padding, dilation)
    failed = loaded().dprs_conv_weight_grads(
        ctypes.byref(conv), x.data_ptr(), e.data_ptr(), out.data_ptr(), out.stride(0), accumulate, threads()
    )
    if failed:
        raise MemoryError(f"no memory for a copy of one sample of x {tuple(x.shape)} per thread")
