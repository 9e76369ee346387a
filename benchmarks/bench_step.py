"""How far is the fused step from the limit, and from its peers? pytest benchmarks/bench_step.py --benchmark-only

One test per (shape, dtype, r): all contenders on the same tensors, checked, then raced. pytest-benchmark's own rows
show ours; ratios are in extra_info and in the tables at the end. Nothing here fails for being slow.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import memory
import pytest
import torch
from contenders import COMPILED, OPACUS, OPACUS_COPY, PAPER, PEERS, build, limit, peers_for
from harness import BOUND, FULL_ONLY, RATES, REPORTED, SHAPES, Case, Workload, check
from names import OURS
from racing import SIGMA, Contender, race
from report import Figure, Results, Subject, step_subject

from dprs_kernels import NoiseSource, PrivateSum

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")   # inside opacus
DTYPES = (torch.float32, torch.bfloat16)
LIMITS = {"DP-CNN": 1.4, "DP-CNN/S": 1.3}   # asked of fp32, r = 0.5: ours over one read
_held: dict[tuple[str, torch.dtype], Workload] = {}


def workload(name: str, dtype: torch.dtype) -> Workload:
    """One at a time, the old one freed first: tests and cases are ordered so that few are made twice."""
    if (name, dtype) not in _held:
        _held.clear()
        _held[name, dtype] = Workload(SHAPES[name], dtype)
    return _held[name, dtype]


def by_default(case: Case) -> bool:
    """fp32 at r = 0.5 on every shape; on DP-CNN also without a mask."""
    if case.shape.name in FULL_ONLY or case.dtype != torch.float32:
        return False
    return case.rate == 0.5 or (case.shape.name == "DP-CNN" and case.rate == 0.0)


CASES = [
    pytest.param(case, id=case.id, marks=[] if by_default(case) else pytest.mark.slow)
    for case in (Case(SHAPES[name], dtype, r) for name in (*REPORTED, *FULL_ONLY) for dtype in DTYPES for r in RATES)
]


def need_memory(case: Case) -> None:
    """G, the copy of a peer that works in place, a peer's temporary copy (fp32, whatever G is), and some."""
    need = 2 * case.bytes + 4 * case.shape.samples * case.shape.size + 2**30
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if free < need:
        pytest.skip(f"{case.id} needs {need / 2**30:.0f} GiB of free memory, {free / 2**30:.0f} are there")


def checked(names: Sequence[str], work: Workload, rate: float, results: Results) -> tuple[list[Contender], list[str]]:
    """Contenders that give the right answer, and what is wrong with the others."""
    right, wrong = [], []
    for name in names:
        try:
            contender = build(name, work, rate)
        except ImportError as error:
            results.note(f"Left out: {name}: {error}")
            continue
        reason = check(contender, work, rate)
        if reason:
            wrong.append(f"{name} at r = {rate:g}: {reason}")
        else:
            right.append(contender)
    return right, wrong


def test_rates(benchmark: Any, results: Results, seconds: float) -> None:
    """Ours at every rate, taking turns with each other: does dropping cost time?"""
    work, entries = workload("DP-CNN", torch.float32), []
    for rate in RATES:
        right, wrong = checked([OURS], work, rate, results)
        assert not wrong, wrong
        right[0].setting, right[0].point = f"r = {rate:g}", {"rate": rate}
        entries += right
    floor, case = limit(work), "DP-CNN, rates"
    with results.watch(case):
        race([floor, *entries], 2 * work.shape.rounds, seconds=seconds)
    shape = work.shape
    columns = Subject("step", case, shape.samples, shape.size, Case(shape, torch.float32, 0.0).bytes, tensors=16)
    results.add(columns, [floor, *entries], limit=floor, ours=entries[0])
    # "Not slower", within what this machine can tell.
    ratio = entries[-1].best / entries[0].best
    results.figures.append(Figure("DP-CNN: ours at r = 0.9 over ours at r = 0", ratio, 1.05, case=case))
    benchmark.pedantic(entries[-1].run, args=(SIGMA,), rounds=3, iterations=1)


