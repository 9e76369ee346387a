"""Every row of PRIVACY.md's edge-case table: what happens, and what the message says."""

import math
import warnings

import pytest
import torch

from dprs_kernels import KeepMask, NoiseSource, PrivateSum, fused_rs_dp_step
from tests.oracle import BACKENDS, DTYPES, Setting, assert_true, random_grads, run

backends = pytest.mark.parametrize("backend", BACKENDS)
BAD = [math.nan, math.inf, -math.inf]


@backends
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("row", [0, 3, 6])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
def test_a_bad_kept_value_removes_its_sample_and_nothing_else(backend, bad, row, dtype, clipping, capfd):
    shapes = [(40, 3), (1100,)]
    keep = KeepMask.draw(shapes, drop_rate=0.5, seed=0, draw=0)
    grads = random_grads(shapes, 7, dtype)
    for sigma in (1.0, 0.0):
        setting = Setting(noise_multiplier=sigma, clipping=clipping)
        without = run(backend, [torch.cat([g[:row], g[row + 1 :]]) for g in grads], keep, setting)
        spoiled = [g.clone() for g in grads]
        spoiled[1][row, int(keep.for_param(1).nonzero()[-1])] = bad
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            outs = run(backend, spoiled, keep, setting)
        # With sigma = 0 the reference sums floats in torch's order, which changes with N.
        close = torch.equal if sigma or backend == "cpu" else lambda a, b: torch.allclose(a, b, rtol=1e-6)
        assert all(close(a, b) for a, b in zip(outs, without, strict=True))
    assert capfd.readouterr() == ("", "")


@backends
@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sigma", [1.0, 0.001, 0.0])
def test_a_bad_dropped_value_is_never_there(backend, bad, dtype, sigma):
    shapes = [(40, 3), (1100,)]
    keep = KeepMask.draw(shapes, drop_rate=0.5, seed=0, draw=0)
    grads = random_grads(shapes, 7, dtype)
    spoiled = [g.masked_fill(~k, bad) for g, k in zip(grads, keep.dense(), strict=True)]
    setting = Setting(noise_multiplier=sigma)
    for a, b in zip(run(backend, spoiled, keep, setting), run(backend, grads, keep, setting), strict=True):
        assert torch.equal(a, b)


@backends
def test_a_norm_beyond_the_range_counts_as_not_finite(backend):
    grads = [torch.full((2, 100), 1e-3)]
    grads[0][1] = 3e38
    setting = Setting(max_grad_norm=1e-3)
    expected = run(backend, [grads[0][:1]], None, setting)[0]
    assert torch.equal(run(backend, grads, None, setting)[0], expected)


@backends
def test_every_sample_bad_is_pure_noise(backend):
    setting = Setting()
    bad = run(backend, [torch.full((9, 50), math.nan)], None, setting)[0]
    assert torch.equal(bad, run(backend, [torch.zeros(0, 50)], None, setting)[0])


@backends
def test_sigma_zero_and_infinite_c_are_allowed(backend):
    for setting in (Setting(noise_multiplier=0.0), Setting(max_grad_norm=math.inf),
                    Setting(max_grad_norm=math.inf, noise_multiplier=0.0)):   # fmt: skip
        assert_true(backend, random_grads([(30,)], 5), None, setting)


@backends
def test_flushed_subnormals_in_the_caller_do_not_matter(backend):
    grads = random_grads([(500,)], 5)
    expected = run(backend, grads, None, Setting())[0]
    if not torch.set_flush_denormal(True):
        pytest.skip("not supported on this CPU")
    try:
        assert torch.equal(run(backend, grads, None, Setting())[0], expected)
    finally:
        torch.set_flush_denormal(False)


