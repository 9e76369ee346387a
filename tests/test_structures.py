"""dprs paper structures: Table 1's rows with masks of each structure, through the command on digits; means by hand."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dprs_kernels import __main__ as cli
from dprs_kernels.paper import structures, table1
from dprs_kernels.paper.table1 import ROWS
from tests.test_table1 import DIGITS, RECORD
from tests.test_table1 import table as table  # a fixture

NAMES = ["none", "coordinate", "row"]


def command(table: list[str]) -> list[str]:
    return ["paper", "structures", *table[2:]]


def test_each_structure_is_run_once_and_shown(
    table: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], kept_memory: list[Any]
) -> None:
    assert cli.main([*command(table), "--seeds", "1", "--rates", "0.5"]) == 0
    assert kept_memory == [()]   # the command's process is its own
    printed, err = capsys.readouterr()
    assert err == ""
    records = table1.read(tmp_path / "t.csv")
    assert [(r.method, r.structure, r.final_rate) for r in records] == [
        ("baseline", "coordinate", 0.0), ("rs", "coordinate", 0.5), ("rs", "row", 0.5), ("rs", "mixed", 0.5)
    ]   # fmt: skip
    assert printed.rstrip().endswith(structures.shown(records, [DIGITS]))
    before = (tmp_path / "t.csv").read_text()
    assert cli.main([*command(table), "--seeds", "1", "--rates", "0.5"]) == 0   # all there
    assert (tmp_path / "t.csv").read_text() == before


def test_settings_differ_in_nothing_else() -> None:
    row = ROWS["fmnist-dp-cnn-s-eps1"]
    planned = structures.jobs([row], seeds=2, structures=NAMES, rates=[0.5, 0.9], refresh=2)
    assert len({job.name for job in planned}) == len(planned) == 2 + 2 * 2 * 2   # plain DP-SGD has no rate
    for job in planned:
        if job.method == "rs":
            rest = replace(job.setting, structure="coordinate", refresh=1, final_rate=0.9)
            assert rest == replace(row.settings["rs"][0], final_rate=0.9)


def test_means_and_the_difference_to_coordinates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Coordinates 50, 52: error 1. Rows 53, 55, two masks an epoch 54: the difference is of those with most seeds."""
    monkeypatch.setattr(table1, "ROWS", {"digits-eps8": DIGITS})
    file = tmp_path / "t.csv"
    for seed, (coordinate, row) in enumerate(((0.50, 0.53), (0.52, 0.55))):
        table1.append(file, replace(RECORD, seed=seed, test_accuracy=coordinate))
        table1.append(file, replace(RECORD, seed=seed, test_accuracy=row, structure="row"))
    table1.append(file, replace(RECORD, structure="row", refresh=2, test_accuracy=0.54))
    table1.append(file, replace(RECORD, sampler="shuffled-nominal", test_accuracy=0.9))   # no proof: left out
    assert cli.main(["paper", "structures", "--show", "--csv", str(file)]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in lines[:4]]
    assert cells[0] == ["row", "final rate", "none", "coordinate", "row", "row, 2 masks an epoch",
                        "best of these - coordinate"]   # fmt: skip
    assert cells[1] == ["digits-eps8", "0.5", "not run", "51.00 ± 1.00 (2)", "54.00 ± 1.00 (2)", "54.00 (1)",
                        "+3.00 ± 1.41"]   # fmt: skip
    assert cells[2] == ["digits-eps8", "0.7", *["not run"] * 4, "-"]


def test_table1_does_not_take_row_masks_for_the_papers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dprs_kernels.paper import table1_text

    table1.append(tmp_path / "t.csv", replace(RECORD, structure="row", test_accuracy=0.99))
    table1.append(tmp_path / "t.csv", replace(RECORD, refresh=3, test_accuracy=0.98))
    shown = table1_text.shown(table1.read(tmp_path / "t.csv"), [DIGITS])
    assert "99.00" not in shown
    assert "98.00" not in shown


def test_other_rates_are_shown_and_nothing_stands_for_coordinates() -> None:
    records = [replace(RECORD, structure="row", final_rate=0.25, refresh=k, test_accuracy=k / 10) for k in (1, 2)]
    head, *lines = structures.shown(records, [DIGITS], markdown=True).splitlines()
    assert "| coordinate | row | row, 2 masks an epoch |" in head
    assert "| digits-eps8 | 0.25 | not run | not run | 10.00 (1) | 20.00 (1) | - |" in lines


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--structures", "tile"], "structures: got tile; expected some of none, coordinate, row"),
        (["--rates", "1.5"], "final_rate: got 1.5"),
        (["--refresh", "0"], "refresh: got 0"),
        (["--seeds", "0"], "seeds: got 0; expected an integer of at least 1"),
    ],
)
def test_structures_refuses(
    arguments: list[str], message: str, table: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*command(table), *arguments]) == 2
    assert f"dprs_kernels: {message}" in capsys.readouterr().err
