"""The four models of bench_training_step.py: who they are, how many samples a logical batch has, and made-up data.

Data are random: what is measured does not depend on what the images show, and nothing has to be downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional

CLASSES, VOCABULARY, TOKENS, WIDTH, HEADS = 10, 1000, 64, 128, 4


def dp_cnn() -> nn.Module:
    """The paper's DP-CNN."""
    layers: list[nn.Module] = []
    for i, (a, b) in enumerate(((3, 32), (32, 32), (32, 64), (64, 64), (64, 128), (128, 128))):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.Tanh(), *([nn.MaxPool2d(2)] if i % 2 else [])]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(2048, 128), nn.Tanh(), nn.Linear(128, CLASSES))


def dp_cnn_s() -> nn.Module:
    """The paper's DP-CNN/S."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, 2, padding=2), nn.Tanh(), nn.MaxPool2d(2, 1), nn.Conv2d(16, 32, 4, 2), nn.Tanh(),
        nn.MaxPool2d(2, 1), nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, CLASSES),
    )   # fmt: skip


class Layer(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)). Attention of plain Linear layers, which all have rules for."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, t, d = x.shape
        parts = self.qkv(self.norm1(x)).chunk(3, -1)
        q, k, v = (part.view(n, t, HEADS, d // HEADS).transpose(1, 2) for part in parts)   # [n, heads, t, d / heads]
        mixed = functional.scaled_dot_product_attention(q, k, v)
        x = x + self.out(mixed.transpose(1, 2).reshape(n, t, d))
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Tokens [n, 64] to classes: two layers of width 128, positions learned, mean over positions at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.Sequential(Layer(), Layer())
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(TOKENS).repeat(len(x), 1)   # batch first, not expanded: Opacus takes .view of it
        return self.head(self.norm(self.layers(self.words(x) + self.places(places))).mean(1))


class Block(nn.Module):
    """Two 3x3 convolutions around a shortcut without parameters: subsampled, new channels zero."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.stride, self.more = (1 if before == after else 2), after - before
        self.conv1 = nn.Conv2d(before, after, 3, self.stride, padding=1, bias=False)
        self.conv2 = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norm1, self.norm2 = (nn.GroupNorm(4, after, affine=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = self.norm2(self.conv2(functional.relu(self.norm1(self.conv1(x)))))
        shortcut = functional.pad(x[:, :, :: self.stride, :: self.stride], (0, 0, 0, 0, 0, self.more))
        return functional.relu(inner + shortcut)


def resnet20() -> nn.Module:
    """ResNet-20 as GEP trains it: GroupNorm(4) without weights, no bias in convolutions."""
    widths = [16, 16, 16, 16, 32, 32, 32, 64, 64, 64]
    blocks = [Block(a, b) for a, b in pairwise(widths)]
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.GroupNorm(4, 16, affine=False), nn.ReLU(), *blocks,
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, CLASSES),
    )   # fmt: skip


@dataclass(frozen=True)
class Model:
    """The default run tries few micro-batches, --full more. The peers' on DP-CNN, best of two on a busy machine, in
    seconds at 16, 32, 64 and 256: Opacus hooks 1.68 1.50 1.51 1.76, functorch 1.49 1.37 1.57 2.01, ghost
    1.34 1.28 1.57 2.12, BackPACK with the paper's lines 5.35 4.61 4.83 5.36."""

    name: str
    make: Callable[[], nn.Module]
    size: int                       # D
    shape: tuple[int, ...]          # of one input
    batch: int                      # logical
    micros: tuple[int, ...]         # for non-private SGD and for ours, besides its default
    peer_micros: tuple[int, ...]
    rounds: int                     # of the race, after two heats
    full_batch: int                 # with --full
    full_micros: tuple[int, ...]    # for everybody

    def build(self) -> nn.Module:
        """The same weights for everybody."""
        torch.manual_seed(0)
        model = self.make()
        assert sum(p.numel() for p in model.parameters()) == self.size
        return model

    def data(self, samples: int) -> tuple[torch.Tensor, torch.Tensor]:
        random = torch.Generator().manual_seed(4)   # with 1 and 3 a maximum of DP-CNN's pooling is a tie in fp32
        y = torch.randint(0, CLASSES, (samples,), generator=random)
        if self.make is Transformer:
            return torch.randint(0, VOCABULARY, (samples, *self.shape), generator=random), y
        return torch.randn(samples, *self.shape, generator=random), y


MODELS = {
    model.name: model
    for model in (
        Model("DP-CNN", dp_cnn, 550_570, (3, 32, 32), 256, (16, 32, 64), (32,), 3, 256, (8, 16, 32, 64, 128, 256)),
        Model("DP-CNN/S", dp_cnn_s, 26_010, (1, 28, 28), 2048, (256, 512), (256,), 5, 2048,
              (64, 128, 256, 512, 1024, 2048)),
        Model("transformer", Transformer, 534_282, (TOKENS,), 64, (16, 32), (32,), 4, 256, (8, 16, 32, 64, 128)),
        Model("ResNet-20", resnet20, 268_346, (3, 32, 32), 64, (32, 64), (32,), 3, 256, (16, 32, 64, 128)),
    )
}   # fmt: skip
