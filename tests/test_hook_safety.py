"""Hooks in models that write in place, share parameters, carry hooks of their own or leaves of others."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from dprs_kernels.grads.arena import Arena
from dprs_kernels.grads.batch_loss import BatchLoss
from dprs_kernels.grads.hooks import per_sample
from dprs_kernels.outer import OuterProducts
from tests.test_hooks import Scale, agree, truth
from tests.test_mixing import Net


def linear(**sizes):
    return {name: nn.Linear(5, size) for name, size in sizes.items()}


def summed(out, y):
    return (out - y).square().flatten(1).sum()


def agree_also_in_an_arena(model, x):
    agree(model, x)
    y = torch.randn_like(model(x))
    expected = truth(model, summed, x, y)
    with per_sample(model, loss_reduction="sum") as source:
        for _ in range(2):
            found = source.grads_into(Arena(len(x)), summed, x, y)
    for name, grad in found.items():
        torch.testing.assert_close(grad.dense() if isinstance(grad, OuterProducts) else grad, expected[name])


# Written in place.


def written_through_a_view(s, x):
    h = s.b(torch.tanh(s.a(x)))
    h[:, 0] = 0
    h[:, 1:3].relu_()
    return s.c(h)


@pytest.mark.parametrize("shape", [(4, 5), (4, 1, 5), (4, 3, 5), (4, 2, 3, 5)])
@pytest.mark.parametrize("bias", [True, False])
def test_an_operation_in_place_after_a_later_layer(shape, bias):
    x = torch.randn(*shape, dtype=torch.float64)
    layers = [nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6, bias=bias), nn.ReLU(inplace=True), nn.Linear(6, 2)]
    agree_also_in_an_arena(nn.Sequential(*layers), x)
    agree_also_in_an_arena(Net(written_through_a_view, **linear(a=5, b=5, c=2)), x)


def test_an_operation_in_place_after_norms_and_layers_without_a_rule():
    x = torch.randn(3, 4, 5, dtype=torch.float64)
    for norm in (nn.InstanceNorm1d(4, affine=True), nn.GroupNorm(2, 4), nn.LayerNorm(5), nn.PReLU()):
        agree(nn.Sequential(nn.Conv1d(4, 4, 1), norm, nn.ReLU(inplace=True), nn.Conv1d(4, 2, 1)), x)
    agree(nn.Sequential(nn.ConvTranspose1d(4, 2, 3), nn.ReLU(inplace=True)), x)


def after_its_call(s, x):
    h = s.a(x)
    h += s.b(h)
    return s.c(h)


def data_after_its_call(s, x):
    y = s.a(x)
    x.mul_(3)
    return s.c(y)


class Gain(nn.Module):
    def __init__(self):
        super().__init__()
        self.gain = nn.Parameter(torch.ones(5))

    def forward(self, x):
        return x.mul_(self.gain)


@pytest.mark.parametrize(("forward", "layer"), [(after_its_call, "b"), (data_after_its_call, "a"), (None, "1")])
@pytest.mark.parametrize("into_arena", [False, True])
def test_an_input_that_is_overwritten_is_refused(forward, layer, into_arena):
    model = nn.Sequential(nn.Linear(5, 5), Gain()) if forward is None else Net(forward, **linear(a=5, b=5, c=2))
    source, given = per_sample(model), (lambda out, y: out.square().mean(), torch.randn(4, 5), torch.zeros(4))
    with pytest.raises(ValueError, match=f"^{layer}: its input was overwritten after the call, or in it"):
        source.grads_into(Arena(4), *given) if into_arena else source.grads(*given)


def test_an_overwritten_input_that_no_gradient_needs():
    model = Net(after_its_call, **linear(a=5, b=5, c=2))
    model.b.weight.requires_grad_(False)
    agree(model, torch.randn(4, 5).double())


class Reversal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return grad.neg_()


@pytest.mark.parametrize("last", [True, False])
def test_a_gradient_that_is_overwritten_on_the_way_back(last):
    def forward(s, x):
        h = torch.tanh(s.a(x))
        out = Reversal.apply(s.c(h)) + s.b(h)   # b's gradient is taken first, and shared
        return out if last else s.d(torch.tanh(out))

    source = per_sample(Net(forward, **linear(a=5, b=5, c=5, d=5)))
    with pytest.raises(ValueError, match="gradient of its output was overwritten on the way back"):
        source.grads_into(Arena(4), nn.MSELoss(), torch.randn(4, 5), torch.zeros(4, 5))


# Parameters that are used twice.


class Shift(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(*shape))

    def forward(self, x):
        return x + self.shift


@pytest.mark.parametrize("shape", [(1, 5), (5,), (1, 1)])
def test_a_parameter_in_two_branches_leaves_the_others_alone(shape):
    branches = Net(lambda s, x: s.q(torch.tanh(s.a(x))) + s.q(torch.tanh(s.b(x))), q=Shift(*shape), **linear(a=5, b=5))
    chain = Net(lambda s, x: s.b(s.q(torch.tanh(s.a(s.q(x))))), q=Shift(*shape), **linear(a=5, b=5))
    for model in (branches, chain):
        agree(model, torch.randn(4, 5).double())
        with per_sample(model, loss_reduction="sum") as source:   # a sum's gradient is expanded: not to be written to
            source.grads(lambda out, y: out.sum(), torch.randn(4, 5).double(), torch.zeros(4))


# Arguments that samples share.


class Biased(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.ones(8, 8))

    def forward(self, x, bias):
        return torch.softmax(x @ self.w @ x.transpose(1, 2) + bias, -1) @ x


@pytest.mark.parametrize("positions", [4, 3])
def test_a_mask_or_bias_over_positions_is_shared(positions):
    """Also where there are as many positions as samples; by position and by name."""
    mask = torch.full((positions, positions), float("-inf")).double().triu(1)
    x = torch.randn(4, positions, 8).double()
    attend = nn.MultiheadAttention(8, 2, batch_first=True)
    agree(Net(lambda s, x: s.m(x, x, x, None, False, mask)[0], m=attend), x)
    agree(Net(lambda s, x: s.m(x, x, x, attn_mask=mask, need_weights=False)[0], m=attend), x)
    bias = torch.randn(positions, positions).double()
    agree(Net(lambda s, x: s.m(x, bias), m=Biased()), x)


def test_a_state_that_is_given_to_a_recurrent_layer():
    agree(Net(lambda s, x: s.g(x, x.new_ones(2, x.shape[0], 4))[0], g=nn.GRU(5, 4, 2, batch_first=True)),
          torch.randn(2, 3, 5).double())   # fmt: skip


# Leaves and hooks that are not the model's.


def test_unfreezing_writes_no_raw_gradient():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
    model[0].requires_grad_(False)
    source = per_sample(model)
    model[0].weight.requires_grad_(True)
    with pytest.raises(ValueError, match=r"0.weight: unfrozen, or added, since the source was made"):
        source.grads(nn.MSELoss(), torch.randn(5, 4), torch.zeros(5, 1))
    assert model[0].weight.grad is None


@pytest.mark.parametrize("where", ["loss", "model"])
def test_a_leaf_that_is_not_the_models_is_refused(where):
    scale = torch.ones(1, requires_grad=True)
    model = Net(lambda s, x: s.a(x * scale if where == "model" else x), **linear(a=1))
    loss_fn = F.mse_loss if where == "model" else lambda out, y: F.mse_loss(out * scale, y)
    with pytest.raises(ValueError, match=r"a tensor of shape \[1\] that requires gradients takes part"):
        per_sample(model).grads(loss_fn, torch.randn(5, 5), torch.zeros(5, 1))
    assert scale.grad is None


def test_data_with_a_graph_behind_it():
    model, before = nn.Linear(4, 2), nn.Linear(4, 4)
    x = before(torch.randn(5, 4))
    source = per_sample(model)
    for _ in range(2):
        source.grads(nn.MSELoss(), x, torch.zeros(5, 2))
    assert before.weight.grad is None


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_hook_of_the_users_that_changes_an_output(when):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    x, y = torch.randn(4, 5).double(), torch.randn(4, 2).double()
    source = None if when == "before" else per_sample(model, loss_reduction="sum")
    model[0].register_forward_hook(lambda module, args, out: 2 * out)
    source = source or per_sample(model, loss_reduction="sum")
    expected = truth(model, summed, x, y)
    for name, grad in source.grads(summed, x, y).items():
        torch.testing.assert_close(grad, expected[name])


def test_layers_under_no_grad_and_checkpoints():
    def constant(s, x):
        with torch.no_grad():
            held = s.a(x)
        return s.b(s.a(x) + held)

    x = torch.randn(4, 5).double()
    agree(Net(constant, **linear(a=5, b=2)), x)
    inner = lambda s: lambda h: torch.relu(s.b(torch.tanh(h)))   # noqa: E731
    agree(Net(lambda s, x: s.c(checkpoint(inner(s), s.a(x), use_reentrant=False)), **linear(a=5, b=5, c=2)), x)
    model = Net(lambda s, x: s.c(checkpoint(inner(s), s.a(x), use_reentrant=True)), **linear(a=5, b=5, c=2)).double()
    with pytest.raises(ValueError, match="use use_reentrant=False"):
        per_sample(model).grads(nn.MSELoss(), x, torch.zeros(4, 2).double())


@pytest.mark.parametrize("layer", [nn.Linear(5, 5), nn.LayerNorm(5), Scale(5)])
def test_a_checkpoint_that_ends_in_a_layer_used_twice(layer):
    """Its recomputation stops by an exception out of the last layer's forward, and no hook of ours is called then."""
    def twice(s, x):
        return s.c(checkpoint(lambda h: s.b(torch.tanh(s.b(h))), s.a(x), use_reentrant=False))

    def blocks(s, x):
        h = s.a(x)
        for linear in (s.c, s.d):
            h = checkpoint(lambda h, linear=linear: s.b(torch.tanh(linear(h))), h, use_reentrant=False)
        return s.e(h)

    x = torch.randn(4, 5).double()
    agree(Net(twice, b=layer, **linear(a=5, c=2)), x)
    agree(Net(blocks, b=layer, **linear(a=5, c=5, d=5, e=2)), x)


