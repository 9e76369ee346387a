"""What does drawing a mask cost? pytest benchmarks/bench_mask.py --benchmark-only

D from DP-CNN/S (26,010) to GPT-2 (124 million, --full). A mask is drawn once an epoch, so even a slow one is cheap;
but exact counts, the same bits everywhere and no D-sized permutation should not cost extra.
"""

from __future__ import annotations

from typing import Any

import mask_contenders
import memory
import pytest
from mask_contenders import RATE, contenders
from names import OURS
from racing import SIGMA, race
from report import Figure, Results, Subject

SIZES = [26_010, 550_570, 11_000_000, pytest.param(124_000_000, marks=pytest.mark.slow)]
ROUNDS = 40
ASKED = {550_570: 5e-3, 124_000_000: 1.0}                          # seconds


def case_of(size: int) -> str:
    return f"mask, D = {size:,}"


@pytest.mark.parametrize("size", SIZES)
def test_mask(size: int, benchmark: Any, results: Results, seconds: float) -> None:
    entries = contenders(size)
    floor, ours = entries[0], entries[1]
    found = {entry.name: mask_contenders.wrong(entry, size) for entry in entries[1:]}
    assert not found[OURS], found
    right = [floor, *(entry for entry in entries[1:] if not found[entry.name])]
    with results.watch(case_of(size)):
        race(right, ROUNDS, seconds=seconds)
    results.add(Subject("mask", case_of(size), 0, size, 4 * size, RATE, "bits"), right, limit=floor, ours=ours)
    if size in ASKED:
        figure = Figure(f"mask for D = {size:,}", ours.best, ASKED[size], form="{:.4f} s", case=case_of(size))
        results.figures.append(figure)
    # No failure: torch.randperm is biased for D in the 100 millions (32-bit numbers modulo what is left), and stays so.
    for name, why in found.items():
        if why:
            results.note(f"Left out of {case_of(size)}: {name}: {why}")
    benchmark.pedantic(ours.run, args=(SIGMA,), rounds=2, iterations=1)


@pytest.mark.parametrize("size", SIZES[2:])
def test_mask_memory(size: int, benchmark: Any, results: Results) -> None:
    """Peak extra memory, in a fresh process; timed only because --benchmark-only asks for it."""
    peaks = benchmark.pedantic(memory.measure, args=("mask", str(size)), rounds=1, iterations=1)
    if peaks is not None:
        results.add_memory(case_of(size), peaks)
