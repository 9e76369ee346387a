"""python -m dprs_kernels: info with and without the CPU kernels, and errors as exit code 2."""

import subprocess
import sys

import numpy
import pytest
import torch

from dprs_kernels import __main__ as cli
from dprs_kernels import __version__, backends, native

FIELDS = ("dprs_kernels", "python", "torch", "triton", "numpy", "gpu", "backend reference", "backend cpu",
          "backend triton", "cpu", "cpu features", "openmp", "threads")   # fmt: skip


def info(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    assert cli.main(["info"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    return {line[:18].strip(): line[18:].strip() for line in lines}


def test_info_prints_every_field(capsys: pytest.CaptureFixture[str]) -> None:
    found = info(capsys)
    assert tuple(found) == FIELDS
    assert all(found.values())
    assert found["dprs_kernels"] == __version__
    assert found["torch"] == torch.__version__
    assert found["numpy"] == numpy.__version__
    assert found["python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert found["threads"] == str(torch.get_num_threads())
    assert found["backend reference"] == "available on cpu"
    for name in backends.NAMES:
        device = torch.device("cuda" if name == "triton" and torch.cuda.is_available() else "cpu")
        why = backends.unavailable(name, device)
        assert found[f"backend {name}"] == (f"unavailable: {why}" if why else f"available on {device}")


@pytest.mark.skipif(native.library() is None, reason="the CPU kernels are not built")
def test_info_names_the_instruction_set(capsys: pytest.CaptureFixture[str]) -> None:
    found = info(capsys)
    levels, in_use = found["cpu features"].split("; in use: ")
    assert levels.split(", ") == native.levels()
    assert in_use in native.levels()
    assert found["openmp"] in ("yes", "no")


def test_info_without_the_cpu_kernels(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "_load", lambda: (None, "it was never built; build it"))
    found = info(capsys)
    assert tuple(found) == FIELDS
    assert found["backend cpu"] == "unavailable: it was never built; build it"
    assert found["backend reference"] == "available on cpu"
    assert found["cpu features"].startswith("unknown")
    assert found["openmp"].startswith("unknown")


def test_info_without_triton(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    real = cli.metadata.version

    def version(name: str) -> str:
        if "triton" in name:
            raise cli.metadata.PackageNotFoundError(name)
        return real(name)

    monkeypatch.setattr(cli.metadata, "version", version)
    assert info(capsys)["triton"] == "not installed"


def test_cpu_name_where_there_is_no_proc(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(path: object) -> str:
        raise FileNotFoundError

    monkeypatch.setattr(cli.Path, "read_text", missing)
    monkeypatch.setattr(cli.platform, "processor", lambda: "")
    assert cli._cpu_name() == cli.platform.machine()


def test_missing_extra_exits_2(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    assert cli.main(["train", "--dataset", "digits"]) == 2
    assert 'pip install "dprs_kernels[train]"' in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [[], ["fly"], ["info", "--wings", "2"]])
def test_argparse_exits_2(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(arguments)
    assert stop.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_module_runs_as_a_program() -> None:
    done = subprocess.run([sys.executable, "-m", "dprs_kernels", "info"], capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout.startswith("dprs_kernels ")
