"""Our hooks against one sample at a time: every layer and option, in float64, where both must agree to rounding."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from dprs_kernels.grads.hooks import per_sample


def truth(model, loss_fn, x, y):
    """name -> [n, *shape], by n backward passes."""
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    inputs = x if isinstance(x, tuple) else (x,)
    n = inputs[0].shape[0]
    rows = {name: [] for name in params}
    for i in range(n):
        loss = loss_fn(model(*(part[i : i + 1] for part in inputs)), y[i : i + 1])
        grads = torch.autograd.grad(loss, list(params.values()), allow_unused=True)
        for (name, p), grad in zip(params.items(), grads, strict=True):
            rows[name].append(torch.zeros_like(p) if grad is None else grad)
    return {name: torch.stack(row) for name, row in rows.items()}


def agree(model, x, seed=0, reduction="mean", dtype=torch.float64):
    """The model's gradients under a squared loss, with hooks and one by one; state and p.grad untouched."""
    torch.manual_seed(seed)
    model = model.to(dtype)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p) * 0.5)
    out = model(*(x if isinstance(x, tuple) else (x,)))
    y = torch.randn_like(out)
    loss_fn = nn.MSELoss(reduction="sum")

    def loss_of(outputs, targets):
        each = (outputs - targets).square().flatten(1).sum(1) if outputs.dim() > 1 else (outputs - targets).square()
        return each.mean() if reduction == "mean" else each.sum()

    keys, before = list(model.state_dict()), copy.deepcopy(model.state_dict())
    expected = truth(model, loss_fn, x, y)
    with per_sample(model, loss_reduction=reduction) as source:
        for _ in range(2):   # twice: nothing is left over
            grads = source.grads(loss_of, x, y)
    assert list(grads) == list(expected)
    for name, grad in grads.items():
        assert grad.shape == expected[name].shape, name
        rtol, atol = (1e-9, 1e-11) if dtype == torch.float64 else (1e-4, 1e-4)
        assert torch.allclose(grad, expected[name], rtol=rtol, atol=atol), name
    assert list(model.state_dict()) == keys
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize("shape", [(4, 5), (4, 3, 5), (4, 2, 3, 5)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_linear(shape, bias, reduction):
    model = nn.Sequential(nn.Linear(5, 6, bias=bias), nn.ReLU(inplace=True), nn.Linear(6, 2))
    agree(model, torch.randn(*shape, dtype=torch.float64), reduction=reduction)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)   # torch's, and our kernel
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_conv(dtype, data):
    dims = data.draw(st.integers(1, 3))
    groups = data.draw(st.sampled_from([1, 2]))
    kind = {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d}[dims]
    mode = data.draw(st.sampled_from(["zeros", "reflect", "circular", "replicate"]))
    stride = data.draw(st.integers(1, 2))
    padding = data.draw(st.sampled_from([0, 1, 2, "same", "valid"])) if stride == 1 else data.draw(st.integers(0, 2))
    conv = kind(2 * groups, 4, kernel_size=data.draw(st.integers(1, 3)), stride=stride, padding=padding,
                dilation=data.draw(st.integers(1, 2)), groups=groups, padding_mode=mode,
                bias=data.draw(st.booleans()))   # fmt: skip
    x = torch.randn(3, 2 * groups, *[data.draw(st.integers(5, 7)) for _ in range(dims)], dtype=dtype)
    agree(nn.Sequential(conv, nn.Tanh()), x, dtype=dtype)


@pytest.mark.parametrize("layer", [
    nn.LayerNorm(6), nn.LayerNorm((4, 6)), nn.RMSNorm(6), nn.GroupNorm(2, 4), nn.InstanceNorm1d(4, affine=True),
], ids=str)   # fmt: skip
def test_norms(layer):
    agree(nn.Sequential(nn.Conv1d(4, 4, 1), layer, nn.ReLU()), torch.randn(3, 4, 6, dtype=torch.float64))


def test_embedding():
    class Lookup(nn.Module):
        def __init__(self):
            super().__init__()
            self.table, self.out = nn.Embedding(7, 4, padding_idx=2), nn.Linear(4, 3)

        def forward(self, index):
            return self.out(self.table(index).mean(1))

    agree(Lookup(), torch.randint(0, 7, (4, 5)))


def test_tied_weights_and_layers_used_twice():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
            self.second.weight = self.first.weight

        def forward(self, x):
            return self.second(torch.tanh(self.first(torch.tanh(self.first(x)))))

    agree(Tied(), torch.randn(4, 4, dtype=torch.float64))


class Scale(nn.Module):
    """A parameterised leaf of one's own."""

    def __init__(self, size):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(size))

    def forward(self, x):
        return torch.tanh(x * self.gain)


def test_other_layers_go_through_torch_func():
    agree(nn.Sequential(nn.Linear(4, 4), Scale(4), nn.PReLU(), nn.Linear(4, 3)), torch.randn(4, 4).double())


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.attend = nn.Linear(3, 4), nn.MultiheadAttention(4, 2, batch_first=True)
        self.norm, self.out = nn.LayerNorm(4), nn.Linear(4, 2)

    def forward(self, x):
        x = self.embed(x)
        return self.out(self.norm(x + self.attend(x, x, x, need_weights=False)[0]).mean(1))


