"""The paper's networks: numbers of parameters, layers, and that every gradient source takes them."""

import doctest

import pytest
import torch
from torch import nn
from torch.nn import functional

from dprs_kernels import per_sample
from dprs_kernels.grads.functional import FunctionalSource
from dprs_kernels.paper import networks
from dprs_kernels.paper.networks import NETWORKS, network_for

SIZES = {   # SETTINGS.md, and 1898 of our own
    "dp-cnn": 550_570, "dp-cnn-s": 26_010, "h-cnn": 187_210, "h-cnn-s": 33_066, "linear-scatter": 155_530,
    "linear-scatter-s": 39_700, "resnet20": 268_346, "linear-probe": 12_810, "digits-cnn": 1_898,
}   # fmt: skip
LOSS = nn.CrossEntropyLoss(reduction="sum")


def batch(name, n=3):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(n, *NETWORKS[name].input_shape, generator=generator), torch.arange(n) % 10


def made(name):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return NETWORKS[name].make()


def one_at_a_time(model, x, y):
    """Micro-batches of one: no gradient source in it."""
    rows = []
    for i in range(len(x)):
        grads = torch.autograd.grad(LOSS(model(x[i : i + 1]), y[i : i + 1]), list(model.parameters()))
        rows.append(torch.cat([g.flatten() for g in grads]))
    return torch.stack(rows)


def flat(model, grads):
    return torch.cat([grads[name].flatten(1) for name, _ in model.named_parameters()], 1)


def test_names():
    assert list(NETWORKS) == list(SIZES)
    assert all(name == network.name for name, network in NETWORKS.items())


@pytest.mark.parametrize("name", SIZES)
def test_size_and_shapes(name):
    model, network = made(name), NETWORKS[name]
    assert sum(p.numel() for p in model.parameters() if p.requires_grad) == SIZES[name] == network.size
    assert not list(model.buffers())
    assert model(batch(name)[0]).shape == (3, 10)


@pytest.mark.parametrize("name", SIZES)
def test_activations(name):
    """tanh, as many as hidden layers; ReLU in GEP's."""
    kinds = [type(module) for module in made(name).modules()]
    hidden = sum(kinds.count(kind) for kind in (nn.Conv2d, nn.Linear)) - 1
    if name == "resnet20":
        assert (kinds.count(nn.ReLU), kinds.count(nn.GroupNorm), kinds.count(nn.Tanh)) == (hidden, hidden, 0)
        norms = [module for module in made(name).modules() if isinstance(module, nn.GroupNorm)]
        assert {(norm.num_groups, norm.affine) for norm in norms} == {(4, False)}
    else:
        assert (kinds.count(nn.Tanh), kinds.count(nn.ReLU)) == (hidden, 0)


def test_the_block_of_resnet20():
    """relu(shortcut + norm(conv(relu(norm(conv x))))), written out."""
    torch.manual_seed(0)
    block, x = networks.Block(4, 8, 2), torch.randn(2, 4, 6, 6)
    inner = functional.relu(functional.group_norm(functional.conv2d(x, block.conv1.weight, stride=2, padding=1), 4))
    out = functional.group_norm(functional.conv2d(inner, block.conv2.weight, padding=1), 4)
    short = torch.cat([x[:, :, ::2, ::2], torch.zeros(2, 4, 3, 3)], 1)
    torch.testing.assert_close(block(x), functional.relu(out + short))


def test_default_initial_weights():
    """torch's own: uniform within 1 / sqrt(fan in)."""
    weight = made("dp-cnn-s")[7].weight   # fc 512-32
    limit = 512**-0.5
    assert weight.abs().max() <= limit
    assert abs(weight.std().item() / (limit / 3**0.5) - 1) < 0.02   # 16,384 values: four standard errors are 0.014


@pytest.mark.parametrize("name", SIZES)
def test_our_hooks(name):
    model, (x, y) = made(name), batch(name)
    truth = one_at_a_time(model, x, y)
    with per_sample(model) as source:
        found = flat(model, source.grads(LOSS, x, y))
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-5 * truth.abs().max().item())


@pytest.mark.parametrize("name", ["dp-cnn-s", "resnet20"])
def test_functional(name):
    model, (x, y) = made(name), batch(name)
    truth = one_at_a_time(model, x, y)
    found = flat(model, FunctionalSource(model).grads(LOSS, x, y))
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-5 * truth.abs().max().item())


@pytest.mark.parametrize("name", SIZES)
def test_opacus(name):
    opacus = pytest.importorskip("opacus")
    from opacus.validators import ModuleValidator

    model, (x, y) = made(name), batch(name)
    truth = one_at_a_time(model, x, y)
    assert ModuleValidator.validate(model) == []
    wrapped = opacus.GradSampleModule(model, loss_reduction="sum")
    LOSS(wrapped(x), y).backward()
    found = torch.cat([p.grad_sample.flatten(1) for p in model.parameters()], 1)
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-5 * truth.abs().max().item())


@pytest.mark.parametrize("name", SIZES)
def test_backpack(name):
    backpack = pytest.importorskip("backpack")
    from backpack.extensions import BatchGrad

    model, (x, y) = made(name), batch(name)
    truth = one_at_a_time(model, x, y)
    backpack.extend(model)
    with backpack.backpack(BatchGrad()):
        backpack.extend(nn.CrossEntropyLoss(reduction="sum"))(model(x), y).backward()
    found = torch.cat([p.grad_batch.flatten(1) for p in model.parameters()], 1)
    torch.testing.assert_close(found, truth, rtol=1e-4, atol=1e-5 * truth.abs().max().item())


def test_resnet_shortcut_halves_and_pads():
    block = networks.Block(16, 32, 2)
    for conv in (block.conv1, block.conv2):
        nn.init.zeros_(conv.weight)
    x = torch.rand(2, 16, 8, 8)
    out = block(x)
    assert torch.equal(out[:, :16], x[:, :, ::2, ::2])
    assert out.shape == (2, 32, 4, 4)
    assert not out[:, 16:].any()


def test_network_for():
    assert network_for("dp-cnn", "svhn") is NETWORKS["dp-cnn"]
    with pytest.raises(ValueError, match=r"network: got 'dpcnn'; expected one of dp-cnn, dp-cnn-s"):
        network_for("dpcnn", "cifar10")
    with pytest.raises(ValueError, match=r"cifar10 or svhn .*\[3, 32, 32\].*not 'fmnist'; for fmnist take dp-cnn-s"):
        network_for("dp-cnn", "fmnist")
    with pytest.raises(ValueError, match=r"not 'imagenet'; see data.load"):
        network_for("dp-cnn", "imagenet")


def test_examples_in_docstrings_run():
    result = doctest.testmod(networks)
    assert result.failed == 0
    assert result.attempted > 0