def of_the_output(s, x):
    out = s.b(s.a(x))
    if out.requires_grad:
        torch.autograd.grad(out.sum(), out, retain_graph=True)
    return out


def of_another_call(s, x):
    h = s.a(x)
    if h.requires_grad:
        torch.autograd.grad(s.b(h).square().sum(), h, retain_graph=True)
    return s.b(h)


@pytest.mark.parametrize(
    ("layer", "forward"),
    [(nn.Linear(5, 5), of_the_output), (nn.Linear(5, 5), of_another_call), (Scale(5), of_another_call)],
)
def test_a_backward_inside_of_the_forward_is_refused(layer, forward):
    """What it finds would be added to the samples' own gradients."""
    with pytest.raises(ValueError, match=r"b: backward ran inside of the model's forward.*use FunctionalSource"):
        per_sample(Net(forward, b=layer, **linear(a=5))).grads(nn.MSELoss(), torch.randn(4, 5), torch.zeros(4, 5))


RANDOM = {
    "attention": nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
    "recurrent": Net(lambda s, x: s.cells(x)[0], cells=nn.LSTM(8, 4, 2, batch_first=True, dropout=0.2)),
}


@pytest.mark.parametrize("case", RANDOM)
def test_dropout_inside_a_layer_without_a_rule(case):
    with pytest.raises(ValueError, match=r"draws random numbers \(dropout\) in its forward.*set its dropout to 0"):
        per_sample(RANDOM[case]).grads(lambda out, y: out.square().mean(), torch.randn(4, 3, 8), torch.zeros(4))


