"""The run's folder and its configuration: what is refused, what survives, the paper's settings."""

import dataclasses
import json
from pathlib import Path

import pytest

from dprs_kernels.paper import train_command
from dprs_kernels.paper.config import DATASETS, PAPER, TrainConfig
from dprs_kernels.paper.networks import NETWORKS
from dprs_kernels.paper.run_folder import Metrics, RunFolder

ROW = Metrics(1, 4, 4, 0.25, 0.5, 1.5, "poisson", 2.0, 2.0)


def config() -> TrainConfig:
    return TrainConfig.of("digits", epochs=3, sigma=1.0)


def test_folder_refuses(tmp_path: Path) -> None:
    RunFolder.create(tmp_path / "run", config())
    with pytest.raises(ValueError, match=r"out: .*run holds a run already; go on with it \(--resume .*run\), or name"):
        RunFolder.create(tmp_path / "run", config())
    with pytest.raises(ValueError, match=r"out: .* exists and is not an empty folder; name another"):
        RunFolder.create(tmp_path, config())
    with pytest.raises(ValueError, match="out: cannot write"):
        RunFolder.create(tmp_path / "run" / "config.json" / "x", config())
    with pytest.raises(ValueError, match=r"run folder: .* has no config.json"):
        RunFolder.open(tmp_path)
    for text, message in (
        ("{", "is no JSON"), ("[]", "is no training configuration"),
        (json.dumps({"format": 1, "dataset": "digits", "x": 2}), "unknown or missing batch, clip, epochs"),
    ):   # fmt: skip
        (tmp_path / "run" / "config.json").write_text(text)
        with pytest.raises(ValueError, match=f"config.json: {message}"):
            RunFolder.open(tmp_path / "run")


def test_folder_metrics(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path / "run", config())
    assert folder.metrics() == []
    for epoch in (1, 2, 3):
        folder.append(dataclasses.replace(ROW, epoch=epoch))
    folder.append(dataclasses.replace(ROW, epoch=2, epsilon=None))   # taken again
    assert [(row.epoch, row.epsilon) for row in folder.metrics()] == [(1, 1.5), (2, None)]
    file = folder.path / "metrics.csv"
    file.write_text(file.read_text() + "3,12,1")   # killed while another program wrote
    assert len(folder.metrics()) == 2
    file.write_text(file.read_text() + "\n")
    with pytest.raises(ValueError, match=r"metrics.csv: line 4 is no row of metrics"):
        folder.metrics()


def test_config_survives_json() -> None:
    ranked = TrainConfig.of("digits", algorithm=4, insecure_seeded_noise=True)
    for made in (config(), ranked, TrainConfig.of("cifar10")):
        assert TrainConfig.from_json(made.to_json()) == made


def test_the_papers_settings() -> None:
    line = TrainConfig.of("cifar10")
    assert (line.model, line.batch, line.lr, line.momentum, line.clip, line.epochs, line.final_rate) == (
        "dp-cnn", 1000, 1.0, 0.0, 1.0, 48, 0.9
    )   # fmt: skip
    assert (TrainConfig.of("fmnist").delta, TrainConfig.of("fmnist").epsilon) == (1e-5, 3.0)
    for dataset, model in PAPER:
        assert dataset in NETWORKS[model].datasets
    assert {(dataset, model) for dataset, model in DATASETS.items()} <= set(PAPER)
    assert set(PAPER) == {(dataset, name) for name, network in NETWORKS.items() for dataset in network.datasets}
    assert set(train_command.MODELS) == set(NETWORKS)
    assert TrainConfig.of("fmnist", optimizer="adam").lr == 1e-3
