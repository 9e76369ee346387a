"""ScatterNet features (J = 2, L = 8): fixed wavelets in place of the first layers, computed once and kept on disk.

    S x = [ x * phi,  |x * psi_1| * phi,  ||x * psi_1| * psi_2| * phi ]       at every fourth pixel
    1 + 16 + 64 = 81 maps per colour: [1, 28, 28] -> [81, 7, 7], [3, 32, 32] -> [243, 8, 8]

Then, by default, GroupNorm without parameters, 27 groups: each image by itself, so it costs no privacy. It is part of
the features here and not of the network, since it would give the same at every epoch. CIFAR-10's other way, channel
statistics estimated privately, is channel_statistics.py; it takes features(..., normalise=None) and costs epsilon.

The files hold features before normalisation (feature_cache.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from dprs_kernels.paper.data import SOURCES, Channels, Data
from dprs_kernels.paper.feature_cache import cache_folder, cached

J, L = 2, 8
MAPS = 1 + J * L + L * L * J * (J - 1) // 2   # 81 per colour
GROUPS = 27
VERSION = 1   # of the files: part of their digest
# What the works on handcrafted features feed in, where it is not data.load's: ImageNet's constants.
INPUTS: dict[str, tuple[Channels, Channels]] = {"cifar10": ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))}


def features(
    data: Data, cache_dir: str | Path | None = None, *, normalise: str | None = "group", progress: bool = True
) -> Data:
    """`data` with ScatterNet features [N, 81 C, H/4, W/4] in the place of its images.

    cache_dir: where they are kept; None is ~/.cache/dprs_kernels (or $XDG_CACHE_HOME). 1.1 GB for Fashion-MNIST, 3.7 GB
        for CIFAR-10. A file is named by a digest of images and settings, so other data never meets it, and appears
        whole or not at all.
    normalise: "group", or None for the features as they are.
    Fashion-MNIST takes 155 s of one core the first time, 6 s later; CIFAR-10 about three times that (from 300 images).
    """
    if normalise not in ("group", None):
        raise ValueError(f"normalise: got {normalise!r}; expected 'group', or None for channel_statistics")
    folder = cache_folder(cache_dir)
    found = {}
    for split in ("train", "test"):
        images = getattr(data, f"{split}_x")
        _check(images, data.name)
        settings = f"{VERSION} J={J} L={L} kymatio={_kymatio()[1]} inputs={_inputs(data.name)}"
        found[split] = cached(
            folder, f"scatter-{data.name}-{split}", images, _from_pixels(images, data.name), shape=_shape(images),
            settings=settings, title=f"ScatterNet, {data.name} {split}", progress=progress,
        )   # fmt: skip
        if normalise == "group":
            group_normalise_(found[split])
    return replace(
        data, train_x=found["train"], test_x=found["test"],
        found_in=f"{data.found_in}; ScatterNet features in {folder}",
    )   # fmt: skip


@functools.lru_cache
def transform(shape: tuple[int, int]) -> Callable[[torch.Tensor], torch.Tensor]:
    """[n, C, H, W] -> [n, 81 C, H/4, W/4] float32, for images of `shape` = (H, W)."""
    scattering = _kymatio()[0](J=J, shape=shape, L=L)
    return lambda x: scattering(x.contiguous()).flatten(1, 2)


def group_normalise_(x: torch.Tensor) -> torch.Tensor:
    """GroupNorm without parameters, in place: each of 27 groups of channels of each image to mean 0, variance 1.

    >>> round(float(group_normalise_(torch.rand(1, 81, 7, 7)).var(correction=0)), 2)
    1.0
    """
    for chunk in x.split(1024):
        chunk.copy_(functional.group_norm(chunk, GROUPS))
    return x


def _kymatio() -> tuple[Any, str]:
    """The transform's class, and the version."""
    try:
        # kymatio.torch also loads the 3-D transform, which asks scipy for a name that 1.17 removed; this does not.
        from kymatio import __version__
        from kymatio.scattering2d.frontend.torch_frontend import ScatteringTorch2D
    except ImportError as error:
        raise ImportError(f'ScatterNet needs kymatio ({error}): pip install "dprs_kernels[paper]"') from error
    return ScatteringTorch2D, __version__


def _inputs(name: str) -> tuple[list[float], list[float]] | None:
    """(scale, shift) per colour that takes data.load's constants off and puts the transform's own on."""
    if name not in INPUTS:
        return None
    (mean, std), source = INPUTS[name], SOURCES[name]
    scale = [a / b for a, b in zip(source.std, std, strict=True)]
    shift = [(a - b) / c for a, b, c in zip(source.mean, mean, std, strict=True)]
    return scale, shift


def _from_pixels(images: torch.Tensor, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
    each, change = transform((images.shape[2], images.shape[3])), _inputs(name)
    if change is None:
        return each
    scale, shift = (torch.tensor(values).view(1, -1, 1, 1) for values in change)
    return lambda x: each(x * scale + shift)


def _shape(images: torch.Tensor) -> tuple[int, int, int]:
    _, colours, height, width = images.shape
    return MAPS * colours, height // 2**J, width // 2**J


def _check(images: torch.Tensor, name: str) -> None:
    if images.dim() != 4 or images.shape[1] not in (1, 3) or any(side % 2**J or side < 16 for side in images.shape[2:]):
        raise ValueError(
            f"data: {name} holds {list(images.shape)}; expected images [N, 1 or 3, H, W] with sides of at least 16, "
            f"multiples of {2**J}, as fmnist, mnist, cifar10 and svhn have"
        )