@pytest.mark.parametrize("rate", [0.5, 0.0], ids=["r0.5", "r0"])
def test_noise_share(rate: float, benchmark: Any, results: Results, seconds: float) -> None:
    """release (words, transform, rounding, writing p.grad) of the whole step; its noise alone is less."""
    work = workload("DP-CNN", torch.float32)
    params, noise = work.params(), NoiseSource()

    def step() -> tuple[float, float]:
        total = PrivateSum(
            params, keep=work.keeps[rate], max_grad_norm=BOUND, noise_multiplier=SIGMA,
            expected_batch_size=work.shape.samples, noise=noise,
        )   # fmt: skip
        times = [time.perf_counter()]
        for part in (lambda: total.add(work.grads), total.release):
            part()
            times.append(time.perf_counter())
        return times[1] - times[0], times[2] - times[1]

    case = f"DP-CNN, share of noise, r = {rate:g}"
    trials: list[tuple[float, float]] = []
    with results.watch(case):
        stop = time.perf_counter() + seconds
        while len(trials) < work.shape.rounds or (len(trials) < 3 * work.shape.rounds and time.perf_counter() < stop):
            trials.append(step())
    add, release = (min(part) for part in zip(*trials, strict=True))
    text = f"DP-CNN: release (noise, p.grad) of the step, r = {rate:g}"
    results.figures.append(Figure(text, release / (add + release), 0.12, form="{:.1%}", case=case))
    benchmark.extra_info.update(add=add, release=release)
    benchmark.pedantic(step, rounds=3, iterations=1)


@pytest.mark.parametrize("case", CASES)
def test_step(case: Case, benchmark: Any, results: Results, full: bool, seconds: float) -> None:
    need_memory(case)
    work = workload(case.shape.name, case.dtype)
    peers = peers_for(case.shape.name, case.dtype, case.rate, full)
    contenders, wrong = checked([OURS, *peers], work, case.rate, results)
    assert contenders, wrong
    ours, floor = contenders[0], limit(work)
    assert ours.name == OURS, wrong
    contenders.insert(0, floor)
    with results.watch(case.id):
        race(contenders, case.shape.rounds, seconds=seconds)
    results.add(step_subject(case), contenders, limit=floor, ours=ours)
    if case.dtype == torch.float32 and case.rate == 0.5:
        add_figures(case, contenders, floor, ours, results)
    benchmark.extra_info.update({f"over {c.name}": ours.over(c) for c in contenders})
    benchmark.group = f"{case.shape.name}: ours, once more alone"
    benchmark.pedantic(ours.run, args=(SIGMA,), rounds=3, iterations=1)
    assert not wrong, wrong


def add_figures(
    case: Case, contenders: Sequence[Contender], floor: Contender, ours: Contender, results: Results
) -> None:
    """No target was set against a mask in place; shown because it is the harder rival."""
    name = case.shape.name
    results.figures.append(
        Figure(f"{name}: ours over reading G once", ours.over(floor), LIMITS.get(name), case=case.id)
    )
    least = {PAPER: 15.0, OPACUS_COPY: 6.0, OPACUS: 1.5, COMPILED: 1.8}
    for c in contenders:
        if c.peer:
            text = f"{name}: {c.name} over ours"
            results.figures.append(Figure(text, c.over(ours), at_least=least.get(c.name), case=case.id))


IMPORT = "import time, torch; t = time.perf_counter(); import dprs_kernels; print(time.perf_counter() - t)"


def test_import(benchmark: Any, results: Results) -> None:
    """In fresh processes, after torch; best of 2."""
    found: list[float] = []

    def once() -> None:
        done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
        found.append(float(done.stdout))

    with results.watch("import"):
        benchmark.pedantic(once, rounds=2, iterations=1)
    text = "import dprs_kernels on top of import torch"
    results.figures.append(Figure(text, min(found), 0.3, form="{:.3f} s", case="import"))


@pytest.mark.parametrize("name", [*REPORTED[:2], *(pytest.param(n, marks=pytest.mark.slow) for n in FULL_ONLY)])
def test_memory(name: str, benchmark: Any, results: Results, full: bool) -> None:
    """Peak extra memory, in a fresh process; timed only because --benchmark-only asks for it."""
    case = Case(SHAPES[name], torch.float32, memory.RATE)
    need_memory(case)
    _held.clear()
    peers = PEERS if full or name == "DP-CNN" else (OPACUS,)   # one shape says who copies
    peaks = benchmark.pedantic(memory.measure, args=("step", name, OURS, *peers), rounds=1, iterations=1)
    if peaks is None:
        return
    benchmark.extra_info.update(peaks)
    results.add_memory(case.id, peaks)
    floats = peaks[OURS] * memory.MIB / (4 * case.shape.size)
    text = f"{name}: extra memory of ours over D floats, p.grad included"
    results.figures.append(Figure(text, floats, torch.get_num_threads() + 2, form="{:.1f}"))
