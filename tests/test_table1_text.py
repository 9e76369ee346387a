"""dprs paper table1 --show: means, standard errors and gains by hand, settings, notes, Markdown."""

from dataclasses import replace
from pathlib import Path

import pytest

from dprs_kernels import __main__ as cli
from dprs_kernels.paper import table1
from dprs_kernels.paper.table1 import ROWS
from tests.test_table1 import DIGITS, RECORD


def made(tmp_path: Path) -> str:
    """Three seeds of the baseline: 50, 52, 54; two of RS: 53, 55; one of another rate: 99; shuffled batches: 60."""
    baseline = replace(RECORD, method="baseline", final_rate=0.0)
    for seed, accuracy in enumerate((0.50, 0.52, 0.54)):
        table1.append(tmp_path / "t.csv", replace(baseline, seed=seed, test_accuracy=accuracy))
    for seed, accuracy in enumerate((0.53, 0.55)):
        table1.append(tmp_path / "t.csv", replace(RECORD, seed=seed, test_accuracy=accuracy))
    table1.append(tmp_path / "t.csv", replace(RECORD, final_rate=0.7, test_accuracy=0.99, ended="budget"))
    table1.append(tmp_path / "t.csv", replace(baseline, sampler="shuffled-nominal", test_accuracy=0.6))
    return str(tmp_path / "t.csv")


def test_show_has_means_and_standard_errors(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Baseline: s = 2, 2 / sqrt 3 = 1.1547. RS: s = sqrt 2, over sqrt 2 = 1. Gain 2, error sqrt(4 / 3 + 1) = 1.5275."""
    other = replace(DIGITS, name="other", note="of other things")
    monkeypatch.setattr(table1, "ROWS", {"digits-eps8": replace(DIGITS, note="of digits"), "other": other})
    assert cli.main(["paper", "table1", "--show", "--csv", made(tmp_path)]) == 0
    blocks = capsys.readouterr().out.split("\n\n")
    lines = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in blocks[0].splitlines()]
    paper = ["50.0 ± 0.10", "51.0 ± 0.20", "+1.0"]
    assert lines == [
        ["row", "batches", "paper: baseline", "RS", "gain", "ours: baseline", "RS", "gain"],
        ["digits-eps8", "poisson", *paper, "52.00 ± 1.15 (3)", "54.00 ± 1.00 (2)", "+2.00 ± 1.53"],
        ["digits-eps8", "shuffled-nominal", *paper, "60.00 (1)", "not run", "-"],
        ["other", "-", *paper, "not run", "not run", "-"],
    ]
    details = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in blocks[1].splitlines()]
    assert [line[3:] for line in details[1:]] == [
        ["e2-lr2-m0-c1-r0-b256 *", "52.00 ± 1.15 (3)", "1.250", "7.999", "1.5"],
        ["e2-lr2-m0-c1-r0.5-b256 *", "54.00 ± 1.00 (2)", "1.250", "7.999", "1.5"],
        ["e2-lr2-m0-c1-r0.7-b256", "99.00 (1)", "1.250", "7.999", "1.5"],
        ["e2-lr2-m0-c1-r0-b256 *", "60.00 (1)", "1.250", "~7.999", "1.5"],
    ]
    notes = blocks[2]
    for words in ("no run's epsilon covers it", "epsilon is no proof", "charged twice: 1.", "digits-eps8: of digits."):
        assert words in notes
    assert "of other things" not in notes


def test_show_in_markdown_and_of_some_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(table1, "ROWS", {**ROWS, "digits-eps8": DIGITS})
    words = ["paper", "table1", "--show", "--markdown", "--csv", made(tmp_path), "--rows", "digits-eps8"]
    assert cli.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| row | batches | paper: baseline | RS | gain | ours: baseline | RS | gain |"
    assert lines[1] == "| --- | --- | --- | --- | --- | --- | --- | --- |"
    assert "| 52.00 ± 1.15 (3) | 54.00 ± 1.00 (2) | +2.00 ± 1.53 |" in lines[2]
    assert any(r"r0.5-b256 \* |" in line for line in lines)
    assert cli.main(["paper", "table1", "--show", "--csv", made(tmp_path), "--rows", "svhn-dp-cnn-eps1"]) == 0
    printed = capsys.readouterr().out
    assert "digits" not in printed
    assert "76.0 ± 0.05      79.1 ± 0.13  +3.1  not run         not run  -" in printed
    assert "e epochs" not in printed   # no setting to explain


def test_show_without_results_names_every_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["paper", "table1", "--show"]) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ROWS)
    assert printed.count("not run") == 2 * len(ROWS)
