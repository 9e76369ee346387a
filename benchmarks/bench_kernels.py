"""What do the Triton kernels compile to? No GPU needed, nothing is timed: pytest benchmarks/bench_kernels.py

Registers, spills, instructions and bounds as `dprs kernels` reads them from the binaries. The default run builds three
kernels for one target; --full builds all of them for every target (minutes). data/kernels.md has the whole table.
"""

from __future__ import annotations

from typing import Any

import pytest
from report import Results

TARGET, KERNELS = "sm_90", ("A norms fp32", "A sums fp32", "release fp32")


def test_kernels(benchmark: Any, results: Results, full: bool) -> None:
    """Timed only because --benchmark-only asks for it: that is the compiler's time."""
    pytest.importorskip("triton", reason="the kernels are compiled by triton")
    from dprs_kernels.backends.shipped import shipped
    from dprs_kernels.compiled import TARGETS, inspect, table

    launches = shipped()

    def read() -> list[str]:
        if full:
            return [table(launches, target) for target in TARGETS]
        reports = [inspect(launch, TARGET) for launch in launches if launch.name in KERNELS]
        return [
            f"Kernel {report.shipped.name} on {TARGET}, compiled, not timed: {report.registers} registers, "
            f"{report.spills} bytes spilled, {report.instructions:.1f} lane-instructions a value"
            for report in reports
        ]

    lines = benchmark.pedantic(read, rounds=1, iterations=1)
    assert lines, f"no kernel is called {' or '.join(KERNELS)}: {[launch.name for launch in launches]}"
    for line in lines:
        results.note(line)
