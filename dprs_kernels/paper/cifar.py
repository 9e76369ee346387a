"""CIFAR-10: the official python files (cifar-10-batches-py) and binary files (cifar-10-batches-bin).

Binary: 10,000 records of one label byte and 3072 pixel bytes (3 x 32 x 32, channel first). Python: a pickled dict with
b"data", uint8 [10000, 3072], and b"labels", a list. A pickle can run any program, so these are read by an unpickler
that knows three names, all of them stood in for by inert classes here; any other name is refused.
"""

from __future__ import annotations

import io
import pickle
from pathlib import Path
from typing import Any

import numpy as np

from dprs_kernels.paper.idx import Bytes, Raw

RECORDS, PIXELS, CLASSES = 10_000, 3 * 32 * 32, 10   # of one file
STEMS = (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
FOLDERS = ("cifar-10-batches-bin", "cifar-10-batches-py", ".")


def read(folder: Path, *, name: str = "cifar10") -> Raw | None:
    """The dataset in `folder` or in its official sub-folders, None where there is none of its files."""
    for inner in (folder / sub for sub in FOLDERS):
        for suffix, reader in ((".bin", read_binary), ("", read_python)):
            paths = [inner / f"{stem}{suffix}" for stem in STEMS]
            if not any(path.is_file() for path in paths):
                continue
            for path in paths:
                if not path.is_file():
                    raise ValueError(
                        f"{path}: missing, though other files of {name} are there; expected data_batch_1 to _5 and "
                        f"test_batch{', each with .bin' if suffix else ''}"
                    )
            parts = [reader(path) for path in paths]
            train = parts[:-1]
            return Raw(
                np.concatenate([x for x, _ in train]), np.concatenate([y for _, y in train]), *parts[-1], str(inner)
            )
    return None


def read_binary(path: Path) -> tuple[Bytes, Bytes]:
    """Images [10000, 3, 32, 32] and labels [10000] of one .bin file."""
    expected, found = RECORDS * (1 + PIXELS), path.stat().st_size
    if found != expected:
        raise ValueError(
            f"{path}: has {found:,} bytes, expected {expected:,} ({RECORDS:,} records of 1 + {PIXELS}); the file is "
            "cut or something else: get it again"
        )
    records = np.fromfile(path, np.uint8).reshape(RECORDS, 1 + PIXELS)
    return _checked(path, records[:, 1:], records[:, 0])


def read_python(path: Path) -> tuple[Bytes, Bytes]:
    """The same of one pickled file."""
    try:
        found = _Unpickler(io.BytesIO(path.read_bytes()), encoding="bytes").load()
    except Exception as error:   # a damaged pickle can fail in any way; it is named, never passed over
        raise ValueError(
            f"{path}: cannot be read as a pickled batch of CIFAR-10 ({type(error).__name__}: {error}); expected the "
            "file of cifar-10-python.tar.gz: get it again"
        ) from error
    data = found.get(b"data") if isinstance(found, dict) else None
    labels = found.get(b"labels") if isinstance(found, dict) else None
    if not isinstance(data, _Array) or not isinstance(labels, list):
        keys = sorted(map(repr, found)) if isinstance(found, dict) else type(found).__name__
        raise ValueError(f"{path}: holds {keys}, expected a dict with an array b'data' and a list b'labels'")
    if data.shape != (RECORDS, PIXELS) or len(data.values) != RECORDS * PIXELS or len(labels) != RECORDS:
        raise ValueError(
            f"{path}: holds data of {data.shape} in {len(data.values):,} bytes and {len(labels):,} labels, expected "
            f"{(RECORDS, PIXELS)} and {RECORDS:,}"
        )
    if not all(type(label) is int and 0 <= label < CLASSES for label in labels):
        raise ValueError(f"{path}: holds labels that are not integers from 0 to {CLASSES - 1}")
    values = np.frombuffer(data.values, np.uint8).reshape(data.shape, order="F" if data.fortran else "C")
    return _checked(path, values, np.array(labels, np.uint8))


def _checked(path: Path, pixels: Bytes, labels: Bytes) -> tuple[Bytes, Bytes]:
    if int(labels.max()) >= CLASSES:
        raise ValueError(f"{path}: holds the label {int(labels.max())}, expected labels from 0 to {CLASSES - 1}")
    return pixels.reshape(-1, 3, 32, 32), labels


class _Dtype:
    """Stands for numpy.dtype: bytes, or refused."""

    def __init__(self, code: bytes, *_: Any) -> None:
        if code != b"u1":
            raise pickle.UnpicklingError(f"an array of type {code!r} instead of bytes")

    def __setstate__(self, state: Any) -> None:
        pass   # byte order and the like: bytes have none


class _Array:
    """Stands for numpy.ndarray: its state, without numpy's own reader, which trusts what it reads."""

    shape: tuple[int, ...] = ()
    values: bytes = b""
    fortran = False

    def __setstate__(self, state: tuple[int, tuple[int, ...], _Dtype, bool, bytes]) -> None:
        _, self.shape, dtype, self.fortran, self.values = state
        if not isinstance(dtype, _Dtype) or not isinstance(self.values, bytes):
            raise pickle.UnpicklingError("an array that is not of bytes")


def _reconstruct(*_: Any) -> _Array:
    return _Array()


class _Unpickler(pickle.Unpickler):
    """Knows the three names that the official files use, and builds nothing but the classes above."""

    def find_class(self, module: str, name: str) -> Any:
        known = {
            ("numpy.core.multiarray", "_reconstruct"): _reconstruct, ("numpy", "ndarray"): _Array,
            ("numpy", "dtype"): _Dtype,
        }   # fmt: skip
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which these files do not need")
        return known[module, name]
