"""Datasets by name, from the standard files, wherever they lie; images come out normalised by public constants.

    x = (bytes / 255 - mean) / std        per channel

    name      mean, std                                                         files
    fmnist    0, 1                                                              idx, plain or .gz (idx.py)
    mnist     0, 1                                                              idx, plain or .gz
    cifar10   (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), the paper's   python or binary (cifar.py)
    svhn      0.5, 0.5: the range [-1, 1]; the paper's code has no SVHN         .mat (svhn.py)
    digits    0, 1 (of 16 grey levels)                                          inside scikit-learn

Searched in this order: the folder given, $DPRS_DATA, Debian's package for Fashion-MNIST. Nothing is downloaded unless
asked.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch

from dprs_kernels.paper import cifar, idx, svhn
from dprs_kernels.paper.idx import Bytes, Raw

VARIABLE = "DPRS_DATA"
CLASSES = 10
DIGITS_TEST, DIGITS_SEED = 360, 0   # held out of 1797, by a public permutation

Channels = tuple[float, ...]


@dataclass(frozen=True, eq=False)
class Data:
    """A dataset in memory. Images [N, C, H, W] float32, labels [N] int64."""

    name: str
    train_x: torch.Tensor
    train_y: torch.Tensor
    test_x: torch.Tensor
    test_y: torch.Tensor
    classes: int
    found_in: str   # where it was read from, for people


class _Source(NamedTuple):
    """How one dataset is found."""

    read: Callable[..., Raw | None]     # (folder, name=) -> Raw, or None where no file of it is
    files: str                          # what a person looks for
    folders: tuple[str, ...]            # inside a searched folder, in this order
    mean: Channels
    std: Channels
    torchvision: str                    # class that downloads it
    remedy: str
    debian: str | None = None


IDX_FILES = "train-images-idx3-ubyte, train-labels-idx1-ubyte, t10k-images-idx3-ubyte, t10k-labels-idx1-ubyte (or .gz)"
SOURCES = {
    "fmnist": _Source(
        idx.read, IDX_FILES, ("fashion-mnist", "fmnist", "FashionMNIST/raw", "."), (0.0,), (1.0,), "FashionMNIST",
        "apt-get install dataset-fashion-mnist, or the four files of github.com/zalandoresearch/fashion-mnist",
        debian="/usr/share/datasets/fashion-mnist",
    ),
    "mnist": _Source(
        idx.read, IDX_FILES, ("mnist", "MNIST/raw", "."), (0.0,), (1.0,), "MNIST", "the four files of the MNIST page",
    ),
    "cifar10": _Source(
        cifar.read, "cifar-10-batches-bin/*.bin or cifar-10-batches-py/*, six files", ("cifar10", "."),
        (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), "CIFAR10",
        "cifar-10-binary.tar.gz or cifar-10-python.tar.gz of www.cs.toronto.edu/~kriz/cifar.html, unpacked",
    ),
    "svhn": _Source(
        svhn.read, "train_32x32.mat, test_32x32.mat", ("svhn", "SVHN", "."), (0.5, 0.5, 0.5), (0.5, 0.5, 0.5), "SVHN",
        "the two files, format 2, of ufldl.stanford.edu/housenumbers",
    ),
}   # fmt: skip
NAMES = (*SOURCES, "digits")


def load(name: str, root: str | Path | None = None, *, download: bool = False) -> Data:
    """The dataset `name` ("fmnist", "mnist", "cifar10", "svhn", "digits").

    root: a folder that holds the files, or a folder of them (root/cifar10, root/FashionMNIST/raw, ...). Where they are
        not in it, $DPRS_DATA and Debian's folder are searched too: found_in tells.
    download: where no folder has them, torchvision fetches them into root or $DPRS_DATA.
    ValueError where files are missing, cut or something else; it names the file, what was expected and what was found.
    """
    if name not in NAMES:
        raise ValueError(f"dataset: got {name!r}; expected one of {', '.join(NAMES)}")
    if name == "digits":
        return _digits()
    source = SOURCES[name]
    raw = _search(name, source, root)
    if raw is None and download:
        _download(name, source, root)
        raw = _search(name, source, root)
    if raw is None:
        raise ValueError(
            f"dataset: no file of {name} in {'; '.join(_searched(source, root))}; expected {source.files}; get "
            f"{source.remedy}, and give its folder (--data DIR or ${VARIABLE}), or download it (dprs train "
            "--download, needs torchvision and a network)"
        )
    train_x, test_x = (normalised(x, source.mean, source.std) for x in (raw.train_x, raw.test_x))
    train_y, test_y = (torch.from_numpy(y.astype(np.int64)) for y in (raw.train_y, raw.test_y))
    return Data(name, train_x, train_y, test_x, test_y, CLASSES, raw.found_in)


def normalised(images: Bytes, mean: Channels, std: Channels) -> torch.Tensor:
    """(images / 255 - mean) / std per channel, float32, from bytes [N, C, H, W].

    >>> normalised(np.full((1, 1, 1, 1), 255, np.uint8), (0.5,), (0.5,)).item()
    1.0
    """
    x = torch.tensor(images).float().div_(255)   # one float copy; CIFAR-10 has 614 MB of them
    shape = (1, len(mean), 1, 1)
    return x.sub_(torch.tensor(mean).view(shape)).div_(torch.tensor(std).view(shape))


def _roots(root: str | Path | None) -> list[Path]:
    if root is not None and not Path(root).expanduser().is_dir():
        raise ValueError(f"data folder: {root} is not a folder; make it, or leave it out to search ${VARIABLE}")
    return [Path(place).expanduser() for place in (root, os.environ.get(VARIABLE)) if place]


def _search(name: str, source: _Source, root: str | Path | None) -> Raw | None:
    folders = [place / inner for place in _roots(root) for inner in source.folders]
    for folder in (*folders, *([Path(source.debian)] if source.debian else [])):
        if (raw := source.read(folder, name=name)) is not None:
            return raw
    return None


def _searched(source: _Source, root: str | Path | None) -> list[str]:
    """For the message: places, not every sub-folder tried."""
    variable = os.environ.get(VARIABLE)
    places = [str(root)] if root is not None else []
    places.append(f"${VARIABLE} ({variable or 'not set'})")
    return [*places, *([source.debian] if source.debian else [])]


def _download(name: str, source: _Source, root: str | Path | None) -> None:
    places = _roots(root)
    if not places:
        raise ValueError(f"download: no folder to put {name} into; give one (--data DIR) or set ${VARIABLE}")
    try:
        from torchvision import datasets
    except ImportError as error:
        raise ImportError(f'download needs torchvision ({error}): pip install "dprs_kernels[download]"') from error
    make = getattr(datasets, source.torchvision)
    try:
        if name == "svhn":
            for split in ("train", "test"):
                make(str(places[0]), split=split, download=True)
        else:
            make(str(places[0]), download=True)
    except (OSError, RuntimeError) as error:
        raise ValueError(
            f"download: torchvision could not fetch {name} into {places[0]} ({error}); without a network get "
            f"{source.remedy}, and give its folder"
        ) from error


def _digits() -> Data:
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise ImportError(f'digits need scikit-learn ({error}): pip install "dprs_kernels[train]"') from error
    found = load_digits()
    x = torch.from_numpy(found.images / 16.0).float().unsqueeze(1)   # [1797, 1, 8, 8], by the known range
    y = torch.from_numpy(found.target).long()
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(DIGITS_SEED))
    test, train = order[:DIGITS_TEST], order[DIGITS_TEST:]
    return Data("digits", x[train], y[train], x[test], y[test], CLASSES, "scikit-learn")
