"""Whole steps on the Triton backend, against the float64 oracle and the other backends."""

import math

import pytest
import torch

from dprs_kernels import KeepMask, NoiseSource, NonPrivateDiagnostics, PrivateSum, fused_rs_dp_step, reference
from dprs_kernels.backends import triton as backend
from dprs_kernels.backends import tuning
from tests.oracle import Setting, key_of, random_grads, true_step
from tests.triton.common import DESIGNS, HALVES, A, B, design_id, drawn
from tests.triton.conftest import DEVICE

SHAPES = [(1104,), (3, 3)]


def run(grads, keep, setting, seed=0, name="triton", parameter=None):
    """One step on poisoned parameters: p.grad holds NaN before, so that whatever is not written shows."""
    device = DEVICE if name == "triton" else torch.device("cpu")
    params = [torch.nn.Parameter(torch.zeros(g.shape[1:], dtype=parameter or g.dtype, device=device)) for g in grads]
    for param in params:
        param.grad = torch.full_like(param, math.nan)
    noise = NoiseSource.seeded_for_tests(seed)
    given = [grad.to(device) for grad in grads]
    fused_rs_dp_step(params, keep=keep, noise=noise, grad_samples=given, backend=name, **vars(setting))
    return [param.grad.cpu() for param in params]


@pytest.mark.parametrize("config", DESIGNS, ids=design_id)
@pytest.mark.parametrize("dtype", HALVES)
def test_a_step_is_the_truth(config, dtype):
    grads, keep, setting = random_grads(SHAPES, 5, dtype), drawn(SHAPES, 0.5), Setting()
    with tuning.override(config):
        outs = run(grads, keep, setting)
    truth = true_step(grads, keep, setting, key_of(0), 0)
    largest = max(float(expected.abs().max()) for expected in truth.outs)
    for out, expected, tolerance, kept in zip(outs, truth.outs, truth.tolerances, keep.dense(), strict=True):
        assert ((out.double() - expected).abs() <= tolerance).all()
        if dtype == torch.float32:
            assert (out.double() - expected).abs().max() <= 1e-6 * largest
        assert torch.equal(out[~kept], torch.zeros_like(out[~kept]))


@pytest.mark.parametrize("samples", [0, 1])
def test_empty_and_single_batches(samples):
    grads = random_grads(SHAPES, samples, scale=1e-3)
    for config in (A, B):
        with tuning.override(config):
            outs = run(grads, None, Setting())
        for out, expected in zip(outs, run(grads, None, Setting(), name="reference"), strict=True):
            assert torch.equal(out, expected)


def test_gradients_of_other_types_than_their_parameters():
    grads = [g.to(d) for g, d in zip(random_grads([(64,), (9,), (40,)], 4), (torch.bfloat16, torch.float32,
             torch.float16), strict=True)]   # fmt: skip
    for parameter in (torch.float32, torch.bfloat16):
        outs = run(grads, None, Setting(), parameter=parameter)
        for out, expected in zip(outs, run(grads, None, Setting(), name="reference", parameter=parameter), strict=True):
            assert out.dtype == parameter
            assert torch.allclose(out.double(), expected.double(), rtol=2.0**-7, atol=1e-6)


def test_micro_batches_and_the_fused_step_agree():
    """add + add + release, three launches and more, and the single launch of design B: the same bits."""
    grads, keep, setting = random_grads(SHAPES, 6), drawn(SHAPES, 0.5), Setting()
    for config in (A, B):
        with tuning.override(config):
            params = [torch.nn.Parameter(torch.zeros(shape, device=DEVICE)) for shape in SHAPES]
            noise = NoiseSource.seeded_for_tests(0)
            total = PrivateSum(params, keep=keep, noise=noise, backend="triton", **vars(setting))
            for a, b in ((0, 1), (1, 4), (4, 6)):
                total.add([grad[a:b].to(DEVICE) for grad in grads])
            total.release()
            for param, out in zip(params, run(grads, keep, setting), strict=True):
                assert torch.equal(param.grad.cpu(), out)