def test_layers_whose_weight_is_computed():
    new = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(5, 5)), nn.Linear(5, 2))
    with pytest.raises(ValueError, match=r"0.parametrizations.weight: no input of this layer has the batch dimension"):
        per_sample(new).grads(nn.MSELoss(), torch.randn(4, 5), torch.zeros(4, 2))


class Root(nn.Module):
    def __init__(self, constant):
        super().__init__()
        self.gain, self.layer, self.constant = nn.Parameter(torch.ones(3)), nn.Linear(3, 1), constant

    def forward(self, x):
        out = {"out": self.layer(x * self.gain)}
        return {**out, "gain": self.gain.exp()} if self.constant else out


def test_a_dict_from_a_module_with_a_parameter_of_its_own():
    x, y, loss_fn = torch.randn(4, 3), torch.zeros(4, 1), lambda out, y: F.mse_loss(out["out"], y)
    model = Root(constant=False)
    expected = truth(model, loss_fn, x, y)
    for name, grad in per_sample(model).grads(loss_fn, x, y).items():
        torch.testing.assert_close(grad, expected[name])
    with pytest.raises(ValueError, match="Root: output 1 has no batch dimension"):
        per_sample(Root(constant=True)).grads(loss_fn, x, y)


# After an error, and after a pass.


