"""python -m benchmarks compare: what moved, what did not, and errors that a person can act on."""

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.test_benchmark_rows import row

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from compare import FLOOR, compare_files, compare_rows
from rows import write_rows

ROOT = Path(__file__).parents[1]


def moved(old, new):
    return [change.relative for change in compare_rows([old], [new]).changes if change.moved]


def test_a_change_within_the_spread_did_not_move():
    assert moved(row(ratio_spread=0.2), row(x_limit=2.38)) == []
    assert moved(row(), row(x_limit=2.38, ratio_spread=0.2)) == []   # either file's
    assert moved(row(ratio_spread=0.2), row(x_limit=2.42)) == [pytest.approx(0.21)]


def test_a_change_below_the_floor_did_not_move_however_small_the_spread():
    calm = row(ratio_spread=0.0)
    assert moved(calm, replace(calm, x_limit=2.0 * (1 + 0.9 * FLOOR))) == []
    assert moved(calm, replace(calm, x_limit=2.0 * (1 + 1.1 * FLOOR))) == [pytest.approx(1.1 * FLOOR)]


def test_swapping_the_files_swaps_slower_and_faster():
    a, b = row(ratio_spread=0.3), row(x_limit=2.65)
    assert len(moved(a, b)) == len(moved(b, a)) == 1
    assert moved(a, b)[0] > 0 > moved(b, a)[0]


def test_another_machine_twice_as_fast_moved_nothing():
    other = row(cpu="B CPU", best_ms=1.0, median_ms=1.05, threads=8)
    assert moved(row(), other) == []
    assert len(compare_rows([row()], [other]).changes) == 1


def test_training_steps_are_compared_by_non_private_sgd():
    step = row(question="training_step", x_sgd=1.1, role="default", setting="micro-batch 12")
    later = replace(step, x_limit=9.0, setting="micro-batch 20")   # the engine's choice is the same contender
    assert moved(step, later) == []
    assert moved(step, replace(later, x_sgd=1.3)) == [pytest.approx(1.3 / 1.1 - 1)]


def test_what_ratios_are_taken_to_says_nothing():
    sgd = row(question="training_step", contender="non-private SGD", x_sgd=1.0, role="best")
    limit = row(question="training_step", contender="read G once (limit)", x_sgd=0.02)
    assert compare_rows([sgd, limit], [sgd, replace(limit, x_sgd=0.04)]).changes == []


def files(tmp_path, old, new):
    write_rows(tmp_path / "old.csv", old)
    write_rows(tmp_path / "new.csv", new)
    return tmp_path / "old.csv", tmp_path / "new.csv"


def test_the_report_names_what_moved_what_did_not_and_what_is_new(tmp_path):
    old = [row(), row(case="a"), row(case="b"), row(case="gone")]
    new = [row(x_limit=1.0, commit="def5678"), row(case="a", x_limit=3.0), row(case="b"), row(case="added")]
    text = "\n".join(compare_files(*files(tmp_path, old, new)))
    slower, faster = (next(line for line in text.splitlines() if line.startswith(k)) for k in ("slower", "faster"))
    assert slower.split()[1:3] == ["a", "dprs_kernels"]
    assert "2 -> 3 " in slower
    assert "+50.0%" in slower
    assert "DP-CNN-fp32-r0.5" in faster
    assert "-50.0%" in faster
    assert "2 moved by more than the spread; 1 did not." in text
    assert "Only in OLD: 1 rows (gone)." in text
    assert "Only in NEW: 1 rows (added)." in text
    assert "def5678" in text


def test_nothing_in_common_is_an_error_with_a_remedy(tmp_path):
    with pytest.raises(ValueError, match=r"\(step\).*\(mask\) have no case and contender in common; compare"):
        compare_files(*files(tmp_path, [row()], [row(question="mask")]))
    with pytest.raises(ValueError, match=r"old\.csv: no rows; were all races disturbed"):
        compare_files(*files(tmp_path, [], [row()]))


def test_the_command_succeeds_whatever_moved_and_fails_on_what_it_cannot_read(tmp_path):
    """From the repository's root, where an installed package of the same name must not win."""
    old, new = files(tmp_path, [row()], [row(x_limit=30.0)])
    command = [sys.executable, "-m", "benchmarks", "compare", str(old)]
    done = subprocess.run([*command, str(new)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert "slower  DP-CNN-fp32-r0.5" in done.stdout
    table = str(ROOT / "benchmarks" / "data" / "table1.csv")
    done = subprocess.run([*command, table], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "no column 'schema'" in done.stderr
    assert "Traceback" not in done.stderr
