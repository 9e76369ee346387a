"""The four models of bench_training_step.py: who they are, how many samples a logical batch has, and made-up data.

Data are random: what is measured does not depend on what the images show, and nothing has to be downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

from dprs_kernels.paper.networks import dp_cnn, dp_cnn_s, resnet20

CLASSES, VOCABULARY, TOKENS, WIDTH, HEADS = 10, 1000, 64, 128, 4


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
    micros: tuple[int, ...]         # for non-private SGD: the best ones of --full
    peer_micros: tuple[int, ...]
    rounds: int                     # of the race, after two heats
    full_batch: int                 # with --full
    full_micros: tuple[int, ...]    # for everybody

    def race(self, batch: int) -> str:
        """The name of its race."""
        return f"{self.name}, {batch}"

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
        Model("DP-CNN", dp_cnn, 550_570, (3, 32, 32), 256, (32, 64), (32,), 5, 256, (8, 16, 32, 64, 128, 256)),
        Model("DP-CNN/S", dp_cnn_s, 26_010, (1, 28, 28), 2048, (512,), (256,), 7, 2048,
              (64, 128, 256, 512, 1024, 2048)),
        Model("transformer", Transformer, 534_282, (TOKENS,), 64, (32,), (32,), 7, 256, (8, 16, 32, 64, 128)),
        Model("ResNet-20", resnet20, 268_346, (3, 32, 32), 64, (64,), (32,), 7, 256, (16, 32, 64, 128)),
    )
}   # fmt: skip
