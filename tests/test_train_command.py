"""dprs train and dprs compare, end to end on digits: results, resumption after kill -9 and Ctrl-C, each error."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from dprs_kernels import __main__ as cli
from dprs_kernels.paper import data as data_module
from dprs_kernels.paper import prepare, train_command
from dprs_kernels.paper import train as train_module
from dprs_kernels.paper.progress import Progress
from dprs_kernels.paper.run_folder import RunFolder

pytest.importorskip("opacus")   # the accountant
pytest.importorskip("sklearn")
pytest.importorskip("matplotlib")
SHORT = ["train", "--dataset", "digits", "--epochs", "2", "--sigma", "2"]
SEEDED = [*SHORT, "--insecure-seeded-noise", "--seed", "3"]


def weights(folder: Path) -> torch.Tensor:
    state = torch.load(folder / "checkpoint.pt", weights_only=True)["model"]
    return torch.cat([value.reshape(-1) for value in state.values()])


def not_empty(file: Path) -> bool:
    from matplotlib.image import imread

    image = imread(file)
    return min(image.shape[:2]) > 100 and bool((image != image[0, 0]).any())


def test_train_ends_with_accuracy_epsilon_and_a_plot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    out = tmp_path / "run"
    assert cli.main(["train", "--dataset", "digits", "--epochs", "3", "--epsilon", "5", "--out", str(out)]) == 0
    assert torch.get_num_threads() == threads
    printed, err = capsys.readouterr()
    found = {line[:14].strip(): line[14:].strip() for line in printed.splitlines()}
    assert 0.2 < float(found["test accuracy"].split("%")[0]) / 100 <= 1   # chance is 0.1
    assert 4.5 < float(found["privacy"].split()[1]) <= 5
    assert found["plot"] == str(out / "plot.png")
    assert not_empty(out / "plot.png")
    lines = err.splitlines()   # no terminal: what was found, then a line an epoch
    assert lines[0].startswith("digits: 1437 training and 360 test images")
    assert [line.split("  ")[0] for line in lines[1:]] == ["epoch 1/3", "epoch 2/3", "epoch 3/3"]
    assert "\r" not in err


def test_options_reach_the_configuration(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--batch", "300", "--lr", "0.7", "--momentum", "0.4", "--clip", "0.3", "--final-rate", "0.2",
               "--algorithm", "4", "--sampler", "shuffled-nominal", "--seed", "9", "--delta", "1e-4", "--refresh", "2",
               "--cooling", "constant", "--backend", "reference", "--data", str(tmp_path)]   # fmt: skip
    assert cli.main([*SHORT, *options, "--no-progress", "--out", str(tmp_path / "run")]) == 0
    printed, err = capsys.readouterr()
    assert err == ""
    assert "NOMINAL epsilon" in printed
    config = RunFolder.open(tmp_path / "run").config
    got = (config.batch, config.lr, config.momentum, config.clip, config.final_rate, config.algorithm, config.sampler,
           config.seed, config.delta, config.refresh, config.cooling, config.backend, config.data, config.epsilon,
           config.sigma, config.epochs)   # fmt: skip
    assert got == (300, 0.7, 0.4, 0.3, 0.2, 4, "shuffled-nominal", 9, 1e-4, 2, "constant", "reference", str(tmp_path),
                   None, 2.0, 2)   # fmt: skip


def test_without_a_dataset(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Fashion-MNIST where it is found, else digits, and says why; into runs/."""
    real, loaded = data_module.load, []

    def load(name: str, *args: object, **more: object) -> data_module.Data:
        loaded.append(name)
        if name == "fmnist":
            raise ValueError("dataset: no file of fmnist")
        return real(name, *args, **more)

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(data_module, "load", load)
    monkeypatch.setattr(prepare, "load", load)
    monkeypatch.setattr(train_command, "QUICK_EPOCHS", {"digits": 1})
    assert cli.main(["train", "--sigma", "2"]) == 0
    assert loaded == ["fmnist", "digits"]
    reason = "taking scikit-learn's digits, since Fashion-MNIST cannot be read: dataset: no file of fmnist"
    assert reason in capsys.readouterr().err
    (folder,) = (tmp_path / "runs").iterdir()
    assert folder.name.startswith("digits-digits-cnn-a1-")
    assert (folder / "plot.png").exists()
    made = train_command._configured({}, Progress(live=False))   # before: not found; now: found
    monkeypatch.setattr(data_module, "load", lambda name, *args, **more: real("digits"))
    assert made[0].dataset == "digits"
    monkeypatch.setattr(train_command, "QUICK_EPOCHS", {"fmnist": 8})
    found = train_command._configured({}, Progress(live=False))[0]
    assert (found.dataset, found.model, found.epochs, found.batch) == ("fmnist", "dp-cnn-s", 8, 2048)