PARAM = torch.nn.Parameter(torch.zeros(3, 2))
GRADS = [torch.zeros(4, 3, 2)]
MISUSE = {
    "C zero": (dict(max_grad_norm=0.0), "max_grad_norm: got 0.0; expected a positive number"),
    "C negative": (dict(max_grad_norm=-1.0), "max_grad_norm: got -1.0"),
    "C nan": (dict(max_grad_norm=math.nan), "max_grad_norm: got nan"),
    "C tiny": (dict(max_grad_norm=1e-30), "max_grad_norm: got 1e-30"),
    "C text": (dict(max_grad_norm="1"), "max_grad_norm: got '1'"),
    "C list": (dict(max_grad_norm=[1.0]), "a list goes with clipping='per_layer'"),
    "C list length": (dict(max_grad_norm=[1.0, 1.0], clipping="per_layer"), "got 2 numbers for 1 parameters"),
    "C inf automatic": (dict(max_grad_norm=math.inf, clipping="automatic"), "max_grad_norm: got inf with clipping="),
    "sigma negative": (dict(noise_multiplier=-0.1), "noise_multiplier: got -0.1; expected a finite number"),
    "sigma nan": (dict(noise_multiplier=math.nan), "noise_multiplier: got nan"),
    "sigma inf": (dict(noise_multiplier=math.inf), "noise_multiplier: got inf"),
    "sigma huge": (dict(noise_multiplier=10**400), "noise_multiplier: got 1000"),   # as a float it would overflow
    "sigma tiny": (dict(noise_multiplier=1e-25), r"noise_multiplier: times max_grad_norm is 1e-25; expected within"),
    "batch zero": (dict(expected_batch_size=0), "expected_batch_size: got 0; expected a positive number, public"),
    "batch huge": (dict(expected_batch_size=10**400), "expected_batch_size: got 1000"),
    "batch nan": (dict(expected_batch_size=math.nan), "expected_batch_size: got nan"),
    "reduction": (dict(loss_reduction="none"), "loss_reduction: got 'none'; expected 'sum'"),
    "clipping": (dict(clipping="adaptive"), "clipping: got 'adaptive'; expected one of flat, per_layer, automatic"),
    "backend": (dict(backend="cuda"), "backend: got 'cuda'; expected one of auto, reference, cpu, triton"),
    "backend triton": (dict(backend="triton"), "backend: 'triton' cannot run on cpu, .* Available here: reference"),
    "noise": (dict(noise=0), "noise: got int; expected a NoiseSource"),
    "keep type": (dict(keep=torch.ones(3, 2)), "keep: got Tensor; expected a KeepMask"),
    "keep shape": (dict(keep=KeepMask.full([(2, 3)])), "keep: made for parameters of other shapes"),
    "scaler": (dict(grad_scaler=torch.amp.GradScaler("cpu")), "grad_scaler: dynamic loss scaling is refused"),
    "shape": (dict(grad_samples=[torch.zeros(4, 2, 3)]), r"params\[0\]: per-sample gradients have shape \[4, 2, 3\]"),
    "no batch": (dict(grad_samples=[torch.zeros(3, 2)]), r"expected \[N, 3, 2\], one row per sample"),
    "dtype": (dict(grad_samples=[torch.zeros(4, 3, 2, dtype=torch.int64)]), "gradients of torch.int64 are not"),
    "sparse": (dict(grad_samples=[torch.zeros(4, 3, 2).to_sparse()]), "gradients of torch.sparse_coo are not"),
    "device": (dict(grad_samples=[torch.zeros(4, 3, 2, device="meta")]), "gradients on meta, parameter on cpu"),
    "count": (dict(grad_samples=GRADS * 2), "grad_samples: got 2 tensors for 1 parameters"),
    "not tensor": (dict(grad_samples=[3]), "per-sample gradients are int; expected a tensor"),
    "kind": (dict(grad_samples=torch.zeros(4, 3, 2)), "grad_samples: got Tensor; expected a list"),
    "dict unnamed": (dict(grad_samples={"w": GRADS[0]}), r"grad_samples: no entry for 'params\[0\]'"),
    "missing": (dict(grad_samples=None), r"no per-sample gradients for this parameter of shape \[3, 2\]; no backward"),
    "params tensor": (dict(params=PARAM), "params: got a tensor; expected a list of parameters"),
    "params empty": (dict(params=[]), "params: got 0 parameters"),
    "params twice": (dict(params=[PARAM, PARAM]), r"params: params\[0\] and params\[1\] are the same tensor"),
    "params kind": (dict(params=[3]), "params: item 0 is int; expected a tensor"),
    "params dtype": (dict(params=[torch.zeros(3, dtype=torch.int32)]), "dtype torch.int32 is not supported"),
    "params devices": (dict(params=[PARAM, torch.zeros(2, device="meta")]), r"params\[1\]: on meta, but params"),
}


def test_an_error_does_not_tell_the_batch_size():
    """How many samples a Poisson batch has is private; errors end up in logs."""
    params = [torch.zeros(3), torch.zeros(2)]
    with pytest.raises(ValueError, match=r"^params\[1\]: not as many samples as params\[0\] has") as raised:
        fused_rs_dp_step(params, grad_samples=[torch.zeros(4177, 3), torch.zeros(4176, 2)], noise=NoiseSource(),
                         **vars(Setting()))   # fmt: skip
    assert "417" not in str(raised.value)


@pytest.mark.parametrize("case", MISUSE)
def test_misuse_raises_before_anything_is_written(case):
    change, message = MISUSE[case]
    noise = NoiseSource()
    PARAM.grad = torch.full_like(PARAM, 7.0)
    arguments = dict(params=[PARAM], grad_samples=GRADS, noise=noise, **vars(Setting())) | change
    with pytest.raises(ValueError, match=message):
        fused_rs_dp_step(arguments.pop("params"), **arguments)
    assert (PARAM.grad == 7.0).all()
    assert noise.step == 0


def test_a_step_consumes_its_gradients():
    param = torch.nn.Parameter(torch.zeros(3))
    param.grad_sample = torch.ones(2, 3)
    fused_rs_dp_step([param], noise=NoiseSource(), **vars(Setting()))
    assert param.grad_sample is None
    with pytest.raises(ValueError, match="they were already used by an earlier step"):
        fused_rs_dp_step([param], noise=NoiseSource(), **vars(Setting()))


def test_both_attributes_are_ambiguous():
    param = torch.nn.Parameter(torch.zeros(3))
    param.grad_sample, param.grad_batch = torch.ones(2, 3), torch.ones(2, 3)
    with pytest.raises(ValueError, match="has both grad_sample and grad_batch"):
        fused_rs_dp_step([param], noise=NoiseSource(), **vars(Setting()))


def test_named_messages_and_uneven_accumulation():
    model = torch.nn.Linear(3, 2)
    model.weight.grad_sample, model.bias.grad_sample = [torch.ones(2, 2, 3)] * 2, [torch.ones(2, 2)]
    with pytest.raises(ValueError, match="bias: 1 accumulated micro-batches, but weight has 2"):
        fused_rs_dp_step(model.named_parameters(), noise=NoiseSource(), **vars(Setting()))
    grads = {"weight": torch.ones(2, 2, 3), "bias": torch.ones(2, 2), "extra": torch.ones(2)}
    with pytest.raises(ValueError, match="'extra' is not among params"):
        fused_rs_dp_step(model.named_parameters(), noise=NoiseSource(), grad_samples=grads, **vars(Setting()))


def test_a_disabled_scaler_is_fine():
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    PrivateSum([PARAM], noise=NoiseSource(), grad_scaler=scaler, **vars(Setting()))
