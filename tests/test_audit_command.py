"""python -m dprs_kernels audit: report and exit codes 0, 1 and 2."""

from functools import partial

import pytest
import torch

from dprs_kernels import __main__ as cli
from dprs_kernels.privacy import audit
from tests.faults import FAULTS
from tests.plain_step import planted


def test_passed_is_0(capsys):
    threads = torch.get_num_threads()
    assert cli.main(["audit", "--backend", "reference", "--suite", "S4", "S5", "--size", "tiny", "--seed", "3"]) == 0
    assert torch.get_num_threads() == threads
    out, err = capsys.readouterr()
    assert out.startswith("audit of fused_rs_dp_step, backend reference, seed 3\n")
    assert out.rstrip().endswith("findings in S4, S5")
    assert err == ""


def test_failed_is_1(capsys, monkeypatch):
    faulty = planted(FAULTS["noise x 0.9"][1], "faulty")
    monkeypatch.setattr(audit, "audit", partial(audit.audit, faulty))
    assert cli.main(["audit", "--suite", "S2", "--size", "small"]) == 1
    out, _ = capsys.readouterr()
    assert out.startswith("audit of faulty")
    assert out.rstrip().endswith("FAILED: S2")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--suite", "S9"], "suites: got 'S9'; expected some of S1, S2"),
        (["--backend", "abacus"], "backend: got 'abacus'; expected one of auto"),
        (["--size", "vast"], "size: got 'vast'; expected one of full, small, tiny"),
        (["--structure", "tile"], "structure: got 'tile'; expected one of 'coordinate', 'row', 'mixed'"),
        (["--seed", "-1"], "seed: got -1; expected an integer of at least 0"),
        (["--attack", "--structure", "row"], "--attack: got --structure row, too; the attacks look at noise"),
        (["--attack", "--suite", "S6"], "--attack: got --suite S6, too; give one of them"),
    ],
)
def test_bad_arguments_are_2(arguments, message, capsys):
    assert cli.main(["audit", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"dprs_kernels: {message}")


@pytest.mark.parametrize("arguments", [["--seed", "many"], ["--suite"], ["--wings"]])
def test_argparse_exits_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["audit", *arguments])
    assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_attack_prints_the_table(capsys):
    assert cli.main(["audit", "--attack", "--size", "tiny"]) == 0
    out, _ = capsys.readouterr()
    assert "sum of four torch.normal" in out
    assert "fused_rs_dp_step, " in out
