"""Does a step grow linearly, in time and memory? pytest benchmarks/bench_scaling.py --benchmark-only

Against N, D, r, threads and the number of tensors: all points of an axis take turns, each beside one read of its own
gradients. The exponent is fitted over the sizes beyond the cache (fit.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import memory
import pytest
from fit import beyond_cache, exponent
from names import OURS
from racing import SIGMA, Contender, race
from report import Figure, Results, Subject
from scaling_points import Point, Work, axes, buffer_for

ROUNDS = 15
GROWING = ("N", "D")   # linear is asked; r and tensors should cost nothing, threads should help


@pytest.mark.parametrize("axis", axes(False))
def test_scaling(axis: str, benchmark: Any, results: Results, full: bool, seconds: float) -> None:
    points = axes(full)[axis]
    buffer = buffer_for(points)
    works = [Work(point, buffer) for point in points]
    limits, ours = [work.limit() for work in works], [work.ours() for work in works]
    wrong = [f"{c.setting}: {why}" for work, c in zip(works, ours, strict=True) if (why := work.wrong(c))]
    assert not wrong, wrong
    case = f"against {axis}"
    with results.watch(case):
        race([entry for pair in zip(limits, ours, strict=True) for entry in pair], ROUNDS, seconds=seconds)
    last = points[-1]
    results.add(
        Subject("scaling", case, last.samples, last.size, last.bytes, last.rate), [*limits, *ours],
        limit={entry.setting: entry for entry in limits},
    )   # fmt: skip
    add_figures(axis, points, limits, ours, results)
    benchmark.extra_info.update({entry.setting: entry.best for entry in ours})
    benchmark.pedantic(ours[-1].run, args=(SIGMA,), rounds=1, iterations=1)


def add_figures(
    axis: str, points: Sequence[Point], limits: Sequence[Contender], ours: Sequence[Contender], results: Results
) -> None:
    case = f"against {axis}"
    if axis in GROWING:
        large = [k for k, point in enumerate(points) if beyond_cache(axis, point.bytes, point.samples)]
        sizes = [points[k].bytes for k in large]
        step, read = (exponent(sizes, [entries[k].best for k in large]) for entries in (ours, limits))
        text = f"exponent of time in {axis}, {points[large[0]].setting} to {points[-1].setting}"
        results.figures.append(Figure(text, step, 1.05, 0.95, "{:.3f}", case))
        results.figures.append(Figure(f"exponent of one read in {axis}", read, form="{:.3f}", case=case))
    elif axis == "threads" and len(points) > 1:
        read, step = (entries[0].best / entries[1].best for entries in (limits, ours))
        asked = 1.6 if read >= 1.6 else None   # asked where the memory's bandwidth allows
        results.figures.append(Figure("two threads over one: the step", step, at_least=asked, case=case))
        results.figures.append(Figure("two threads over one: one read, the bandwidth's ratio", read, case=case))
    else:
        text = f"the step at {points[-1].setting} over {points[0].setting}"
        results.figures.append(Figure(text, ours[-1].best / ours[0].best, case=case))


@pytest.mark.parametrize("axis", [pytest.param(a, marks=[] if a in GROWING else pytest.mark.slow) for a in axes(False)])
def test_scaling_memory(axis: str, benchmark: Any, results: Results, full: bool) -> None:
    """Peak extra memory of every point; timed only because --benchmark-only asks for it."""
    settings = [point.setting for point in axes(full)[axis]]
    commands = [("scaling", axis, setting, *["full"] * full) for setting in settings]
    found = benchmark.pedantic(memory.measure_each, args=(commands,), rounds=1, iterations=1)
    peaks = dict(zip(settings, found, strict=True))
    for row in results.rows:
        if peaks.get(row.setting) is not None and (row.case, row.contender) == (f"against {axis}", OURS):
            row.peak_mib = round(peaks[row.setting], 2)
