"""Which design, tile and group are launched: a pure function, so a table of what it must say."""

import sys

import pytest
import torch

from dprs_kernels import KeepMask, NoiseSource, backends, fused_rs_dp_step
from dprs_kernels.backends import triton, tuning
from dprs_kernels.backends.tuning import A100, H100, L2_SHARE, Config, Device, choose, window
from tests.oracle import Setting

SIZES = [1, 100, 4096, 26_010, 187_000, 550_570, 1_000_000, 1_300_000, 11_000_000, 10**9]


@pytest.mark.parametrize(
    ("size", "element_size", "device", "expected"),
    [
        (26_010, 4, A100, Config("B", 1024, 8, 16, 5)),
        (550_570, 4, A100, Config("B", 4096, 8, 2, 1)),
        (550_570, 4, H100, Config("B", 2048, 8, 4, 1)),
        (550_570, 2, A100, Config("B", 4096, 8, 4, 1)),
        (1_300_000, 2, A100, Config("B", 4096, 8, 2, 1)),
        (1_300_000, 4, A100, Config("A")),                      # no group of two fits
        (11_000_000, 2, H100, Config("A")),
        (550_570, 4, Device(4 * 2**20, 304), Config("A")),      # MI300X: 4 MB of L2 an XCD
        (550_570, 8, H100, Config("A")),
    ],
)
def test_the_papers_networks(size, element_size, device, expected):
    assert choose(size, element_size, device) == expected


@pytest.mark.parametrize("device", [A100, H100, Device(96 * 2**20, 144), Device(2**20, 20)])
@pytest.mark.parametrize("element_size", [2, 4])
def test_a_window_always_fits_and_programs_have_work(device, element_size):
    for size in SIZES:
        config = choose(size, element_size, device)
        if config.design == "B":
            assert window(size, element_size, config.group, config.lag) <= L2_SHARE * device.l2
            assert config.group >= 2
            resident = device.processors * tuning.RESIDENT_THREADS // (32 * config.warps)
            assert config.lag * -(-size // config.columns) >= tuning.IN_FLIGHT * resident
            assert config.columns * element_size >= 32 * config.warps * tuning.VECTOR   # a vector a thread


def test_the_override_is_scoped():
    device = torch.device("cpu")
    chosen = tuning.config_for(26_010, 4, device)
    with tuning.override(Config("A")):
        assert tuning.config_for(26_010, 4, device) == Config("A")
    assert tuning.config_for(26_010, 4, device) == chosen


def test_rows_are_split_only_where_programs_are_few():
    assert tuning.splits(10_000, 64, A100) == 1
    assert tuning.splits(13, 512, A100) == 34
    assert tuning.splits(13, 8, A100) == 1   # 32 rows are not worth a second program


@pytest.fixture
def param():
    param = torch.nn.Parameter(torch.zeros(3))
    param.grad = torch.full((3,), 7.0)
    return param


def refused(param, match, **change):
    """Raises, with this message, before anything is written."""
    noise = NoiseSource()
    arguments = dict(noise=noise, grad_samples=[torch.zeros(2, 3)], backend="triton", **vars(Setting())) | change
    with pytest.raises(ValueError, match=match):
        fused_rs_dp_step([("w", param)], **arguments)
    assert (param.grad == 7.0).all()
    assert noise.step == 0


def test_a_cpu_tensor_without_the_interpreter(param):
    pytest.importorskip("triton")
    refused(param, "'triton' cannot run on cpu, where w is: it needs tensors on a GPU, got cpu .*TRITON_INTERPRET=1")


def test_missing_triton_names_the_extra(param, monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    triton._triton.cache_clear()
    try:
        refused(param, r"triton cannot be imported .*pip install 'dprs_kernels\[triton\]'.*Available here: reference")
        assert "dprs_kernels[triton]" in backends.unavailable("triton", torch.device("cuda"))
    finally:
        monkeypatch.undo()
        triton._triton.cache_clear()


def test_interpreting_needs_tensors_on_the_cpu(monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(triton, "interpreted", lambda: True)
    assert "tensors must be on the CPU, got cuda:1" in triton.unavailable(torch.device("cuda:1"))


def test_masks_of_cpu_parameters_are_drawn_on_the_cpu():
    keep = KeepMask.draw(torch.nn.Linear(3, 2).named_parameters(), drop_rate=0.5, seed=0, draw=0)
    assert keep.bits.device.type == "cpu"
    assert keep == KeepMask.draw([(2, 3), (2,)], drop_rate=0.5, seed=0, draw=0)
