"""idx files of Fashion-MNIST and MNIST: small ones made here, and every way they can be broken."""

import gzip
import struct

import numpy as np
import pytest
import torch

from dprs_kernels.paper import data, idx


def generated(seed, *shape, below=256):
    return np.random.default_rng(seed).integers(0, below, shape, dtype=np.uint8)


def idx_bytes(array, magic=None):
    magic = 0x800 | array.ndim if magic is None else magic
    return struct.pack(f">{1 + array.ndim}I", magic, *array.shape) + array.tobytes()


def write_idx(folder, *, zipped=False, train=5, test=3):
    folder.mkdir(parents=True, exist_ok=True)
    arrays = {
        "train_x": generated(0, train, 28, 28), "train_y": generated(1, train, below=10),
        "test_x": generated(2, test, 28, 28), "test_y": generated(3, test, below=10),
    }   # fmt: skip
    for part, array in arrays.items():
        name, content = idx.FILES[part][0], idx_bytes(array)
        (folder / f"{name}{'.gz' if zipped else ''}").write_bytes(gzip.compress(content) if zipped else content)
    return arrays


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("inner", ["", "fashion-mnist", "FashionMNIST/raw"])
def test_idx(tmp_path, zipped, inner):
    arrays = write_idx(tmp_path / inner, zipped=zipped)
    found = data.load("fmnist", tmp_path)
    assert (found.name, found.classes, found.found_in) == ("fmnist", 10, str(tmp_path / inner))
    assert found.train_x.dtype == found.test_x.dtype == torch.float32
    assert found.train_y.dtype == found.test_y.dtype == torch.int64
    for part in ("train", "test"):
        images = torch.from_numpy(arrays[f"{part}_x"]).float()[:, None] / 255
        assert torch.equal(getattr(found, f"{part}_x"), images)
        assert getattr(found, f"{part}_y").tolist() == arrays[f"{part}_y"].tolist()


def test_a_plain_file_goes_before_its_gz(tmp_path):
    write_idx(tmp_path)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(b"not read")
    assert len(data.load("mnist", tmp_path).train_x) == 5


def broken(tmp_path, file, change):
    write_idx(tmp_path)
    path = tmp_path / file
    content = change(path.read_bytes())
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    return path


IMAGES, LABELS = "train-images-idx3-ubyte", "t10k-labels-idx1-ubyte"


@pytest.mark.parametrize(
    ("file", "change", "message"),
    [
        (IMAGES, lambda b: None, "missing, plain or as .gz, though other files of fmnist are there"),
        (IMAGES, lambda b: b"", "begins with nothing, expected the idx magic number 00000803"),
        (IMAGES, lambda b: b[:9], "begins with 00000803, expected the idx magic number 00000803 .* or cut"),
        (IMAGES, lambda b: b"\x1f\x8b\x08\x00" + b[4:], "begins with 1f8b0800"),
        (LABELS, lambda b: b"\0\0\x08\x03" + b[4:], "begins with 00000803, expected the idx magic number 00000801"),
        (IMAGES, lambda b: b[:-1], r"announces 3,920 bytes of images \[5, 28, 28\], found 3,919; .* get it again"),
        (IMAGES, lambda b: b + b"x", "announces 3,920 bytes of images .* found more"),
        (IMAGES, lambda b: b[:4] + b"\xff\xff\xff\xff" + b[8:], "announces 3,367,254,359,280 bytes"),
        (IMAGES, lambda b: b[:11] + b"\x1d" + b[12:], r"images of \(29, 28\), expected \(28, 28\)"),
        (LABELS, lambda b: idx_bytes(np.zeros(4, np.uint8)), "holds 4 labels, expected 3, as many as"),
        (LABELS, lambda b: b[:-1] + b"\x0a", "holds the label 10, expected labels from 0 to 9"),
    ],
)
def test_broken_idx(tmp_path, file, change, message):
    path = broken(tmp_path, file, change)
    with pytest.raises(ValueError, match=f"{path.name}.*{message}"):
        data.load("fmnist", tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b[:-10], lambda b: b[:40], lambda b: b"no gzip", lambda b: b[:60] + b"\0" * 99,
        lambda b: b[:10] + b"\xff" * 20 + b[30:],   # no such block: zlib's own error
    ],
)   # fmt: skip
def test_broken_gz(tmp_path, change):
    write_idx(tmp_path, zipped=True)
    path = tmp_path / f"{IMAGES}.gz"
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ValueError, match=f"{IMAGES}.gz: .*get it again"):
        data.load("fmnist", tmp_path)


def test_a_header_cannot_make_a_gz_fill_the_memory(tmp_path):
    """A megabyte of zeros behind a header that announces five images: no more than those are unpacked."""
    path = tmp_path / "x.gz"
    path.write_bytes(gzip.compress(idx_bytes(generated(0, 5, 28, 28)) + bytes(1 << 20)))
    sizes = []

    class Counting:
        def __init__(self, file):
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def read(self, size):
            sizes.append(size)
            return self.file.read(size)

    with pytest.MonkeyPatch.context() as patch:
        opened = gzip.open
        patch.setattr(idx.gzip, "open", lambda path: Counting(opened(path)))
        with pytest.raises(ValueError, match="found more"):
            idx.read_file(path, "images")
    assert sum(sizes) == 16 + 5 * 784 + 1


def test_mnist_is_not_taken_for_fashion(tmp_path):
    write_idx(tmp_path, train=12)
    labels = np.array([*idx.FIRST_LABELS["mnist"], 0, 0], np.uint8)
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(idx_bytes(labels))
    assert data.load("mnist", tmp_path).train_y[:2].tolist() == [5, 0]
    with pytest.raises(ValueError, match=r"train-labels.*these are the labels of mnist.*expected fmnist.*of its own"):
        data.load("fmnist", tmp_path)
