"""The audit's suites on the Triton kernels, in the interpreter at its smallest size; on a GPU in full."""

import pytest

from dprs_kernels.backends import launches
from dprs_kernels.privacy.audit import SUITES, audit
from tests.triton.conftest import INTERPRETED


@pytest.fixture(autouse=True)
def wide_tiles(monkeypatch):
    """The interpreter pays by the tile: noise of 8,192 coordinates at once. A coordinate's noise does not depend on
    its tile (test_noise.py)."""
    release = launches.release

    def wide(*arguments):
        launch = release(*arguments)
        return launches.Launch({**launch.constants, "BLOCKS": 1024}, launch.warps, 8192)

    if INTERPRETED:
        monkeypatch.setattr(launches, "release", wide)


@pytest.mark.parametrize("suite", SUITES)
def test_the_suite_passes(suite):
    report = audit(backend="triton", suites=[suite])
    assert report.passed, str(report)
    assert report.backend == "triton"


# S3, S5 and S6 look at noise, whatever the mask is; S1 with mixed masks takes half a minute, and runs on the CPU.
@pytest.mark.parametrize(
    ("suite", "structure"), [("S1", "row"), ("S2", "row"), ("S4", "row"), ("S2", "mixed"), ("S4", "mixed")]
)
def test_the_suite_passes_with_structured_masks(suite, structure):
    report = audit(backend="triton", suites=[suite], structure=structure)
    assert report.passed, str(report)
