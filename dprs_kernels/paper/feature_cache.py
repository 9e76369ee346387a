"""Features computed once: a file per split, named by a digest of all they depend on, there whole or not at all.

Features are as private as the images that they are made of: files are readable for you alone (mode 0600), and never
belong into a repository.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from dprs_kernels.files import written_whole

CHUNK = 256   # images at a time


def cached(
    folder: Path,
    name: str,
    images: torch.Tensor,
    each: Callable[[torch.Tensor], torch.Tensor],
    *,
    shape: tuple[int, ...],
    settings: str,
    title: str,
    progress: bool,
) -> torch.Tensor:
    """each(images) [N, *shape] float32, from the file of `name` and digest in `folder`, which is made where missing.

    settings: whatever else the features depend on; part of the digest.
    """
    path = folder / f"{name}-{digest(images, settings)}.npy"
    expected = (len(images), *shape)
    if not path.exists():
        try:
            _write(path, images, each, expected, title, progress)
        except OSError as error:
            raise ValueError(f"{path}: cannot be written ({error}); make room there, or set $XDG_CACHE_HOME") from error
    return _read(path, expected)


def digest(images: torch.Tensor, settings: str) -> str:
    """32 hex digits."""
    hashed = hashlib.sha256(f"{settings} {tuple(images.shape)}".encode())
    for chunk in images.split(4096):
        hashed.update(chunk.contiguous().numpy().tobytes())
    return hashed.hexdigest()[:32]


def cache_folder(cache_dir: str | Path | None) -> Path:
    """Made where missing; None is ~/.cache/dprs_kernels, or in $XDG_CACHE_HOME."""
    if cache_dir is None:
        cache_dir = Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache") / "dprs_kernels"
    folder = Path(cache_dir).expanduser()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"cache_dir: {folder} cannot be made ({error}); give a folder that can be written") from error
    return folder


def _write(
    path: Path, images: torch.Tensor, each: Callable[[torch.Tensor], torch.Tensor], shape: tuple[int, ...], title: str,
    progress: bool,
) -> None:   # fmt: skip
    """All features into a file beside `path`, which then takes its name."""
    with written_whole(path, mode=0o600) as file:
        np.lib.format.write_array_header_1_0(
            file, {"descr": np.lib.format.dtype_to_descr(np.dtype("<f4")), "fortran_order": False, "shape": shape}
        )
        with torch.no_grad(), _bar(len(images), title, progress) as bar:
            for chunk in images.split(CHUNK):
                file.write(each(chunk).contiguous().numpy().astype("<f4", copy=False).tobytes())
                bar.update(len(chunk))


def _read(path: Path, shape: tuple[int, ...]) -> torch.Tensor:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); delete it, and it is computed again") from error
    if array.dtype != np.dtype("<f4") or array.shape != shape:
        raise ValueError(
            f"{path}: holds {array.dtype} {list(array.shape)}, expected float32 {list(shape)}; delete it, and it is "
            "computed again"
        )
    return torch.from_numpy(array)


def _bar(total: int, title: str, show: bool) -> Any:
    try:
        from tqdm import tqdm
    except ImportError as error:
        raise ImportError(f'the progress bar needs tqdm ({error}): pip install "dprs_kernels[paper]"') from error
    return tqdm(total=total, desc=title, unit="image", disable=not show)
