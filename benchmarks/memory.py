"""Peak extra memory of one step, in a process of its own.

    python benchmarks/memory.py step SHAPE CONTENDER...           {contender: MiB}
    python benchmarks/memory.py training MODEL CONTENDER MICRO N  MiB
    python benchmarks/memory.py scaling AXIS SETTING [full]       MiB
    python benchmarks/memory.py mask D                            {contender: MiB}

"Extra" is the highest resident set during one call minus the one right before it: inputs, weights and masks are there
already, p.grad is not, so the result itself counts. Code, threads and libraries were paid for by a call on something
tiny, and freed memory was given back first, so no arena hides anything. The resolution is that of the kernel's page
counters, about 0.25 MB.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import json
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from contenders import COMPILED, build
from harness import SHAPES, Workload
from racing import SIGMA

RATE = 0.5
MIB = 2**20


def _status(field: str) -> int:
    """VmRSS (now) or VmHWM (highest since the last reset), in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def extra(call: Callable[[], object]) -> float:
    """One call's peak, in MiB, after freed memory went back to the system and the high-water mark was restarted."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = _status("VmRSS")
    call()
    return (_status("VmHWM") - before) / MIB


def step(shape: str, *names: str) -> dict[str, float]:
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
    peaks = {}
    for name in present:
        contender = build(name, work, RATE)
        if name == COMPILED:   # a compiled step exists only after a call on this shape
            contender.run(SIGMA)
        peaks[name] = extra(functools.partial(contender.run, SIGMA))
    return peaks


def training(case: str, contender: str, micro: str, samples: str) -> float:
    """A step on two samples pays for the code."""
    import training_contenders
    from training_models import MODELS

    model = MODELS[case].build()
    x, y = MODELS[case].data(int(samples))
    step = training_contenders.build(contender, model, training_contenders.Settings(int(micro), int(samples)))
    step(x[:2], y[:2])
    for p in model.parameters():
        p.grad = None
    return extra(lambda: step(x, y))


def scaling(axis: str, setting: str, *full: str) -> float:
    """One point of an axis: scratch that stays with the process would be counted at the first one alone."""
    import scaling_points

    return extra(scaling_points.for_memory({p.setting: p for p in scaling_points.axes(bool(full))[axis]}[setting]))


def mask(size: str) -> dict[str, float]:
    import mask_contenders

    for contender in mask_contenders.contenders(1000):
        contender.run(SIGMA)
    return {c.name: extra(functools.partial(c.run, SIGMA)) for c in mask_contenders.contenders(int(size))}


SUBJECTS: dict[str, Callable[..., Any]] = {"step": step, "training": training, "scaling": scaling, "mask": mask}


@functools.cache
def measure(*arguments: str) -> Any:
    """Runs this file in a fresh process; None where the system cannot tell (no Linux /proc, no glibc)."""
    if not sys.platform.startswith("linux"):
        return None
    done = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"memory of {' '.join(arguments)}: {done.stderr.strip().splitlines()[-1]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure_each(commands: Iterable[Sequence[str]]) -> list[Any]:
    """measure for each of them, two at a time: what a process needs does not depend on who else is there."""
    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(lambda arguments: measure(*arguments), commands))


def main(arguments: Sequence[str]) -> None:
    warnings.simplefilter("ignore")   # of libraries; the parent shows the end of stderr only when something fails
    print(json.dumps(SUBJECTS[arguments[0]](*arguments[1:])))


if __name__ == "__main__":
    main(sys.argv[1:])
