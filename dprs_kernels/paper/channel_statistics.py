"""Mean and deviation of feature channels, estimated privately: CIFAR-10's normalisation of ScatterNet features.

    m_i = mean over positions of x_i / s              [K] per image, s public, || m_i || clipped to 2 sqrt(K)
    q_i = mean over positions of (x_i / s)^2          [K] per image,           || q_i || clipped to 2 sqrt(K)
    M   = (sum_i m_i + 2 sigma sqrt(K) z) / N         Q likewise: two Gaussian mechanisms, every image in both
    mean = s M        std = s sqrt(max(Q - M^2, 0.01))

s brings all K channels to one size, since maps of order 0, 1 and 2 differ a hundredfold and isotropic noise would
drown the small ones. It is the root mean square of each channel over made-up images (noise with the 1/f spectrum of
photographs, from a fixed seed), so it says nothing of the data. Clip, sum and noise are PrivateSum's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn

from dprs_kernels.layout import Layout
from dprs_kernels.masked_step import StepRecord
from dprs_kernels.noise import NoiseSource
from dprs_kernels.paper.scatter import transform
from dprs_kernels.plan import make_plan
from dprs_kernels.privacy.ledger import POISSON, Ledger
from dprs_kernels.step import PrivateSum

NOISE_MULTIPLIER = 8.0      # of each of the two, as the works on handcrafted features have it
LEAST_VARIANCE = 0.01       # in units of s^2: noise may push Q below M^2
MADE_UP, SEED = 64, 0       # images behind s
BOUND = 2.0                 # times sqrt(K), the norm of an image whose every channel is as large as s
CHUNK = 1024


@dataclass(frozen=True, eq=False)
class ChannelStatistics:
    """Public once made: its privacy is in the ledger that took `records`."""

    mean: torch.Tensor                  # [K] float32
    std: torch.Tensor                   # [K] float32
    records: tuple[StepRecord, ...]     # two releases at sample rate 1


class Standardise(nn.Module):
    """(x - mean) / std per channel, [n, K, H, W]: the layer before a network. Its numbers are buffers, so that they go
    into checkpoints with the weights; until `fill` it passes x through.

    >>> Standardise(3)(torch.ones(1, 3, 2, 2)).mean().item()
    1.0
    """

    mean: torch.Tensor   # [K, 1, 1]
    std: torch.Tensor    # [K, 1, 1]

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(channels, 1, 1))
        self.register_buffer("std", torch.ones(channels, 1, 1))

    def fill(self, statistics: ChannelStatistics) -> None:
        for buffer, values in ((self.mean, statistics.mean), (self.std, statistics.std)):
            buffer.copy_(values.view_as(buffer))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - self.mean) / self.std


def cost(channels: int, noise_multiplier: float = NOISE_MULTIPLIER) -> list[tuple[float, float, int]]:
    """What estimate will charge, for accounting.calibrate's `besides`: two releases at sample rate 1.

    >>> [(round(noise, 3), q, count) for noise, q, count in cost(243)]
    [(8.0, 1.0, 2)]
    """
    plan = make_plan(
        Layout.of([(channels,)]), max_grad_norm=_bound(channels), noise_multiplier=noise_multiplier,
        expected_batch_size=1,
    )   # fmt: skip
    return [(noise_multiplier * _bound(channels) / plan.sensitivity(channels), 1.0, 2)]


def estimate(
    x: torch.Tensor,
    *,
    scales: torch.Tensor,
    expected_size: float,
    noise: NoiseSource,
    ledger: Ledger,
    noise_multiplier: float = NOISE_MULTIPLIER,
) -> ChannelStatistics:
    """The statistics of training features x [N, K, H, W], charged to `ledger` before they are returned.

    scales: s [K], public (public_scales).
    expected_size: the divisor N, a public number: 50,000 for CIFAR-10. Under add/remove adjacency len(x) is private.
    ledger: gets two lines, Poisson at sample rate 1. With sigma = 8 they alone are epsilon 0.70 at delta 1e-5 (RDP):
        the same ledger has to take the training steps.

    >>> made = estimate(torch.rand(500, 3, 2, 2), scales=torch.ones(3), expected_size=500, noise=NoiseSource(),
    ...                 ledger=Ledger(), noise_multiplier=1.0)
    >>> made.mean.shape, len(made.records)
    (torch.Size([3]), 2)
    """
    if x.dim() != 4 or scales.shape != x.shape[1:2]:
        raise ValueError(f"x: got {list(x.shape)} with scales {list(scales.shape)}; expected [N, K, H, W] and [K]")
    if not bool(((scales > 0) & scales.isfinite()).all()):
        raise ValueError("scales: expected K finite numbers above 0; public_scales makes them")
    if not isinstance(ledger, Ledger):
        raise ValueError(f"ledger: got {type(ledger).__name__}; expected the run's Ledger, which is charged twice here")
    s = scales.float()
    released, records = [], []
    for power in (1, 2):
        record, values = _release(x, s, power, float(expected_size), noise, noise_multiplier)
        ledger.append(record, sampler=POISSON, sample_rate=1.0, adjacency="add_remove")
        records.append(record)
        released.append(values)
    mean, square = released
    deviation = (square - mean.square()).clamp(min=LEAST_VARIANCE).sqrt()
    return ChannelStatistics(mean * s, deviation * s, tuple(records))


def public_scales(input_shape: tuple[int, int, int]) -> torch.Tensor:
    """s [81 C] for images of (C, H, W): the root mean square of each ScatterNet map over made-up images."""
    colours, height, width = input_shape
    generator = torch.Generator().manual_seed(SEED)
    white = torch.randn(MADE_UP, colours, height, width, generator=generator)
    frequencies = torch.hypot(torch.fft.fftfreq(height)[:, None], torch.fft.rfftfreq(width)[None, :])
    frequencies[0, 0] = 1 / max(height, width)   # the mean too, as if it were the lowest frequency
    images = torch.fft.irfft2(torch.fft.rfft2(white) / frequencies, s=(height, width))
    images /= images.std()
    with torch.no_grad():
        return transform((height, width))(images).square().mean((0, 2, 3)).sqrt()


def _bound(channels: int) -> float:
    return BOUND * math.sqrt(channels)


def _release(
    x: torch.Tensor, scales: torch.Tensor, power: int, size: float, noise: NoiseSource, noise_multiplier: float
) -> tuple[StepRecord, torch.Tensor]:
    """One Gaussian mechanism, [K]: the mean over images of their mean over positions of (x / s)^power."""
    target = torch.zeros(len(scales))
    total = PrivateSum(
        [("channels", target)], max_grad_norm=_bound(len(scales)), noise_multiplier=noise_multiplier,
        expected_batch_size=size, noise=noise, backend="auto",
    )   # fmt: skip
    for chunk in x.split(CHUNK):
        total.add([(chunk / scales.view(1, -1, 1, 1)).pow(power).mean((2, 3))])
    total.release()
    assert target.grad is not None   # release wrote it
    return total.record(), target.grad