def test_a_folder_that_was_named_is_not_passed_over(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No digits in the place of data that somebody asked for."""

    def load(name: str, *args: object) -> None:
        raise ValueError(f"dataset: no file of {name} in the folder")

    monkeypatch.setattr(data_module, "load", load)
    assert cli.main(["train", "--data", str(tmp_path / "nothere"), "--no-progress"]) == 2
    assert "dataset: no file of fmnist in" in capsys.readouterr().err


def start(*arguments: str) -> subprocess.Popen[str]:
    root = Path(__file__).parent.parent
    return subprocess.Popen(
        [sys.executable, "-m", "dprs_kernels", *arguments], cwd=root, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True,
    )   # fmt: skip


def wait_for_steps(ledger: Path, steps: int, process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + 240
    while not ledger.exists() or ledger.read_bytes().count(b"\n") <= steps:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.005)


def test_resume_after_kill_9(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Seeded: the model is bit for bit that of a run nobody killed; the ledger holds what was taken twice."""
    long = [word if word != "2" or SEEDED[i - 1] != "--epochs" else "6" for i, word in enumerate(SEEDED)]
    assert cli.main([*long, "--out", str(tmp_path / "whole")]) == 0
    process = start(*long, "--out", str(tmp_path / "killed"))
    wait_for_steps(tmp_path / "killed" / "ledger.jsonl", 15, process)   # in the third epoch of six steps
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    capsys.readouterr()
    assert cli.main(["train", "--resume", str(tmp_path / "killed")]) == 0
    printed, err = capsys.readouterr()
    assert "seeded for tests: noise and batches go on bit for bit" in err
    assert "NO PRIVACY CLAIM: seeded noise" in printed
    assert torch.equal(weights(tmp_path / "killed"), weights(tmp_path / "whole"))
    found = re.search(r"steps +36 of 36, (\d+) charged", printed)
    assert found
    assert 36 <= int(found[1]) == (tmp_path / "killed" / "ledger.jsonl").read_text().count("\n") - 1
    assert [row.epoch for row in RunFolder.open(tmp_path / "killed").metrics()] == [1, 2, 3, 4, 5, 6]


def ctrl_c(monkeypatch: pytest.MonkeyPatch, at: int, times: int = 1) -> list[int]:
    """Presses it in step `at`. [number of steps so far]"""
    real, steps = train_module._Run._step, [0]

    def step(self: object, *args: object) -> float:
        steps[0] += 1
        if steps[0] == at:
            for _ in range(times):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)
        return real(self, *args)   # type: ignore[arg-type]

    monkeypatch.setattr(train_module._Run, "_step", step)
    return steps


def test_ctrl_c_finishes_the_step_and_names_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "a run"
    handler = signal.getsignal(signal.SIGINT)
    with monkeypatch.context() as patch:
        ctrl_c(patch, at=4)
        assert cli.main([*SEEDED, "--out", str(out)]) == 130
    assert signal.getsignal(signal.SIGINT) is handler
    printed, err = capsys.readouterr()
    assert printed == ""
    assert "interrupted: finishing this step and saving; Ctrl-C again stops at once" in err
    assert f"interrupted after step 4 of 12, saved; go on with: dprs train --resume '{out}'" in err
    assert cli.main(["train", "--resume", str(out)]) == 0
    assert "12 of 12, 12 charged" in capsys.readouterr().out
    assert cli.main([*SEEDED, "--out", str(tmp_path / "whole")]) == 0
    assert torch.equal(weights(out), weights(tmp_path / "whole"))


