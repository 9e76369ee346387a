"""ChaCha20 and the noise on the device: known answers, the CPU's words, the reference's grid values."""

import numpy as np
import pytest
import torch

from dprs_kernels import native, reference
from dprs_kernels.backends import launches, tables
from dprs_kernels.backends import triton as backend
from dprs_kernels.kernels import noise as kernels
from dprs_kernels.kernels import rng
from dprs_kernels.layout import Layout
from tests.oracle import Setting, key_of
from tests.triton.common import drawn
from tests.triton.conftest import DEVICE

RFC_KEY = bytes(range(32))


def words(key, step, first, blocks):
    """uint32 [blocks, 16] from the kernel."""
    at = tables.upload_ints([tables.signed(step)], DEVICE)
    start = tables.upload_ints([first - (first >> 63 << 64)], DEVICE)
    out = torch.zeros(blocks, 16, dtype=torch.int32, device=DEVICE)
    secret = tables.device_key(key, DEVICE)
    rng._words_kernel[(-(-blocks // 64),)](out, secret, at, start, blocks, BLOCK_B=64, num_warps=4)
    return out.cpu().numpy().view(np.uint32)


def test_rfc_8439():
    """Section 2.3.2: key 00..1f, block counter 1, nonce 00 00 00 09 00 00 00 4a 00 00 00 00. Our 64-bit counter is the
    RFC's counter and the first nonce word; our step is the other two."""
    got = words(RFC_KEY, 0x4A000000, 1 + (0x09000000 << 32), 1)[0]
    assert got.tolist() == [
        0xE4E7F110, 0x15593BD1, 0x1FDD0F50, 0xC47120A3, 0xC7F4D1C7, 0x0368C033, 0x9AAA2204, 0x4E6CD4C3,
        0x466482D2, 0x09AA9F07, 0x05D7C214, 0xA2028BD9, 0xD19C12B5, 0xB94E16DE, 0xE883D0CB, 0x4E3C50A2,
    ]   # fmt: skip


@pytest.mark.parametrize("key", [bytes(32), b"\xff" * 32, key_of(3)])
@pytest.mark.parametrize(("step", "first"), [(0, 0), (2**63 + 5, 7), (2**64 - 1, 2**32 - 3), (12, 2**64 - 70)])
def test_words_equal_the_reference_and_the_cpu(key, step, first):
    got = words(key, step, first, 70)
    assert np.array_equal(got, reference.words(key, step, first, 70))
    if native.library() is not None:
        made = np.empty((70, 16), dtype=np.uint32)
        native.loaded().dprs_words(key, step, first, 70, made.ctypes.data)
        assert np.array_equal(got, made)


def test_normals_of_chosen_words():
    """All zeros (the far tail, 9.42), all ones (radius 0), every quarter turn and the neighbours of each."""
    chosen = [0, 1, 2**64 - 1, 2**63, 2**63 - 1, 2**62, 2**62 + 1, 2**61, 3 << 61, 2**53 + 1, 0x5BF58476D1CE4E5B]
    pairs = np.array([(w, v) for w in chosen for v in chosen], dtype=np.uint64)
    pairs = np.concatenate([pairs, np.zeros((-len(pairs) % 4, 2), dtype=np.uint64)])
    blocks = len(pairs) // 4
    z = torch.zeros(blocks * 8, dtype=torch.float64, device=DEVICE)
    given = torch.from_numpy(pairs.view(np.int64)).to(DEVICE)
    kernels._normals_kernel[(-(-len(pairs) // 64),)](z, given, blocks, BLOCK_B=64, num_warps=4, enable_fp_fusion=False)
    expected = reference.normals(pairs.view(np.uint32).reshape(-1, 16))
    assert np.abs(z.cpu().numpy() - expected).max() < 2.0**-48
    assert z.abs().max() > 9.4


def noise_of(plan, key, step, keep=None, dtype=torch.float64, total=None):
    """What release writes, over B = 1 in units of the grid."""
    outs = [torch.full(shape, float("nan"), dtype=dtype, device=DEVICE) for shape in plan.layout.shapes]
    if total is None:
        total = torch.zeros(plan.layout.padded, dtype=torch.int64)
    bits = None if keep is None else keep.bits.to(DEVICE)
    backend.release(outs, total.to(DEVICE), bits, plan, key, step)
    return [out.cpu() for out in outs]


def test_grid_values_equal_the_reference(monkeypatch):
    """R4: equal on at least 1 - 2^-20 of coordinates; here on all of 2^18. One tile of 2^16, for the interpreter's
    sake: a coordinate's noise does not depend on the tile."""
    size = 2**18
    wide = launches.Launch({**launches.release(torch.float64, False, True).constants, "BLOCKS": 8192}, 8, 8 * 8192)
    monkeypatch.setattr(launches, "release", lambda *_: wide)
    plan = Setting(expected_batch_size=1).plan(Layout.of([(size,)]))
    for seed in (0, 1):
        got = noise_of(plan, key_of(seed), 5)[0] / plan.grid
        expected = reference.noise(plan, key_of(seed), 5)
        assert torch.equal(got, got.round())
        assert (got != expected).sum() <= size * 2.0**-20


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("drop_rate", [None, 0.5])
def test_a_release_equals_the_reference(dtype, drop_rate):
    """Every dtype of p.grad, odd shapes, sums of both signs; dropped coordinates exactly +0."""
    shapes = [(7, 5), (1,), (700,), (0, 3)]
    keep = drawn(shapes, drop_rate)
    plan = Setting(expected_batch_size=3).plan(Layout.of(shapes))
    total = torch.randint(-(2**34), 2**34, (plan.layout.padded,), generator=torch.Generator().manual_seed(0))
    outs = noise_of(plan, key_of(0), 9, keep, dtype, total)
    expected = [torch.empty(shape, dtype=dtype) for shape in shapes]
    reference.release(expected, total, None if keep is None else keep.bits, plan, key_of(0), 9)
    for out, right, kept in zip(outs, expected, keep.dense() if keep else [None] * 4, strict=True):
        assert torch.equal(out, right)
        assert kept is None or not out[~kept].signbit().any()


@pytest.mark.parametrize("setting", [
    Setting(noise_multiplier=0.0), Setting(max_grad_norm=float("inf")), Setting(noise_multiplier=1e-4),
    Setting(noise_multiplier=1e-17), Setting(max_grad_norm=2.0**-50, noise_multiplier=300.0),
], ids=str)   # fmt: skip
def test_every_grid_and_unit(setting):
    """Without noise, without a bound, tiny noise (whole numbers beyond 2^52) and large noise."""
    plan = setting.plan(Layout.of([(333,)]))
    total = torch.randn(plan.layout.padded, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    total = (total * 2.0**40).long() if plan.unit else total
    got = noise_of(plan, key_of(2), 0, total=total)[0]
    expected = [torch.empty(333, dtype=torch.float64)]
    reference.release(expected, total, None, plan, key_of(2), 0)
    assert torch.equal(got, expected[0]) or torch.allclose(got, expected[0], rtol=2.0**-51, atol=0)
