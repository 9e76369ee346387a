"""Fashion-MNIST and MNIST: four idx files, plain or gzipped.

A file is a magic number (0, 0, type, dimensions), one big-endian 32-bit size per dimension, then the values. Only
bytes (type 8) occur here: images have magic 0x00000803 and sizes N, 28, 28, labels 0x00000801 and N.
"""

from __future__ import annotations

import gzip
import math
import zlib
from pathlib import Path
from typing import IO, NamedTuple, cast

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]
MAGIC = {"images": 0x00000803, "labels": 0x00000801}
SIDE, CLASSES = 28, 10
FILES = {
    "train_x": ("train-images-idx3-ubyte", "images"), "train_y": ("train-labels-idx1-ubyte", "labels"),
    "test_x": ("t10k-images-idx3-ubyte", "images"), "test_y": ("t10k-labels-idx1-ubyte", "labels"),
}   # fmt: skip
# The two datasets have the same file names: their first training labels tell them apart.
FIRST_LABELS = {"mnist": [5, 0, 4, 1, 9, 2, 1, 3, 1, 4], "fmnist": [9, 0, 0, 3, 0, 2, 7, 2, 5, 5]}


class Raw(NamedTuple):
    """What the readers of all datasets return: bytes as they lie in the files, images [N, C, H, W], labels [N]."""

    train_x: Bytes
    train_y: Bytes
    test_x: Bytes
    test_y: Bytes
    found_in: str


def read(folder: Path, *, name: str) -> Raw | None:
    """The dataset in `folder`, None where there is none of its files; ValueError where they are broken."""
    paths = {part: _path(folder, file) for part, (file, _) in FILES.items()}
    if not any(paths.values()):
        return None
    for part, path in paths.items():
        if path is None:
            raise ValueError(
                f"{folder / FILES[part][0]}: missing, plain or as .gz, though other files of {name} are there; "
                f"expected all of {', '.join(file for file, _ in FILES.values())}"
            )
    arrays = {part: read_file(cast(Path, path), FILES[part][1]) for part, path in paths.items()}
    for split in ("train", "test"):
        count, labels = len(arrays[f"{split}_x"]), len(arrays[f"{split}_y"])
        if count != labels:
            raise ValueError(
                f"{paths[split + '_y']}: holds {labels} labels, expected {count}, as many as {paths[split + '_x']} "
                "has images; the two are not of one dataset"
            )
    first = arrays["train_y"][:10].tolist()
    for other, known in FIRST_LABELS.items():
        if other != name and first == known:
            raise ValueError(
                f"{paths['train_y']}: these are the labels of {other} ({first} ...), expected {name}; the file names "
                "are the same, keep each dataset in a folder of its own"
            )
    images = {part: arrays[part][:, None] for part in ("train_x", "test_x")}   # [N, 1, 28, 28]
    return Raw(images["train_x"], arrays["train_y"], images["test_x"], arrays["test_y"], str(folder))


def read_file(path: Path, kind: str) -> Bytes:
    """Images [N, 28, 28] or labels [N] (kind: "images" or "labels") of one file, whose header is believed and checked:
    at most what it announces is read, so a bad .gz fills no memory."""
    magic, dimensions = MAGIC[kind], MAGIC[kind] & 255
    try:
        with cast("IO[bytes]", gzip.open(path) if path.suffix == ".gz" else path.open("rb")) as file:
            header = file.read(4 + 4 * dimensions)
            if len(header) < 4 + 4 * dimensions or int.from_bytes(header[:4], "big") != magic:
                raise ValueError(
                    f"{path}: begins with {header[:4].hex() or 'nothing'}, expected the idx magic number {magic:08x} "
                    f"({kind}); the file is something else, or cut: get it again"
                )
            shape = tuple(int(size) for size in np.frombuffer(header, ">u4")[1:])
            if shape[1:] not in ((), (SIDE, SIDE)):
                raise ValueError(f"{path}: holds images of {shape[1:]}, expected {(SIDE, SIDE)}")
            size = math.prod(shape)
            values = _at_most(file, size + 1)
    except (EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path}: cannot be read ({error}); expected a whole idx file, get it again") from error
    if len(values) != size:
        found = "more" if len(values) > size else f"{len(values):,}"
        raise ValueError(
            f"{path}: its header announces {size:,} bytes of {kind} {list(shape)}, found {found}; the file is cut or "
            "damaged: get it again"
        )
    array = np.frombuffer(values, np.uint8).reshape(shape)
    if kind == "labels" and size and int(array.max()) >= CLASSES:
        raise ValueError(f"{path}: holds the label {int(array.max())}, expected labels from 0 to {CLASSES - 1}")
    return array


def _at_most(file: IO[bytes], size: int) -> bytes:
    """A header may announce terabytes: pieces, so that memory follows what is there."""
    pieces = []
    while size > 0 and (piece := file.read(min(size, 1 << 24))):
        pieces.append(piece)
        size -= len(piece)
    return b"".join(pieces)


def _path(folder: Path, file: str) -> Path | None:
    return next((path for path in (folder / file, folder / f"{file}.gz") if path.is_file()), None)
