"""Runs tests/triton/ in Triton's interpreter, one process per file: the variable must be set before the import.

The processes start when the tests are collected (conftest.py) and run one after another beside the other tests: a
second core halves the time of the whole."""

import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
FILES = sorted(path.name for path in (HERE / "triton").glob("test_*.py"))
SECONDS = 400   # of one file; they take 10 to 100
_runs: dict[str, Future] = {}


def start(names):
    if not torch.cuda.is_available():
        pool = ThreadPoolExecutor(max_workers=1)
        _runs.update({name: pool.submit(_run, name) for name in names})
        pool.shutdown(wait=False)


def _run(name):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/triton/{name}"]
    return subprocess.run(command, cwd=HERE.parent, env=environment, capture_output=True, text=True, timeout=SECONDS)


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/triton runs on the GPU itself")
@pytest.mark.parametrize("name", FILES)
def test_in_the_interpreter(name):
    pytest.importorskip("triton")
    done = _runs[name].result()
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
