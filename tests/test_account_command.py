"""The command line's `account`: the figures of accounting, what they mean, exit codes."""

import re
import sys
from pathlib import Path

import pytest

from dprs_kernels.__main__ import main
from dprs_kernels.masked_step import StepRecord
from dprs_kernels.privacy.accounting import NOT_COVERED, affordable_steps, calibrate, epsilon
from dprs_kernels.privacy.ledger import Ledger

pytest.importorskip("opacus")
pytest.importorskip("dp_accounting")
DATA = ["--delta", "1e-5", "--samples", "1000", "--batch", "50"]   # q = 0.05, 20 steps an epoch


def answers(output: str) -> dict[str, list[float]]:
    """accountant -> the figures of its row."""
    rows = re.findall(r"^(rdp|prv|pld) +([\d.]+(?: +[\d.]+)*) ", output, re.MULTILINE)
    return {name: [float(cell) for cell in cells.split()] for name, cells in rows}


def filled(path: Path, steps: int = 30, sampler: str = "poisson", adjacency: str | None = "add_remove") -> Ledger:
    ledger = Ledger(path)
    for step in range(steps):
        record = StepRecord(
            step=step, key_id="0123456789abcdef", private=True, noise_multiplier=1.5, max_grad_norm=1.0,
            expected_batch_size=50.0, sensitivity=1.0, drop_rate=0.0, kept=8, keep_digest="d",
        )   # fmt: skip
        ledger.append(record, sampler=sampler, sample_rate=0.05, adjacency=adjacency)
    return ledger


def test_sigma(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["account", "sigma", "--epsilon", "3", *DATA, "--epochs", "2"]) == 0
    output = capsys.readouterr().out
    assert "the smallest sigma for epsilon 3 at delta 1e-05; q = 0.05, 40 steps" in output
    run = {"target_epsilon": 3.0, "target_delta": 1e-5, "sample_rate": 0.05, "steps": 40}
    expected = {name: [calibrate(**run, accountant=name)] for name in ("rdp", "prv", "pld")}
    assert answers(output) == expected
    assert "adjacency   add/remove: epsilon protects against data with one sample more or less" in output
    for item in NOT_COVERED:
        assert item in output
    for word in ("tried", "several runs", "shuffled", "without noise"):
        assert word in output.partition("not covered")[2]


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
def test_epsilon(capsys: pytest.CaptureFixture[str], adjacency: str) -> None:
    command = ["account", "epsilon", "--sigma", "1.5", *DATA, "--epochs", "1.99", "--adjacency", adjacency]
    assert main(command) == 0
    output = capsys.readouterr().out
    assert "epsilon at delta 1e-05 for sigma 1.5; q = 0.05, 40 steps" in output   # 39.8: a part of a step is a step
    for name, (got,) in answers(output).items():
        spent = epsilon(
            noise_multiplier=1.5, sample_rate=0.05, steps=40, delta=1e-5, accountant=name, adjacency=adjacency
        )
        assert got == pytest.approx(spent, abs=5e-4)
    if adjacency == "replace_one":
        assert answers(output).keys() == {"rdp", "pld"}
        assert re.search(r"^prv +no answer: adjacency: got 'replace_one'", output, re.MULTILINE)
        assert "replace-one: epsilon protects against data with one sample in place of another" in output
    else:
        assert answers(output).keys() == {"rdp", "prv", "pld"}


def test_epochs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["account", "epochs", "--sigma", "1.5", "--epsilon", "1.5", *DATA]) == 0
    found = answers(capsys.readouterr().out)
    run = {"noise_multiplier": 1.5, "sample_rate": 0.05, "target_epsilon": 1.5, "target_delta": 1e-5}
    steps = affordable_steps(**run)
    assert found["rdp"][1] == steps > 0
    assert found["rdp"][0] <= steps / 20 < found["rdp"][0] + 0.1   # rounded down
    assert found["pld"][1] >= found["prv"][1] > steps


