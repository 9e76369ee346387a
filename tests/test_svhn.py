"""SVHN's .mat files: small ones made here, and every way they can be broken."""

import numpy as np
import pytest

from dprs_kernels.paper import data, svhn
from tests.test_idx import generated


def write_svhn(folder, **changes):
    from scipy.io import savemat

    for i, file in enumerate(svhn.FILES):
        content = {"X": generated(i, 32, 32, 3, 6), "y": np.array([[1, 2, 9, 10, 10, 3]], np.uint8).T} | changes
        savemat(folder / file, content)


def test_svhn(tmp_path):
    write_svhn(tmp_path)
    found = data.load("svhn", tmp_path)
    assert found.train_y.tolist() == found.test_y.tolist() == [1, 2, 9, 0, 0, 3]
    expected = generated(0, 32, 32, 3, 6).transpose(3, 2, 0, 1) / 255 * 2 - 1
    np.testing.assert_allclose(found.train_x.double(), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"X": np.zeros((32, 32, 3, 6))}, r"train_32x32.mat: X is float64 \[32, 32, 3, 6\], expected uint8"),
        ({"X": generated(0, 6, 3, 32, 32)}, r"X is uint8 \[6, 3, 32, 32\], expected uint8 \[32, 32, 3, N\]"),
        ({"y": np.ones((5, 1), np.uint8)}, r"y holds 5 labels, expected 6"),
        ({"y": np.zeros((6, 1), np.uint8)}, r"y holds labels other than the integers 1 to 10"),
    ],
)
def test_broken_svhn(tmp_path, changes, message):
    write_svhn(tmp_path, **changes)
    with pytest.raises(ValueError, match=message):
        data.load("svhn", tmp_path)


def test_damaged_svhn(tmp_path):
    from scipy.io import savemat

    write_svhn(tmp_path)
    path = tmp_path / svhn.FILES[1]
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"test_32x32.mat: cannot be read as a MATLAB file"):
        data.load("svhn", tmp_path)
    savemat(path, {"z": np.ones(1)})
    with pytest.raises(ValueError, match=r"test_32x32.mat: holds neither X nor y, expected the variables X and y"):
        data.load("svhn", tmp_path)
    path.unlink()
    with pytest.raises(ValueError, match=r"test_32x32.mat: missing, though another file of svhn is there"):
        data.load("svhn", tmp_path)
