"""The fused step against the float64 truth: dtypes, clipping styles, masks, shapes, sources, outputs."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dprs_kernels import KeepMask, NoiseSource, NonPrivateDiagnostics, fused_rs_dp_step
from dprs_kernels.outer import OuterProducts
from dprs_kernels.row_grads import RowGrads
from tests.oracle import BACKENDS, DTYPES, Setting, assert_true, random_grads, run

SHAPES = [(33, 7), (5,), (1025, 3), (), (2, 3, 4, 5), (64,)]
backends = pytest.mark.parametrize("backend", BACKENDS)


@backends
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
@pytest.mark.parametrize("rate", [0.0, 0.5, 0.999])
@pytest.mark.parametrize("sigma", [1.3, 0.002, 0.0])
def test_truth(backend, dtype, clipping, rate, sigma):
    keep = KeepMask.draw(SHAPES, drop_rate=rate, seed=1, draw=2)
    setting = Setting(max_grad_norm=1.7, noise_multiplier=sigma, clipping=clipping)
    assert_true(backend, random_grads(SHAPES, 13, dtype), keep, setting)


@backends
@pytest.mark.parametrize("samples", [0, 1, 2, 3, 4, 5, 9, 70])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_any_number_of_samples(backend, samples, reduction):
    keep = KeepMask.draw(SHAPES, drop_rate=0.3, seed=0, draw=samples)
    assert_true(backend, random_grads(SHAPES, samples), keep, Setting(loss_reduction=reduction))


@backends
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_shapes_and_values(backend, data):
    shapes = data.draw(st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=4))
    if not any(math.prod(shape) for shape in shapes):
        return
    samples = data.draw(st.integers(0, 9))
    exponent = data.draw(st.integers(-60, 60))   # of two: gradients from 1e-18 to 1e18 times C
    grads = random_grads(shapes, samples, data.draw(st.sampled_from(DTYPES[:3])), seed=data.draw(st.integers(0, 99)))
    grads = [grad * 2.0**exponent for grad in grads]
    keep = KeepMask.draw(shapes, drop_rate=data.draw(st.floats(0, 0.99)), seed=0, draw=0)
    setting = Setting(
        max_grad_norm=data.draw(st.floats(1e-3, 1e3)),
        noise_multiplier=data.draw(st.sampled_from([0.0, 0.01, 1.0, 50.0])),
        clipping=data.draw(st.sampled_from(["flat", "per_layer", "automatic"])),
    )
    assert_true(backend, grads, keep, setting)


@backends
def test_mixed_dtypes_in_one_step(backend):
    grads = [g.to(d) for g, d in zip(random_grads([(40, 3)] * 4, 6), DTYPES, strict=True)]
    assert_true(backend, grads, KeepMask.draw([(40, 3)] * 4, drop_rate=0.5, seed=0, draw=0), Setting())


@backends
def test_no_clipping_is_algorithm_2(backend):
    """C = inf: noise of standard deviation sigma, nothing clipped."""
    grads = random_grads([(50,)], 8, scale=100.0)
    out = run(backend, grads, None, Setting(max_grad_norm=math.inf, noise_multiplier=0.0, expected_batch_size=1))[0]
    assert torch.allclose(out.double(), grads[0].double().sum(0), rtol=1e-6)
    assert_true(backend, grads, None, Setting(max_grad_norm=math.inf, noise_multiplier=2.0))


@backends
def test_per_layer_bounds_as_a_list(backend):
    setting = Setting(max_grad_norm=[0.5, 2.0, 1.0], clipping="per_layer")
    assert_true(backend, random_grads([(7,), (9, 2), (300,)], 5, scale=2.0), None, setting)


LAYOUTS = {
    "transposed": lambda g: g.transpose(1, 2).contiguous().transpose(1, 2),
    "sliced rows": lambda g: torch.stack([g, torch.full_like(g, math.nan)], 1)[:, 0],
    "sliced columns": lambda g: torch.cat([g, torch.full_like(g, math.nan)], 2)[:, :, : g.shape[2]],
    "every second": lambda g: torch.stack([g, torch.full_like(g, math.nan)], 3)[..., 0],
    "samples last": lambda g: g.movedim(0, -1).contiguous().movedim(-1, 0),
    "reversed strides": lambda g: g.permute(0, 2, 1).flip(1).contiguous().flip(1).permute(0, 2, 1),
    "expanded": lambda g: g[:1].expand_as(g),
}


@backends
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", LAYOUTS)
def test_strided_gradients(backend, kind, dtype):
    """The same numbers in another layout give the same bits, and neighbours in memory are never read into it."""
    (plain,) = random_grads([(37, 45)], 6, dtype)
    strided = LAYOUTS[kind](plain)
    same = strided.contiguous()
    keep = KeepMask.draw([(37, 45)], drop_rate=0.4, seed=0, draw=0)
    assert torch.equal(run(backend, [strided], keep, Setting())[0], run(backend, [same], keep, Setting())[0])
    assert_true(backend, [strided], keep, Setting())


@backends
def test_large_offsets(backend):
    """A row stride of 2^31 + 5 elements needs 64-bit offsets; rows overlap in a small buffer with a far base."""
    if backend == "reference":
        pytest.skip("torch's own indexing")
    storage = torch.empty(0)
    try:
        storage = torch.empty(2**31 + 5 + 100, dtype=torch.float16)   # 4.3 GB, untouched but for two pages
    except RuntimeError:
        pytest.skip("not enough address space")
    rows = storage.as_strided((2, 100), (2**31 + 5, 1))
    rows.copy_(random_grads([(100,)], 2, torch.float16)[0])
    assert_true(backend, [rows], None, Setting())


@backends
@pytest.mark.parametrize("source", ["grad_sample", "grad_batch", "list", "dict", "accumulated"])
def test_sources_agree(backend, source):
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.Linear(3, 2))
    named, grads = list(model.named_parameters()), random_grads([p.shape for p in model.parameters()], 6)
    explicit = None
    if source in ("grad_sample", "grad_batch"):
        for (_, param), grad in zip(named, grads, strict=True):
            setattr(param, source, grad)
    elif source == "accumulated":
        for (_, param), grad in zip(named, grads, strict=True):
            param.grad_sample = [grad[:2], grad[2:]]
    else:
        explicit = grads if source == "list" else {n: g for (n, _), g in zip(named, grads, strict=True)}
    setting = Setting()
    noise = NoiseSource.seeded_for_tests(0)
    fused_rs_dp_step(named, noise=noise, grad_samples=explicit, backend=backend, **vars(setting))
    for param, expected in zip(model.parameters(), run(backend, grads, None, setting), strict=True):
        assert torch.equal(param.grad, expected)
        assert getattr(param, "grad_sample", None) is None
        assert getattr(param, "grad_batch", None) is None


@backends
def test_gradient_tensors_keep_shape_dtype_and_identity(backend):
    param = torch.nn.Parameter(torch.zeros(3, 4, dtype=torch.bfloat16))
    arguments = dict(noise=NoiseSource(), backend=backend, **vars(Setting()))
    fused_rs_dp_step([param], grad_samples=[torch.randn(2, 3, 4)], **arguments)   # fp32 gradients, bf16 parameter
    assert (param.grad.shape, param.grad.dtype, param.grad.device) == (param.shape, param.dtype, param.device)
    held = param.grad
    fused_rs_dp_step([param], grad_samples=[torch.randn(2, 3, 4)], **arguments)
    assert param.grad is held
    param.grad = torch.zeros(4, 3, dtype=torch.bfloat16).t()   # not contiguous: replaced, not written through
    fused_rs_dp_step([param], grad_samples=[torch.randn(2, 3, 4)], **arguments)
    assert param.grad.is_contiguous()


@backends
@pytest.mark.parametrize("looking", [False, True])
@pytest.mark.parametrize("bound", [1.0, math.inf])   # sums of integers have no graph, those of floats would
def test_gradients_that_belong_to_a_graph_do_not_pull_p_grad_into_it(backend, bound, looking):
    """p.grad with a graph behind it keeps every sample's gradient alive, beyond the step that was to sum them."""
    params = [torch.nn.Parameter(torch.zeros(3, 4)), torch.nn.Parameter(torch.zeros(5, 2))]
    e, a = (torch.randn(2, size, requires_grad=True) * 1 for size in (5, 2))
    grads = [torch.randn(2, 3, 4, requires_grad=True) * 1, OuterProducts(e, a)]
    fused_rs_dp_step(
        params, grad_samples=grads, noise=NoiseSource(), backend=backend,
        non_private_diagnostics=NonPrivateDiagnostics() if looking else None, **vars(Setting(max_grad_norm=bound)),
    )   # fmt: skip
    assert [(p.grad.requires_grad, p.grad.grad_fn) for p in params] == [(False, None)] * 2


