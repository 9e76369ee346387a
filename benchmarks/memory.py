"""Peak extra memory of one step, in a process of its own: python benchmarks/memory.py SHAPE CONTENDER...

Prints {contender: floats per coordinate} as JSON. "Extra" is the highest resident set during one call minus the one
right before it, when gradients and masks are already there; p.grad is not, so the result itself counts as 1. The
resolution is that of the kernel's page counters, about 0.25 MB: nothing at 11M coordinates, 0.1 at DP-CNN, 2.5 at
DP-CNN/S.
"""

from __future__ import annotations

import ctypes
import gc
import json
import subprocess
import sys
from pathlib import Path

import torch
from contenders import COMPILED, OURS, build
from harness import SHAPES, SIGMA, Workload

RATE = 0.5


def _status(field: str) -> int:
    """VmRSS (now) or VmHWM (highest since the last reset), in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def _settle() -> int:
    """Gives freed memory back to the system, restarts the high-water mark; resident bytes now."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return _status("VmRSS")


def _extra(name: str, work: Workload) -> int:
    """One call's peak, in bytes. Code, threads and libraries were paid for by a call on a tiny shape; a compiled
    step exists only after a call on this one."""
    contender = build(name, work, RATE)
    if name == COMPILED:
        contender.run(SIGMA)
    before = _settle()
    contender.run(SIGMA)
    return _status("VmHWM") - before


def main(shape: str, names: list[str]) -> None:
    warm = Workload(SHAPES["tiny"], torch.float32)
    present = []
    for name in names:
        try:
            contender = build(name, warm, RATE)
        except ImportError:   # an optional library: bench_step.py says which
            continue
        present.append(name)
        if name != COMPILED:
            contender.run(SIGMA)
    work = Workload(SHAPES[shape], torch.float32)
    print(json.dumps({name: _extra(name, work) / (4 * work.shape.size) for name in present}))


def measure(shape: str, names: list[str]) -> dict[str, float]:
    """Runs this file in a fresh process; {} where the system cannot tell (no Linux /proc, no glibc)."""
    if not sys.platform.startswith("linux"):
        return {}
    command = [sys.executable, __file__, shape, *names]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"memory of {shape}: {done.stderr.strip().splitlines()[-1]}")
    return {name: float(value) for name, value in json.loads(done.stdout.splitlines()[-1]).items()}


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or [OURS])
