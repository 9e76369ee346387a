"""add/release: the same bits for any split, any thread count, any group size; and misuse refused."""

import copy
import itertools
import math
import pickle

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dprs_kernels import KeepMask, NoiseSource, PrivateSum
from tests.oracle import BACKENDS, DTYPES, ORDERS, Setting, random_grads, run

backends = pytest.mark.parametrize("backend", BACKENDS)
needs_cpu = pytest.mark.skipif("cpu" not in BACKENDS, reason="needs the CPU kernels")
SHAPES = [(33, 7), (5,), (1030,)]


def split_run(backend, grads, keep, setting, cuts):
    params = [torch.nn.Parameter(torch.zeros(g.shape[1:], dtype=g.dtype)) for g in grads]
    total = PrivateSum(params, keep=keep, noise=NoiseSource.seeded_for_tests(0), backend=backend, **vars(setting))
    edges = [0, *sorted(cuts), grads[0].shape[0]]
    for a, b in itertools.pairwise(edges):
        total.add([grad[a:b] for grad in grads])
    total.release()
    return [param.grad for param in params]


@backends
@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_any_split_gives_the_same_bits(backend, data):
    samples = data.draw(st.integers(0, 20))
    setting = Setting(
        noise_multiplier=data.draw(st.sampled_from([1.0, 0.001])),
        clipping=data.draw(st.sampled_from(["flat", "per_layer", "automatic"])),
    )
    grads = random_grads(SHAPES, samples, data.draw(st.sampled_from(DTYPES)), scale=3.0)
    keep = KeepMask.draw(SHAPES, drop_rate=0.5, seed=0, draw=0)
    cuts = data.draw(st.lists(st.integers(0, samples), max_size=4))
    for a, b in zip(split_run(backend, grads, keep, setting, cuts), run(backend, grads, keep, setting), strict=True):
        assert torch.equal(a, b)


@backends
def test_the_order_of_samples_does_not_matter(backend):
    """Integer sums: exact, so also order-free. (Float sums, sigma = 0, are only split-free on the CPU backend.)"""
    grads = random_grads(SHAPES, 40)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(0))
    shuffled = [grad[order] for grad in grads]
    for a, b in zip(run(backend, grads, None, Setting()), run(backend, shuffled, None, Setting()), strict=True):
        assert torch.equal(a, b)


