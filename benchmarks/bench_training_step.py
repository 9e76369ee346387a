"""What does a private step cost, forward and backward included? benchmarks/bench_training_step.py --benchmark-only

Whole steps (forward, backward, clip, mask, noise, SGD) on one logical batch of four models, r = 0.5 for those that
mask. 1.0 is non-private SGD at its own best micro-batch; ours is judged at the micro-batch that its engine chooses,
every peer at its best one. All are checked against float64 first (training_truth.py). Who has several micro-batches
runs them in two heats, then the best of each contender race; all take turns (racing.race). The limit reads [N, D]
floats once: what a step that is handed per-sample gradients cannot avoid. --full: larger batches of the last two
models, more micro-batches and peers, memory on every model.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import memory
import pytest
import torch
from limit import fastest_read
from names import LIMIT, OURS
from racing import SIGMA, Contender, race
from report import Figure, Results, Subject
from rows import standing
from training_contenders import (
    BACKPACK,
    FULL_PEERS,
    MASKED,
    OPACUS_HOOKS,
    OPACUS_MODES,
    PEERS,
    PLAIN,
    RATE,
    Settings,
    build,
    default_micro,
)
from training_models import MODELS, Model
from training_truth import Truth

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning", "ignore::FutureWarning")
HEATS = 2
COSTS = {"DP-CNN": 1.35, "DP-CNN/S": 1.4}   # asked: ours over non-private SGD
_left_out: set[tuple[str, str]] = set()     # model, contender


def peers_of(full: bool) -> tuple[str, ...]:
    return tuple(name for name in PEERS if full or name not in FULL_PEERS)


def runnable(case: Model, names: Sequence[str], results: Results) -> tuple[list[str], list[str]]:
    """Private contenders that are right, and what is wrong with the others. A peer that cannot run is left out."""
    truth, right, wrong = Truth(case), [], []
    for name in names:
        try:
            reason = truth.wrong(name)
        except (ImportError, NotImplementedError, RuntimeError, ValueError, AttributeError, TypeError) as error:
            if name == OURS:
                raise
            _left_out.add((case.name, name))
            where = "" if isinstance(error, ImportError) else f" on {case.name}"
            results.note(f"Left out: {name}{where}: {type(error).__name__}: {f'{error} '.splitlines()[0]}".rstrip())
            continue
        if reason:
            wrong.append(f"{name}: {reason}")
        else:
            right.append(name)
    return right, wrong


def micro_batches(case: Model, name: str, full: bool) -> list[int]:
    """What to try. Ours runs at the engine's choice, and, to see whether that is a good one, with --full at others."""
    batch = case.full_batch if full else case.batch
    micros = case.full_micros if full else case.peer_micros if name in PEERS else case.micros
    if name == OURS:
        micros = (default_micro(case.build()), *(micros if full else ()))
    return list(dict.fromkeys(min(micro, batch) for micro in micros))


def entries_for(case: Model, names: Sequence[str], full: bool) -> list[Contender]:
    batch = case.full_batch if full else case.batch
    x, y = case.data(batch)
    entries = []
    for name in names:
        for micro in micro_batches(case, name, full):
            step = build(name, case.build(), Settings(micro, batch))
            step(x[:2], y[:2])   # warm
            run = lambda sigma, step=step: step(x, y)   # noqa: E731
            setting = f"micro-batch {micro}"
            entries.append(Contender(name, run, name in MASKED, peer=name in PEERS, setting=setting, micro=micro))
    return entries


def best_of(entries: Sequence[Contender], name: str) -> Contender:
    return min((entry for entry in entries if entry.name == name), key=lambda entry: entry.best)


def race_all(entries: Sequence[Contender], floor: Contender, rounds: int, seconds: float) -> None:
    """Heats for those with several micro-batches, then one of each; roles are given afterwards. A peer races until it
    has had its share of the seconds, two turns at least: the slowest takes 4 s a step."""
    ours = next(entry for entry in entries if entry.name == OURS)   # at the engine's choice
    several = [entry for entry in entries if sum(other.name == entry.name for other in entries) > 1]
    if several:
        race([floor, *several], HEATS)
    firsts = [entry for entry in entries if entry not in several]
    finalists = [e for e in entries if e in firsts or e is ours or e is best_of(several, e.name)]
    race([floor, *finalists], rounds, seconds=seconds, patience=seconds / len(finalists), least=2)
    for entry in entries:
        entry.role = "default" if entry is ours else "best" if entry is best_of(entries, entry.name) else "other"


