"""One-sided: the float64 norm of every clipped sample is at most C, on rows chosen to break it (R5)."""

import math

import pytest
import torch

from dprs_kernels import KeepMask, NoiseSource, fused_rs_dp_step
from tests.oracle import BACKENDS, Setting, run

backends = pytest.mark.parametrize("backend", BACKENDS)


def clipped(backend, row, bound, keep=None, clipping="flat"):
    """What one sample contributes, in float64: no noise, batch size 1, an fp64 parameter for fp32 gradients."""
    param = torch.nn.Parameter(torch.zeros(row.shape, dtype=torch.float64))
    fused_rs_dp_step(
        [param], keep=keep, max_grad_norm=bound, noise_multiplier=0.0, expected_batch_size=1,
        noise=NoiseSource.seeded_for_tests(0), grad_samples=[row.unsqueeze(0)], clipping=clipping, backend=backend,
    )   # fmt: skip
    return param.grad


def adversarial_rows(size, generator):
    """Rows whose fp32 norms go wrong: long constant runs, one large value among many small, growing, alternating
    magnitudes, values whose squares round up, and the edges of the range."""
    j = torch.arange(size, dtype=torch.float64)
    yield torch.randn(size, generator=generator)
    yield torch.full((size,), 1 / math.sqrt(size) * (1 + 2.0**-22))
    yield torch.cat([torch.tensor([1.0]), torch.full((size - 1,), 2.0**-12)])
    yield torch.cat([torch.full((size - 1,), 2.0**-12), torch.tensor([4096.0])])
    yield (1 + 2.0**-12 * (j % 7)).float()                       # squares need more than 24 bits
    yield torch.exp(-8 * j / size).float()
    yield torch.where(j % 2 == 0, 1.0, 1e-7).float()
    yield (torch.randn(size, generator=generator).double() * 1e18).float()
    yield (torch.randn(size, generator=generator).double() * 1e-17).float()
    yield torch.where(j % 16 == 15, 1e-3, 3.0).float()           # a heavy lane
    yield (torch.rand(size, generator=generator) ** 8).clamp_min(1e-37)   # subnormals may count as 0


@backends
@pytest.mark.parametrize("size", [1, 15, 256, 1024, 1025, 40_000])
@pytest.mark.parametrize("bound", [1.0, 0.1, 3e-5, 1234.5])
def test_clipped_norm_is_at_most_c(backend, size, bound):
    generator = torch.Generator().manual_seed(size)
    for i, row in enumerate(adversarial_rows(size, generator)):
        for clipping in ("flat", "automatic"):
            norm = float(clipped(backend, row, bound, clipping=clipping).norm())
            assert norm <= bound, (i, clipping, norm / bound - 1)
        true = float(row.double().norm())
        if true > bound:   # and not clipped more than the margin
            assert float(clipped(backend, row, bound).norm()) > bound * (1 - 2.5 * 2.0**-20)
        else:
            assert torch.equal(clipped(backend, row, bound), row.double()) or true > bound * (1 - 2.0**-19)


@backends
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_too(backend, dtype):
    generator = torch.Generator().manual_seed(0)
    for row in adversarial_rows(3000, generator):
        row = row.to(dtype)
        if row.isfinite().all():
            assert float(clipped(backend, row, 0.7).norm()) <= 0.7


def test_twenty_million_coordinates():
    """A sequential fp32 norm overshoots by 2.1 % here on plain Gaussian gradients."""
    backend = BACKENDS[-1]
    row = torch.randn(20_000_000, generator=torch.Generator().manual_seed(0))
    true = float(row.double().norm())
    for bound in (1.0, true * (1 - 2.0**-21), true * 1.0001):
        out = clipped(backend, row, bound)
        assert float(out.norm()) <= bound
    constant = torch.full((20_000_000,), 1.0)
    assert 1 - 2.5 * 2.0**-20 < float(clipped(backend, constant, 1.0).norm()) <= 1.0


@backends
def test_per_layer_bounds_each_and_all(backend):
    grads = [torch.randn(1, 50) * 9, torch.randn(1, 70, 2) * 9, torch.randn(1, 3) * 9]
    setting = Setting(max_grad_norm=2.0, noise_multiplier=0.0, expected_batch_size=1, clipping="per_layer")
    outs = run(backend, [g.double() for g in grads], None, setting)
    assert all(float(out.norm()) <= 2.0 / math.sqrt(3) for out in outs)
    assert math.sqrt(sum(float(out.norm()) ** 2 for out in outs)) <= 2.0


@backends
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e-3, 1.0, 1e6, 1e19, 1e25])
@pytest.mark.parametrize("kind", ["one-hot", "dense", "dropped only"])
@pytest.mark.parametrize("place", [0, 3, 6])
def test_replay_with_a_canary(backend, scale, kind, place):
    """S1: f(data + canary) - f(data) under the same noise is the canary's clipped contribution, at any scale."""
    size, sigma = 3001, 1.0
    keep = KeepMask.draw([(size,)], drop_rate=0.5, seed=0, draw=0)
    generator = torch.Generator().manual_seed(1)
    canary = torch.randn(size, generator=generator) * scale
    if kind == "one-hot":
        canary = torch.zeros(size)
        canary[int(keep.indices()[place])] = scale
    elif kind == "dropped only":
        canary[keep.dense()[0]] = 0
    data = torch.randn(6, size, generator=generator) * 0.1
    with_canary = torch.cat([data[:place], canary[None], data[place:]])
    setting = Setting(noise_multiplier=sigma, expected_batch_size=1)
    grid = setting.plan(keep.layout).grid
    difference = _difference(backend, with_canary, data, keep, setting)
    kept = torch.where(keep.dense()[0], canary.double(), 0.0)
    norm = float(kept.norm())
    expected = kept * min(1.0, (1 - 2.0**-20) / norm) if norm else kept
    assert (difference - expected).abs().max() <= 1.01 * grid
    assert float(difference.norm()) <= 1 + math.sqrt(keep.count) * grid * 1.01


def _difference(backend, a, b, keep, setting):
    """Released sums of two data sets under the same key, in float64 parameters."""
    results = []
    for rows in (a, b):
        param = torch.nn.Parameter(torch.zeros(rows.shape[1], dtype=torch.float64))
        fused_rs_dp_step([param], keep=keep, noise=NoiseSource.seeded_for_tests(0), grad_samples=[rows],
                         backend=backend, **vars(setting))   # fmt: skip
        results.append(param.grad.clone())
    return results[0] - results[1]