class Fails(nn.Module):
    def __init__(self):
        super().__init__()
        self.cells, self.out, self.bad = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 2), False
        self.own = nn.Parameter(torch.ones(2))

    def forward(self, x):
        out = self.out(self.cells(x)[0]) * self.own
        if self.bad and torch.is_grad_enabled():
            raise KeyboardInterrupt
        return out


def test_after_an_error_the_model_is_as_it_was():
    model = Fails()
    source, given = per_sample(model), (nn.MSELoss(), torch.randn(3, 2, 4), torch.zeros(3, 2, 2))
    expected = source.grads(*given)
    model.out.weight.grad = held = torch.ones(2, 4)
    params = dict(model.named_parameters())
    model.bad = True
    with pytest.raises(KeyboardInterrupt):
        source.grads(*given)
    assert {name: id(p) for name, p in model.named_parameters()} == {name: id(p) for name, p in params.items()}
    assert all(isinstance(weight, nn.Parameter) for weight in model.cells._flat_weights)
    assert model.out.weight.grad is held
    model.bad = False
    model(given[1]).sum().backward()   # hooks sleep
    assert model.own.grad is not None
    for name, grad in source.grads(*given).items():
        assert torch.equal(grad, expected[name])


def test_a_pass_leaves_no_graph_behind(monkeypatch):
    """Freed at once, without the garbage collector: nothing holds itself in a circle."""
    seen, check_rows = [], BatchLoss.check_rows

    def watched(self, rows, scale=1.0):
        seen.append(weakref.ref(rows))
        check_rows(self, rows, scale)

    monkeypatch.setattr(BatchLoss, "check_rows", watched)
    source = per_sample(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.PReLU(), nn.Linear(4, 2)))
    gc.disable()
    try:
        source.grads(nn.MSELoss(), torch.randn(3, 4), torch.zeros(3, 2))
        assert [reference() for reference in seen] == [None]
    finally:
        gc.enable()


def test_a_loss_that_no_parameter_takes_part_in():
    model = nn.Linear(3, 1)
    with pytest.raises(ValueError, match="the loss does not depend on any trainable parameter"):
        per_sample(model).grads(lambda out, y: y.sum(), torch.randn(4, 3), torch.ones(4))


def test_words_of_one_micro_batch_do_not_stay_for_the_next():
    model = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(8, 1))
    arena, y = Arena(3), torch.zeros(3, 1)
    with per_sample(model) as source:
        source.grads_into(arena, nn.MSELoss(), torch.tensor([[1, 2]] * 3), y)
        arena.recycle()
        found = source.grads_into(arena, nn.MSELoss(), torch.tensor([[5, 6]] * 3), y)["0.weight"]
    assert not found[:, 1:3].any()
    assert found[:, 5:7].any()


def test_sums_over_positions_are_fp32_under_autocast():
    """300 ones: bf16 cannot count beyond 256."""
    model = nn.Linear(2, 1, bias=False)
    x = torch.ones(3, 300, 2)
    with per_sample(model, loss_reduction="sum") as source, torch.autocast("cpu", torch.bfloat16):
        grads = source.grads(lambda out, y: out.sum(), x, torch.zeros(3))["weight"]
    assert grads.dtype == torch.float32
    assert torch.equal(grads, torch.full((3, 1, 2), 300.0))
