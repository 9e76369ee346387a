"""Outer products that are never stored: the bits of the stored ones, on every backend."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dprs_kernels import KeepMask, NoiseSource, PrivateSum
from dprs_kernels.backends import cpu
from dprs_kernels.outer import OuterProducts
from tests.oracle import BACKENDS, DTYPES


def released(grads, shapes, backend, keep=None, **changes):
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in shapes]
    arguments = {"max_grad_norm": 1.0, "noise_multiplier": 1.0, "expected_batch_size": 4, **changes}
    total = PrivateSum(params, keep=keep, noise=NoiseSource.seeded_for_tests(0), backend=backend, **arguments)
    total.add(grads)
    total.release()
    return [param.grad for param in params]


def factors(n, out, width, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    return OuterProducts(torch.randn(n, out, dtype=dtype), torch.randn(n, width, dtype=dtype))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sigma", [1.0, 0.001, 0.0])
@pytest.mark.parametrize("rate", [0.0, 0.5, 0.95])
def test_the_bits_of_the_stored_product(backend, dtype, sigma, rate):
    shapes = [(33, 70), (5,), (128, 2048)]
    keep = KeepMask.draw(shapes, drop_rate=rate, seed=0, draw=0)
    made = [factors(9, 33, 70, dtype), torch.randn(9, 5), factors(9, 128, 2048, dtype, seed=1)]
    stored = [made[0].dense(), made[1], made[2].dense()]
    arguments = {"shapes": shapes, "backend": backend, "keep": keep, "noise_multiplier": sigma}
    for a, b in zip(released(made, **arguments), released(stored, **arguments), strict=True):
        assert torch.equal(a, b)


@pytest.mark.skipif("cpu" not in BACKENDS, reason="no CPU kernels")
@settings(max_examples=60, deadline=None)
@given(
    n=st.integers(0, 9), out=st.integers(1, 40), width=st.integers(1, 1500), split=st.sampled_from(cpu.SPLITS),
    group=st.integers(1, 9), at_once=st.sampled_from([1, 2, 4]),
)   # fmt: skip
def test_any_shape_and_order(n, out, width, split, group, at_once):
    made = factors(n, out, width)
    with cpu.order(split, group=group, at_once=at_once):
        (a,) = released([made], [(out, width)], "cpu")
    (b,) = released([made.dense()], [(out, width)], "cpu")
    assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_strided_factors(backend):
    wide = factors(6, 14, 40)
    made = OuterProducts(wide.e[:, ::2], wide.a.t().contiguous().t()[:, 3:])
    (a,) = released([made], [(7, 37)], backend)
    (b,) = released([made.dense()], [(7, 37)], backend)
    assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sample_that_is_not_finite_contributes_nothing(backend):
    made = factors(6, 7, 30)
    made.a[2, 4] = float("nan")
    made.e[4, 1] = float("inf")
    rest = [0, 1, 3, 5]
    (a,) = released([made], [(7, 30)], backend)
    (b,) = released([OuterProducts(made.e[rest], made.a[rest])], [(7, 30)], backend)
    assert torch.equal(a, b)
    assert a.isfinite().all()


def test_the_same_factors_twice_are_refused():
    made = factors(3, 4, 5)
    total = PrivateSum([torch.nn.Parameter(torch.zeros(4, 5))], max_grad_norm=1.0, noise_multiplier=1.0,
                       expected_batch_size=3, noise=NoiseSource())   # fmt: skip
    total.add([made])
    with pytest.raises(ValueError, match=r"params\[0\]: these per-sample gradients were already added"):
        total.add([made])
    made.e.mul_(2)
    total.add([made])


def test_bad_factors():
    with pytest.raises(ValueError, match=r"e: got shape \[3\]; expected two dimensions"):
        OuterProducts(torch.ones(3), torch.ones(3, 2))
    with pytest.raises(ValueError, match=r"a: 4 samples, torch\.float32 on cpu; e has 3"):
        OuterProducts(torch.ones(3, 2), torch.ones(4, 2))
    with pytest.raises(ValueError, match=r"params\[0\]: per-sample gradients have shape \[3, 2, 2\]"):
        released([factors(3, 2, 2)], [(2, 5)], "auto")
