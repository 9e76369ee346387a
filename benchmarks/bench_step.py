"""How far is the fused step from the limit, and from its peers? pytest benchmarks/ --benchmark-only

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
from contenders import OPACUS, OURS, PEERS, build, limit, peers_for
from harness import BOUND, RATES, REPORTED, SHAPES, SIGMA, Case, Contender, Workload, check, race
from report import IMPORT_FIGURE, MASK_FIGURES, NOISE_ALL_FIGURE, NOISE_FIGURE, RATE_FIGURE, Results

from dprs_kernels import KeepMask, NoiseSource, PrivateSum

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")   # inside opacus
DTYPES = (torch.float32, torch.bfloat16)
CASES = [Case(SHAPES[name], dtype, rate) for name in REPORTED for dtype in DTYPES for rate in RATES]


_held: dict[tuple[str, torch.dtype], Workload] = {}


def workload(name: str, dtype: torch.dtype) -> Workload:
    """One at a time, the old one freed first: tests and cases are ordered so that few are made twice."""
    if (name, dtype) not in _held:
        _held.clear()
        _held[name, dtype] = Workload(SHAPES[name], dtype)
    return _held[name, dtype]


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
            if (note := f"{name}: {error}") not in results.notes:
                results.notes.append(note)
            continue
        reason = check(contender, work, rate)
        if reason:
            wrong.append(f"{name} at r = {rate:g}: {reason}")
        else:
            right.append(contender)
    return right, wrong


def test_rates(benchmark: Any, results: Results) -> None:
    """Ours at every rate, taking turns with each other: does dropping cost time?"""
    work = workload("DP-CNN", torch.float32)
    entries = []
    for rate in RATES:
        right, wrong = checked([OURS], work, rate, results)
        assert not wrong, wrong
        right[0].name = f"r = {rate:g}"
        entries += right
    with results.watch(RATE_FIGURE):
        race([limit(work), *entries], 2 * work.shape.rounds)
    results.figures[RATE_FIGURE] = entries[-1].best / entries[0].best
    benchmark.extra_info.update({entry.name: entry.best for entry in entries})
    benchmark.pedantic(entries[-1].run, args=(SIGMA,), rounds=3, iterations=1)


@pytest.mark.parametrize(("rate", "figure"), [(0.5, NOISE_FIGURE), (0.0, NOISE_ALL_FIGURE)], ids=["r0.5", "r0"])
def test_noise_share(rate: float, figure: str, benchmark: Any, results: Results) -> None:
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

    with results.watch(figure):
        trials = [step() for _ in range(2 * work.shape.rounds)]
    add, release = (min(part) for part in zip(*trials, strict=True))
    results.figures[figure] = release / (add + release)
    benchmark.extra_info.update(add=add, release=release)
    benchmark.pedantic(step, rounds=3, iterations=1)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_step(case: Case, benchmark: Any, results: Results, request: pytest.FixtureRequest) -> None:
    full = request.config.getoption("--full")
    if not full and case.dtype != torch.float32 and case.rate != 0.5:
        pytest.skip("bf16 at other rates: --full")
    need_memory(case)
    work = workload(case.shape.name, case.dtype)
    peers = peers_for(case.shape.name, case.dtype, case.rate, full)
    contenders, wrong = checked([OURS, *peers], work, case.rate, results)
    assert contenders, wrong
    assert contenders[0].name == OURS, wrong
    contenders.insert(0, limit(work))
    with results.watch(case.id):
        race(contenders, case.shape.rounds)
    results.add(case, contenders)
    best = {c.name: c.best for c in contenders}
    benchmark.extra_info.update({f"over {name}": best[OURS] / seconds for name, seconds in best.items()})
    ours = contenders[1]
    benchmark.group = f"{case.shape.name}: ours, once more alone"
    benchmark.pedantic(ours.run, args=(SIGMA,), rounds=3, iterations=1)
    assert not wrong, wrong


MASKS: dict[str, tuple[Sequence[tuple[int, ...]], int]] = {
    "DP-CNN": (SHAPES["DP-CNN"].shapes, 20),
    "GPT-2": (((124_000_000,),), 3),
}


@pytest.mark.parametrize("name", MASKS)
def test_mask_draw(name: str, benchmark: Any, results: Results) -> None:
    shapes, rounds = MASKS[name]
    draws = iter(range(2**32))
    best = float("inf")

    def draw() -> KeepMask:
        nonlocal best
        start = time.perf_counter()
        keep = KeepMask.draw(shapes, drop_rate=0.5, seed=0, draw=next(draws))
        best = min(best, time.perf_counter() - start)
        return keep

    with results.watch(MASK_FIGURES[name]):
        keep: KeepMask = benchmark.pedantic(draw, rounds=rounds, iterations=1)
    assert keep.count == keep.size - keep.size // 2
    results.figures[MASK_FIGURES[name]] = best


IMPORT = "import time, torch; t = time.perf_counter(); import dprs_kernels; print(time.perf_counter() - t)"


def test_import(benchmark: Any, results: Results) -> None:
    """In fresh processes, after torch; best of 5."""
    seconds: list[float] = []

    def once() -> None:
        done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, check=True)
        seconds.append(float(done.stdout))

    with results.watch(IMPORT_FIGURE):
        benchmark.pedantic(once, rounds=5, iterations=1)
    results.figures[IMPORT_FIGURE] = min(seconds)


@pytest.mark.parametrize("name", REPORTED)
def test_memory(name: str, benchmark: Any, results: Results, request: pytest.FixtureRequest) -> None:
    """Peak extra memory, in a fresh process; timed only because --benchmark-only asks for it."""
    full = request.config.getoption("--full")
    need_memory(Case(SHAPES[name], torch.float32, memory.RATE))
    _held.clear()
    peers = PEERS if full or name == "DP-CNN" else (OPACUS,)   # who copies is known from one shape
    extra = benchmark.pedantic(memory.measure, args=(name, [OURS, *peers]), rounds=1, iterations=1)
    benchmark.extra_info.update(extra)
    results.add_memory(name, extra)
