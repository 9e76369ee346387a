"""Losses that are no mean or sum over samples are refused, whatever the first samples are."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dprs_kernels.grads.hooks import per_sample
from tests.test_mixing import Net, everywhere, make
from tests.test_sources import one_at_a_time

WEIGHT = torch.tensor([1.0, 100.0])


def weighted(out, y):
    return F.cross_entropy(out, y, weight=WEIGHT)


@everywhere
def test_a_weighted_mean_is_found_where_the_first_samples_are_alike(name):
    x, y = torch.randn(6, 3), torch.tensor([0, 0, 0, 0, 0, 1])
    with pytest.raises(ValueError, match="not that of its own loss, as in a mean; it mixes samples"):
        make(name, nn.Linear(3, 2)).grads(weighted, x, y)
    with pytest.raises(ValueError, match=r"class weights .* use reduction='sum'"):
        make(name, nn.Linear(3, 2)).grads(functools.partial(F.cross_entropy, weight=WEIGHT), x, y)


def test_a_weighted_mean_is_found_where_all_lose_the_same():
    """The last layer starts at 0 in many recipes: values cannot tell, gradients do."""
    model = nn.Linear(3, 2)
    nn.init.zeros_(model.weight), nn.init.zeros_(model.bias)
    with pytest.raises(ValueError, match="mixes samples"):
        per_sample(model).grads(weighted, torch.randn(6, 3), torch.tensor([0, 0, 0, 0, 0, 1]))


def test_every_micro_batch_is_asked():
    source, x = per_sample(nn.Linear(3, 2)), torch.randn(6, 3)
    source.grads(weighted, x, torch.zeros(6, dtype=torch.long))   # of one class it is a mean
    with pytest.raises(ValueError, match="mixes samples"):
        source.grads(weighted, x, torch.tensor([0, 0, 0, 0, 0, 1]))


def test_every_sample_has_its_turn():
    """Two of 32 samples are mixed: not among those that the first micro-batch asks for, so that it takes a while."""
    def loss_fn(out, y):
        return (out - y).square().mean() + (out[13] * out[14]).sum() if len(out) > 14 else (out - y).square().mean()

    source, x, y = per_sample(nn.Linear(3, 1)), torch.randn(32, 3), torch.zeros(32, 1)
    said = None
    for _ in range(32):
        try:
            source.grads(loss_fn, x, y)
        except ValueError as error:
            said = str(error)
    assert said is not None
    assert "mixes samples" in said


@everywhere
def test_ignored_targets_under_any_mean(name):
    model, x = nn.Linear(3, 4), torch.randn(5, 2, 3)
    y = torch.randint(4, (5, 2))
    flat = lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())   # noqa: E731
    source = make(name, model)
    source.grads(flat, x, y)
    y[:, 1] = -100   # as many in each: values and gradients are those of a mean, the next batch's are not
    with pytest.raises(ValueError, match=r"not ignore_index \(-100\), which mixes samples"):
        source.grads(flat, x, y)
    ignoring = functools.partial(F.cross_entropy, ignore_index=3)
    with pytest.raises(ValueError, match=r"not ignore_index \(3\)"):
        source.grads(ignoring, x[:, 0], torch.tensor([0, 1, 2, 3, 0]))
    with pytest.raises(ValueError, match=r"not ignore_index \(-100\)"):
        source.grads(lambda out, y: F.cross_entropy(out[:, 0], y[0]), x, (y[:, 1], y))


@pytest.mark.parametrize("kind", ["tuple", "dict"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_outputs_in_tuples_and_dicts(kind, reduction):
    """A wrong reduction is found; a right one gives each sample's own gradient, also of an output with its batch second
    and of one that the model itself goes on with."""
    def forward(s, x):
        h = torch.tanh(s.a(x))
        outs = s.b(h), h, x.sum(1).long(), h.T.detach().clone().T.contiguous().T
        return outs if kind == "tuple" else dict(zip("abcd", outs, strict=True))

    def loss_fn(out, y):
        first, second, third, fourth = out if kind == "tuple" else out.values()
        each = (first - y).square().sum(1) + second.square().sum(1) + third * 0.0 + fourth.sum(0) * second[:, 0]
        return each.mean() if reduction == "mean" else each.sum()

    model = Net(forward, a=nn.Linear(4, 3), b=nn.Linear(3, 2)).double()
    x, y = torch.randn(5, 4).double(), torch.randn(5, 2).double()
    truth = one_at_a_time(model, loss_fn, x, y)
    for key, grad in per_sample(model, loss_reduction=reduction).grads(loss_fn, x, y).items():
        torch.testing.assert_close(grad, truth[key])
    other = "sum" if reduction == "mean" else "mean"
    said = f"taken as a {other} over samples, but it is a {reduction}; pass loss_reduction='{reduction}'"
    with pytest.raises(ValueError, match=said):
        per_sample(model, loss_reduction=other).grads(loss_fn, x, y)


def test_a_first_batch_of_one_proves_nothing():
    source, x = per_sample(nn.Linear(3, 2)), torch.randn(16, 3)
    y = torch.zeros(16, dtype=torch.long)
    loss_fn = lambda out, y: F.cross_entropy(out, y) + (out[3] * out[-1]).sum() if len(out) > 3 else out.sum() * 0   # noqa: E731
    source.grads(loss_fn, x[:1], y[:1])
    assert source._loss._passed is None
    with pytest.raises(ValueError, match="mixes samples"):
        source.grads(loss_fn, x, y)


def test_rows_do_not_depend_on_the_number_of_samples():
    """bf16: rows over n would be rounded differently; n a power of two and not, the same bits."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).bfloat16()
    x, y = torch.randn(9, 6).bfloat16(), torch.randint(3, (9,))
    with per_sample(model) as source:
        nine, eight = (source.grads(nn.CrossEntropyLoss(), x[:n], y[:n]) for n in (9, 8))
    for key, grad in eight.items():
        assert torch.equal(nine[key][:8], grad)