class Recurrent(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.cells, self.out = kind(3, 4, num_layers=2, batch_first=True), nn.Linear(4, 2)

    def forward(self, x):
        out, state = self.cells(x)
        last = state[0] if isinstance(state, tuple) else state
        return self.out(out[:, -1] + last[0])


def test_attention():
    agree(Attention(), torch.randn(4, 5, 3, dtype=torch.float64))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent(kind):
    agree(Recurrent(kind), torch.randn(4, 5, 3, dtype=torch.float64))


def test_frozen_unused_and_empty():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    model[0].weight.requires_grad_(False)
    agree(model, torch.randn(4, 4, dtype=torch.float64))
    model.unused = nn.Linear(3, 3).double()
    model.forward = lambda x: model[2](model[1](model[0](x)))
    with per_sample(model) as source:
        grads = source.grads(nn.MSELoss(), torch.randn(4, 4).double(), torch.randn(4, 2).double())
        assert torch.equal(grads["unused.weight"], torch.zeros(4, 3, 3).double())
        empty = source.grads(nn.MSELoss(), torch.randn(0, 4).double(), torch.randn(0, 2).double())
    assert {name: tuple(g.shape) for name, g in empty.items()} == {
        name: (0, *p.shape) for name, p in model.named_parameters() if p.requires_grad
    }


def test_ordinary_training_is_untouched_while_attached():
    model = nn.Linear(3, 2)
    with per_sample(model):
        F.mse_loss(model(torch.ones(4, 3)), torch.zeros(4, 2)).backward()
        assert model.weight.grad is not None


class Outer(nn.Module):
    """Owns a parameter and contains layers that own theirs."""

    def __init__(self):
        super().__init__()
        self.token, self.inner, self.out = nn.Parameter(torch.zeros(4)), nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x):
        return self.out(torch.tanh(self.inner(x) * self.token) + self.token)


def test_parameters_beside_layers():
    agree(Outer(), torch.randn(4, 4).double())


class Direct(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return F.linear(self.layer(x), self.layer.weight)


class Centred(nn.Module):
    def forward(self, x):
        return x - 1e-3 * x.mean(0)


MISUSE = {
    "batch norm": (nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), r"1 \(BatchNorm1d\): normalises with the stat"),
    "nothing trainable": (nn.ReLU(), "ReLU has no trainable parameter"),
    "used outside": (Direct(), "layer.weight: used outside of its module's forward"),
    "mixed samples": (nn.Sequential(nn.Linear(4, 4), Centred()), "model: Sequential mixes samples"),
    "batch second": (Recurrent(lambda *a, **k: nn.GRU(3, 4)), "cells: GRU has batch_first=False"),
}


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_is_named_and_changes_nothing(case):
    model, message = MISUSE[case]
    x = torch.randn(4, 5, 3) if case == "batch second" else torch.randn(4, 4)
    with pytest.raises(ValueError, match=message):
        per_sample(model).grads(nn.MSELoss(), x, torch.zeros(4, 4))
    assert all(p.grad is None for p in model.parameters())


def test_a_layer_that_mixes_samples_is_named():
    class Mix(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def forward(self, x):
            return self.layer(x[:2])

    with pytest.raises(ValueError, match="layer: no input of this layer has the batch dimension"):
        per_sample(Mix()).grads(nn.MSELoss(), torch.randn(4, 4), torch.zeros(4, 2))


def test_dropout_and_random_layers_are_not_taken_for_mixing():
    model = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.RReLU(), nn.Linear(8, 4))
    grads = per_sample(model).grads(nn.MSELoss(), torch.randn(6, 4), torch.zeros(6, 4))
    assert all(grad.isfinite().all() for grad in grads.values())


def test_the_check_for_mixing_leaves_the_random_stream_alone():
    model, x, y = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5)), torch.randn(6, 4), torch.zeros(6, 8)
    source = per_sample(model)
    results = []
    for _ in range(2):   # the first pass checks, the second does not
        torch.manual_seed(0)
        results.append(source.grads(nn.MSELoss(), x, y)["0.weight"])
    assert torch.equal(*results)


@pytest.mark.parametrize("how", ["torch.compile", "in place", "a block"])
def test_a_compiled_model(how):
    """Hooks are called between the compiled graphs; the answers are those of the model as it was."""
    torch.manual_seed(0)
    block = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Dropout(0.0))
    plain = nn.Sequential(block, nn.Flatten(), nn.Linear(64, 8), nn.GELU(), nn.Linear(8, 3))
    x, y, loss_fn = torch.randn(5, 1, 6, 6), torch.randint(0, 3, (5,)), nn.CrossEntropyLoss()
    with per_sample(plain) as source:
        expected = source.grads(loss_fn, x, y)
    compiled = plain
    if how == "torch.compile":
        compiled = torch.compile(plain, backend="aot_eager")
    else:
        (plain if how == "in place" else block).compile(backend="aot_eager")
    with per_sample(compiled) as source:
        for _ in range(2):
            found = source.grads(loss_fn, x, y)
            for name, grad in expected.items():
                same = found[f"_orig_mod.{name}" if how == "torch.compile" else name]
                assert torch.allclose(same, grad, atol=1e-6)
    assert compiled(x).shape == (5, 3)
    assert all(p.grad is None for p in plain.parameters())


def test_hooks_on_a_model_that_ran_compiled_already():
    """torch.compile does not look for new hooks in a graph that it has: an error, never zeros."""
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 2))
    compiled = torch.compile(plain, backend="aot_eager")
    compiled(torch.randn(5, 4))
    with pytest.raises(ValueError, match="compiled model ran before its hooks were attached"):
        per_sample(compiled).grads(nn.MSELoss(), torch.randn(5, 4), torch.zeros(5, 2))
