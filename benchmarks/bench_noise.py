"""What does one normal cost on one core? pytest benchmarks/bench_noise.py --benchmark-only

Nanoseconds per normal: best time over the number made. Ours is the release of a step, so rounding, adding and writing
p.grad are in it; "release without noise" is what is left of that at sigma = 0. libm starts from words that are there
already. The others draw from generators that an attacker could predict, torch.randn in fp32.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from names import OURS
from noise_contenders import READ, SILENT, Normals
from racing import SIGMA, race
from report import Figure, Results, Subject

ROUNDS = 15
CASES = [("noise", 2**20), pytest.param("noise, 16 times as many", 2**24, marks=pytest.mark.slow)]


@pytest.mark.parametrize(("case", "count"), CASES)
def test_noise(case: str, count: int, benchmark: Any, results: Results, seconds: float) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        made = Normals(count)
        entries = made.contenders()
        found = {entry.name: made.wrong(entry) for entry in entries if entry.name != READ}
        assert not found[OURS] + found[SILENT], found
        right = [entry for entry in entries if not found.get(entry.name)]
        with results.watch(case):
            race(right, ROUNDS, seconds=seconds)
        ours = next(entry for entry in right if entry.name == OURS)
        results.add(Subject("noise", case, 0, count, 4 * count, dtype="fp32"), right, limit=right[0], ours=ours)
        benchmark.pedantic(ours.run, args=(SIGMA,), rounds=2, iterations=1)
    finally:
        torch.set_num_threads(threads)
    best = {entry.name: entry.best / count * 1e9 for entry in right}
    text = f"one normal on one core, {count:,} of them"
    results.figures.append(Figure(f"{text}, release included", best[OURS], 5.0, form="{:.2f} ns", case=case))
    results.figures.append(Figure(f"{text}, over no noise", best[OURS] - best[SILENT], form="{:.2f} ns", case=case))
    assert not any(found.values()), found
