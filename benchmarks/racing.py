"""How contenders are timed: they take turns on the same tensors, within the seconds that their file may spend.

A slow minute of the machine then hits all of them, and ratios survive it. Who else used the CPUs meanwhile is
measured, since no taking of turns helps against that.
"""

from __future__ import annotations

import gc
import math
import os
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

SIGMA = 1.0   # noise_multiplier of every timed step
# Seconds of a file in the default run, on two hyperthreads of one core. conftest.py prints what each one took.
BUDGETS = {
    "bench_step": 50.0,
    "bench_training_step": 70.0,
    "bench_rows": 30.0,
    "bench_scaling": 28.0,
    "bench_noise": 9.0,
    "bench_mask": 8.0,
    "bench_kernels": 6.0,
    "bench_gpu": 60.0,
}   # 201 without bench_gpu, which is skipped where there is no GPU
RACING = 0.3      # of a budget; the rest makes tensors, checks contenders and measures memory in fresh processes
EXTRA = 0.4       # of a race's seconds, for ours and the limit alone: a best of 6 turns was 15 % above a best of 20
FULL = 10.0       # --full: that many times as long
LEAST = 3         # turns that everybody gets, whatever the budget: a peer that takes fresh memory was seen at 6.2 s
                  # once and at 1.6 s next


@dataclass
class Contender:
    """run(sigma) does one whole step and returns the released gradients, one tensor per parameter."""

    name: str
    run: Callable[[float], Any]
    masked: bool = True          # False: its truth is that of r = 0, whatever the case
    seeded: bool = False         # its first step uses the noise that harness.spec_noise predicts
    peer: bool = True            # not ours, not the limit
    setting: str = ""            # "micro-batch 32", "N = 256"
    role: str = ""               # training steps: "default" (our engine's choice), "best", "other"
    micro: int = 0
    point: dict[str, Any] = field(default_factory=dict)   # what its row says instead of the race's: N, D, threads, ...
    trials: list[float] = field(default_factory=list)     # seconds, one per round from the first on

    @property
    def best(self) -> float:
        return min(self.trials)

    @property
    def median(self) -> float:
        return statistics.median(self.trials)

    @property
    def spread(self) -> float:
        """Seconds: the middle half's width."""
        return middle_half(self.trials)

    def over(self, base: Contender) -> float:
        """Best over best, of the rounds that both were in: who had more turns has the better best.

        >>> Contender("peer", print, trials=[6.0, 4.0]).over(Contender("ours", print, trials=[2.0, 2.0, 1.0]))
        2.0
        """
        both = min(len(self.trials), len(base.trials))
        return min(self.trials[:both]) / min(base.trials[:both])

    def ratio_spread(self, base: Contender) -> float:
        """The middle half's width of the ratios round by round, over their median: what the two do together (a slow
        minute) is not in it."""
        ratios = [mine / other for mine, other in zip(self.trials, base.trials, strict=False)]
        return middle_half(ratios) / statistics.median(ratios)


def middle_half(values: Sequence[float]) -> float:
    """
    >>> round(middle_half([1.0, 2.0, 3.0, 4.0, 50.0]), 6)
    2.0
    """
    low, high = torch.tensor(values, dtype=torch.float64).quantile(torch.tensor([0.25, 0.75], dtype=torch.float64))
    return float(high - low)


def race(
    contenders: Sequence[Contender],
    rounds: int,
    *,
    seconds: float = math.inf,
    patience: float = 1.2,
    least: int = LEAST,
) -> None:
    """Rounds in which everybody has a turn, each in another order: `rounds` of them, or fewer once `seconds` are over
    and everybody had `least` turns. A peer sits out the rest once it has had that and more than `patience` seconds;
    once `seconds` are over all of them do, and ours and the limit, which are quick, go on for EXTRA of that time.

    Drawn orders, the same in every race: in turns that rotate, everybody always runs behind the same one, and of four
    kernels that are equally fast one was 8 % ahead in race after race."""
    start = time.perf_counter()
    gc.collect()
    gc.disable()
    try:
        for k in range(rounds):
            spent = time.perf_counter() - start
            if k >= least and spent > (1 + EXTRA) * seconds:
                return
            late = k >= least and spent > seconds
            for entry in random.Random(k).sample(contenders, len(contenders)):
                if entry.peer and len(entry.trials) >= least and (late or sum(entry.trials) > patience):
                    continue
                turn = time.perf_counter()
                entry.run(SIGMA)
                entry.trials.append(time.perf_counter() - turn)
    finally:
        gc.enable()


def race_seconds(file: str, races: int, *, full: bool) -> float:
    """What each of a file's `races` tests may spend racing. Fewer tests (-k) get more each.

    >>> race_seconds("bench_mask", 2, full=False)
    1.2
    """
    if file not in BUDGETS:
        raise ValueError(f"file: {file!r} has no budget; add it to BUDGETS in benchmarks/racing.py")
    return BUDGETS[file] * RACING / races * (FULL if full else 1.0)


class Bystanders:
    """The share of the CPUs that other processes took while we raced; timings under them mean little."""

    share = 0.0

    def __enter__(self) -> Bystanders:
        self._start = (_busy_seconds(), sum(os.times()[:4]), time.perf_counter())
        return self

    def __exit__(self, *error: object) -> None:
        busy, own, wall = _busy_seconds() - self._start[0], sum(os.times()[:4]) - self._start[1], time.perf_counter()
        self.share = max(0.0, busy - own) / ((wall - self._start[2]) * (os.cpu_count() or 1))


def _busy_seconds() -> float:
    """user + nice + system + irq + softirq + steal of all CPUs; 0 where there is no /proc."""
    stat = Path("/proc/stat")
    if not stat.exists():
        return 0.0
    ticks = [int(word) for word in stat.read_text().split("\n", 1)[0].split()[1:9]]
    return (sum(ticks) - ticks[3] - ticks[4]) / os.sysconf("SC_CLK_TCK")   # without idle and iowait
