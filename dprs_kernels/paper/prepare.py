"""What a run starts from and is measured on: data, initial weights, accuracy."""

from __future__ import annotations

import torch
from torch import nn

from dprs_kernels.paper.config import TrainConfig
from dprs_kernels.paper.data import Data, load
from dprs_kernels.paper.networks import Network
from dprs_kernels.paper.progress import Progress, Silent

EVALUATED = 1000   # test images at a time


def make_model(network: Network, seed: int) -> nn.Module:
    """Initial weights by a public seed; torch's global generator stays as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return network.make()


def load_data(config: TrainConfig, network: Network, progress: Progress) -> Data:
    data = load(config.dataset, config.data)
    if network.features == "scatter":
        from dprs_kernels.paper.scatter import features

        data = features(data, progress=not isinstance(progress, Silent))
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
