"""ScatterNet features: what the transform is, the cache's life, normalisation."""

import doctest
import os
import stat
import sys

import numpy as np
import pytest
import torch
from torch import nn

from dprs_kernels.paper import feature_cache, scatter
from dprs_kernels.paper.data import Data
from dprs_kernels.paper.networks import NETWORKS

pytest.importorskip("kymatio", reason="needs the extra dprs_kernels[paper]")


@pytest.fixture(autouse=True)
def one_thread():
    """Small pieces of work: a second thread only waits."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def few(name="fmnist", n=5, shape=(1, 28, 28), seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(n, *shape, generator=generator)
    return Data(name, x, torch.arange(n), x[:2] * 0.5, torch.arange(2), 10, "made up")


def features(data, folder, **settings):
    return scatter.features(data, folder, progress=False, **settings)


@pytest.fixture
def counted(monkeypatch):
    """How many images the transform was given."""
    counts = []
    original = scatter.transform

    def make(shape):
        each = original(shape)
        return lambda x: counts.append(len(x)) or each(x)

    monkeypatch.setattr(scatter, "transform", make)
    return counts


@pytest.mark.parametrize(
    ("name", "shape", "networks"),
    [("fmnist", (1, 28, 28), ("h-cnn-s", "linear-scatter-s")), ("cifar10", (3, 32, 32), ("h-cnn", "linear-scatter"))],
)
def test_shapes_fit_the_networks(tmp_path, name, shape, networks):
    found = features(few(name, shape=shape), tmp_path)
    for network in networks:
        assert tuple(found.train_x.shape) == (5, *NETWORKS[network].input_shape)
        assert NETWORKS[network].make()(found.test_x).shape == (2, 10)
    assert (found.name, found.train_y.tolist(), found.train_x.dtype) == (name, [0, 1, 2, 3, 4], torch.float32)
    assert found.found_in == f"made up; ScatterNet features in {tmp_path}"


def test_what_the_transform_is():
    """A constant image: the low pass gives the constant back and wavelets nothing. A shift by four pixels of a periodic
    image moves the features by one. Scaling by -2 doubles the moduli."""
    each = scatter.transform((32, 32))
    flat = each(torch.full((1, 1, 32, 32), 0.7))[0]
    torch.testing.assert_close(flat[0], torch.full((8, 8), 0.7), atol=1e-4, rtol=0)
    assert flat[1:].abs().max() < 1e-4
    x = torch.rand(1, 1, 32, 32, generator=torch.Generator().manual_seed(0))
    inside = slice(3, 5)   # away from the border, which is padded
    moved, still = each(x.roll((4, 4), (2, 3)))[0], each(x)[0]
    torch.testing.assert_close(moved[:, inside, inside], still[:, 2:4, 2:4], atol=2e-3, rtol=0.05)
    turned = each(-2 * x)[0]
    torch.testing.assert_close(turned[0], -2 * still[0])
    torch.testing.assert_close(turned[1:], 2 * still[1:])
    assert (still[1:] > -1e-3).all()


def test_energy_of_orders_falls():
    maps = scatter.transform((28, 28))(few(n=20).train_x).square().mean((0, 2, 3))
    assert maps[0] > maps[1:17].mean() > maps[17:].mean() > 0


def test_colours_are_transformed_alike():
    x = torch.rand(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    each = scatter.transform((32, 32))
    torch.testing.assert_close(each(x)[:, 81:162], each(x[:, 1:2]))


def test_cifar_goes_in_with_imagenet_constants(tmp_path):
    """data.load's (b - m) / s becomes (b - m') / s'."""
    pixels = torch.rand(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))

    def normalised(mean, std):
        return (pixels - torch.tensor(mean).view(1, 3, 1, 1)) / torch.tensor(std).view(1, 3, 1, 1)

    ours = normalised((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
    data = Data("cifar10", ours, torch.zeros(3), ours, torch.zeros(3), 10, "made up")
    expected = scatter.transform((32, 32))(normalised((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    found = features(data, tmp_path, normalise=None).train_x
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)
    raw = scatter.transform((32, 32))(ours)
    assert (found - raw).abs().max() > 0.05   # so the above can fail


def test_group_normalisation_is_a_layer_without_parameters(tmp_path):
    plain = features(few(), tmp_path, normalise=None).train_x
    layer = nn.GroupNorm(27, 81, affine=False)
    torch.testing.assert_close(features(few(), tmp_path).train_x, layer(plain))
    assert sum(p.numel() for p in layer.parameters()) == 0


def test_an_image_does_not_see_the_others(tmp_path):
    """So normalising costs no privacy."""
    all_of_them = features(few(), tmp_path).train_x
    data = few()
    alone = Data("fmnist", data.train_x[3:4], data.train_y[3:4], data.test_x, data.test_y, 10, "made up")
    torch.testing.assert_close(features(alone, tmp_path).train_x[0], all_of_them[3], rtol=1e-5, atol=1e-6)


def test_computed_once(tmp_path, counted, monkeypatch):
    monkeypatch.setattr(feature_cache, "CHUNK", 2)
    first = features(few(), tmp_path)
    assert counted == [2, 2, 1, 2]
    second = features(few(), tmp_path)
    assert len(counted) == 4
    assert torch.equal(first.train_x, second.train_x)
    assert torch.equal(first.test_x, second.test_x)
    files = sorted(tmp_path.iterdir())
    assert [file.name[:20] for file in files] == ["scatter-fmnist-test-", "scatter-fmnist-train"]
    assert all(stat.S_IMODE(os.stat(file).st_mode) == 0o600 for file in files)   # as private as the images


@pytest.mark.parametrize("change", ["pixel", "name", "version", "settings"])
def test_another_input_is_another_file(tmp_path, counted, monkeypatch, change):
    features(few(), tmp_path)
    before, data = len(counted), few()
    if change == "pixel":
        data.train_x[4, 0, 27, 27] += 1e-3
        data.test_x[1, 0, 27, 27] += 1e-3
    elif change == "name":
        data = few("mnist")
    elif change == "version":
        monkeypatch.setattr(scatter, "VERSION", 2)
    else:
        monkeypatch.setitem(scatter.INPUTS, "fmnist", ((0.1,), (1.0,)))
    features(data, tmp_path)
    assert sum(counted[before:]) == 7


def test_an_interrupted_computation_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(feature_cache, "CHUNK", 2)
    original = scatter.transform

    def make(shape):
        each, calls = original(shape), []

        def interrupted(x):
            calls.append(1)
            if len(calls) == 2:
                raise KeyboardInterrupt
            return each(x)

        return interrupted

    monkeypatch.setattr(scatter, "transform", make)
    with pytest.raises(KeyboardInterrupt):
        features(few(), tmp_path)
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setattr(scatter, "transform", original)
    assert features(few(), tmp_path).train_x.isfinite().all()


def test_a_damaged_file_is_named(tmp_path):
    features(few(), tmp_path)
    path = next(tmp_path.glob("*-train-*"))
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(ValueError, match=rf"{path.name}: cannot be read .*delete it, and it is computed again"):
        features(few(), tmp_path)
    np.save(path, np.zeros((5, 81, 7, 6), np.float32))
    with pytest.raises(ValueError, match=rf"{path.name}: holds float32 \[5, 81, 7, 6\], expected .*\[5, 81, 7, 7\]"):
        features(few(), tmp_path)


def test_wrong_arguments(tmp_path):
    with pytest.raises(ValueError, match=r"data: digits holds \[5, 1, 8, 8\]; expected images"):
        features(few("digits", shape=(1, 8, 8)), tmp_path)
    with pytest.raises(ValueError, match=r"data: fmnist holds \[5, 81, 28, 28\]"):
        features(few(shape=(81, 28, 28)), tmp_path)
    with pytest.raises(ValueError, match="normalise: got 'batch'; expected 'group', or None"):
        features(few(), tmp_path, normalise="batch")
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"cache_dir: .*file.* cannot be made"):
        features(few(), tmp_path / "file" / "inner")


def test_default_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    features(few(n=1), None)
    assert len(list((tmp_path / "dprs_kernels").iterdir())) == 2


def test_without_kymatio(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "kymatio", None)
    with pytest.raises(ImportError, match=r"ScatterNet needs kymatio .*dprs_kernels\[paper\]"):
        features(few(), tmp_path)


def test_progress_is_shown(tmp_path, capsys):
    scatter.features(few(), tmp_path)
    assert "ScatterNet, fmnist train: 100%" in capsys.readouterr().err


def test_examples_in_docstrings_run():
    result = doctest.testmod(scatter)
    assert result.failed == 0
    assert result.attempted > 0
