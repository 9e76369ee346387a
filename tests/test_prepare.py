"""Features of a run: ScatterNet's normalised privately inside the run, frozen ones, and what is loaded for each."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from dprs_kernels.paper import channel_statistics, plots, prepare
from dprs_kernels.paper.config import TrainConfig
from dprs_kernels.paper.data import Data
from dprs_kernels.paper.networks import NETWORKS
from dprs_kernels.paper.progress import Silent
from dprs_kernels.paper.train import RunFailed, resume, train
from dprs_kernels.privacy.checkpoint import TrainingState
from dprs_kernels.privacy.ledger import Ledger

pytest.importorskip("opacus")       # the accountant
pytest.importorskip("matplotlib")
pytest.importorskip("kymatio")      # public_scales
K = 243


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(plots, "plot", lambda *args, **more: None)
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def features() -> Data:
    """As ScatterNet's of CIFAR-10, not normalised: channels of very different sizes."""
    generator = torch.Generator().manual_seed(0)
    x = channel_statistics.public_scales((3, 32, 32)).view(1, K, 1, 1) * torch.rand(80, K, 8, 8, generator=generator)
    return Data("cifar10", x[:64], torch.arange(64) % 10, x[64:], torch.arange(16) % 10, 10, "the test")


def config(**changes: object) -> TrainConfig:
    settings = dict(epochs=2, batch=16, lr=0.1, epsilon=4.0, final_rate=0.5)
    return TrainConfig.of("cifar10", "linear-scatter", **{**settings, **changes})


def mean_in(folder: Path) -> torch.Tensor:
    return torch.load(folder / "checkpoint.pt", weights_only=True)["model"]["0.mean"]


def test_channel_statistics_are_charged_and_paid_for(features: Data, tmp_path: Path) -> None:
    """Two releases at q = 1 in the run's ledger, and the steps' noise is larger by what they cost: epsilon holds."""
    before = features.train_x.clone()
    assert config().normalise == "channels"
    result = train(config(), out=tmp_path / "run", data=features)
    assert (result.ended, result.steps, result.charged) == ("finished", 8, 10)
    assert 3.9 < result.epsilon <= 4.0
    assert "channel statistics, estimated privately: two releases, in epsilon" in result.summary()
    charges = list(Ledger.read(tmp_path / "run" / "ledger.jsonl").records())
    assert [charge.sample_rate for charge in charges] == [1.0] * 2 + [0.25] * 8
    assert len({charge.record.key_id for charge in charges}) == 2   # the statistics have a noise key of their own
    assert result.sigma > train(config(normalise="group"), data=features).sigma
    assert torch.equal(features.train_x, before)                    # the data is shared with other runs
    assert mean_in(tmp_path / "run").abs().max() > 0


def test_a_resumed_run_does_not_pay_twice(features: Data, tmp_path: Path) -> None:
    steps = iter([False, False, False, True])
    result = train(config(), out=tmp_path / "run", data=features, stop=lambda: next(steps))
    assert (result.ended, result.charged) == ("interrupted", 5)
    mean = mean_in(tmp_path / "run")
    result = resume(tmp_path / "run", data=features)
    assert (result.ended, result.steps, result.charged) == ("finished", 8, 10)
    assert torch.equal(mean_in(tmp_path / "run"), mean)


def test_killed_before_the_first_step(features: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The statistics are in a checkpoint before a step is taken."""

    def killed(*args: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("dprs_kernels.paper.train._Run._loop", killed)
        with pytest.raises(KeyboardInterrupt):
            train(config(), out=tmp_path / "run", data=features)
    assert (Ledger.read(tmp_path / "run" / "ledger.jsonl").steps, mean_in(tmp_path / "run").shape) == (2, (K, 1, 1))
    assert resume(tmp_path / "run", data=features).charged == 10


def test_statistics_are_not_paid_for_above_the_budget(
    features: Data, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that dies between the estimate and its checkpoint pays again, until the budget does not: then it ends
    before the release, not after."""

    def full(*args: object) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(TrainingState, "save", full)
    made = config(epsilon=1.0, epochs=1)
    with pytest.raises(RunFailed, match="after 2 charged steps: OSError: No space left on device"):
        train(made, out=tmp_path / "run", data=features)
    message = r"epsilon: estimating channel statistics would bring it to 1\.\d+, above the budget of 1, .* 2 releases"
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            resume(tmp_path / "run", data=features)
    assert Ledger.read(tmp_path / "run" / "ledger.jsonl").steps == 2


def test_seeded_runs_are_equal(features: Data, tmp_path: Path) -> None:
    for name in ("a", "b"):
        train(config(insecure_seeded_noise=True, epochs=1), out=tmp_path / name, data=features)
    assert torch.equal(mean_in(tmp_path / "a"), mean_in(tmp_path / "b"))
    keys = {charge.record.key_id for charge in Ledger.read(tmp_path / "a" / "ledger.jsonl").records()}
    assert len(keys) == 2   # seeded, too, no stream serves both


def test_channels_are_refused_without_scatternet() -> None:
    with pytest.raises(ValueError, match="normalise: got 'channels' with dp-cnn; expected a network on ScatterNet"):
        train(TrainConfig.of("cifar10", normalise="channels"))
    with pytest.raises(ValueError, match="normalise: got 'batch'; expected 'group' or 'channels'"):
        TrainConfig.of("cifar10", normalise="batch")


def test_each_network_gets_its_features(features: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(prepare, "load", lambda *args: features)
    monkeypatch.setattr(prepare.scatter, "features", lambda data, **more: asked.append(("scatter", more)) or data)
    monkeypatch.setattr(prepare.probe, "features", lambda data, **more: asked.append(("probe", more)) or data)
    made = config()
    for model, normalise in (("h-cnn", "group"), ("h-cnn", "channels"), ("linear-probe", "group"), ("dp-cnn", "group")):
        prepare.load_data(replace(made, model=model, normalise=normalise), NETWORKS[model], Silent())
    assert asked == [
        ("scatter", dict(normalise="group", progress=False)), ("scatter", dict(normalise=None, progress=False)),
        ("probe", dict(progress=False)),
    ]   # fmt: skip
