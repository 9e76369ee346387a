"""The registry: which backends exist, which can run here, which one a call gets.

A backend is a module with the two verbs `accumulate_` and `release` of reference.py and a function
`unavailable(device) -> str`, the reason why it cannot run on that device ("" if it can). It may have a third verb,
`step_`, both in one pass where nobody asks for norms (NEEDS_TOTAL = False: with sums of its own, and None for a
total); TAKES, the kinds of gradients that it reads, where that is more than tensors; and `sums(layout, bits) -> int`,
how many values a total has, where that is not one for each padded coordinate.
"""

from __future__ import annotations

import importlib
import warnings
from functools import cache
from types import ModuleType

import torch

NAMES = ("reference", "cpu", "triton")
_warned: set[ModuleType] = set()


@cache   # 20 us a step
def _module(name: str) -> ModuleType:
    return importlib.import_module(f"dprs_kernels.backends.{name}")


def unavailable(name: str, device: torch.device) -> str:
    """Why `name` cannot run on `device`; "" if it can."""
    return str(_module(name).unavailable(device))


def resolve(name: str, device: torch.device, tensor: str = "params[0]") -> ModuleType:
    """The backend for a call: the named one or ValueError, which names the tensor that is on `device`; "auto" goes
    by the device and warns once when it falls back to the reference."""
    if name == "auto":
        wanted = _module("cpu" if device.type == "cpu" else "triton")
        why = wanted.unavailable(device)
        if not why:
            return wanted
        if wanted not in _warned:
            _warned.add(wanted)
            name = wanted.__name__.rpartition(".")[2]
            warnings.warn(
                f"dprs_kernels: the {name} backend cannot run ({why}); using the reference, which is correct and slow",
                stacklevel=4,
            )
        return _module("reference")
    if name not in NAMES:
        raise ValueError(f"backend: got {name!r}; expected one of auto, {', '.join(NAMES)}")
    if why := unavailable(name, device):
        usable = [other for other in NAMES if not unavailable(other, device)]
        raise ValueError(
            f"backend: {name!r} cannot run on {device}, where {tensor} is: {why}. Available here: {', '.join(usable)}"
        )
    return _module(name)
