"""The front door: exact names and signatures that users rely on, and examples that run."""

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest
import torch

import dprs_kernels
from dprs_kernels import GradualCooling, KeepMask, NoiseSource, PrivateSum, fused_rs_dp_step

STEP = ["params", "keep", "max_grad_norm", "noise_multiplier", "expected_batch_size", "noise", "grad_samples",
        "loss_reduction", "clipping", "backend", "grad_scaler", "non_private_diagnostics"]   # fmt: skip


def names(function):
    return [name for name in inspect.signature(function).parameters if name != "self"]


def keyword_only(function):
    rest = list(inspect.signature(function).parameters.values())
    rest = [p for p in rest if p.name not in ("self", "params", "params_or_shapes", "scores")]
    return all(p.kind is p.KEYWORD_ONLY for p in rest)


def test_exports():
    assert sorted(dprs_kernels.__all__) == [
        "ConstantRate", "CustomRate", "GradualCooling", "KeepMask", "NoiseSource", "NonPrivateDiagnostics",
        "PrivateSum", "RSDPOptimizer", "StreamingEngine", "__version__", "fused_rs_dp_step", "per_sample",
    ]   # fmt: skip
    assert all(hasattr(dprs_kernels, name) for name in dprs_kernels.__all__)


def test_signatures():
    assert names(fused_rs_dp_step) == STEP
    assert names(PrivateSum.__init__) == [name for name in STEP if name != "grad_samples"]
    assert names(PrivateSum.add) == ["grad_samples"]
    assert names(PrivateSum.release) == []
    assert names(KeepMask.draw) == ["params_or_shapes", "drop_rate", "seed", "draw", "structure"]
    assert names(KeepMask.from_scores) == ["scores", "drop_rate"]
    assert names(GradualCooling.__init__) == ["final_rate", "epochs", "refresh"]
    assert names(NoiseSource.__init__) == []
    for function in (fused_rs_dp_step, PrivateSum.__init__, KeepMask.draw, KeepMask.from_scores):
        assert keyword_only(function), function
    defaults = {k: p.default for k, p in inspect.signature(fused_rs_dp_step).parameters.items()}
    assert (defaults["keep"], defaults["loss_reduction"], defaults["clipping"], defaults["backend"]) == (
        None, "sum", "flat", "auto",
    )   # fmt: skip


@pytest.mark.parametrize("member", ["count", "size", "drop_rate", "bits", "structure"])
def test_mask_properties_are_read_only(member):
    keep = KeepMask.full([(3,)])
    with pytest.raises(AttributeError):
        setattr(keep, member, 1)


@pytest.mark.parametrize("module", ["layout", "mask", "noise", "optimizer", "outer", "schedule", "step"])
def test_examples_in_docstrings_run(module):
    result = doctest.testmod(importlib.import_module(f"dprs_kernels.{module}"))
    assert result.failed == 0
    assert result.attempted > 0


def readme_block(marker):
    text = (Path(__file__).parents[1] / "README.md").read_text()
    block = re.search(rf"<!-- {marker} -->\s*```python\n(.*?)```", text, re.S)
    assert block, f"README has no block marked {marker!r}"
    return block.group(1)


def test_the_readme_loop_runs():
    """The block in the README, as it stands, on a tiny model."""
    torch.manual_seed(0)
    model = torch.nn.Linear(4, 2)
    data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randint(0, 2, (64,)))
    space = {"model": model, "loader": torch.utils.data.DataLoader(data, batch_size=16), "torch": torch,
             "optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "epochs": 3,
             "loss_fn": torch.nn.functional.cross_entropy}   # fmt: skip
    before = model.weight.detach().clone()
    exec(readme_block("loop"), space)
    assert not torch.equal(before, model.weight.detach())
    assert space["noise"].step == 3 * 4


def test_the_private_run_in_the_readme(tmp_path, monkeypatch, capsys):
    """From the target to the epsilon, as it stands, on small data."""
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(60, 3), torch.randint(0, 2, (60,)))
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
    names = dict(torch=torch, data=data, model=model, q=0.1, steps=10, epochs=3, batch=6.0,
                 loss_fn=torch.nn.CrossEntropyLoss())   # fmt: skip
    exec(readme_block("private run"), names)
    assert 2.5 < float(capsys.readouterr().out) <= 3.0
    assert names["optimizer"].keep.drop_rate == pytest.approx(0.9, abs=0.05)