def negative_view(tensor):
    """The same numbers, of which torch has only noted that they are to be negated, as `.imag` of a conjugate does."""
    return torch._neg_view(-tensor)


@backends
@pytest.mark.parametrize("samples", [1, 5])
def test_signs_that_torch_has_only_noted_are_seen(backend, samples):
    shapes = [(7, 3), (5, 2), (9,), (4, 6)]
    keep = KeepMask.draw(shapes, drop_rate=0.5, seed=0, draw=0, structure="row")
    rows = keep.kept_rows(3)
    e, a, values = torch.randn(samples, 5), torch.randn(samples, 2), torch.randn(samples, len(rows.kept), 6)
    full, conjugate = torch.randn(samples, 7, 3), torch.randn(samples, 9, dtype=torch.complex64).conj().imag
    plain = [full, OuterProducts(e, a), conjugate.resolve_neg(), RowGrads(values, rows)]
    noted = [negative_view(full), OuterProducts(negative_view(e), a), conjugate, RowGrads(negative_view(values), rows)]
    found = []
    for grads in (plain, noted):
        params = [torch.nn.Parameter(torch.zeros(s)) for s in shapes]
        if grads is noted:
            params[0].grad = torch._neg_view(torch.zeros(7, 3))   # not written to as if it were an ordinary one
        fused_rs_dp_step(
            params, keep=keep, grad_samples=grads, noise=NoiseSource.seeded_for_tests(3), backend=backend,
            **vars(Setting()),
        )   # fmt: skip
        found.append([p.grad.resolve_neg() for p in params])
    assert all(torch.equal(*pair) for pair in zip(*found, strict=True))


