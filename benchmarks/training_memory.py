"""Peak memory of one training step, in a process of its own.

    python benchmarks/training_memory.py MODEL CONTENDER MICRO N

Prints bytes. Fresh process, model and data made, one step on two samples (code, threads and libraries are paid for),
p.grad cleared, freed memory given back, the high-water mark restarted (memory.py); then one whole step on N samples:
its highest resident set minus the one right before it. So activations, per-sample gradients, buffers and p.grad count;
weights, data and the library itself do not. Freed arenas cannot hide anything: only two samples ran before.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import warnings

from memory import _settle, _status
from training_contenders import Settings, build
from training_models import MODELS

UNIT = 2**20


def main(case: str, contender: str, micro: int, samples: int) -> None:
    warnings.simplefilter("ignore")   # of libraries; the parent shows the end of stderr only when something fails
    model = MODELS[case].build()
    x, y = MODELS[case].data(samples)
    step = build(contender, model, Settings(micro or None, samples))
    step(x[:2], y[:2])
    for p in model.parameters():
        p.grad = None
    before = _settle()
    step(x, y)
    print(_status("VmHWM") - before)


@functools.cache
def measure(case: str, contender: str, micro: int, samples: int) -> float | None:
    """MiB; micro = 0 lets ours choose. None where the system cannot tell (no Linux /proc, no glibc)."""
    if not sys.platform.startswith("linux"):
        return None
    command = [sys.executable, __file__, case, contender, str(micro), str(samples)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"memory of {contender} on {case}: {done.stderr.strip().splitlines()[-1]}")
    return int(done.stdout.splitlines()[-1]) / UNIT


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
