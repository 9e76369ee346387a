"""CIFAR-10's binary and pickled files: small ones made here, every way they can be broken, and the real ones."""

import os
import struct
from pathlib import Path

import numpy as np
import pytest

from dprs_kernels.paper import cifar, data
from tests.test_idx import generated

CIFAR = Path(os.environ.get(data.VARIABLE, "")) / "cifar-10-batches-bin" / "test_batch.bin"


# Pickles as Python 2 wrote the official files: these opcodes, which Python 3's pickle does not write any more.


def old_string(value):
    return b"T" + struct.pack("<i", len(value)) + value


def old_int(value):
    return b"J" + struct.pack("<i", value)


def old_array(array, *, code=b"u1", fortran=False, reconstruct=b"cnumpy.core.multiarray\n_reconstruct\n"):
    values = array.tobytes(order="F" if fortran else "C")
    dtype = b"cnumpy\ndtype\n" + old_string(code) + old_int(0) + old_int(1) + b"\x87R"
    dtype += b"(" + old_int(3) + old_string(b"|") + b"NNN" + old_int(-1) + old_int(-1) + old_int(0) + b"tb"
    shape = b"".join(old_int(size) for size in array.shape) + b"\x86"
    empty = reconstruct + b"cnumpy\nndarray\n" + old_int(0) + b"\x85" + old_string(b"b") + b"\x87R"
    return empty + b"(" + old_int(1) + shape + dtype + (b"\x88" if fortran else b"\x89") + old_string(values) + b"tb"


def old_pickle(pixels, labels, **settings):
    entries = old_string(b"batch_label") + old_string(b"training batch 1 of 5")
    entries += old_string(b"labels") + b"](" + b"".join(old_int(label) for label in labels) + b"e"
    entries += old_string(b"data") + old_array(pixels, **settings)
    return b"\x80\x02}(" + entries + b"u."


def write_cifar(folder, kind, **settings):
    """Six files with cifar.RECORDS records."""
    folder.mkdir(parents=True, exist_ok=True)
    batches = []
    for i, stem in enumerate(cifar.STEMS):
        pixels, labels = generated(i, cifar.RECORDS, 3072), generated(i + 10, cifar.RECORDS, below=10)
        if kind == "bin":
            (folder / f"{stem}.bin").write_bytes(np.concatenate([labels[:, None], pixels], 1).tobytes())
        else:
            (folder / stem).write_bytes(old_pickle(pixels, labels.tolist(), **settings))
        batches.append((pixels.reshape(-1, 3, 32, 32), labels))
    return batches


@pytest.fixture
def few_records(monkeypatch):
    monkeypatch.setattr(cifar, "RECORDS", 4)


@pytest.mark.usefixtures("few_records")
@pytest.mark.parametrize(
    ("kind", "inner", "settings"),
    [
        ("bin", "cifar-10-batches-bin", {}), ("bin", "", {}), ("bin", "cifar10/cifar-10-batches-bin", {}),
        ("python", "cifar-10-batches-py", {}), ("python", "", {"fortran": True}),
    ],
)   # fmt: skip
def test_cifar(tmp_path, kind, inner, settings):
    batches = write_cifar(tmp_path / inner, kind, **settings)
    found = data.load("cifar10", tmp_path)
    assert found.found_in == str(tmp_path / inner)
    assert found.train_y.tolist() == np.concatenate([y for _, y in batches[:5]]).tolist()
    assert found.test_y.tolist() == batches[5][1].tolist()
    mean, std = np.array([0.4914, 0.4822, 0.4465]), np.array([0.2023, 0.1994, 0.2010])
    for x, images in ((found.train_x, np.concatenate([x for x, _ in batches[:5]])), (found.test_x, batches[5][0])):
        expected = (images / 255 - mean[:, None, None]) / std[:, None, None]
        assert x.shape == expected.shape
        np.testing.assert_allclose(x.double(), expected, atol=2e-6)


@pytest.mark.usefixtures("few_records")
@pytest.mark.parametrize(
    ("kind", "change", "message"),
    [
        ("bin", lambda b: None, r"data_batch_3.bin: missing, though other files .* each with .bin"),
        ("bin", lambda b: b[:-3073], r"data_batch_3.bin: has 9,219 bytes, expected 12,292 \(4 records of 1 \+ 3072\)"),
        ("bin", lambda b: b + b"x", r"has 12,293 bytes, expected 12,292"),
        ("bin", lambda b: b"\x0a" + b[1:], r"data_batch_3.bin: holds the label 10"),
        ("python", lambda b: None, r"data_batch_3: missing"),
        ("python", lambda b: b[:-100], r"data_batch_3: cannot be read as a pickled batch"),
        ("python", lambda b: b"", r"cannot be read as a pickled batch of CIFAR-10 \(EOFError"),
        ("python", lambda b: b"\x80\x02]q\x01.", r"data_batch_3: holds list, expected a dict"),
        ("python", lambda b: b"\x80\x02}(" + old_string(b"a") + old_int(1) + b"u.", r"holds \[\"b'a'\"\], expected a"),
        ("python", lambda b: old_pickle(generated(0, 3, 3072), [1, 2, 3]), r"data of \(3, 3072\) in 9,216 bytes and 3"),
        ("python", lambda b: old_pickle(generated(0, 4, 3072), [1, 2, 3]), r"3 labels, expected \(4, 3072\) and 4"),
        ("python", lambda b: old_pickle(generated(0, 4, 3072), [1, 2, 3, 10]), r"labels that are not integers from 0"),
        ("python", lambda b: old_pickle(generated(0, 4, 3072), [1] * 4, code=b"O8"), r"an array of type b'O8'"),
    ],
)
def test_broken_cifar(tmp_path, kind, change, message):
    write_cifar(tmp_path, kind)
    path = tmp_path / f"data_batch_3{'.bin' if kind == 'bin' else ''}"
    content = change(path.read_bytes())
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        data.load("cifar10", tmp_path)


@pytest.mark.usefixtures("few_records")
@pytest.mark.parametrize("name", ["posix\nsystem", "builtins\neval", "numpy\nload", "numpy.core.multiarray\nscalar"])
def test_a_pickle_runs_nothing(tmp_path, name):
    """A file that would call a program: refused at the name, before any call."""
    write_cifar(tmp_path, "python")
    mark = tmp_path / "called"
    call = f"c{name}\n".encode() + old_string(f"touch {mark}".encode()) + b"\x85R."
    (tmp_path / "data_batch_1").write_bytes(b"\x80\x02" + call)
    with pytest.raises(ValueError, match=rf"asks for {name.replace(chr(10), '.')}, which these files do not need"):
        data.load("cifar10", tmp_path)
    assert not mark.exists()


@pytest.mark.skipif(not CIFAR.is_file(), reason=f"needs CIFAR-10's binary files in {CIFAR.parent}")
def test_the_real_cifar10(tmp_path):
    images, labels = cifar.read_binary(CIFAR)
    assert images.shape == (10000, 3, 32, 32)
    assert np.bincount(labels).tolist() == [1000] * 10
    # As a pickled file, through the other reader, to the same bytes.
    (tmp_path / "test_batch").write_bytes(old_pickle(images.reshape(-1, 3072), labels.tolist()))
    again, same = cifar.read_python(tmp_path / "test_batch")
    assert np.array_equal(again, images)
    assert np.array_equal(same, labels)
