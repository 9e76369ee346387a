"""What a run starts from and is measured on: data, initial weights, accuracy."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn

from dprs_kernels.paper import channel_statistics, probe, scatter
from dprs_kernels.paper.config import TrainConfig
from dprs_kernels.paper.data import Data, load
from dprs_kernels.paper.networks import Network
from dprs_kernels.paper.progress import Progress, Silent
from dprs_kernels.paper.recipes import noise_for
from dprs_kernels.privacy.ledger import Ledger

EVALUATED = 1000           # test images at a time
STATISTICS_SEED = 2**62    # added to a test's seed: another stream than the steps' and the ranking's noise


def make_model(network: Network, seed: int) -> nn.Module:
    """Initial weights by a public seed; torch's global generator stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return network.make()


def with_statistics(network: Network) -> Network:
    """The network behind a Standardise layer, which a run fills (channel_statistics.py)."""
    if network.features != "scatter":
        raise ValueError(
            f"normalise: got 'channels' with {network.name}; expected a network on ScatterNet features: leave it out"
        )
    channels = network.input_shape[0]
    return replace(network, make=lambda: nn.Sequential(channel_statistics.Standardise(channels), network.make()))


def fill_statistics(
    model: nn.Module, features: torch.Tensor, ledger: Ledger, *, seed_for_tests: int | None = None
) -> None:
    """Estimates channel statistics of training features [N, K, H, W] privately, charged to `ledger`, and puts them
    into with_statistics' layer. N counts as public, as in q = B/N."""
    layer = next(module for module in model.modules() if isinstance(module, channel_statistics.Standardise))
    _, channels, height, width = features.shape
    images = (channels // scatter.MAPS, height * 2**scatter.J, width * 2**scatter.J)
    noise = noise_for(seed_for_tests, STATISTICS_SEED)
    scales = channel_statistics.public_scales(images)
    layer.fill(
        channel_statistics.estimate(features, scales=scales, expected_size=len(features), noise=noise, ledger=ledger)
    )


def load_data(config: TrainConfig, network: Network, progress: Progress) -> Data:
    data = load(config.dataset, config.data)
    if network.features == "scatter":
        normalise = "group" if config.normalise == "group" else None   # else in the network
        data = scatter.features(data, normalise=normalise, progress=not isinstance(progress, Silent))
    elif network.features == "probe":
        data = probe.features(data, progress=not isinstance(progress, Silent))
    progress.note(f"{config.dataset}: {len(data.train_x)} training and {len(data.test_x)} test images, {data.found_in}")
    return data


@torch.no_grad()
def accuracy_of(model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> float:
    """The share that is right; in evaluation mode, EVALUATED images at a time."""
    was = model.training
    model.eval()
    right = sum(
        int((model(x).argmax(1) == y).sum())
        for x, y in zip(images.split(EVALUATED), labels.split(EVALUATED), strict=True)
    )
    model.train(was)
    return right / len(images)