def test_ctrl_c_twice_stops_at_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        ctrl_c(patch, at=4, times=2)
        assert cli.main([*SHORT, "--out", str(tmp_path / "run")]) == 130
    assert f"interrupted; go on with: dprs train --resume {tmp_path / 'run'}" in capsys.readouterr().err
    assert cli.main(["train", "--resume", str(tmp_path / "run")]) == 0
    assert "12 of 12, 15 charged" in capsys.readouterr().out   # no checkpoint yet: three steps were taken again


def test_a_failed_run_exits_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def step(self: object, *args: object) -> float:
        raise OSError("No space left on device")

    monkeypatch.setattr(train_module._Run, "_step", step)
    assert cli.main([*SHORT, "--out", str(tmp_path / "run")]) == 1
    err = capsys.readouterr().err
    assert "the run failed after 0 charged steps: OSError: No space left on device" in err
    assert f"go on with: dprs train --resume {tmp_path / 'run'}" in err
    assert "Traceback" not in err
    assert "Traceback" in (tmp_path / "run" / "error.txt").read_text()


def test_row_masks_by_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str], kept_memory: list[Any]) -> None:
    rows = ["--structure", "row", "--final-rate", "0.5", "--no-progress", "--out", str(tmp_path / "run")]
    assert cli.main([*SHORT, *rows]) == 0
    assert capsys.readouterr().err == ""
    assert RunFolder.open(tmp_path / "run").config.structure == "row"
    assert kept_memory == [()]   # the command's process is its own


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "dp-cnn"], "network: dp-cnn takes cifar10 or svhn"),
        (["--model", "hal"], "network: got 'hal'; expected one of dp-cnn"),
        (["--epochs", "0"], "epochs: got 0; expected an integer of at least 1"),
        (["--epsilon", "3"], "epsilon, sigma: got both; give the budget, or the noise multiplier"),
        (["--final-rate", "1"], "final_rate: got 1.0; expected a number in [0, 1)"),
        (["--batch", "5000"], "expected_batch_size: got 5000; expected at most 1437"),
        (["--lr", "nan"], "lr: got nan; expected a positive number"),
        (["--momentum", "2"], "momentum: got 2.0; expected a number in [0, 1)"),
        (["--structure", "tile"], "structure: got 'tile'; expected 'coordinate' or 'row' or 'mixed'"),
        (["--clip", "-1"], "clip: got -1.0; expected a positive, finite number"),
        (["--sigma", "-1"], "sigma: got -1.0; expected a finite number of at least 0"),
        (["--delta", "0"], "delta: got 0.0; expected a number in (0, 1)"),
        (["--seed", "-3"], "seed: got -3; expected an integer"),
        (["--clip", "inf"], "clip: got inf; expected a positive, finite number"),
        (["--threads", "0"], "threads: got 0; expected an integer of at least 1"),
        (["--backend", "abacus"], "backend: got 'abacus'; expected one of"),
        (["--resume", "nowhere"], "resume: got --dataset, --epochs, --sigma, --out too"),
    ],
)
def test_train_refuses(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([*SHORT, "--out", str(tmp_path / "run"), *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert f"dprs_kernels: {message}" in err
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["train", "--resume", "nowhere"], "run folder: nowhere has no config.json; expected a folder that dprs train"),
        (["train", "--dataset", "svhn", "--data", "."], "dataset: no file of svhn in"),
        (["train", "--model", "dp-cnn"], "model: got 'dp-cnn' without a dataset; give --dataset, too"),
        (["compare", "nowhere"], "run folder: nowhere has no config.json"),
    ],
)
def test_refuses_what_is_missing(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:   # fmt: skip
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("DPRS_DATA", raising=False)
    assert cli.main(arguments) == 2
    assert f"dprs_kernels: {message}" in capsys.readouterr().err


def test_a_folder_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*SHORT, "--out", str(tmp_path / "run")]) == 0
    assert cli.main([*SHORT, "--out", str(tmp_path / "run")]) == 2
    assert f"holds a run already; go on with it (--resume {tmp_path / 'run'})" in capsys.readouterr().err
    (tmp_path / "run" / "checkpoint.pt").write_bytes(b"no checkpoint")
    assert cli.main(["train", "--resume", str(tmp_path / "run")]) == 2
    assert "checkpoint.pt is no checkpoint of TrainingState.save, or damaged" in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--algorithm", "5"], ["--sampler", "lottery"], ["--wings", "2"], ["--epochs"]])
