"""What do masks of whole rows save? benchmarks/bench_rows.py --benchmark-only

Whole steps of DP-CNN on one logical batch (forward, backward, clip, mask, noise, SGD), row masks at several drop rates,
beside a coordinate mask and non-private SGD at its best micro-batch, which is 1.0. Each is held against float64 first.
A cooled run drops r = 0 in its first epoch and 0.9 in its last, linearly: its cost is the mean over that interval, by
trapezoids between the rates that were raced. Memory: peak of one step in a fresh process. Sent: what a rank of a
distributed step gives away, the kept values of p.grad; the mask itself is three numbers that all ranks know.
--full: more rates and micro-batches of SGD.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import memory
from bench_training_step import best_of, limit
from names import OURS
from racing import Contender, race
from report import Figure, Results, Subject
from training_contenders import PLAIN, RATE, ROWS, Settings, build, default_micro, mask_for
from training_models import MODELS
from training_truth import Truth

CASE = MODELS["DP-CNN"]
RATES, FULL_RATES = (0.0, 0.5, 0.9), (0.0, 0.25, 0.5, 0.75, 0.9)
ASKED = {0.5: 1.1, 0.9: 0.9}   # over non-private SGD
COOLED = 1.05
HEATS = 2


def name_of(rate: float) -> str:
    return next(name for name, found in ROWS.items() if found == rate)


def cooled(rates: Sequence[float], costs: Sequence[float]) -> float:
    """The mean cost over the interval of rates, linear between them.

    >>> cooled([0.0, 0.5, 0.9], [1.0, 1.0, 1.0])
    1.0
    """
    pieces = zip(rates, rates[1:], costs, costs[1:], strict=False)
    return sum((high - low) * (a + b) / 2 for low, high, a, b in pieces) / (rates[-1] - rates[0])


def entry(name: str, micro: int) -> Contender:
    x, y = CASE.data(CASE.batch)
    step = build(name, CASE.build(), Settings(micro, CASE.batch))
    step(x[:2], y[:2])   # warm
    return Contender(name, lambda sigma: step(x, y), name != PLAIN, peer=name == PLAIN, setting=f"micro-batch {micro}")


def test_rows(benchmark: Any, results: Results, full: bool, seconds: float) -> None:
    rates = FULL_RATES if full else RATES
    truth = Truth(CASE)
    for rate in rates:
        wrong = truth.under(mask_for(name_of(rate), CASE.build())).wrong(name_of(rate))
        assert not wrong, wrong
    micro = default_micro(CASE.build())
    rows = [entry(name_of(rate), micro) for rate in rates]
    plain = [entry(PLAIN, size) for size in (CASE.full_micros if full else CASE.micros)]
    coordinates, floor = entry(OURS, micro), limit(CASE.batch, CASE.size)
    subject = Subject("rows", f"rows, {CASE.name}, {CASE.batch}", CASE.batch, CASE.size, 4 * CASE.batch * CASE.size,
                      tensors=len(list(CASE.build().parameters())))   # fmt: skip
    with results.watch(subject.case):
        race([floor, *plain], HEATS)
        sgd = best_of(plain, PLAIN)
        race([floor, sgd, coordinates, *rows], CASE.rounds, seconds=seconds, patience=seconds)
    for contender in (*plain, coordinates, *rows):
        contender.role = "other" if contender in plain and contender is not sgd else "best"
        contender.point = {"rate": ROWS.get(contender.name, RATE if contender is coordinates else 0.0)}
    results.add(subject, [floor, *plain, coordinates, *rows], limit=floor, ours=coordinates, sgd=sgd)
    costs = [contender.over(sgd) for contender in rows]
    for rate, cost in zip(rates, costs, strict=True):
        text = f"DP-CNN, rows, r = {rate:g}: whole step over non-private SGD"
        results.figures.append(Figure(text, cost, ASKED.get(rate), case=subject.case))
    text = "DP-CNN, rows: a whole run cooled from 0 to 0.9 over non-private SGD"
    results.figures.append(Figure(text, cooled(rates, costs), COOLED, case=subject.case))
    benchmark.extra_info.update({contender.name: contender.best for contender in rows})
    benchmark.pedantic(rows[-1].run, args=(1.0,), rounds=1, iterations=1)


def test_memory_and_bytes_sent(benchmark: Any, results: Results, full: bool) -> None:
    """Timed only because --benchmark-only asks for it."""
    names = [name_of(rate) for rate in (FULL_RATES if full else RATES)]

    def peaks() -> dict[str, float | None]:
        micro = str(default_micro(CASE.build()))   # of this process, whose allocator it depends on
        commands = (("training", CASE.name, name, micro, str(CASE.batch)) for name in names)
        return dict(zip(names, memory.measure_each(commands), strict=True))

    found = benchmark.pedantic(peaks, rounds=1, iterations=1)
    benchmark.extra_info.update(found)
    results.add_memory(f"rows, {CASE.name}, {CASE.batch}", found)
    first, last = found[names[0]], found[names[-1]]
    if first and last:
        text = "DP-CNN, rows: peak memory of a step at r = 0.9 over r = 0"
        results.figures.append(Figure(text, last / first, 1.0))
    for name in names:
        keep = mask_for(name, CASE.build())
        results.note(f"{name}: a rank sends {4 * keep.count:,} bytes of p.grad, {keep.count / keep.size:.1%} of it.")
