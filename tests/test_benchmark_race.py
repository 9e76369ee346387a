"""The harness: who is wrong is not timed, turns are taken, budgets end races, disturbed races are not kept."""

import doctest
import itertools
import re
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import bench_step
import fit
import mask_contenders
import plot
import racing
from contenders import PAPER
from fit import exponent
from harness import SHAPES, Shape, Workload, check
from names import LIMIT, OURS
from noise_contenders import RANDN, Normals
from racing import BUDGETS, Contender, race, race_seconds
from report import DISTURBED, Figure, Results, Subject, race_table, target_table
from rows import standing
from scaling_points import Point, Work, buffer_for


class Clock:
    """Time passes only when a contender runs."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        monkeypatch.setattr(racing.time, "perf_counter", lambda: self.now)

    def contender(self, name, seconds, **options):
        def run(sigma):
            self.ran.append(name)
            self.now += seconds

        self.ran = []
        return Contender(name, run, **options)


@pytest.mark.parametrize("spoil", [lambda out: out * 1.001, lambda out: out + 1.0, lambda out: out * float("nan")])
def test_a_wrong_contender_is_not_timed(spoil, monkeypatch):
    """Also one that is wrong by a thousandth, or where it drops."""
    work = Workload(SHAPES["tiny"], torch.float32)
    honest = bench_step.build

    def build(name, work, rate):
        contender = honest(name, work, rate)
        run = contender.run
        if name == PAPER:
            contender.run = lambda sigma: [spoil(out) for out in run(sigma)]
        return contender

    right, wrong = bench_step.checked([OURS, PAPER], work, 0.5, Results())
    assert [contender.name for contender in right] == [OURS, PAPER]
    assert wrong == []
    monkeypatch.setattr(bench_step, "build", build)
    right, wrong = bench_step.checked([OURS, PAPER], work, 0.5, Results())
    assert [contender.name for contender in right] == [OURS]
    assert wrong[0].startswith(f"{PAPER} at r = 0.5: ")


def test_noise_of_the_wrong_size_is_seen():
    work = Workload(Shape("small", 8, ((20_000,),)), torch.float32)
    contender = bench_step.build(PAPER, work, 0.5)
    run = contender.run
    contender.run = lambda sigma: run(0.9 * sigma)
    assert re.match(r"noise has variance 0\.(7|8)", check(contender, work, 0.5))   # 0.81, with a standard error of 0.01


def test_a_missing_library_is_left_out_and_said(monkeypatch):
    def build(name, work, rate):
        raise ImportError("No module named 'peer'")

    results = Results()
    monkeypatch.setattr(bench_step, "build", build)
    assert bench_step.checked(["peer"], Workload(SHAPES["tiny"], torch.float32), 0.5, results) == ([], [])
    assert results.notes == ["Left out: peer: No module named 'peer'"]


def test_a_scaled_step_that_is_wrong_is_seen():
    point = Point("N = 20", 20, ((30, 2), (30,)))
    work = Work(point, buffer_for([point]))
    ours = work.ours()
    assert work.wrong(ours) == ""
    run = ours.run
    ours.run = lambda sigma: [grad * 1.001 for grad in run(sigma)]
    assert work.wrong(ours).startswith("off by")


def test_a_wrong_mask_and_a_wrong_normal_are_seen():
    size = 4096
    for contender in mask_contenders.contenders(size)[1:]:
        assert mask_contenders.wrong(contender, size) == ""
    fixed = Contender("first half", lambda sigma: torch.arange(size // 2))
    assert "lie in the first half" in mask_contenders.wrong(fixed, size)
    short = Contender("one too few", lambda sigma: torch.randperm(size)[: size // 2 - 1])
    assert "2047 coordinates dropped, expected 2048" in mask_contenders.wrong(short, size)
    made = Normals(4096)
    for contender in made.contenders():
        if contender.name in (OURS, RANDN):
            assert made.wrong(contender) == ""
    assert "variance" in made.wrong(Contender("uniform", lambda sigma: torch.rand(4096) - 0.5))
    assert "off by" in made.wrong(Contender(OURS, lambda sigma: torch.randn(4096)))


def test_turns_are_taken_and_nobody_always_runs_behind_the_same_one(monkeypatch):
    clock = Clock(monkeypatch)
    entries = [clock.contender(name, 1.0, peer=False) for name in "abc"]
    race(entries, 60)
    rounds = ["".join(clock.ran[k : k + 3]) for k in range(0, 180, 3)]
    assert all(sorted(turns) == ["a", "b", "c"] for turns in rounds)
    assert [len(entry.trials) for entry in entries] == [60, 60, 60]
    assert all(sum(turns[0] == name for turns in rounds) >= 10 for name in "abc")
    behind = Counter(before + after for turns in rounds for before, after in itertools.pairwise(turns))
    assert len(behind) == 6
    assert min(behind.values()) >= 10   # of 20 on average
    first, clock.ran[:] = list(clock.ran), []
    race(entries, 60)
    assert clock.ran == first


def test_a_race_ends_with_its_seconds_but_everybody_gets_three_turns(monkeypatch):
    clock = Clock(monkeypatch)
    entries = [clock.contender("ours", 1.0, peer=False), clock.contender("peer", 1.0)]
    race(entries, 100, seconds=9.0, patience=60.0)
    assert [len(entry.trials) for entry in entries] == [8, 5]   # 10 s together, then ours alone up to 12.6
    race(slow := [clock.contender("slow", 60.0, peer=False)], 100, seconds=9.0)
    assert len(slow[0].trials) == 3


def test_a_slow_peer_sits_out_but_ours_does_not(monkeypatch):
    clock = Clock(monkeypatch)
    peer, ours = clock.contender("peer", 2.0), clock.contender("ours", 2.0, peer=False)
    race([peer, ours], 8, patience=1.0)
    assert (len(peer.trials), len(ours.trials)) == (3, 8)


def test_every_bench_file_has_a_budget_and_all_fit_into_four_minutes():
    files = {path.stem for path in (Path(racing.__file__).parent).glob("bench_*.py")}
    assert files == set(BUDGETS)
    assert sum(BUDGETS.values()) - BUDGETS["bench_gpu"] <= 225   # and 15 s to start
    assert race_seconds("bench_step", 10, full=True) == 10 * race_seconds("bench_step", 10, full=False)
    with pytest.raises(ValueError, match="'bench_x' has no budget; add it to BUDGETS"):
        race_seconds("bench_x", 1, full=False)


def results_of(*times):
    entries = [Contender(LIMIT, print, trials=[1.0, 1.0, 2.0]), Contender(OURS, print, trials=list(times))]
    results = Results()
    results.watch("a case")
    results.add(Subject("step", "a case", 4, 10, 160, 0.5), entries, limit=entries[0], ours=entries[1])
    return results


def test_a_row_has_ratios_spreads_and_versions():
    row = standing(results_of(3.0, 3.0, 6.0).rows, "a case", OURS)
    assert (row.x_limit, row.best_ms, row.median_ms, row.rounds) == (3.0, 3000.0, 3000.0, 3)
    assert row.ratio_spread == 0.0   # a slow round hit both: the ratio never moved
    assert row.spread_ms == 1500.0
    assert row.library.startswith("dprs_kernels ")
    assert row.cpu
    assert row.torch == torch.__version__


def test_a_disturbed_race_is_said_so_and_kept_out_of_the_csv():
    results = results_of(3.0, 3.0, 6.0)
    results.figures.append(Figure("ours over one read", 3.0, at_most=1.4, case="a case"))
    assert len(results.kept()) == 2
    assert "MISSED" in target_table(results)[-1]
    results.watched["a case"].share = DISTURBED + 0.4
    assert results.kept() == []
    assert "disturbed" in target_table(results)[-1]
    said = [line for line in race_table(results) if line.startswith("Disturbed")]
    assert said == ["Disturbed: other processes took 50% of the CPUs during a case; not in the CSV, run it again."]


def test_bystanders_are_noticed():
    with racing.Bystanders() as alone:
        sum(range(10**7))   # our own work is none; 0.3 s, since the kernel counts in steps of 0.01
    assert alone.share <= 1.0
    other = racing.Bystanders()
    with pytest.MonkeyPatch.context() as patch:
        busy = iter([0.0, 5.0])
        patch.setattr(racing, "_busy_seconds", lambda: next(busy))
        with other:
            pass
    assert other.share > 1.0   # five seconds of others in no time


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0])
def test_the_exponent_of_made_data(power):
    sizes = [10.0, 30.0, 100.0, 1000.0]
    assert exponent(sizes, [7 * size**power for size in sizes]) == pytest.approx(power, abs=1e-9)
    noisy = [7 * size**power * wobble for size, wobble in zip(sizes, (1.02, 0.98, 0.98, 1.02), strict=True)]
    assert exponent(sizes, noisy) == pytest.approx(power, abs=0.01)


@pytest.mark.parametrize("module", [fit, racing, plot])
def test_examples_run(module):
    tried = doctest.testmod(module)
    assert tried.attempted > 0
    assert tried.failed == 0


def test_an_exponent_needs_two_sizes():
    with pytest.raises(ValueError, match="two different ones: run with --full"):
        exponent([5, 5], [1.0, 2.0])
    with pytest.raises(ValueError, match="got 1 for 2 sizes"):
        exponent([5, 6], [1.0])
    with pytest.raises(ValueError, match="positive numbers"):
        exponent([5, 6], [1.0, 0.0])