def test_ledger(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = filled(tmp_path / "run")
    assert main(["account", "ledger", str(tmp_path / "run"), "--delta", "1e-5"]) == 0
    output = capsys.readouterr().out
    assert f"of the 30 steps in {tmp_path}/run" in output
    assert f"head        {ledger.head}" in output
    assert "add/remove" in output
    assert "assumed" not in output   # the ledger knows
    for name, (got,) in answers(output).items():
        assert got == pytest.approx(ledger.epsilon(1e-5, name), abs=5e-4)
    assert main(["account", "ledger", str(tmp_path / "run"), "--delta", "1e-5", "--no-amplification"]) == 0
    output = capsys.readouterr().out
    assert "without amplification" in output
    assert answers(output)["rdp"][0] == pytest.approx(ledger.epsilon(1e-5, amplification=False), abs=5e-4)


def test_ledger_of_shuffled_batches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ledger = filled(tmp_path / "run", sampler="shuffled_partition_nominal")
    command = ["account", "ledger", str(tmp_path / "run"), "--delta", "1e-5"]
    assert main(command) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.match(r"dprs_kernels: sampler: 30 steps drew shuffled partitions", captured.err)
    assert main([*command, "--nominal-as-poisson"]) == 0
    output = capsys.readouterr().out
    assert output.startswith("NOMINAL epsilon at delta 1e-05")
    assert "shuffled partitions counted as Poisson samples: the true epsilon is larger" in output
    assert answers(output)["rdp"][0] == pytest.approx(ledger.epsilon(1e-5, nominal_as_poisson=True), abs=5e-4)


def test_ledger_without_adjacency(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    filled(tmp_path / "run", steps=2, adjacency=None)
    command = ["account", "ledger", str(tmp_path / "run"), "--delta", "1e-5"]
    assert main(command) == 2
    assert "adjacency: some steps do not state it" in capsys.readouterr().err
    assert main([*command, "--adjacency", "replace_one"]) == 0
    assert "replace-one" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--samples": "0"}, "--samples: got 0; expected an integer of at least 1"),
        ({"--batch": "2000"}, "--batch: got 2000; expected a number above 0, at most --samples, 1000"),
        ({"--batch": "nan"}, "--batch: got nan"),
        ({"--epochs": "0"}, "--epochs: got 0; expected a positive number"),
        ({"--delta": "1"}, "--delta: got 1; expected a number in (0, 1)"),
        ({"--delta": "0.001"}, "--delta: got 0.001; expected a number below 1 / samples = 0.001: at that delta a mech"),
        ({"--sigma": "-1"}, "noise_multiplier: got -1.0; expected a finite number of at least 0"),
    ],
)
def test_wrong_numbers(capsys: pytest.CaptureFixture[str], change: dict[str, str], message: str) -> None:
    options = {"--sigma": "1", "--delta": "1e-5", "--samples": "1000", "--batch": "50", "--epochs": "1", **change}
    assert main(["account", "epsilon", *(f"{name}={value}" for name, value in options.items())]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith(f"dprs_kernels: {message}")
    assert captured.out == ""


@pytest.mark.parametrize(("delta", "warned"), [("1e-3", True), ("2e-2", True), ("9e-4", False)])
def test_a_large_delta_for_a_ledger_is_warned_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], delta: str, warned: bool
) -> None:
    """The ledger tells the size of the data as expected batch size over q: 50 / 0.05."""
    filled(tmp_path / "run", steps=2)
    assert main(["account", "ledger", str(tmp_path / "run"), "--delta", delta]) == 0
    assert ("WARNING     delta" in capsys.readouterr().out) is warned


def test_prv_says_where_it_ends_and_the_others_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["account", "epsilon", "--sigma", "0.5", *DATA, "--epochs", "1000"]) == 0
    output = capsys.readouterr().out
    assert answers(output).keys() == {"rdp", "pld"}
    assert re.search(r"^prv +no answer: accountant: 'prv' does not end at large epsilons", output, re.MULTILINE)


def test_missing_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["account", "ledger", str(tmp_path / "none"), "--delta", "1e-5"]) == 2
    assert "none does not exist or is empty; expected a ledger" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["account"], ["account", "sigma"], ["account", "what"]])
def test_a_question_and_its_options_are_required(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        main(arguments)
    assert raised.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_a_missing_accountant_says_how_to_install(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["account", "epsilon", "--sigma", "1.234", *DATA, "--epochs", "1"]
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    assert main(command) == 0
    output = capsys.readouterr().out
    assert answers(output).keys() == {"rdp", "prv"}
    assert re.search(r'^pld +not installed: .*pip install "dprs_kernels\[accounting\]"', output, re.MULTILINE)
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    assert main([*command[:3], "1.2345", *command[4:]]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "pip install" in captured.err
