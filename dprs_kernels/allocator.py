"""Memory that a training loop frees and takes again stays with the process, where glibc hands it out.

By default glibc gives large blocks back to the system as they are freed, and every pass of a convolutional network gets
its activations as new pages, which the system clears one by one: up to 80,000 page faults in a step of DP-CNN on 256
images, a quarter of its time. That holds for non-private training just as well.
"""

from __future__ import annotations

import ctypes
import os

TRIM_THRESHOLD, TOP_PAD, MMAP_THRESHOLD = -1, -2, -3   # mallopt's names for them (malloc.h)
VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_")
LARGEST_BLOCK = 32 * 2**20   # the most that mallopt takes: larger blocks still come and go
STEP = 64 * 2**20            # by which the heap grows

_kept = 0


def keep_freed_memory(limit: int = 2**30) -> bool:
    """Up to `limit` bytes that are free stay with the process; for all of it, from now on. False, and nothing is done,
    where the C library is not glibc, or where the environment has its own say (VARIABLES, GLIBC_TUNABLES).

    Call it once, before training, in a program of your own: it is a setting of the process, not of this library, which
    never calls it for you; `dprs train` is such a program and does.
    """
    global _kept
    if limit < 0:
        raise ValueError(f"limit: got {limit}; expected a number of bytes, at least 0")
    libc = ctypes.CDLL(None)
    if _told_by_environment() or not hasattr(libc, "gnu_get_libc_version"):
        return False
    settings = {MMAP_THRESHOLD: LARGEST_BLOCK, TOP_PAD: min(STEP, limit), TRIM_THRESHOLD: min(limit, 2**31 - 1)}
    if not all(libc.mallopt(name, value) for name, value in settings.items()):
        return False
    _kept = limit
    return True


def kept() -> int:
    """Bytes that keep_freed_memory was told to keep; 0 if it was not called, or could do nothing."""
    return _kept


def _told_by_environment() -> bool:
    return any(name in os.environ for name in VARIABLES) or "glibc.malloc" in os.environ.get("GLIBC_TUNABLES", "")
