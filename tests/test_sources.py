"""Gradient sources against one sample at a time, in float64, and through PrivateSum to p.grad."""

import copy
import functools
import gc
import sys
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from dprs_kernels import KeepMask, NoiseSource, PrivateSum
from dprs_kernels.grads import source as contract
from dprs_kernels.grads.backpack import BackpackSource
from dprs_kernels.grads.functional import FunctionalSource
from dprs_kernels.grads.hooks import per_sample
from dprs_kernels.grads.opacus import OpacusSource
from dprs_kernels.grads.source import completed

MAKERS = {
    "hooks": per_sample,
    "functional": FunctionalSource,
    "functional chunk 2": functools.partial(FunctionalSource, chunk_size=2),
    "backpack": BackpackSource,
    "opacus hooks": functools.partial(OpacusSource, mode="hooks"),
    "opacus functorch": functools.partial(OpacusSource, mode="functorch"),
    "opacus ew": functools.partial(OpacusSource, mode="ew"),
}


@pytest.fixture(autouse=True, scope="module")
def _one_thread():
    """Tensors are tiny: a second thread waits more than it works (39 s with it, 16 s without, at load 3)."""
    held = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(held)


def make(name, model, **options):
    library = name.split()[0]
    if library in ("backpack", "opacus"):
        pytest.importorskip(library)
    return MAKERS[name](model, **options)


everywhere = pytest.mark.parametrize("name", MAKERS)


def mlp():
    return nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))


def cnn(norm=True):
    middle = [nn.GroupNorm(2, 4)] if norm else []
    head = [nn.AvgPool2d(2), nn.Flatten(), nn.Linear(4 * 2 * 2, 3)]
    return nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1), *middle, nn.ReLU(), *head)


def samples(n, *shape, classes=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, *shape, dtype=torch.float64, generator=generator)
    return x, torch.randint(classes, (n,), generator=generator)


def one_at_a_time(model, loss_fn, x, y):
    """name -> [n, *shape] by n ordinary backward passes."""
    named = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    xs, n = (x if isinstance(x, tuple) else (x,)), len(y)
    rows = {name: [] for name, _ in named}
    for i in range(n):
        loss = loss_fn(model(*(part[i : i + 1] for part in xs)), y[i : i + 1])
        grads = torch.autograd.grad(loss, [p for _, p in named], allow_unused=True)
        for (name, p), g in zip(named, grads, strict=True):
            rows[name].append(torch.zeros_like(p) if g is None else g)
    return {name: torch.stack(r) for name, r in rows.items()}


def assert_same(source, loss_fn, x, y, truth, tolerance=1e-12):
    grads = source.grads(loss_fn, x, y)
    assert list(grads) == [name for name, _ in source.params] == list(truth)
    for key, value in truth.items():
        assert grads[key].dtype == value.dtype
        assert not grads[key].requires_grad
        torch.testing.assert_close(grads[key], value, rtol=tolerance, atol=tolerance, msg=lambda m, k=key: f"{k}: {m}")


def check(name, model, loss_fn, x, y, tolerance=1e-12, **options):
    truth = one_at_a_time(model, loss_fn, x, y)   # before hooks are attached
    source = make(name, model, **options)
    assert_same(source, loss_fn, x, y, truth, tolerance)
    return source


@everywhere
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("n", [1, 5])
@pytest.mark.parametrize("network", ["mlp", "cnn"])
def test_every_source_gives_each_samples_own_gradient(name, reduction, n, network):
    model = mlp().double() if network == "mlp" else cnn(norm=name != "backpack").double()
    x, y = samples(n, 6) if network == "mlp" else samples(n, 2, 8, 8)
    loss_fn = nn.CrossEntropyLoss(reduction=reduction)
    truth = one_at_a_time(model, loss_fn, x, y)
    source = make(name, model)
    for _ in range(2):   # nothing is left over from the first
        assert_same(source, loss_fn, x, y, truth)


