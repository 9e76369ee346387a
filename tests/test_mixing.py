"""Models that mix samples, hide the batch dimension or keep something of the samples are refused, by every source."""

import functools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dprs_kernels.grads.backpack import BackpackSource
from dprs_kernels.grads.functional import FunctionalSource
from dprs_kernels.grads.hooks import per_sample
from dprs_kernels.grads.mixing import _differ, check_independent
from dprs_kernels.grads.opacus import OpacusSource

MAKERS = {
    "hooks": per_sample, "backpack": BackpackSource, "opacus hooks": OpacusSource,
    "opacus ew": functools.partial(OpacusSource, mode="ew"),
}   # fmt: skip
everywhere = pytest.mark.parametrize("name", MAKERS)


def make(name, model, **options):
    if name != "hooks":
        pytest.importorskip(name.split()[0])
    return MAKERS[name](model, **options)


class Net(nn.Module):
    """Layers by name, and a forward."""

    def __init__(self, forward, **layers):
        super().__init__()
        self.run = forward
        for name, layer in layers.items():
            setattr(self, name, layer)

    def forward(self, *x):
        return self.run(self, *x)


def two(forward):
    return Net(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 1))


def frozen_gru(s, x):
    return s.b(s.g(x.unsqueeze(1))[0].squeeze(1))


def far(s, x):
    half = x.shape[0] // 2
    return s.b(torch.cat([x[:half] + x[half : 2 * half], x[half:]]) if half > 1 else x)


MIXING = {
    "mean": two(lambda s, x: s.b(x - x.mean(0))),
    "causal": two(lambda s, x: s.b(s.a(x).cumsum(0))),
    "anticausal": two(lambda s, x: s.b(s.a(x).flip(0).cumsum(0).flip(0))),
    "halves": two(far),
    "tuple": two(lambda s, x: (s.b(x), s.a(x) - s.a(x).mean(0))),
    "dict": two(lambda s, x: {"out": s.b(x), "more": [s.a(x) - s.a(x).mean(0)]}),
    "one number of all": two(lambda s, x: (s.b(x), s.a(x).square().mean())),
    "number of samples": two(lambda s, x: s.b(x) / x.shape[0]),
}


@everywhere
@pytest.mark.parametrize("case", MIXING)
def test_mixing_is_found(name, case):
    model = MIXING[case]
    model = Net(model.run, a=nn.Linear(4, 4), b=nn.Linear(4, 1))   # libraries change it

    def loss_fn(out, y):
        first = out["out"] if isinstance(out, dict) else out[0] if isinstance(out, tuple) else out
        return F.mse_loss(first, y)

    with pytest.raises(ValueError, match="model: Net mixes samples: the output of one changes with the"):
        make(name, model).grads(loss_fn, torch.randn(6, 4), torch.zeros(6, 1))


@everywhere
@pytest.mark.parametrize("rows", [1, 4])
def test_samples_that_are_alike_hide_nothing(name, rows):
    """A constant second sample, equal rows of indices, a batch of one: others are made up."""
    centred = lambda s, x: s.b(s.a(x) - s.a(x).mean(0))   # noqa: E731
    with pytest.raises(ValueError, match="mixes samples"):
        make(name, two(centred)).grads(nn.MSELoss(), torch.full((rows, 4), 0.5), torch.zeros(rows, 1))
    words = Net(lambda s, x: s.b(s.e(x).mean(1) - s.e(x).mean((0, 1))), e=nn.Embedding(9, 4), b=nn.Linear(4, 1))
    with pytest.raises(ValueError, match="mixes samples"):
        make(name, words).grads(nn.MSELoss(), torch.tensor([[3, 7]]).expand(rows, 2), torch.zeros(rows, 1))


def test_indices_are_exchanged():
    """The first sample in all others: no batch size shows it."""
    words = Net(lambda s, x: s.b(s.e(x) + s.e(x[:1])), e=nn.Embedding(9, 4), b=nn.Linear(4, 1))
    with pytest.raises(ValueError, match="changes with the values of another"):
        check_independent(words, {}, torch.arange(4))


def test_a_check_that_could_change_nothing_is_made_again():
    words = Net(lambda s, x: s.b(s.e(x) - s.e(x).mean(0)), e=nn.Embedding(9, 4), b=nn.Linear(4, 1))
    source = per_sample(words)
    same = torch.full((4,), 3)
    assert not check_independent(words, {}, same).conclusive
    source.grads(nn.MSELoss(), same, torch.zeros(4, 1))
    with pytest.raises(ValueError, match="mixes samples"):
        source.grads(nn.MSELoss(), torch.arange(4), torch.zeros(4, 1))


@everywhere
def test_a_model_is_asked_again_when_its_mode_changes(name):
    model = two(lambda s, x: s.b(x - x.mean(0)) if s.a.training else s.b(x))
    model.a.eval().requires_grad_(False)
    source, given = make(name, model), (nn.MSELoss(), torch.randn(4, 4), torch.zeros(4, 1))
    source.grads(*given)
    model.train()
    with pytest.raises(ValueError, match="mixes samples"):
        source.grads(*given)


def test_frozen_layers_with_the_batch_second():
    for layer in (nn.GRU(4, 4), nn.MultiheadAttention(4, 2)):
        with pytest.raises(ValueError, match=r"g: \w+ has batch_first=False"):
            per_sample(Net(frozen_gru, g=layer.requires_grad_(False), b=nn.Linear(4, 1)))


