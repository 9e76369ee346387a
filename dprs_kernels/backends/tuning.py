"""Which design, tile and group the Triton backend launches: pure functions of public sizes, no autotune.

Design A, any D and N: norms, factors, sums (then release), two passes over the gradients.
Design B, one launch and one pass: a group's second touch must come while it is still in L2.

    bytes between the two touches = ((2 lag + 1) group es + 8) D        rows of 2 lag + 1 groups, int64 sums
    past the L2 this is a cliff (1.0 -> 1.9 passes), so the group comes from the window, and B is not used at all
    if it would be smaller than 2: an 8-byte atomic for every 4-byte value would cost what a pass does.

What no machine without a GPU can tell is the rate of those atomics. benchmarks/bench_gpu.py races A against B.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

VECTOR = 16                # bytes of a load
NORM_ROWS, NORM_LANES = 8, 128
NORM_COLUMNS = 8192        # 64 values a thread and row: what the reduction costs is then 0.6 instructions a value
SUM_ROWS, SUM_LANES = 4, 128
SUM_COLUMNS = 2048         # 16 columns a thread: 32 registers of int64 sums
RELEASE_COLUMNS = 2048     # one ChaCha20 block a thread of 8 warps
L2_SHARE = 0.65            # of the L2 is ours: the rest holds tables, outputs and what is on its way
MAX_GROUP = 32
IN_FLIGHT = 0.6            # lag * tiles over programs in flight: at 0.6 2-8 % is waiting (simulated), at 0.3 13-26 %
RESIDENT_REGISTERS = 128   # a thread of design B: 512 threads of it fill a multiprocessor's 65536
RESIDENT_THREADS = 512


@dataclass(frozen=True)
class Device:
    """What the choice depends on. l2: bytes; processors: SMs or CUs."""

    l2: int
    processors: int


A100 = Device(l2=40 * 2**20, processors=108)
H100 = Device(l2=50 * 2**20, processors=132)


@dataclass(frozen=True)
class Config:
    """design "A", or "B" with tiles of `columns`, groups of `group` samples and P2 `lag` groups behind P1."""

    design: str
    columns: int = 0
    warps: int = 8
    group: int = 0
    lag: int = 0


def window(size: int, element_size: int, group: int, lag: int) -> int:
    """Bytes between design B's two touches of a row."""
    return ((2 * lag + 1) * group * element_size + 8) * size


def choose(size: int, element_size: int, device: Device) -> Config:
    """The design for D = size coordinates of element_size bytes.

    For each tile: the lag that keeps every resident program busy (P2(k) waits for all of P1(k)), then the largest
    power of two of samples a group whose window fits. Of those the one with the most values a thread: taking a
    ticket, reducing norms and adding sums cost the same for any number. Between equals, the shorter lag.
    """
    best, most = Config("A"), (0, 0)
    if element_size > 4:   # float64 gradients are for checking, not for speed
        return best
    for columns in (4096, 2048, 1024, 512):
        warps = min(8, columns * element_size // (VECTOR * 32))   # a vector a thread, at least
        tiles, resident = -(-size // columns), device.processors * RESIDENT_THREADS // (32 * warps)
        lag = max(1, math.ceil(IN_FLIGHT * resident / tiles))
        group = MAX_GROUP
        while group > 1 and window(size, element_size, group, lag) > L2_SHARE * device.l2:
            group //= 2
        rank = (group * columns // warps, -lag)
        if group >= 2 and rank > most:
            best, most = Config("B", columns, warps, group, lag), rank
    return best


def splits(tiles: int, blocks: int, device: Device) -> int:
    """Over how many programs a tile's rows are split in design A: enough for four programs a multiprocessor,
    at least 8 blocks (32 rows) each. Sums are integers, so the result does not depend on it."""
    return max(1, min(-(-4 * device.processors // tiles), blocks // 8))


_override: Config | None = None


@contextmanager
def override(config: Config) -> Iterator[None]:
    """For tests: this config for every launch inside. Results must not change."""
    global _override
    before, _override = _override, config
    try:
        yield
    finally:
        _override = before


def config_for(size: int, element_size: int, device: torch.device) -> Config:
    return _override or choose(size, element_size, facts(device))


def facts(device: torch.device) -> Device:
    """L2 and multiprocessors of a GPU; an A100's where there is none (the interpreter).

    AMD's large GPUs have an L2 for each of several dies: what one program read, another does not find, so it counts as
    none and design A serves. (B compiles for gfx942 and is correct there; it is not chosen.)
    """
    if device.type != "cuda":
        return A100
    properties = torch.cuda.get_device_properties(device)
    l2 = 0 if torch.version.hip else int(properties.L2_cache_size)
    return Device(l2=l2, processors=int(properties.multi_processor_count))