def test_design_b_takes_one_launch(monkeypatch):
    """And design A four: norms, factors, sums, release."""
    kernels, counts = backend._triton()[0], {}

    class Counted:
        def __init__(self, name, kernel):
            self.name, self.kernel = name, kernel

        def __getitem__(self, grid):
            counts[self.name] = counts.get(self.name, 0) + 1
            return self.kernel[grid]

    for module, name in ((kernels.norms, "_norms_tile_kernel"), (kernels.norms, "_norms_factor_kernel"),
                         (kernels.sums, "_sums_tile_kernel"), (kernels.noise, "_release_tile_kernel"),
                         (kernels.one_pass, "_one_pass_kernel"), (kernels.stage, "_stage_rows_kernel")):   # fmt: skip
        monkeypatch.setattr(module, name, Counted(name, getattr(module, name)))
    grads = random_grads([(512,)], 4)
    with tuning.override(B):
        run(grads, None, Setting())
    assert counts == {"_one_pass_kernel": 1}
    counts.clear()
    with tuning.override(A):
        run(grads, None, Setting())
    assert counts == {"_norms_tile_kernel": 1, "_norms_factor_kernel": 1, "_sums_tile_kernel": 1,
                      "_release_tile_kernel": 1}   # fmt: skip


def test_diagnostics_and_consumed_gradients():
    grads = random_grads([(64,)], 4, scale=1.0)
    for config in (A, B):
        param = torch.nn.Parameter(torch.zeros(64, device=DEVICE))
        param.grad_sample = grads[0].to(DEVICE)
        seen = NonPrivateDiagnostics()
        with tuning.override(config):
            fused_rs_dp_step([param], noise=NoiseSource(), backend="triton", non_private_diagnostics=seen,
                             **vars(Setting()))   # fmt: skip
        assert param.grad_sample is None
        assert torch.allclose(seen.norms.cpu()[:, 0], grads[0].double().norm(dim=1), rtol=1e-6)


def test_a_mask_drawn_from_device_parameters_stays_there():
    params = [torch.nn.Parameter(torch.zeros(40, 5, device=DEVICE))]
    keep = KeepMask.draw(params, drop_rate=0.5, seed=1, draw=2)
    assert keep.bits.device.type == DEVICE.type
    assert keep.digest() == KeepMask.draw([(40, 5)], drop_rate=0.5, seed=1, draw=2).digest()
    assert keep.bits_on(DEVICE) is keep.bits_on(DEVICE)


class TestCapture:
    """CUDA graphs, as far as they can be seen without one: under capture Python runs once, so nothing that must differ
    between replays may come from it. A replay is what the captured tensor operations do again."""

    @pytest.fixture
    def source(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        return NoiseSource.seeded_for_tests(0)

    def test_a_capture_needs_a_key_on_the_device_first(self, source):
        with pytest.raises(RuntimeError, match="take one ordinary step on cuda:0 before capturing"):
            source.claim(torch.device("cuda:0"))

    def test_every_replay_has_its_own_step_and_key(self, source):
        device = torch.device("cuda:0")
        source._graph_states[device] = source._graph_state(torch.device("cpu"))   # no GPU: the state on the CPU
        first, second = source.claim(device), source.claim(device)
        assert first.key[4] == 0
        assert second.key[4] == 1
        assert source.step == 0   # Python's counter is not the graph's
        assert not torch.equal(first.key[:4], torch.tensor(list(memoryview(key_of(0)).cast("q"))))
        assert source.captured_steps() == 4   # the one tensor stands under two devices here
        plan = Setting(expected_batch_size=1).plan(backend.Layout.of([(64,)]))
        outs = []
        for stream in (first, second):
            outs.append(torch.zeros(64, device=DEVICE))
            total = torch.zeros(64, dtype=torch.int64, device=DEVICE)
            backend.release(outs[-1:], total, None, plan, stream.key.to(DEVICE), stream.step)
        key = bytes(first.key[:4].numpy().tobytes())
        expected = torch.zeros(64)
        reference.release([expected], torch.zeros(64, dtype=torch.int64), None, plan, key, 1)
        assert torch.equal(outs[1].cpu(), expected)
        assert not torch.equal(outs[0], outs[1])
