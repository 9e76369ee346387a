"""A loop under torch.compile: whole graphs, the eager result, and no two calls merged into one."""

import pytest
import torch

from dprs_kernels import KeepMask, NoiseSource, fused_rs_dp_step
from tests.oracle import Setting, random_grads

# aot_eager traces, functionalizes and removes dead code like the default, without compiling C++ for minutes.
compiled = pytest.mark.parametrize("mode", ["aot_eager"])


@pytest.fixture
def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))


def private_step(model, x, y, keep, noise):
    """Forward, per-sample gradients and the fused step in one traced function."""

    def loss(params, x, y):
        out = torch.func.functional_call(model, params, (x.unsqueeze(0),))
        return torch.nn.functional.cross_entropy(out, y.unsqueeze(0))

    params = {name: param.detach() for name, param in model.named_parameters()}
    grads = torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0, 0))(params, x, y)
    fused_rs_dp_step(list(model.named_parameters()), keep=keep, noise=noise, grad_samples=grads, **vars(Setting()))


def released(model):
    return [param.grad.clone() for param in model.parameters()]


@compiled
def test_a_compiled_step_is_the_eager_step(model, mode):
    x, y = torch.randn(8, 6), torch.randint(0, 2, (8,))
    step = torch.compile(private_step, fullgraph=True, backend=mode)
    eager, traced = NoiseSource.seeded_for_tests(3), NoiseSource.seeded_for_tests(3)
    for draw in range(3):
        keep = KeepMask.draw(model.parameters(), drop_rate=0.5, seed=0, draw=draw)
        private_step(model, x, y, keep, eager)
        expected = released(model)
        step(model, x, y, keep, traced)
        assert traced.step == eager.step == draw + 1
        for a, b in zip(released(model), expected, strict=True):
            assert torch.allclose(a, b, atol=1e-5)   # gradients may differ in the last bits; noise may not


@compiled
def test_equal_calls_are_not_merged_and_none_is_dropped(mode):
    """Without the ticket a compiler would compute two equal calls once: the same noise twice."""
    param, grads = torch.nn.Parameter(torch.zeros(50)), random_grads([(50,)], 4)
    noise = NoiseSource.seeded_for_tests(0)

    def twice():
        outs = []
        for _ in range(2):
            fused_rs_dp_step([param], noise=noise, grad_samples=grads, **vars(Setting()))
            outs.append(param.grad.clone())
        return outs

    a, b = torch.compile(twice, fullgraph=True, backend=mode)()
    assert noise.step == 2
    assert not torch.equal(a, b)


@compiled
def test_attributes_are_consumed_there_too(mode):
    param = torch.nn.Parameter(torch.zeros(5))
    param.grad_sample = torch.ones(2, 5)
    noise = NoiseSource()

    def step():
        fused_rs_dp_step([param], noise=noise, **vars(Setting()))

    torch.compile(step, fullgraph=True, backend=mode)()
    assert param.grad_sample is None
    assert param.grad.any()


@compiled
def test_misuse_still_raises(mode):
    param = torch.nn.Parameter(torch.zeros(5))

    def step(sigma):
        fused_rs_dp_step([param], noise=NOISE, grad_samples=[torch.ones(2, 5)], max_grad_norm=1.0,
                         noise_multiplier=sigma, expected_batch_size=2)   # fmt: skip

    with pytest.raises(ValueError, match=r"noise_multiplier: got -1.0"):
        torch.compile(step, fullgraph=True, backend=mode)(-1.0)


NOISE = NoiseSource()


def test_the_operator_passes_torchs_own_checks():
    """Schema, fake kernel and mutation as declared."""
    from dprs_kernels import ops

    noise = NoiseSource.seeded_for_tests(0)
    keep = KeepMask.draw([(7,)], drop_rate=0.5, seed=0, draw=0)
    arguments = ([torch.zeros(7)], [torch.ones(3, 7)], keep.bits, keep.count, noise._ticket, noise._handle, [1.0],
                 1.0, 4.0, "sum", "flat", "auto")   # fmt: skip
    torch.library.opcheck(ops._step_op, arguments, test_utils=["test_schema", "test_faketensor"])


@pytest.mark.slow
def test_inductor(model):
    test_a_compiled_step_is_the_eager_step(model, "inductor")