@needs_cpu
@pytest.mark.parametrize("sigma", [1.0, 0.001, 0.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_and_order_do_not_matter(sigma, dtype):
    shapes = [(300, 41), (7,), (5000,)]
    grads = random_grads(shapes, 37, dtype)
    keep = KeepMask.draw(shapes, drop_rate=0.6, seed=0, draw=0)
    setting = Setting(noise_multiplier=sigma)
    expected = run("cpu", grads, keep, setting)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 8):
            torch.set_num_threads(threads)
            for which, order in enumerate(ORDERS):
                with order():
                    for a, b in zip(run("cpu", grads, keep, setting), expected, strict=True):
                        assert torch.equal(a, b), (threads, which)
    finally:
        torch.set_num_threads(before)


@needs_cpu
def test_repeated_calls_are_bit_equal():
    grads = random_grads([(70_000,)], 16)
    first = run("cpu", grads, None, Setting())[0]
    assert all(torch.equal(run("cpu", grads, None, Setting())[0], first) for _ in range(20))


@backends
def test_a_sum_without_samples_is_full_noise(backend):
    """S4: zero gradients with N = 0, 1, 7, 64 and the same key: identical output."""
    setting = Setting()
    none = split_run(backend, random_grads(SHAPES, 0), None, setting, [])
    params = [torch.nn.Parameter(torch.zeros(shape)) for shape in SHAPES]
    PrivateSum(params, noise=NoiseSource.seeded_for_tests(0), backend=backend, **vars(setting)).release()
    for a, b in zip(none, [p.grad for p in params], strict=True):
        assert torch.equal(a, b)
        assert (a != 0).float().mean() > 0.99
    for samples in (1, 7, 64):
        zeros = [torch.zeros(samples, *shape) for shape in SHAPES]
        assert all(torch.equal(a, b) for a, b in zip(none, run(backend, zeros, None, setting), strict=True))


@backends
def test_one_accumulator_is_all_the_memory(backend):
    grads = random_grads([(1000,)], 4)
    total = PrivateSum([torch.zeros(1000)], noise=NoiseSource(), backend=backend, **vars(Setting()))
    total.add(grads)
    assert total._sum().numel() * total._sum().element_size() <= 8 * (1024 + 32)
    total.release()
    assert total._total is None


# ---- misuse


@pytest.fixture
def total():
    return PrivateSum([torch.nn.Parameter(torch.zeros(4))], noise=NoiseSource(), **vars(Setting()))


def test_release_is_once(total):
    total.release()
    with pytest.raises(ValueError, match="release: this PrivateSum was released; noise is added once"):
        total.release()
    with pytest.raises(ValueError, match="add: this PrivateSum was released"):
        total.add([torch.zeros(2, 4)])
    with pytest.raises(ValueError, match="step: this PrivateSum was released"):
        total.step()   # this first, whatever there is to say of its gradients


def test_the_same_gradients_count_once(total):
    grads = [torch.randn(2, 4)]
    total.add(grads)
    with pytest.raises(ValueError, match=r"params\[0\]: these per-sample gradients were already added"):
        total.add(grads)
    grads[0].normal_()   # one buffer, filled again: fine
    total.add(grads)


def test_freed_gradients_may_share_an_address(total):
    for _ in range(50):
        total.add([torch.randn(3, 4)])


@pytest.mark.parametrize("name", ["max_grad_norm", "keep", "plan", "noise", "params", "noise_multiplier"])
def test_settings_are_fixed_for_life(total, name):
    with pytest.raises(ValueError, match=f"{name}: fixed for the life of a PrivateSum"):
        setattr(total, name, 2.0)


def test_a_mask_written_to_in_between_is_refused():
    keep = KeepMask.draw([(4,)], drop_rate=0.5, seed=0, draw=0)
    total = PrivateSum([torch.nn.Parameter(torch.zeros(4))], keep=keep, noise=NoiseSource(), **vars(Setting()))
    total.add([torch.zeros(2, 4)])
    keep.bits.fill_(-1)
    with pytest.raises(ValueError, match=r"release: keep.bits was written to"):
        total.release()
    assert total.noise.step == 0


def test_a_failed_add_adds_nothing():
    params = [torch.nn.Parameter(torch.zeros(4)), torch.nn.Parameter(torch.zeros(2))]
    total = PrivateSum(params, noise=NoiseSource.seeded_for_tests(0), **vars(Setting(noise_multiplier=0.0)))
    with pytest.raises(ValueError, match="samples"):
        total.add([torch.ones(3, 4), torch.ones(2, 2)])
    total.release()
    assert not params[0].grad.any()
    assert math.isfinite(float(params[0].grad.sum()))


@backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("samples", [0, 3])
def test_means_in_16_bits_have_no_bound(backend, dtype, samples):
    """g/n is rounded differently for n and n - 1: at n = 3000 one sample moved a bf16 sum by 15.6 C."""
    param = torch.nn.Parameter(torch.zeros(4))
    setting = Setting(loss_reduction="mean")
    for verb in ("add", "step"):
        total = PrivateSum([param], noise=NoiseSource(), backend=backend, **vars(setting))
        with pytest.raises(ValueError, match=rf"^loss_reduction: got 'mean' with gradients of {dtype} for params\[0\]"):
            getattr(total, verb)([torch.zeros(samples, 4, dtype=dtype)])
        assert total.noise.step == 0
        total.add([torch.zeros(samples, 4)])   # fp32 is taken
    total = PrivateSum([param], noise=NoiseSource(), backend=backend, **vars(Setting()))
    total.step([torch.zeros(samples, 4, dtype=dtype)])


@backends
@pytest.mark.parametrize("verb", ["release", "step"])
def test_record_of_a_release(backend, verb):
    """For a loop of one's own, which charges a ledger by hand."""
    param, noise = torch.nn.Parameter(torch.zeros(40)), NoiseSource()
    noise.claim()
    keep = KeepMask.draw([(40,)], drop_rate=0.25, seed=0, draw=0)
    for mask, kept in ((None, 40), (keep, 30)):
        total = PrivateSum([param], keep=mask, noise=noise, backend=backend, **vars(Setting(max_grad_norm=2.0)))
        with pytest.raises(ValueError, match=r"^record: nothing was released; call release\(\) first"):
            total.record()
        at = noise.step
        if verb == "step":
            total.step([torch.zeros(3, 40)])
        else:
            total.release()
        noise.claim()   # somebody else's: the record is of what the sum took
        record = total.record()
        assert (record.step, record.key_id, record.private, record.kept) == (at, noise.key_id, True, kept)
        assert record.sensitivity == total.plan.sensitivity(kept) > record.max_grad_norm == 2.0
        assert record.drop_rate == (0.0 if mask is None else 0.25)
        assert record.keep_digest == (KeepMask.full([param]) if mask is None else keep).digest()
    assert record.noise_multiplier == Setting().noise_multiplier


def test_a_failed_release_has_no_record(total, monkeypatch):
    monkeypatch.setattr(type(total), "_bits", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        total.release()
    assert total.claimed == (total.noise.key_id, 0)
    with pytest.raises(ValueError, match=r"^record: nothing was released"):
        total.record()


def test_seeded_and_unbounded_sums_are_not_private():
    for noise, change in (
        (NoiseSource.seeded_for_tests(0), {}), (NoiseSource(), dict(noise_multiplier=0.0)),
        (NoiseSource(), dict(max_grad_norm=math.inf)),
    ):   # fmt: skip
        total = PrivateSum([torch.nn.Parameter(torch.zeros(3))], noise=noise, **vars(Setting(**change)))
        total.release()
        assert not total.record().private


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_sum_cannot_be_duplicated(duplicate):
    """Two copies would release the same samples twice, and each would call it one step."""
    total = PrivateSum([torch.nn.Parameter(torch.zeros(3))], max_grad_norm=1.0, noise_multiplier=1.0,
                       expected_batch_size=2, noise=NoiseSource())   # fmt: skip
    total.add([torch.ones(2, 3)])
    with pytest.raises(ValueError, match="cannot be copied or pickled"):
        duplicate(total)