def limit(samples: int, size: int) -> Contender:
    read = fastest_read([torch.ones(samples, size)])
    return Contender(LIMIT, lambda sigma: read(), masked=False, peer=False)


@pytest.mark.parametrize("name", MODELS)
def test_training_step(name: str, benchmark: Any, results: Results, full: bool, seconds: float) -> None:
    case = MODELS[name]
    batch = case.full_batch if full else case.batch
    right, wrong = runnable(case, (OURS, *peers_of(full)), results)
    assert OURS in right, wrong
    entries, floor = entries_for(case, [PLAIN, *right], full), limit(batch, case.size)
    with results.watch(case.race(batch)):
        race_all(entries, floor, case.rounds, seconds)
    ours, plain = next(entry for entry in entries if entry.role == "default"), best_of(entries, PLAIN)
    shape = Subject(
        "training_step", case.race(batch), batch, case.size, 4 * batch * case.size, RATE,
        tensors=len(list(case.build().parameters())),
    )   # fmt: skip
    results.add(shape, [floor, *entries], limit=floor, ours=ours, sgd=plain)
    add_figures(case, entries, ours, plain, batch, results)
    benchmark.extra_info.update({f"{entry.name} / {entry.micro}": entry.best for entry in entries})
    benchmark.pedantic(ours.run, args=(SIGMA,), rounds=1, iterations=1)
    assert not wrong, wrong


def add_figures(
    case: Model, entries: Sequence[Contender], ours: Contender, plain: Contender, batch: int, results: Results
) -> None:
    text, race = f"{case.name}: whole step of ours over non-private SGD", case.race(batch)
    results.figures.append(Figure(text, ours.over(plain), COSTS.get(case.name), case=race))
    over = {entry.name: best_of(entries, entry.name).over(ours) for entry in entries}
    modes = [over[name] for name in OPACUS_MODES if name in over]
    rivals = {"the best Opacus mode, no mask": (min(modes, default=None), 1.6),
              "BackPACK with the paper's lines": (over.get(BACKPACK), 4.0)}   # fmt: skip
    for rival, (ratio, least) in rivals.items():
        if ratio is not None:
            text, asked = f"{case.name}: whole step of {rival}, over ours", least if case.name == "DP-CNN" else None
            results.figures.append(Figure(text, ratio, at_least=asked, case=race))


def memory_command(case: Model, name: str, batch: int, results: Results) -> tuple[str, ...]:
    """For memory.py, at the micro-batch that stands for the contender in the race, else the first."""
    row = standing(results.rows, case.race(batch), name)
    if name == OURS:
        micro = default_micro(case.build())
    else:
        micro = int(row.setting.split()[-1]) if row else case.peer_micros[0]
    return "training", case.name, name, str(micro), str(batch)


@pytest.mark.parametrize("name", [pytest.param(m, marks=[] if m == "DP-CNN" else pytest.mark.slow) for m in MODELS])
def test_training_memory(name: str, benchmark: Any, results: Results, full: bool) -> None:
    """Timed only because --benchmark-only asks for it."""
    case = MODELS[name]
    batch = case.full_batch if full else case.batch
    peers = [peer for peer in PEERS if (name, peer) not in _left_out] if full else [OPACUS_HOOKS]

    names = (PLAIN, OURS, *peers)

    def peaks() -> dict[str, float | None]:
        commands = [memory_command(case, contender, batch, results) for contender in names]
        return dict(zip(names, memory.measure_each(commands), strict=True))

    found = benchmark.pedantic(peaks, rounds=1, iterations=1)
    benchmark.extra_info.update(found)
    results.add_memory(case.race(batch), found)
    if name == "DP-CNN" and found[OURS] and found[PLAIN]:
        text = "DP-CNN: peak memory of a step of ours over non-private SGD"
        results.figures.append(Figure(text, found[OURS] / found[PLAIN], 1.6))


def test_memory_of_a_large_batch(benchmark: Any, results: Results, full: bool) -> None:
    """Ours streams: a large logical batch should take what 256 takes. The data are there before the mark is set."""
    case, large = MODELS["DP-CNN"], 4096 if full else 1024
    commands = [memory_command(case, OURS, batch, results) for batch in (large, case.batch)]
    much, usual = benchmark.pedantic(memory.measure_each, args=(commands,), rounds=1, iterations=1)
    benchmark.extra_info.update({str(large): much, str(case.batch): usual})
    if much and usual:
        text = f"DP-CNN: peak memory of ours, batch {large} over {case.batch}"
        results.figures.append(Figure(text, much / usual, 1.1))
