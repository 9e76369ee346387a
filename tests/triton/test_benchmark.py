"""The GPU benchmark's own code, on a tiny shape: what has no GPU here must not rot."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))


@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")   # inside opacus
def test_a_race_checks_and_times_every_contender():
    pytest.importorskip("opacus")
    import bench_gpu
    from contenders import OPACUS, OPACUS_COPY, PAPER
    from harness import SHAPES, Workload

    from tests.triton.conftest import DEVICE

    work = Workload(SHAPES["tiny"], torch.float32, str(DEVICE))
    entries = bench_gpu.race_on(work, 0.5, [PAPER, OPACUS, OPACUS_COPY], 1)
    names = [entry.name for entry in entries]
    assert names[1:] == ["dprs_kernels", bench_gpu.DESIGN_A, bench_gpu.DESIGN_B, PAPER, OPACUS, OPACUS_COPY]
    assert all(entry.best > 0 for entry in entries)
