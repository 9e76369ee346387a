"""The paper's networks, by name, with their exact numbers of parameters D.

    name               D         input            layers
    dp-cnn             550,570   3 x 32 x 32      six 3x3 convolutions 32, 32, 64, 64, 128, 128, then 128, 10
    dp-cnn-s           26,010    1 x 28 x 28      8x8 and 4x4 convolutions of 16 and 32, then 32, 10
    h-cnn              187,210   243 x 8 x 8      on ScatterNet features: 3x3 convolutions 64, 64, then 10
    h-cnn-s            33,066    81 x 7 x 7       on ScatterNet features: 3x3 convolutions 16, 32, then 32, 10
    linear-scatter     155,530   243 x 8 x 8      one linear layer on ScatterNet features of CIFAR-10, SVHN
    linear-scatter-s   39,700    81 x 7 x 7       the same for Fashion-MNIST, MNIST
    resnet20           268,346   3 x 32 x 32      GEP's: widths 16, 32, 64, GroupNorm without parameters
    linear-probe       12,810    1280             one linear layer on frozen features of an ImageNet network (probe.py)
    digits-cnn         1,898     1 x 8 x 8        ours, for scikit-learn's digits: convolutions 8, 16, then 10

tanh after every hidden layer (resnet20: ReLU), torch's default initial weights. ScatterNet features are
normalised where they are made (scatter.py), which sees one image at a time, or by channel statistics that are estimated
privately in the run (channel_statistics.py). No
layer mixes samples: per_sample, Opacus and BackPACK all take these networks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

COLOUR, GREY = ("cifar10", "svhn"), ("fmnist", "mnist")
CLASSES = 10
GROUPS = 4   # of resnet20's GroupNorm


@dataclass(frozen=True)
class Network:
    """What a recipe has to know of a network before it is made.

    >>> NETWORKS["dp-cnn-s"].size
    26010
    """

    name: str
    make: Callable[[], nn.Module]   # initial weights from torch's global generator
    size: int                       # D: trainable parameters
    input_shape: tuple[int, ...]    # of one image or feature map
    datasets: tuple[str, ...]       # names of data.load that fit
    features: str                   # "pixels"; "scatter", "probe": inputs are scatter.features, probe.features


def dp_cnn() -> nn.Module:
    """[n, 3, 32, 32] -> [n, 10]; pooling halves 32 to 4 in three steps, 128 x 4 x 4 = 2048."""
    layers: list[nn.Module] = []
    for before, width in ((3, 32), (32, 64), (64, 128)):
        layers += [nn.Conv2d(before, width, 3, padding=1), nn.Tanh()]
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 128), nn.Tanh(), nn.Linear(128, CLASSES))


def dp_cnn_s() -> nn.Module:
    """[n, 1, 28, 28] -> [n, 10]; sides 28, 13, 12 (pooled), 5, 4 (pooled): 32 x 4 x 4 = 512."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=2), nn.Tanh(), nn.MaxPool2d(2, stride=1),
        nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, stride=1),
        nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, CLASSES),
    )   # fmt: skip


def h_cnn() -> nn.Module:
    """[n, 243, 8, 8] -> [n, 10]."""
    return nn.Sequential(
        nn.Conv2d(243, 64, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2),
        nn.Conv2d(64, 64, 3, padding=1), nn.Tanh(),
        nn.Flatten(), nn.Linear(1024, CLASSES),
    )   # fmt: skip


def h_cnn_s() -> nn.Module:
    """[n, 81, 7, 7] -> [n, 10]; the first stride halves 7 to 4."""
    return nn.Sequential(
        nn.Conv2d(81, 16, 3, stride=2, padding=1), nn.Tanh(),
        nn.Conv2d(16, 32, 3, padding=1), nn.Tanh(),
        nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, CLASSES),
    )   # fmt: skip


def linear_scatter() -> nn.Module:
    """[n, 243, 8, 8] -> [n, 10]."""
    return nn.Sequential(nn.Flatten(), nn.Linear(243 * 8 * 8, CLASSES))


def linear_scatter_s() -> nn.Module:
    """[n, 81, 7, 7] -> [n, 10]."""
    return nn.Sequential(nn.Flatten(), nn.Linear(81 * 7 * 7, CLASSES))


def linear_probe() -> nn.Module:
    """[n, 1280] -> [n, 10]."""
    return nn.Sequential(nn.Linear(1280, CLASSES))


def digits_cnn() -> nn.Module:
    """[n, 1, 8, 8] -> [n, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2),
        nn.Conv2d(8, 16, 3, padding=1), nn.Tanh(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64, CLASSES),
    )   # fmt: skip


class Block(nn.Module):
    """relu(shortcut(x) + norm(conv(relu(norm(conv(x)))))). The shortcut has no parameters: every second pixel where the
    side halves, zeros for the new channels."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride=stride, padding=1, bias=False)
        self.norm1, self.relu1 = nn.GroupNorm(GROUPS, width, affine=False), nn.ReLU()
        self.conv2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm2, self.relu2 = nn.GroupNorm(GROUPS, width, affine=False), nn.ReLU()
        self.stride, self.new = stride, width - before

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm2(self.conv2(self.relu1(self.norm1(self.conv1(x)))))
        short = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.new))
        return self.relu2(out + short)


def resnet20() -> nn.Module:
    """[n, 3, 32, 32] -> [n, 10]: three stages of three blocks, mean over positions."""
    widths = (16, 16, 16, 16, 32, 32, 32, 64, 64, 64)
    blocks = [Block(a, b, 1 if a == b else 2) for a, b in pairwise(widths)]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.GroupNorm(GROUPS, 16, affine=False), nn.ReLU(), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES),
    )   # fmt: skip


NETWORKS: dict[str, Network] = {
    network.name: network
    for network in (
        Network("dp-cnn", dp_cnn, 550_570, (3, 32, 32), COLOUR, "pixels"),
        Network("dp-cnn-s", dp_cnn_s, 26_010, (1, 28, 28), GREY, "pixels"),
        Network("h-cnn", h_cnn, 187_210, (243, 8, 8), COLOUR, "scatter"),
        Network("h-cnn-s", h_cnn_s, 33_066, (81, 7, 7), GREY, "scatter"),
        Network("linear-scatter", linear_scatter, 155_530, (243, 8, 8), COLOUR, "scatter"),
        Network("linear-scatter-s", linear_scatter_s, 39_700, (81, 7, 7), GREY, "scatter"),
        Network("resnet20", resnet20, 268_346, (3, 32, 32), COLOUR, "pixels"),
        Network("linear-probe", linear_probe, 12_810, (1280,), (*COLOUR, *GREY), "probe"),
        Network("digits-cnn", digits_cnn, 1_898, (1, 8, 8), ("digits",), "pixels"),
    )
}


def network_for(name: str, dataset: str) -> Network:
    """NETWORKS[name], refused where it does not fit the dataset's images.

    >>> network_for("h-cnn-s", "fmnist").features
    'scatter'
    """
    if name not in NETWORKS:
        raise ValueError(f"network: got {name!r}; expected one of {', '.join(NETWORKS)}")
    network = NETWORKS[name]
    if dataset not in network.datasets:
        fitting = [other.name for other in NETWORKS.values() if dataset in other.datasets]
        remedy = f"for {dataset} take {' or '.join(fitting)}" if fitting else "see data.load for the datasets"
        raise ValueError(
            f"network: {name} takes {' or '.join(network.datasets)} (inputs of {list(network.input_shape)}), not "
            f"{dataset!r}; {remedy}"
        )
    return network
