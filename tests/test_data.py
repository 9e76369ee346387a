"""Datasets by name: where files are searched, what comes out, downloads, and messages. Readers have their own tests."""

import doctest
import sys
import types
from pathlib import Path

import pytest
import torch

from dprs_kernels.paper import data, idx
from tests.test_idx import write_idx
from tests.test_svhn import write_svhn

DEBIAN = Path("/usr/share/datasets/fashion-mnist")


@pytest.fixture(autouse=True)
def no_other_place(monkeypatch):
    """Neither the environment nor Debian's folder answers, unless a test says so."""
    monkeypatch.delenv(data.VARIABLE, raising=False)
    monkeypatch.setitem(data.SOURCES, "fmnist", data.SOURCES["fmnist"]._replace(debian=None))


def test_search_order(tmp_path, monkeypatch):
    first, second, third = (tmp_path / name for name in "abc")
    for count, folder in ((6, second), (7, third)):
        write_idx(folder, train=count)
    first.mkdir()
    monkeypatch.setenv(data.VARIABLE, str(second))
    monkeypatch.setitem(data.SOURCES, "fmnist", data.SOURCES["fmnist"]._replace(debian=str(third)))
    assert len(data.load("fmnist", first).train_x) == 6
    assert len(data.load("fmnist").train_x) == 6
    monkeypatch.delenv(data.VARIABLE)
    assert len(data.load("fmnist", first).train_x) == 7
    write_idx(first, train=8)
    monkeypatch.setenv(data.VARIABLE, str(second))
    assert len(data.load("fmnist", first).train_x) == 8


def test_digits():
    pytest.importorskip("sklearn")
    found, again = data.load("digits"), data.load("digits")
    assert (found.train_x.shape, found.test_x.shape) == ((1437, 1, 8, 8), (360, 1, 8, 8))
    assert (found.train_x.min(), found.train_x.max(), found.train_x.dtype) == (0, 1, torch.float32)
    assert torch.equal(found.test_x, again.test_x)
    assert sorted(set(found.test_y.tolist())) == list(range(10))


@pytest.mark.parametrize("name", list(data.SOURCES))
def test_missing(tmp_path, monkeypatch, name):
    monkeypatch.setenv(data.VARIABLE, "/nowhere")
    with pytest.raises(ValueError, match=rf"no file of {name} in {tmp_path}; .DPRS_DATA \(/nowhere\)") as raised:
        data.load(name, tmp_path)
    message = str(raised.value)
    assert data.SOURCES[name].files in message
    assert data.SOURCES[name].remedy in message
    assert "--download" in message


def test_wrong_arguments(tmp_path):
    with pytest.raises(ValueError, match="dataset: got 'cifar100'; expected one of fmnist, mnist, cifar10, svhn"):
        data.load("cifar100")
    with pytest.raises(ValueError, match=r"data folder: .*absent is not a folder; make it"):
        data.load("fmnist", tmp_path / "absent")


def fake_torchvision(monkeypatch, make):
    module = types.ModuleType("torchvision")
    module.datasets = types.SimpleNamespace(FashionMNIST=make, SVHN=make)
    monkeypatch.setitem(sys.modules, "torchvision", module)


def test_download_is_read_by_our_readers(tmp_path, monkeypatch):
    calls = []

    def make(root, **arguments):
        calls.append(arguments)
        write_idx(Path(root) / "FashionMNIST" / "raw")

    fake_torchvision(monkeypatch, make)
    assert len(data.load("fmnist", tmp_path, download=True).train_x) == 5
    data.load("fmnist", tmp_path, download=True)   # there already
    assert calls == [{"download": True}]


def test_download_of_svhn_fetches_both_files(tmp_path, monkeypatch):
    fake_torchvision(monkeypatch, lambda root, split, download: write_svhn(tmp_path) if split == "test" else None)
    assert len(data.load("svhn", tmp_path, download=True).test_x) == 6


def test_download_that_fails(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match="download: no folder to put fmnist into; give one"):
        data.load("fmnist", download=True)

    def make(root, **arguments):
        raise RuntimeError("no route")

    fake_torchvision(monkeypatch, make)
    with pytest.raises(ValueError, match=r"torchvision could not fetch fmnist .*no route.*apt-get install"):
        data.load("fmnist", tmp_path, download=True)
    monkeypatch.setitem(sys.modules, "torchvision", None)
    with pytest.raises(ImportError, match=r"dprs_kernels\[download\]"):
        data.load("fmnist", tmp_path, download=True)


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="needs Debian's package dataset-fashion-mnist")
def test_the_real_fashion_mnist(monkeypatch):
    monkeypatch.undo()   # Debian's folder answers
    monkeypatch.delenv(data.VARIABLE, raising=False)
    found = data.load("fmnist")
    assert (found.train_x.shape, found.test_x.shape) == ((60000, 1, 28, 28), (10000, 1, 28, 28))
    assert found.train_y[:10].tolist() == idx.FIRST_LABELS["fmnist"]
    assert torch.bincount(found.train_y).tolist() == [6000] * 10
    assert abs(found.train_x.mean().item() - 0.2860) < 1e-4   # the mean that everyone quotes


def test_examples_in_docstrings_run():
    result = doctest.testmod(data)
    assert result.failed == 0
    assert result.attempted > 0
