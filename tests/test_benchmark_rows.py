"""The benchmarks' result files: what is written is read back, races are replaced whole, foreign files are refused."""

import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import rows
from rows import SCHEMA, Row, merged, newest_machine, read_rows, save, write_rows


def row(**changes: object) -> Row:
    """A row of the step, 2 x read, unless said otherwise."""
    plain = Row(
        schema=SCHEMA, question="step", commit="abc1234", date="2026-01-01T00:00Z", device="cpu", cpu="A CPU",
        threads=2, torch="2.13.0", case="DP-CNN-fp32-r0.5", N=256, D=1000, tensors=2, dtype="fp32", rate=0.5,
        contender="dprs_kernels", library="dprs_kernels 1", setting="", role="", best_ms=2.0, median_ms=2.1,
        spread_ms=0.1, rounds=11, bytes=1_024_000, x_limit=2.0, x_sgd=None, x_ours=1.0, ratio_spread=0.03,
    )   # fmt: skip
    return replace(plain, **changes)   # type: ignore[arg-type]


def test_rows_come_back_as_they_were_written(tmp_path):
    path = tmp_path / "step.csv"
    written = [row(), row(contender="Opacus, no mask", rounds=None, x_limit=None, peak_mib=1.5, setting="a, b")]
    write_rows(path, written)
    assert read_rows(path) == written


def test_a_newer_race_replaces_the_older_one_as_a_whole(tmp_path):
    old = [row(), row(contender="gone"), row(case="other"), row(cpu="B CPU"), row(threads=1)]
    new = [row(date="2026-02-01T00:00Z")]
    assert merged(old, new) == [row(case="other"), row(cpu="B CPU"), row(threads=1), *new]
    save(old, tmp_path)
    (written,) = save(new, tmp_path)
    assert read_rows(written) == merged(old, new)


def test_rows_go_to_the_file_of_their_question(tmp_path):
    written = save([row(), row(question="mask")], tmp_path)
    assert [path.name for path in written] == ["step.csv", "mask.csv"]
    assert {found.question for found in read_rows(tmp_path / "mask.csv")} == {"mask"}


def test_tables_show_one_machine_and_the_newest():
    old, new = row(cpu="A"), row(cpu="B", date="2026-02-01T00:00Z")
    assert newest_machine([new, old, replace(new, case="x")]) == [new, replace(new, case="x")]
    assert newest_machine([]) == []


def edited(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("schema,", "version,", "no column 'schema'.*older than schema.*pytest benchmarks/ --benchmark-only"),
        (f"\n{SCHEMA},step", "\n1,step", "line 2: schema '1', this code reads.*commit that its rows name"),
        (",2.0,2.1,", ",fast,2.1,", "line 2: .*'fast'; was it edited by hand"),
        (",0.03,\n", "\n", "line 2: no value for ratio_spread, peak_mib; is the file cut off"),
    ],
    ids=["foreign", "old", "edited", "cut"],
)
def test_what_is_no_result_file_is_refused_with_a_remedy(old, new, message, tmp_path):
    path = tmp_path / "step.csv"
    write_rows(path, [row()])
    edited(path, old, new)
    with pytest.raises(ValueError, match=f"{re.escape(str(path))}.*{message}"):
        read_rows(path)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"nothing\.csv: cannot be read .*expected a CSV written by benchmarks/"):
        read_rows(tmp_path / "nothing.csv")


def test_the_files_in_the_repository_have_this_schema():
    found = [read_rows(path) for path in rows.DATA.glob("*.csv") if path.stem in rows.QUESTIONS]
    assert found
    for one in found:
        assert one
        assert all(entry.commit and entry.cpu and entry.library for entry in one)


def test_what_runs_from_a_source_tree_says_its_version(monkeypatch):
    monkeypatch.setitem(sys.modules, "a_tree", type(sys)("a_tree"))
    assert rows.library("a_tree") == "a_tree"
    sys.modules["a_tree"].__version__ = "3.1"
    assert rows.library("a_tree") == "a_tree 3.1"
    assert re.fullmatch(r"torch \d+\.\d+.*", rows.library("torch"))


def test_two_cpus_of_one_name_are_two_machines(tmp_path):
    """A hypervisor calls both "AMD EPYC": rows of the one must not replace those of the other."""
    info, names = tmp_path / "cpuinfo", []
    for family, model in ((25, 17), (26, 2)):
        one = f"processor\t: 0\ncpu family\t: {family}\nmodel\t\t: {model}\nmodel name\t: AMD EPYC\n"
        info.write_text(one + "\n" + one.replace("\t: 0", "\t: 1"))
        names.append(rows.cpu_name(info))
    assert names == ["AMD EPYC (family 25, model 17)", "AMD EPYC (family 26, model 2)"]
    assert len(merged([row(cpu=names[0])], [row(cpu=names[1])])) == 2
    info.write_text("processor\t: 0\nmodel name\t: A CPU\n")
    assert rows.cpu_name(info) == "A CPU"
    assert rows.cpu_name(tmp_path / "none")   # no such file: what Python knows