T = 5
HIDDEN = {
    "positions": (lambda s, x: s.b(s.a(x) + s.p(torch.arange(T))).mean(1), "p: no input of this layer has the batch"),
    "batch second": (lambda s, x: s.b(s.a(x.transpose(0, 1))).transpose(0, 1).mean(1), "a: the batch is not the first"),
    "prototypes": (lambda s, x: s.a(x).mean(1)[:, :1] @ s.b(torch.ones(T, 4)).T, "b: no input of this layer has"),
    "merged": (lambda s, x: s.b(s.a(x.flatten(0, 1))).unflatten(0, (-1, T)).mean(1), r"a: a tensor of shape \[20, 4\]"),
    "one row": (lambda s, x: s.b(x).mean(1) + s.a(torch.ones(4))[:1], "a: no input of this layer has the batch"),
}


@everywhere
@pytest.mark.parametrize("n", [T, T + 2])
@pytest.mark.parametrize("case", HIDDEN)
def test_layers_that_do_not_see_the_batch(name, case, n):
    """Also where another dimension has the batch's size."""
    forward, said = HIDDEN[case]
    model = Net(forward, a=nn.Linear(4, 4), b=nn.Linear(4, 1), p=nn.Embedding(T, 4))
    with pytest.raises(ValueError, match=said):
        make(name, model).grads(lambda out, y: out.square().sum(), torch.randn(n, T, 4), torch.zeros(n))
    if case == "positions":   # the remedy that the message gives
        model = Net(lambda s, x: s.b(s.a(x) + s.p(torch.arange(T).expand(x.shape[:2]))).mean(1), **dict(
            a=nn.Linear(4, 4), b=nn.Linear(4, 1), p=nn.Embedding(T, 4)))   # fmt: skip
        given = nn.MSELoss(), torch.randn(n, T, 4), torch.zeros(n, 1)
        expected = FunctionalSource(model).grads(*given)
        for key, grad in make(name, model).grads(*given).items():
            torch.testing.assert_close(grad, expected[key], rtol=1e-5, atol=1e-6)


def test_a_branch_that_was_not_taken_at_first_is_checked_too():
    model = Net(lambda s, x: (s.b(s.a(x.transpose(0, 1))).transpose(0, 1) if s.other else s.b(x)).mean(1),
                a=nn.Linear(4, 4), b=nn.Linear(4, 1))   # fmt: skip
    source, given = per_sample(model), (nn.MSELoss(), torch.randn(T, T, 4), torch.zeros(T, 1))
    model.other = False
    source.grads(*given)
    model.other = True
    with pytest.raises(ValueError, match="a: the batch is not the first dimension"):
        source.grads(*given)


class Ema(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(3, 1), how
        self.register_buffer("mu", torch.zeros(3))

    def forward(self, x):
        if self.how == "written":
            self.mu.mul_(0.9).add_(0.1 * x.mean(0))
        elif self.how == "replaced":
            self.mu = self.mu + x.amax(0)
        elif self.how == "counted":
            self.mu += 1
        else:
            self.mu += x.shape[0]
        return self.layer(x)


@pytest.mark.parametrize("name", ["hooks", "backpack"])
@pytest.mark.parametrize("how", ["written", "replaced", "number of samples"])
def test_buffers_that_keep_something_of_the_samples(name, how):
    if name == "backpack":
        pytest.importorskip("backpack")
    model = nn.Sequential(Ema(how))
    with pytest.raises(ValueError, match=r"0\.mu: a buffer that the forward writes from the samples, without noise"):
        MAKERS[name](model).grads(nn.MSELoss(), torch.randn(4, 3) + 5, torch.zeros(4, 1))
    assert torch.equal(model[0].mu, torch.zeros(3))   # the check put it back


def test_buffers_beside_dropout():
    """Where batch sizes cannot be compared, values are."""
    model = nn.Sequential(Ema("written"), nn.Dropout(0.5))
    with pytest.raises(ValueError, match=r"0\.mu: a buffer that the forward writes from the samples"):
        per_sample(model).grads(nn.MSELoss(), torch.randn(4, 3), torch.zeros(4, 1))


def test_a_counter_of_passes_is_no_secret():
    model = Ema("counted")
    source = per_sample(model)
    for passes in (1, 2):
        source.grads(nn.MSELoss(), torch.randn(4, 3), torch.zeros(4, 1))
        assert torch.equal(model.mu, torch.full((3,), float(passes)))


def test_the_check_does_not_write_to_the_data():
    model = Net(lambda s, x: s.b(x.sub_(0.5)), b=nn.Linear(4, 1))
    x = torch.ones(4, 4)
    per_sample(model).grads(nn.MSELoss(), x, torch.zeros(4, 1))
    assert torch.equal(x, torch.full((4, 4), 0.5))   # once, by the pass itself


def test_not_a_number_in_one_run_only_is_a_difference():
    nan, inf = float("nan"), float("inf")
    same = torch.tensor([1.0, nan, inf])
    assert not _differ(same, same.clone(), 1.0)
    assert not _differ(same, torch.tensor([1.0 + 1e-6, nan, inf]), 1.0)
    for other in ([1.0, 1.0, inf], [nan, nan, inf], [1.0, nan, -inf], [1.1, nan, inf]):
        assert _differ(same, torch.tensor(other), 1.0)


def test_outputs_of_another_kind():
    model = Net(lambda s, x: (s.b(x), object()), b=nn.Linear(4, 1))
    with pytest.raises(ValueError, match="model: a object among the outputs; expected tensors"):
        per_sample(model).grads(lambda out, y: F.mse_loss(out[0], y), torch.randn(4, 4), torch.zeros(4, 1))
