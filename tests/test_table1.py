"""dprs paper table1: rows against the paper, runs on digits through the command, what is cut goes on, means by hand."""

import csv
import doctest
import fcntl
import os
import signal
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from dprs_kernels import __main__ as cli
from dprs_kernels.paper import table1, table1_runs, table1_text
from dprs_kernels.paper import train as train_module
from dprs_kernels.paper.config import TrainConfig
from dprs_kernels.paper.networks import network_for
from dprs_kernels.paper.run_folder import RunFolder
from dprs_kernels.paper.table1 import ROWS, Job, Record, Row, Setting
from tests.test_train_command import ctrl_c

TINY = Setting(epochs=2, lr=2.0, momentum=0.0, clip=1.0, final_rate=0.0, batch=256)   # 12 steps
RS = replace(TINY, final_rate=0.5)
DIGITS = Row("digits-eps8", "digits", "digits-cnn", 8.0, {"baseline": (50.0, 0.1), "rs": (51.0, 0.2)},
             {"baseline": (TINY,), "rs": (RS, replace(RS, final_rate=0.7))})   # fmt: skip
RECORD = Record(
    date="2026-01-02", commit="abc", row="digits-eps8", method="rs", seed=0, **asdict(RS), sampler="poisson",
    accountant="rdp", sigma=1.25, epsilon=7.999, delta=1e-5, test_accuracy=0.5, ended="finished", steps=12,
    seconds=90.0, threads="1", version="0", torch="2", opacus="1", python="3",
)   # fmt: skip


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command's words, for a table of digits alone, with its files in tmp_path."""
    pytest.importorskip("opacus")
    pytest.importorskip("sklearn")
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(table1, "ROWS", {"digits-eps8": DIGITS})
    files = ["--out", str(tmp_path / "runs"), "--csv", str(tmp_path / "t.csv")]
    return ["paper", "table1", "--rows", "digits-eps8", *files, "--no-progress"]


def no_step(self: object, *args: object) -> float:
    raise AssertionError("a step was taken")


def test_rows_are_the_papers() -> None:
    means = {name: (row.paper["baseline"][0], row.paper["rs"][0]) for name, row in ROWS.items()}
    assert means == {
        "fmnist-dp-cnn-s-eps3": (86.6, 87.4), "fmnist-dp-cnn-s-eps1": (83.2, 84.5),
        "fmnist-h-cnn-s-eps3": (88.9, 89.2), "fmnist-h-cnn-s-eps1": (85.8, 87.0),
        "cifar10-dp-cnn-eps3": (62.8, 64.3), "cifar10-dp-cnn-eps1": (52.5, 55.1),
        "cifar10-h-cnn-eps3": (69.7, 70.0), "cifar10-h-cnn-eps1": (62.4, 63.2),
        "svhn-dp-cnn-eps3": (83.4, 84.5), "svhn-dp-cnn-eps1": (76.0, 79.1),
        "svhn-h-cnn-eps3": (85.9, 86.8), "svhn-h-cnn-eps1": (80.7, 82.2),
    }   # fmt: skip
    first = {method: ROWS["cifar10-dp-cnn-eps3"].settings[method][0] for method in table1.METHODS}   # published
    assert first["baseline"] == Setting(epochs=40, lr=1.0, momentum=0.0, clip=1.0, final_rate=0.0, batch=1000)
    assert first["rs"] == Setting(epochs=48, lr=1.0, momentum=0.0, clip=1.0, final_rate=0.9, batch=1000)
    grey = Setting(epochs=40, lr=4.0, momentum=0.0, clip=1.0, final_rate=0.0, batch=2048)   # SETTINGS.md, rescaled
    assert ROWS["fmnist-dp-cnn-s-eps3"].settings["baseline"][0] == grey
    scatter = ROWS["cifar10-h-cnn-eps3"].settings["baseline"][0]
    assert scatter == Setting(epochs=60, lr=4.0, momentum=0.0, clip=1.0, final_rate=0.0, batch=8192)


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_dprs_train_has_the_tables_settings_by_default(row: Row) -> None:
    for job in table1.jobs([row], seeds=1):
        given = dict(final_rate=0.0) if job.method == "baseline" else {}
        assert TrainConfig.of(row.dataset, row.model, epsilon=row.epsilon, **given) == job.config()


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_every_setting_is_one_of_the_papers_grid(row: Row) -> None:
    network_for(row.model, row.dataset)
    start = row.settings["baseline"][0]
    planned = table1.jobs([row], seeds=1, grid=True)
    assert len({job.name for job in planned}) == len(planned) == 7
    for job in planned:
        setting, config = job.setting, job.config("there")
        assert setting.final_rate in ((0.0,) if job.method == "baseline" else (0.5, 0.7, 0.9))
        assert setting.clip in (0.1, 0.5, 1.0)
        assert setting.clip / (1 - setting.momentum) == 1
        assert setting.epochs / start.epochs in (1, 1.2, 1.5)
        assert (config.epsilon, config.claim, config.data, config.algorithm) == (row.epsilon, "poisson", "there", 1)
        assert (config.epochs, config.final_rate, config.batch) == (setting.epochs, setting.final_rate, setting.batch)


