"""SVHN, cropped digits: train_32x32.mat and test_32x32.mat with X [32, 32, 3, N] and y [N, 1], where 10 means 0."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from dprs_kernels.paper.idx import Bytes, Raw

FILES = ("train_32x32.mat", "test_32x32.mat")
CLASSES = 10


def read(folder: Path, *, name: str = "svhn") -> Raw | None:
    """The dataset in `folder`, None where there is none of its files."""
    paths = [folder / file for file in FILES]
    if not any(path.is_file() for path in paths):
        return None
    for path in paths:
        if not path.is_file():
            raise ValueError(f"{path}: missing, though another file of {name} is there; expected {' and '.join(FILES)}")
    train, test = (read_file(path) for path in paths)
    return Raw(*train, *test, str(folder))


def read_file(path: Path) -> tuple[Bytes, Bytes]:
    """Images [N, 3, 32, 32] and labels [N] of one .mat file."""
    try:
        from scipy.io import loadmat
    except ImportError as error:
        raise ImportError(f'svhn needs scipy ({error}): pip install "dprs_kernels[paper]"') from error
    try:
        found = loadmat(path, variable_names=["X", "y"])
    except Exception as error:   # scipy's reader fails in many ways on damaged files; all of them are named here
        raise ValueError(
            f"{path}: cannot be read as a MATLAB file ({type(error).__name__}: {error}); expected X [32, 32, 3, N] and "
            "y [N, 1]: get it again"
        ) from error
    if "X" not in found or "y" not in found:
        names = sorted(key for key in found if not key.startswith("__"))
        raise ValueError(f"{path}: holds {names or 'neither X nor y'}, expected the variables X and y")
    images, labels = np.asarray(found["X"]), np.asarray(found["y"]).ravel()
    if images.dtype != np.uint8 or images.ndim != 4 or images.shape[:3] != (32, 32, 3):
        raise ValueError(f"{path}: X is {images.dtype} {list(images.shape)}, expected uint8 [32, 32, 3, N]")
    if len(labels) != images.shape[3]:
        raise ValueError(f"{path}: y holds {len(labels)} labels, expected {images.shape[3]}, as X has images")
    if labels.dtype.kind not in "ui" or not ((labels >= 1) & (labels <= CLASSES)).all():
        raise ValueError(f"{path}: y holds labels other than the integers 1 to {CLASSES}, where {CLASSES} means 0")
    return np.ascontiguousarray(images.transpose(3, 2, 0, 1)), (labels % CLASSES).astype(np.uint8)
