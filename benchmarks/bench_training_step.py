"""What does a private step cost, forward and backward included? benchmarks/bench_training_step.py --benchmark-only

Whole steps (forward, backward, clip, mask, noise, SGD) on one logical batch of four models, r = 0.5 for those that
mask. 1.0 is non-private SGD at its own best micro-batch; ours is judged at the micro-batch that its engine chooses,
every peer at its best one. All are checked against float64 first (training_truth.py). Two heats of every micro-batch,
then the best of each contender race; all take turns (harness.race). Peak memory comes from fresh processes
(training_memory.py). --full: larger batches of the last two, more micro-batches, memory on every model.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import training_memory
from contenders import OURS
from harness import SIGMA, Contender, race
from report import (
    BACKPACK_FIGURE,
    OPACUS_FIGURE,
    TRAINING_GROWTH_FIGURE,
    TRAINING_MEMORY_FIGURE,
    Results,
    device,
    step_figure,
)
from training_contenders import BACKPACK, OPACUS_MODES, PEERS, PLAIN, RATE, Settings, build, default_micro
from training_models import MODELS, Model
from training_report import TrainingRow, race_name, version, write_training_csv
from training_truth import Truth

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
HEATS = 2
PATIENCE = 10.0   # seconds that a peer may take in a race, after three turns
LARGE = 4096      # the logical batch whose memory is compared with the ordinary one's


@dataclass
class Entry(Contender):
    """A contender at one micro-batch."""

    micro: int = 0
    role: str = "other"


@pytest.fixture(scope="module", autouse=True)
def rows_to_csv(results: Results) -> Iterator[None]:
    yield
    if results.training.rows:
        write_training_csv(results.training, results.disturbed())


def runnable(case: Model, results: Results) -> tuple[list[str], list[str]]:
    """Private contenders that are right, and what is wrong with the others. A peer that cannot run is left out."""
    truth, right, wrong = Truth(case), [], []
    for name in (OURS, *PEERS):
        try:
            reason = truth.wrong(name)
        except (ImportError, NotImplementedError, RuntimeError, ValueError) as error:
            if name == OURS:
                raise
            results.training.left_out.append((case.name, name, f"{type(error).__name__}: {error}".splitlines()[0]))
            continue
        if reason:
            wrong.append(f"{name}: {reason}")
        else:
            right.append(name)
    return right, wrong


def micro_batches(case: Model, name: str, full: bool) -> list[int]:
    """What to try; the engine's choice comes first with ours."""
    batch = case.full_batch if full else case.batch
    micros = case.full_micros if full else case.peer_micros if name in PEERS else case.micros
    if name == OURS:
        micros = (default_micro(case.build()), *micros)
    return list(dict.fromkeys(min(micro, batch) for micro in micros))


def entries_for(case: Model, names: Sequence[str], full: bool) -> list[Entry]:
    batch = case.full_batch if full else case.batch
    x, y = case.data(batch)
    entries = []
    for name in names:
        for micro in micro_batches(case, name, full):
            step = build(name, case.build(), Settings(micro, batch))
            step(x[:2], y[:2])   # warm
            run = lambda sigma, step=step: step(x, y)   # noqa: E731
            entries.append(Entry(name, run, peer=name in PEERS, micro=micro))
    return entries


def best_of(entries: Sequence[Entry], name: str) -> Entry:
    return min((entry for entry in entries if entry.name == name), key=lambda entry: entry.best)


def record(case: Model, entries: Sequence[Entry], batch: int, results: Results) -> None:
    base = best_of(entries, PLAIN).best
    ours = next(entry for entry in entries if entry.role == "default").best
    for entry in entries:
        results.training.rows.append(TrainingRow(
            results.commit, results.date, device(), torch.get_num_threads(), torch.__version__, version("opacus"),
            version("backpack-for-pytorch"), case.name, case.size, batch,
            RATE if entry.name in (OURS, BACKPACK) else 0.0, entry.name, entry.micro, entry.role,
            round(entry.best, 4), round(entry.median, 4), round(entry.spread, 4), len(entry.trials),
            round(entry.best / base, 3), round(entry.best / ours, 3),
        ))   # fmt: skip
    results.figures[step_figure(case.name)] = ours / base
    if case.name != "DP-CNN":
        return
    best = {entry.name: best_of(entries, entry.name).best for entry in entries}
    if modes := [best[name] for name in OPACUS_MODES if name in best]:
        results.figures[OPACUS_FIGURE] = min(modes) / ours
    if BACKPACK in best:
        results.figures[BACKPACK_FIGURE] = best[BACKPACK] / ours


@pytest.mark.parametrize("name", MODELS)
def test_training_step(name: str, benchmark: Any, results: Results, request: pytest.FixtureRequest) -> None:
    case, full = MODELS[name], request.config.getoption("--full")
    right, wrong = runnable(case, results)
    assert OURS in right, wrong
    entries = entries_for(case, [PLAIN, *right], full)
    ours = next(entry for entry in entries if entry.name == OURS)   # at the engine's choice
    with results.watch(race_name(name)):
        race(entries, HEATS, budget=PATIENCE)
        finalists = [entry for entry in entries if entry is ours or entry is best_of(entries, entry.name)]
        race(finalists, case.rounds, budget=PATIENCE)
    for entry in entries:
        entry.role = "default" if entry is ours else "best" if entry is best_of(entries, entry.name) else "other"
    record(case, entries, case.full_batch if full else case.batch, results)
    benchmark.extra_info.update({f"{entry.name} / {entry.micro}": entry.best for entry in entries})
    benchmark.pedantic(ours.run, args=(SIGMA,), rounds=1, iterations=1)
    assert not wrong, wrong


def measure(case: Model, name: str, batch: int, results: Results) -> float | None:
    """At the micro-batch that stands for the contender in the race, or the first one where there was none."""
    row = results.training.find(case.name, name)
    micro = 0 if name == OURS else row.micro_batch if row else case.peer_micros[0]
    peak = training_memory.measure(case.name, name, micro, batch)
    if row and row.batch == batch:
        row.peak_mb = None if peak is None else round(peak, 1)
    return peak


@pytest.mark.parametrize("name", MODELS)
def test_training_memory(name: str, benchmark: Any, results: Results, request: pytest.FixtureRequest) -> None:
    """Timed only because --benchmark-only asks for it."""
    case, full = MODELS[name], request.config.getoption("--full")
    if not full and name != "DP-CNN":
        pytest.skip("memory on other models: --full")
    batch = case.full_batch if full else case.batch
    unable = {contender for model, contender, _ in results.training.left_out if model == name}
    names = [PLAIN, OURS, *(peer for peer in PEERS if peer not in unable)]

    def peaks() -> dict[str, float | None]:
        return {contender: measure(case, contender, batch, results) for contender in names}

    found = benchmark.pedantic(peaks, rounds=1, iterations=1)
    benchmark.extra_info.update(found)
    if name == "DP-CNN" and found[OURS] and found[PLAIN]:
        results.figures[TRAINING_MEMORY_FIGURE] = found[OURS] / found[PLAIN]


def test_memory_of_a_large_batch(benchmark: Any, results: Results) -> None:
    """Ours streams: a logical batch of 4096 should take what 256 takes. The data are there before the mark is set."""
    case = MODELS["DP-CNN"]
    large = benchmark.pedantic(measure, args=(case, OURS, LARGE, results), rounds=1, iterations=1)
    usual = measure(case, OURS, case.batch, results)
    benchmark.extra_info.update({str(LARGE): large, str(case.batch): usual})
    if large and usual:
        results.figures[TRAINING_GROWTH_FIGURE] = large / usual