@everywhere
def test_an_empty_batch_does_not_run_the_model(name):
    class Refuses(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            assert x.shape[0] > 0
            return self.layer(x)

    source = make(name, Refuses())
    grads = source.grads(nn.CrossEntropyLoss(), torch.empty(0, 6), torch.empty(0, dtype=torch.long))
    assert {k: tuple(g.shape) for k, g in grads.items()} == {"layer.weight": (0, 3, 6), "layer.bias": (0, 3)}


@everywhere
def test_losses_without_a_reduction_attribute(name):
    model = mlp().double()
    x, _ = samples(5, 6)
    y = samples(5, 3, seed=1)[0]
    check(name, model, F.mse_loss, x, y)
    check(name, mlp().double(), functools.partial(F.mse_loss, reduction="sum"), x, y)
    check(name, mlp().double(), lambda out, y: (out - y).square().sum(), x, y, loss_reduction="sum")


@everywhere
def test_mean_over_positions_is_the_samples_own_mean(name):
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3))   # float32: BackPACK's Embedding knows no other
    tokens = torch.randint(7, (5, 6))
    y = samples(5, 6, 3)[0].float()
    check(name, model, nn.MSELoss(), tokens, y, tolerance=1e-6)


@everywhere
def test_frozen_parameters_have_no_entry_and_p_grad_is_untouched(name):
    model = mlp().double()
    model[0].weight.requires_grad_(False)
    model[2].bias.requires_grad_(False)
    x, y = samples(5, 6)
    held = torch.full_like(model[2].weight, 7.0)
    model[2].weight.grad = held
    truth = one_at_a_time(model, nn.CrossEntropyLoss(), x, y)
    assert list(truth) == ["0.bias", "2.weight"]
    assert_same(make(name, model), nn.CrossEntropyLoss(), x.requires_grad_(), y, truth)
    assert model[2].weight.grad is held
    assert torch.equal(held, torch.full_like(held, 7.0))
    assert model[0].bias.grad is None
    assert x.grad is None
    assert all(getattr(p, a, None) is None for p in model.parameters() for a in ("grad_sample", "grad_batch"))


class Branches(nn.Module):
    """One branch takes part at a time; the other is run for nothing, or not at all."""

    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(6, 3), nn.Linear(6, 3)
        self.use, self.run_both = "one", False

    def forward(self, x):
        outs = {k: getattr(self, k)(x) for k in ("one", "two") if self.run_both or k == self.use}
        return outs[self.use]


@everywhere
@pytest.mark.parametrize("run_both", [False, True])
def test_an_unused_branch_gets_zeros_and_recovers(name, run_both):
    model = Branches().double()
    model.run_both = run_both
    x, y = samples(5, 6)
    plain = copy.deepcopy(model)
    source = make(name, model)
    for use in ("one", "two", "two", "one"):
        model.use = plain.use = use
        assert_same(source, nn.CrossEntropyLoss(), x, y, one_at_a_time(plain, nn.CrossEntropyLoss(), x, y))


@everywhere
def test_an_evaluation_with_gradients_on_leaves_no_trace(name):
    model = mlp().double()
    x, y = samples(5, 6)
    truth = one_at_a_time(model, nn.CrossEntropyLoss(), x, y)
    source = make(name, model)
    model(samples(9, 6)[0]).sum()
    assert_same(source, nn.CrossEntropyLoss(), x, y, truth)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(7, 4), nn.Linear(4, 7, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, tokens):
        return self.out(torch.tanh(self.embed(tokens)).mean(1))


@everywhere
def test_tied_weights(name):
    model = Tied()
    tokens, y = torch.randint(7, (5, 6)), torch.randint(7, (5,))
    check(name, model, nn.CrossEntropyLoss(), tokens, y, tolerance=1e-6)


