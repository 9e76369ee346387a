"""How far are the Triton kernels from the limit, and from their peers, on the GPU at hand? Skipped without one.

    pytest benchmarks/bench_gpu.py --benchmark-only

The same race as bench_step.py, on the device: every contender is checked against float64 before it is timed, a turn
ends when the device has finished. Designs A and B race as themselves beside the chosen one. Rows go to data/step.csv
under the GPU's name. What the kernels compile to is in data/kernels.md, from a machine without a GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from contenders import COMPILED, OPACUS, OPACUS_COPY, OPACUS_INPLACE, PAPER, build, limit, ours
from harness import SHAPES, Case, Workload, check
from names import OURS
from racing import SIGMA, Contender, race
from report import Results, step_subject

from dprs_kernels.backends import tuning

DESIGN_A, DESIGN_B = "dprs_kernels, design A", "dprs_kernels, design B"
CASES = [
    Case(SHAPES[name], dtype, rate)
    for name in ("DP-CNN", "DP-CNN/S", "one tensor")
    for dtype in (torch.float32, torch.bfloat16)
    for rate in (0.0, 0.5, 0.9)
]
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU: times are never written unmeasured")


def pinned(run: Callable[[float], Sequence[torch.Tensor]], config: tuning.Config) -> Any:
    def with_config(sigma: float) -> Sequence[torch.Tensor]:
        with tuning.override(config):
            return run(sigma)

    return with_config


def contenders(work: Workload, rate: float, peers: Sequence[str]) -> list[Contender]:
    """Ours as users get it, both designs, and the peers."""
    config = tuning.choose(work.shape.size, work.dtype.itemsize, tuning.facts(work.device))
    entries = [Contender(OURS, ours(work, rate, "triton"), seeded=True, peer=False)]
    for name, pin in ((DESIGN_A, tuning.Config("A")), (DESIGN_B, config)):
        if pin.design == name[-1]:
            entries.append(Contender(name, pinned(ours(work, rate, "triton"), pin), seeded=True))
    return entries + [build(name, work, rate) for name in peers]


def finished(entry: Contender, work: Workload) -> Contender:
    """A turn lasts until the device is done."""
    run = entry.run

    def wait(sigma: float) -> Sequence[torch.Tensor]:
        outs = run(sigma)
        if work.device.type == "cuda":
            torch.cuda.synchronize(work.device)
        return outs

    entry.run = wait
    return entry


def race_on(work: Workload, rate: float, peers: Sequence[str], rounds: int) -> list[Contender]:
    """The limit and the contenders that are right, raced; a wrong one of ours is an error."""
    entries = [limit(work)]
    for entry in contenders(work, rate, peers):
        wrong = check(entry, work, rate)
        if wrong and entry.seeded:
            raise AssertionError(f"{entry.name}: {wrong}")
        if not wrong:
            entries.append(entry)
    race([finished(entry, work) for entry in entries], rounds)
    return entries


@needs_gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_gpu_step(case: Case, benchmark: Any, results: Results) -> None:
    work = Workload(case.shape, case.dtype, "cuda")
    peers = [PAPER, OPACUS_COPY, OPACUS_INPLACE, OPACUS, COMPILED]
    if case.shape.name == "one tensor":
        peers.remove(PAPER)   # its second and third copy of G
    entries = race_on(work, case.rate, peers, 5 * case.shape.rounds)
    results.add(step_subject(case, torch.cuda.get_device_name()), entries, limit=entries[0], ours=entries[1])
    best = {entry.name: entry.best for entry in entries}
    benchmark.extra_info.update({f"over {name}": best[OURS] / seconds for name, seconds in best.items()})
    benchmark.pedantic(entries[1].run, args=(SIGMA,), rounds=3, iterations=1)