def test_argparse_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", *arguments])
    assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for word in ("--final-rate", "--resume", "--insecure-seeded-noise", "--compare-plain", "dp-cnn-s", "130"):
        assert word in text


def test_compare(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    assert cli.main([*SHORT, "--out", str(tmp_path / "secure"), "--no-progress"]) == 0
    nominal = [*SHORT, "--sampler", "shuffled-nominal", "--optimizer", "adam", "--seed", "4"]
    assert cli.main([*nominal, "--out", str(tmp_path / "shuffled"), "--no-progress"]) == 0
    assert cli.main([*SEEDED, "--out", str(tmp_path / "seeded"), "--no-progress"]) == 0
    with monkeypatch.context() as patch:
        ctrl_c(patch, at=1)
        assert cli.main([*SHORT, "--out", str(tmp_path / "begun"), "--no-progress"]) == 130
    with monkeypatch.context() as patch:
        ctrl_c(patch, at=8)   # in the second epoch of 6 steps
        assert cli.main([*SHORT, "--out", str(tmp_path / "stopped"), "--no-progress"]) == 130
    capsys.readouterr()
    names = ["secure", "shuffled", "seeded", "begun", "stopped"]
    picture = tmp_path / "all.png"
    assert cli.main(["compare", *(str(tmp_path / name) for name in names), "--out", str(picture)]) == 0
    lines = capsys.readouterr().out.splitlines()
    cells = {line.split()[0]: line.split() for line in lines[:6]}
    assert [line.split()[0] for line in lines[:6]] == ["run", *names]
    assert len(set(map(len, cells.values()))) == 1
    epsilon = {name: cells[name][cells["run"].index("epsilon")] for name in names}
    assert float(epsilon["secure"]) > 0
    assert epsilon["stopped"].startswith(">")   # charged steps of an epoch without a row
    assert epsilon["shuffled"].startswith("~")
    assert (epsilon["seeded"], epsilon["begun"]) == ("none", "-")
    assert cells["shuffled"][cells["run"].index("mom")] == "adam"
    accuracy = RunFolder.open(tmp_path / "secure").metrics()[-1].test_accuracy
    assert cells["secure"][cells["run"].index("accuracy")] == f"{accuracy:.2%}"
    assert lines[6:] == [
        "~ nominal: shuffled batches counted as Poisson samples, no proof",
        "> more was spent: steps of an epoch that was not finished; dprs account ledger RUN/ledger.jsonl has all",
        f"picture {picture}",
    ]
    assert not_empty(picture)
    for arguments, message in (
        (["secure", "secure"], "runs: one is named twice"),
        (["begun"], "runs: none has a finished epoch"),
        (["secure", "--out", str(tmp_path / "no" / "where.png")], "out: cannot write"),
        (["secure", "--out", str(tmp_path / "picture.xyz")], "out: cannot write"),
    ):
        folders = [word if word.startswith(("-", "/")) else str(tmp_path / word) for word in arguments]
        assert cli.main(["compare", *folders]) == 2
        assert message in capsys.readouterr().err