class Twice(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.out(torch.tanh(self.inner(torch.tanh(self.inner(x)))))


@everywhere
def test_a_module_called_twice(name):
    model = Twice().double()
    x, y = samples(5, 6)
    truth = one_at_a_time(model, nn.CrossEntropyLoss(), x, y)
    source = make(name, model)
    if name == "backpack":
        with pytest.raises(ValueError, match=r"inner \(Linear\): called 2 times .* use FunctionalSource"):
            source.grads(nn.CrossEntropyLoss(), x, y)
    else:
        assert_same(source, nn.CrossEntropyLoss(), x, y, truth)


class Around(nn.Module):
    """Uses a parameter without calling its module."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(6, 6), nn.Linear(6, 3)
        self.also_called = False

    def forward(self, x):
        h = F.linear(x, self.inner.weight, self.inner.bias)
        return self.out(torch.tanh(self.inner(h) if self.also_called else h))


@everywhere
@pytest.mark.parametrize("also_called", [False, True])
def test_a_parameter_used_outside_of_its_module_is_not_missed(name, also_called):
    model = Around().double()
    model.also_called = also_called
    x, y = samples(5, 6)
    truth = one_at_a_time(model, nn.CrossEntropyLoss(), x, y)
    source = make(name, model)
    if name in ("hooks", "backpack", "opacus hooks", "opacus functorch"):
        said = "do not add up to the batch's" if also_called else "took part in the loss, but got no per-sample"
        if name == "hooks":
            said = "used outside of its module's forward"
        with pytest.raises(ValueError, match=rf"inner.weight: .*{said}"):
            source.grads(nn.CrossEntropyLoss(), x, y)
    else:
        assert_same(source, nn.CrossEntropyLoss(), x, y, truth)


REFUSED = {
    ("backpack", "circular"): "padding_mode='circular' is not supported",
    ("backpack", "padding_idx"): "padding_idx, .* not supported",
    ("opacus hooks", "circular"): "0.weight: .* do not add up",
    ("opacus hooks", "padding_idx"): "0.weight: .* do not add up",
    ("opacus ew", "padding_idx"): "expanded weights ignore padding_idx",
}


@everywhere
@pytest.mark.parametrize("what", ["circular", "padding_idx"])
def test_an_option_that_a_library_ignores_is_found(name, what):
    """Right or refused; never wrong."""
    if what == "circular":
        conv = nn.Conv2d(2, 3, 3, padding=1, padding_mode="circular")
        model = nn.Sequential(conv, nn.Flatten(), nn.Linear(75, 3)).double()
        x, y = samples(5, 2, 5, 5)
    else:
        model = nn.Sequential(nn.Embedding(7, 4, padding_idx=0), nn.Flatten(), nn.Linear(24, 3)).double()
        x, y = torch.arange(30).reshape(5, 6) % 7, samples(5, 1)[1]
    if (name, what) in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[name, what]):
            check(name, model, nn.CrossEntropyLoss(), x, y)
    else:
        check(name, model, nn.CrossEntropyLoss(), x, y)


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 3), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.randn(3))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, a, b):
        self.calls += 1
        return (self.a(a) + self.b(b)) * self.scale


def test_functional_several_inputs_own_parameters_and_buffers():
    model = TwoInputs().double()
    (a, y), (b, _) = samples(5, 6), samples(5, 4, seed=1)
    truth = one_at_a_time(model, nn.CrossEntropyLoss(), (a, b), y)
    calls = int(model.calls)
    assert_same(FunctionalSource(model), nn.CrossEntropyLoss(), (a, b), y, truth)
    assert int(model.calls) == calls


def test_functional_several_targets():
    model = mlp().double()
    (x, y), (z, _) = samples(5, 6), samples(5, 3, seed=1)

    def loss_fn(out, targets):
        return F.cross_entropy(out, targets[0]) + F.mse_loss(out, targets[1])

    grads = FunctionalSource(model).grads(loss_fn, x, (y, z))
    parts = [one_at_a_time(model, f, x, t) for f, t in ((F.cross_entropy, y), (F.mse_loss, z))]
    for key in grads:
        torch.testing.assert_close(grads[key], parts[0][key] + parts[1][key])


@pytest.mark.parametrize("name", ["hooks", "backpack", "opacus hooks", "opacus ew"])
def test_two_inputs_and_targets_through_libraries(name):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(6, 3), nn.Linear(4, 3)

        def forward(self, a, b):
            return self.a(a) + self.b(b)

    model = Sum().double()
    (a, y), (b, _) = samples(5, 6), samples(5, 4, seed=1)
    truth = one_at_a_time(model, nn.CrossEntropyLoss(), (a, b), y)
    assert_same(make(name, model), nn.CrossEntropyLoss(), (a, b), y, truth)
    grads = make(name, Sum().double()).grads(lambda out, t: F.cross_entropy(out, t[0]), (a, b), (y, y))
    assert grads["a.weight"].shape == (5, 3, 6)


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.layer = kind(4, 5, num_layers=2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(10, 3)

    def forward(self, x):
        out, state = self.layer(x)
        state = state[0] if isinstance(state, tuple) else state
        return self.out(out[:, -1] + torch.cat([state[0], state[1]], 1))


class Cells(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell, self.out = nn.LSTMCell(4, 5), nn.Linear(5, 3)

    def forward(self, x):
        state = None
        for t in range(x.shape[1]):
            state = self.cell(x[:, t], state)
        return self.out(state[0])


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN, None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])   # float32 LSTMs have a path of their own
def test_functional_recurrent(kind, dtype):
    model = (Recurrent(kind) if kind else Cells()).to(dtype)
    x, y = samples(5, 6, 4)
    x = x.to(dtype)
    enabled = torch.backends.mkldnn.enabled
    truth = one_at_a_time(model, nn.CrossEntropyLoss(), x, y)
    tolerance = 1e-12 if dtype == torch.float64 else 1e-5
    assert_same(FunctionalSource(model, chunk_size=3), nn.CrossEntropyLoss(), x, y, truth, tolerance)
    assert torch.backends.mkldnn.enabled == enabled


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norm, self.out = nn.LayerNorm(8), nn.Linear(8, 3)

    def forward(self, x):
        return self.out(self.norm(x + self.attend(x, x, x, need_weights=False)[0]).mean(1))


def test_functional_attention():
    model = Attention().double()
    x, y = samples(5, 6, 8)
    truth = one_at_a_time(model, nn.CrossEntropyLoss(), x, y)
    with warnings.catch_warnings():
        warnings.simplefilter("error")   # no batching rule: torch would loop over samples
        assert_same(FunctionalSource(model), nn.CrossEntropyLoss(), x, y, truth)


def test_functional_dropout():
    model = nn.Sequential(nn.Linear(6, 3, bias=False), nn.Dropout(0.5))
    x, y = torch.ones(64, 6), torch.zeros(64, 3)
    dropped = FunctionalSource(model).grads(F.mse_loss, x, y)["0.weight"][:, :, 0] == 0   # [64, 3]
    assert len({tuple(row.tolist()) for row in dropped}) > 4
    with pytest.raises(RuntimeError, match="random"):
        FunctionalSource(model, randomness="error").grads(F.mse_loss, x, y)


def test_opacus_recurrent_layers():
    pytest.importorskip("opacus")
    from opacus.layers import DPLSTM

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.out = DPLSTM(4, 5, batch_first=True), nn.Linear(5, 3)

        def forward(self, x):
            return self.out(self.layer(x)[0][:, -1])

    model = Net().double()
    x, y = samples(5, 6, 4)
    check("opacus hooks", model, nn.CrossEntropyLoss(), x, y)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("wrapped_as", ["mean", "sum"])
@pytest.mark.parametrize("expanded", [False, True])
def test_opacus_module_wrapped_by_the_user(reduction, wrapped_as, expanded):
    library = pytest.importorskip("opacus.grad_sample")
    model = mlp().double()
    x, y = samples(5, 6)
    loss_fn = nn.CrossEntropyLoss(reduction=reduction)
    truth = one_at_a_time(model, loss_fn, x, y)
    kind = library.GradSampleModuleExpandedWeights if expanded else library.GradSampleModule
    assert_same(OpacusSource(kind(model, loss_reduction=wrapped_as)), loss_fn, x, y, truth)


def test_opacus_take_gives_accumulated_micro_batches():
    library = pytest.importorskip("opacus.grad_sample")
    model = mlp().double()
    x, y = samples(7, 6)
    truth = one_at_a_time(model, nn.CrossEntropyLoss(), x, y)
    wrapped = library.GradSampleModule(model)
    source = OpacusSource(wrapped)
    assert source.take() == []
    for rows in (slice(0, 4), slice(4, 7)):
        nn.CrossEntropyLoss()(wrapped(x[rows]), y[rows]).backward()
    with pytest.raises(ValueError, match=r"0.weight: p.grad_sample is held .* use it with take\(\)"):
        source.grads(nn.CrossEntropyLoss(), x, y)
    first, second = source.take()
    for key, value in truth.items():
        torch.testing.assert_close(torch.cat([first[key], second[key]]), value)
    assert source.take() == []


@everywhere
@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
def test_private_gradients_are_the_same_from_all_sources(name, clipping):
    torch.manual_seed(0)
    model = cnn(norm=False).double()
    x, y = samples(9, 2, 8, 8)
    loss_fn = nn.CrossEntropyLoss()
    named = list(model.named_parameters())
    truth = one_at_a_time(model, loss_fn, x, y)

    def private(params, batches):
        total = PrivateSum(
            params, keep=KeepMask.draw([p for _, p in params], drop_rate=0.5, seed=1, draw=0), max_grad_norm=0.3,
            noise_multiplier=1.0, expected_batch_size=8, noise=NoiseSource.seeded_for_tests(3),
            clipping=clipping,
        )   # fmt: skip
        for batch in batches:
            total.add(batch)
        total.release()
        return [p.grad.clone() for _, p in params]

    expected = private(named, [truth])
    source = make(name, model)
    parts = (source.grads(loss_fn, x[rows], y[rows]) for rows in (slice(0, 5), slice(5, 5), slice(5, 9)))
    for got, want in zip(private(source.params, parts), expected, strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@everywhere
def test_gradients_are_freed_with_the_dict(name):
    model = cnn(norm=False).double()
    x, y = samples(5, 2, 8, 8)
    source = make(name, model)
    grads = source.grads(nn.CrossEntropyLoss(), x, y)
    refs = [weakref.ref(g) for g in grads.values()]
    del grads
    gc.collect()
    assert [ref() for ref in refs] == [None] * len(refs)
    kept = [k for m in model.modules() for k in vars(m) if k in ("input0", "output", "activations")]
    assert kept == []


@everywhere
def test_autocast(name):
    model = mlp()
    x, y = samples(5, 6)
    x = x.float()
    truth = one_at_a_time(model, nn.CrossEntropyLoss(), x, y)
    source = make(name, model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        grads = source.grads(nn.CrossEntropyLoss(), x, y)
    for key, value in truth.items():
        torch.testing.assert_close(grads[key].float(), value, rtol=0.05, atol=0.05)


# What is refused, and what is said.


@everywhere
def test_batch_statistics_are_refused(name):
    for module, path in ((nn.BatchNorm1d(5), "1"), (nn.SyncBatchNorm(5), "1")):
        with pytest.raises(ValueError, match=rf"{path} \({type(module).__name__}\): .* nn.GroupNorm, or .*\.eval\(\)"):
            make(name, nn.Sequential(nn.Linear(6, 5), module, nn.Linear(5, 3)))
    without = nn.BatchNorm1d(5, track_running_stats=False).eval()
    with pytest.raises(ValueError, match="statistics of the batch"):
        make(name, nn.Sequential(nn.Linear(6, 5), without))
    with pytest.raises(ValueError, match=r"0 \(Embedding\): max_norm rescales .* without noise"):
        make(name, nn.Sequential(nn.Embedding(6, 5, max_norm=1.0)))
    with pytest.raises(ValueError, match=r"0 \(InstanceNorm1d\): updates running statistics"):
        make(name, nn.Sequential(nn.InstanceNorm1d(5, track_running_stats=True), nn.Linear(6, 5)))


@everywhere
def test_batch_norm_that_is_frozen_works_until_it_thaws(name):
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5, affine=False), nn.Linear(5, 3)).double()
    model[1].eval()
    x, y = samples(5, 6)
    source = check(name, model, nn.CrossEntropyLoss(), x, y)
    model.train()
    with pytest.raises(ValueError, match=r"1 \(BatchNorm1d\)"):
        source.grads(nn.CrossEntropyLoss(), x, y)


@everywhere
def test_errors_of_data_and_loss(name):
    x, y = samples(5, 6)
    source = make(name, mlp().double())
    cases = [
        ((x, y[:4]), "y: 4 samples, but x has 5; the batch dimension comes first"),
        (((x, x[:3]), y), r"x\[1\]: 3 samples, but x\[0\] has 5"),
        ((x.tolist(), y), "x: got list; expected a tensor"),
        ((x, torch.tensor(1)), "y: has no dimensions; expected"),
        (((), ()), "x and y: no tensors"),
    ]
    for (a, b), said in cases:
        with pytest.raises(ValueError, match=said):
            source.grads(nn.CrossEntropyLoss(), a, b)
    with pytest.raises(ValueError, match="reduction 'none'; expected 'mean' or 'sum'"):
        source.grads(nn.CrossEntropyLoss(reduction="none"), x, y)
    with pytest.raises(ValueError, match=r"class weights .* use reduction='sum'"):
        source.grads(nn.CrossEntropyLoss(weight=torch.ones(3).double()), x, y)
    with pytest.raises(ValueError, match=r"returned shape \[\d\]; expected one number"):
        source.grads(lambda out, y: F.cross_entropy(out, y, reduction="none"), x[:1], y[:1])
    with pytest.raises(ValueError, match="loss_reduction: got 'average'"):
        make(name, mlp(), loss_reduction="average")
    with pytest.raises(ValueError, match=r"loss_reduction: got 'sum', but loss_fn.reduction is 'mean'"):
        make(name, mlp().double(), loss_reduction="sum").grads(nn.CrossEntropyLoss(), x, y)
    with pytest.raises(ValueError, match="no trainable parameter; call requires_grad_"):
        make(name, mlp().requires_grad_(False))
    source.params[0][1].requires_grad_(False)
    with pytest.raises(ValueError, match=r"0.weight: frozen since the source was made"):
        source.grads(nn.CrossEntropyLoss(), x, y)


@pytest.mark.parametrize("name", ["hooks", "backpack", "opacus hooks", "opacus ew"])
def test_losses_that_mix_samples_are_refused_where_they_see_a_batch(name):
    x, y = samples(5, 6)
    source = make(name, mlp().double())
    with pytest.raises(ValueError, match="taken as a mean over samples, but it is a sum; pass loss_reduction='sum'"):
        source.grads(lambda out, y: F.cross_entropy(out, y, reduction="sum"), x, y)
    with pytest.raises(ValueError, match="it mixes samples"):
        source.grads(lambda out, y: F.cross_entropy(out, y) + (out @ out.T).mean(), x, y)
    y[2] = -100
    with pytest.raises(ValueError, match=r"not ignore_index \(-100\), which mixes samples"):
        source.grads(nn.CrossEntropyLoss(), x, y)
    y[2] = 0
    assert len(source.grads(nn.CrossEntropyLoss(), x, y)) == 4
    y[2] = -100
    with pytest.raises(ValueError, match="ignore_index"):   # also after a first good batch
        source.grads(nn.CrossEntropyLoss(), x, y)
    summed = nn.CrossEntropyLoss(reduction="sum")
    assert source.grads(summed, x, y)["0.weight"][2].count_nonzero() == 0


@pytest.mark.parametrize("name", ["hooks", "backpack", "opacus hooks", "opacus ew"])
def test_outputs_without_the_batch_first(name):
    class Transposed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x).T

    with pytest.raises(ValueError, match=r"outputs have shape \[3, 5\]; expected 5 samples, batch first"):
        make(name, Transposed()).grads(lambda out, y: out.sum(), torch.randn(5, 6), torch.zeros(5))


def test_backpack_names_what_it_cannot_do():
    cases = [
        (cnn(), r"1 \(GroupNorm\): BackPACK cannot make its per-sample gradients: .* use FunctionalSource"),
        (Recurrent(nn.LSTM), r"layer \(LSTM\): .* final states"),
        (Attention(), r"attend \(MultiheadAttention\): "),
        (nn.Sequential(nn.Embedding(5, 3, padding_idx=0)), r"0 \(Embedding\): .* padding_idx"),
        (Tied().double(), r"embed \(Embedding\): .* float32 only, got torch.float64"),
        (nn.Sequential(nn.Conv1d(2, 3, 3, padding_mode="circular")), r"0 \(Conv1d\): .*padding_mode='circular'"),
        (TwoInputs(), r"model \(TwoInputs\): .* exact class"),
    ]
    for model, said in cases:
        with pytest.raises(ValueError, match=said):
            make("backpack", model)
    frozen = cnn().double()
    frozen[1].requires_grad_(False)
    x, y = samples(5, 2, 8, 8)
    check("backpack", frozen, nn.CrossEntropyLoss(), x, y)


def test_opacus_names_what_it_cannot_do():
    library = pytest.importorskip("opacus.grad_sample")
    cases = [
        (Recurrent(nn.LSTM), "hooks", r"layer \(LSTM\): refused by Opacus; .*ModuleValidator.fix"),
        (Attention(), "functorch", r"attend \(MultiheadAttention\): refused by Opacus"),
        (TwoInputs(), "hooks", r"model \(TwoInputs\): has trainable parameters and buffers"),
        (mlp(), "ghost", "mode: got 'ghost'; expected one of hooks, functorch, ew"),
        (library.GradSampleModuleFastGradientClipping(mlp()), "hooks", "FastGradientClipping makes no per-sample"),
        (library.GradSampleModule(mlp(), batch_first=False), "hooks", "batch_first=False"),
    ]
    for model, mode, said in cases:
        with pytest.raises(ValueError, match=said):
            OpacusSource(model, mode)
    model = mlp()
    OpacusSource(model)
    with pytest.raises(ValueError, match="has Opacus hooks already"):
        OpacusSource(model)
    source = OpacusSource(mlp().eval())
    with pytest.raises(ValueError, match=r"0 \(Linear\): in eval mode, .* model.train\(\)"):
        source.grads(nn.CrossEntropyLoss(), torch.randn(2, 6), torch.zeros(2, dtype=torch.long))
    source = OpacusSource(nn.Sequential(nn.Conv2d(2, 3, 3), nn.Flatten(), nn.PReLU()), "ew")
    with pytest.raises(ValueError, match=r"expanded weights: .*prelu.*; use mode='hooks', or FunctionalSource"):
        source.grads(F.mse_loss, torch.randn(2, 2, 3, 3), torch.zeros(2, 3))


def test_functional_options():
    with pytest.raises(ValueError, match="chunk_size: got 0; expected a positive integer"):
        FunctionalSource(mlp(), chunk_size=0)
    with pytest.raises(ValueError, match="randomness: got 'none'"):
        FunctionalSource(mlp(), randomness="none")


@pytest.mark.parametrize(("library", "kind"), [("backpack", BackpackSource), ("opacus", OpacusSource)])
def test_a_missing_library_names_its_extra(library, kind, monkeypatch):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(ImportError, match=rf'pip install "dprs_kernels\[{library}\]"'):
        kind(mlp())


@everywhere
def test_a_layer_unfrozen_later_is_refused(name):
    model = mlp()
    model[0].requires_grad_(False)
    source = make(name, model)
    model[0].bias.requires_grad_(True)
    with pytest.raises(ValueError, match=r"0.bias: unfrozen, or added, since the source was made; make a new source"):
        source.grads(nn.CrossEntropyLoss(), torch.randn(4, 6), torch.zeros(4, dtype=torch.long))
    assert model[0].bias.grad is None


def test_rows_that_are_not_samples():
    params = [("w", nn.Parameter(torch.zeros(2)))]
    assert completed(params, {}, 3)["w"].shape == (3, 2)
    with pytest.raises(ValueError, match="w: gradients with other rows than samples: the batch must be the first"):
        completed(params, {"w": torch.zeros(4, 2)}, 3)


def test_sources_keep_the_contract():
    source: contract.Source = FunctionalSource(mlp())   # read by mypy too
    assert not any(hasattr(make_one(mlp()), "loss_reduction") for make_one in (per_sample, FunctionalSource))
    assert [name for name, _ in source.params] == ["0.weight", "0.bias", "2.weight", "2.bias"]