@backends
def test_inputs_are_not_written(backend):
    grads = random_grads(SHAPES, 5)
    before = [grad.clone() for grad in grads]
    run(backend, grads, KeepMask.draw(SHAPES, drop_rate=0.5, seed=0, draw=0), Setting())
    assert all(torch.equal(a, b) for a, b in zip(grads, before, strict=True))


@backends
def test_diagnostics_are_opt_in_and_right(backend):
    grads = random_grads([(30,)], 7, scale=0.2)
    grads[0][2, 3] = math.nan
    seen, param = NonPrivateDiagnostics(), torch.nn.Parameter(torch.zeros(30))
    fused_rs_dp_step(
        [param], grad_samples=grads, noise=NoiseSource.seeded_for_tests(0), backend=backend,
        non_private_diagnostics=seen, **vars(Setting()),
    )   # fmt: skip
    assert torch.equal(param.grad, run(backend, grads, None, Setting())[0])   # looking changes no bit
    expected = grads[0].double().norm(dim=1).nan_to_num(math.inf)
    assert seen.norms.shape == (7, 1)
    assert torch.allclose(seen.norms[:, 0], expected, rtol=2.0**-20)
    assert seen.clipped == pytest.approx(float((expected > 1 - 2.0**-20).double().mean()))


@pytest.mark.skipif("cpu" not in BACKENDS, reason="needs the CPU kernels")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
def test_the_cpu_kernel_is_the_reference(dtype, clipping):
    """Sums in units and noise are integers: apart from a rare norm whose factor differs in the 24th bit, equal."""
    keep = KeepMask.draw(SHAPES, drop_rate=0.5, seed=1, draw=0)
    grads, setting = random_grads(SHAPES, 50, dtype), Setting(clipping=clipping)
    plan = setting.plan(keep.layout)
    for a, b in zip(run("cpu", grads, keep, setting), run("reference", grads, keep, setting), strict=True):
        step = plan.grid / setting.expected_batch_size
        assert ((a - b).abs() <= step + torch.finfo(dtype).eps * b.abs()).all()
        assert (a == b).double().mean() > 0.97