def test_jobs_have_a_fixed_order() -> None:
    def order(**options: Any) -> list[tuple[str, int, float]]:
        return [(job.method, job.seed, job.setting.final_rate) for job in table1.jobs([DIGITS], **options)]

    assert order(seeds=2) == [("baseline", 0, 0.0), ("rs", 0, 0.5), ("baseline", 1, 0.0), ("rs", 1, 0.5)]
    whole = [("baseline", 0, 0.0), ("rs", 0, 0.5), ("rs", 0, 0.7)]
    assert order(seeds=1, grid=True, methods=["rs", "baseline"]) == whole
    assert order(seeds=2, methods=["rs"]) == [("rs", 0, 0.5), ("rs", 1, 0.5)]


def test_a_table_from_start_to_end(
    table: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main([*table, "--seeds", "1"]) == 0
    printed, err = capsys.readouterr()
    assert err == ""
    with open(tmp_path / "t.csv", newline="") as file:
        header, *lines = list(csv.reader(file))
    assert header == [
        "date", "commit", "row", "method", "seed", "epochs", "lr", "momentum", "clip", "final_rate", "batch", "refresh",
        "structure", "sampler", "accountant", "sigma", "epsilon", "delta", "test_accuracy", "ended", "steps", "seconds",
        "threads", "version", "torch", "opacus", "python",
    ]   # fmt: skip
    assert len(lines) == 2
    records = table1.read(tmp_path / "t.csv")
    assert [(record.method, record.final_rate) for record in records] == [("baseline", 0.0), ("rs", 0.5)]
    for record in records:
        assert 7.5 < record.epsilon <= 8
        assert (record.sampler, record.accountant, record.ended, record.steps) == ("poisson", "rdp", "finished", 12)
        assert (record.threads, record.commit) == ("1", table1_runs.commit())
        job = Job(DIGITS, record.method, record.setting, record.seed)
        rows = RunFolder.open(tmp_path / "runs" / job.name).metrics()
        assert record.test_accuracy == pytest.approx(rows[-1].test_accuracy, rel=1e-5)
        assert record.seconds == pytest.approx(sum(row.seconds for row in rows), rel=1e-5)
        assert f"{job.name}: test accuracy {rows[-1].test_accuracy:.2%}, epsilon {record.epsilon:.3f}" in printed
    assert printed.rstrip().endswith(table1_text.shown(records, [DIGITS]))

    before = (tmp_path / "t.csv").read_text()
    monkeypatch.setattr(train_module._Run, "_step", no_step)
    assert cli.main([*table, "--seeds", "1"]) == 0   # all there
    assert (tmp_path / "t.csv").read_text() == before
    (tmp_path / "t.csv").write_text("".join(before.splitlines(keepends=True)[:2]) + "2026-01-")   # killed while writing
    monkeypatch.setattr(table1_runs, "commit", lambda: "of no step")
    assert cli.main([*table, "--seeds", "1"]) == 0   # the run is there, its line was lost
    assert table1.read(tmp_path / "t.csv") == records


def test_what_was_interrupted_goes_on(
    table: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = ctrl_c(monkeypatch, at=12 + 4)   # in the first epoch of the second run
    handler = signal.getsignal(signal.SIGINT)
    nominal = [*table, "--seeds", "1", "--sampler", "shuffled-nominal"]
    with monkeypatch.context() as patch:
        patch.setattr(table1_runs, "commit", lambda: "older")
        assert cli.main(nominal) == 130
    assert signal.getsignal(signal.SIGINT) is handler
    assert "dprs_kernels: interrupted; the same command goes on" in capsys.readouterr().err
    assert [record.method for record in table1.read(tmp_path / "t.csv")] == ["baseline"]
    monkeypatch.setattr(table1_runs, "commit", lambda: "newer")
    assert cli.main([*nominal, "--threads", "2"]) == 0
    assert steps[0] == 24   # none was taken twice
    baseline, rs = table1.read(tmp_path / "t.csv")
    assert (baseline.commit, baseline.threads, rs.commit, rs.threads) == ("older", "1", "older newer", "1 2")
    assert (rs.sampler, rs.steps, rs.ended) == ("shuffled-nominal", 12, "finished")
    assert "nominal epsilon" in capsys.readouterr().out


def test_steps_that_are_lost_stay_charged(
    table: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C twice, as a kill: no checkpoint, so three steps are taken again and the budget ends before the last."""
    ctrl_c(monkeypatch, at=4, times=2)
    words = [*table, "--seeds", "1", "--methods", "rs"]
    assert cli.main(words) == 130
    assert "dprs_kernels: interrupted; the same command goes on" in capsys.readouterr().err
    assert cli.main(words) == 0
    (record,) = table1.read(tmp_path / "t.csv")
    assert (record.ended, record.steps) == ("budget", 9)
    assert record.epsilon <= 8
    assert "charged twice: 1." in capsys.readouterr().out


def test_a_failed_run_exits_1_and_goes_on(
    table: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: object, *args: object) -> float:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(train_module._Run, "_step", full)
        assert cli.main([*table, "--seeds", "1", "--methods", "rs"]) == 1
    name = table1.jobs([DIGITS], seeds=1, methods=["rs"])[0].name
    err = capsys.readouterr().err
    assert f"dprs_kernels: {name} failed after 0 charged steps: OSError: No space left on device" in err
    assert table1.read(tmp_path / "t.csv") == []
    file = tmp_path / "runs" / name / "config.json"
    whole = file.read_text()
    file.write_text(whole.replace('"lr": 2.0', '"lr": 3.0'))
    assert cli.main([*table, "--seeds", "1", "--methods", "rs"]) == 2
    assert f"out: {file.parent} holds a run of other settings; move it away" in capsys.readouterr().err
    file.write_text(whole)
    assert cli.main([*table, "--seeds", "1", "--methods", "rs", "--data", str(tmp_path)]) == 0   # data may move
    assert [record.ended for record in table1.read(tmp_path / "t.csv")] == ["finished"]


def test_the_file_of_results_comes_back_as_written(tmp_path: Path) -> None:
    file = tmp_path / "new" / "t.csv"
    assert table1.read(file) == []
    other = replace(RECORD, seed=1, commit="a b", test_accuracy=0.25)
    table1.append(file, RECORD)
    table1.append(file, other)
    table1.append(file, replace(RECORD, test_accuracy=0.9))   # the same run again: the first counts
    assert table1.read(file) == [RECORD, other]
    with open(file, "a") as torn:
        torn.write("2026-01-03,abc,digits")
    assert table1.read(file) == [RECORD, other]
    third = replace(RECORD, seed=2)
    table1.append(file, third)
    assert table1.read(file) == [RECORD, other, third]


def test_several_processes_may_write_one_file(tmp_path: Path) -> None:
    """One is in the middle of its line, which must not be taken for a torn one, when the other comes."""
    table1.append(tmp_path / "t.csv", RECORD)
    table1.append(tmp_path / "t.csv", replace(RECORD, seed=1))
    *before, line = (tmp_path / "t.csv").read_text().splitlines(keepends=True)
    (tmp_path / "t.csv").write_text("".join(before))
    with open(tmp_path / "t.csv", "a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write(line[:20])
        file.flush()
        child = os.fork()
        if child == 0:
            try:
                table1.append(tmp_path / "t.csv", replace(RECORD, seed=2))
                os._exit(0)
            finally:
                os._exit(1)
        time.sleep(0.2)   # long enough for a child that does not wait
        file.write(line[20:])
        file.flush()
        fcntl.flock(file, fcntl.LOCK_UN)
        assert os.waitpid(child, 0)[1] == 0
    assert [record.seed for record in table1.read(tmp_path / "t.csv")] == [0, 1, 2]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("date,speed\n1,2\n", "has columns date, speed; expected date, commit, row"),
        (",".join(table1.COLUMNS) + "\n2026-01-02,abc\n", "line 2 of .* is no result .*; mend or delete the line"),
        (",".join(table1.COLUMNS) + "\n" + ",".join("x" * 25) + "\n", "line 2 of .* is no result .*'x'"),
    ],
)
def test_a_file_of_something_else_is_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(text)
    with pytest.raises(ValueError, match=message):
        table1.read(tmp_path / "t.csv")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--rows", "mnist", "fmnist-dp-cnn-s-eps3"], "rows: got mnist; expected some of fmnist-dp-cnn-s-eps3, "),
        (["--show", "--rows", "mnist"], "rows: got mnist; expected some of"),
        ([], "rows: got none; expected some of fmnist-dp-cnn-s-eps3"),
        (["--rows", "svhn-dp-cnn-eps1", "--seeds", "0"], "seeds: got 0; expected an integer of at least 1"),
        (["--rows", "svhn-dp-cnn-eps1", "--threads", "0"], "threads: got 0; expected an integer of at least 1"),
        (["--rows", "svhn-dp-cnn-eps1", "--markdown"], "markdown: got it without --show"),
        (["--show", "--csv", "nowhere.csv"], "csv: nowhere.csv is not a file; expected one that dprs paper table1"),
        (["--rows", "svhn-dp-cnn-eps3", "svhn-dp-cnn-eps1", "--data", "."],
         "row svhn-dp-cnn-eps3: dataset: no file of svhn in"),
    ],
)   # fmt: skip
def test_table1_refuses(
    words: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DPRS_DATA", raising=False)
    assert cli.main(["paper", "table1", *words]) == 2
    assert f"dprs_kernels: {message}" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_missing_data_is_missed_before_the_first_run(
    table: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    svhn = ROWS["svhn-dp-cnn-eps3"]
    monkeypatch.setattr(table1, "ROWS", {"digits-eps8": DIGITS, svhn.name: svhn})
    monkeypatch.setattr(train_module._Run, "_step", no_step)
    monkeypatch.delenv("DPRS_DATA", raising=False)
    assert cli.main([*table, "--rows", "digits-eps8", svhn.name]) == 2
    assert "expected train_32x32.mat, test_32x32.mat" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_unwritable_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"csv: cannot write .*t\.csv .*; name a file that you may write \(--csv"):
        table1.append(tmp_path / "file" / "t.csv", RECORD)


def test_examples_in_docstrings() -> None:
    result = doctest.testmod(table1)
    assert result.attempted > 2
    assert result.failed == 0
