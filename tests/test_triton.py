"""Runs tests/triton/ in Triton's interpreter, one process per file: the variable must be set before the import."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent
FILES = sorted(path.name for path in (HERE / "triton").glob("test_*.py"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="tests/triton runs on the GPU itself")
@pytest.mark.parametrize("name", FILES)
def test_in_the_interpreter(name):
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/triton/{name}"]
    done = subprocess.run(command, cwd=HERE.parent, env=environment, capture_output=True, text=True, timeout=540)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
