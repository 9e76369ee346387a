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
    def capturing(self, monkeypatch):
        return lambda on: monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: on)

    @pytest.fixture
    def device(self):
        return torch.device("cuda:0")   # a name: state and tensors stay on the CPU where there is no GPU

    @pytest.fixture
    def source(self, device):
        source = NoiseSource.seeded_for_tests(0)
        source._graph_states[device] = source._graph_state(DEVICE)
        return source

    def test_a_capture_needs_a_key_on_the_device_first(self, capturing, device):
        capturing(True)
        with pytest.raises(RuntimeError, match="take one ordinary step on cuda:0 before capturing"):
            NoiseSource().claim(device)

    def test_every_claim_has_its_own_steps_under_a_key_of_its_own(self, source, capturing, device):
        capturing(True)
        first, second = source.claim(device), source.claim(device)
        assert first.key[4] == 0
        assert second.key[4] == 1 << 48   # graphs that run at the same time never meet
        assert source.step == 0           # Python's counter is not the graph's
        assert first.key[:4].tolist() != list(memoryview(key_of(0)).cast("q"))
        source._graph_states.pop(device)
        assert source.captured_steps() == 2
        source._graph_claims = 256
        source._graph_states[device] = source._graph_state(DEVICE)
        with pytest.raises(RuntimeError, match="256 steps of this NoiseSource are captured already"):
            source.claim(device)

    def test_steps_captured_before_a_resume_still_count(self, capturing, device):
        source = NoiseSource()
        source._graph_states[device] = source._graph_state(DEVICE)
        capturing(True)
        source.claim(device)
        source._graph_states.pop(DEVICE)
        source.load_state_dict(source.state_dict())
        assert source.captured_steps() == 1

    def test_noise_comes_from_the_captured_words(self, source, capturing, device):
        plan = Setting(expected_batch_size=1).plan(backend.Layout.of([(64,)]))
        total = torch.zeros(64, dtype=torch.int64, device=DEVICE)
        outs = [torch.zeros(64, device=DEVICE) for _ in range(3)]
        backend.release(outs[:1], total, None, plan, key_of(0), 0)   # tables are there from an ordinary step
        capturing(True)
        streams = [source.claim(device) for _ in range(2)]
        for out, stream in zip(outs[1:], streams, strict=True):
            backend.release([out], total, None, plan, stream.key, stream.step)
        key = streams[0].key[:4].cpu().numpy().tobytes()
        for out, stream in zip(outs[1:], streams, strict=True):
            expected = torch.zeros(64)
            reference.release([expected], total.cpu(), None, plan, key, int(stream.key[4]))
            assert torch.equal(out.cpu(), expected)

    @pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
    def test_half_a_step_is_refused(self, capturing):
        param = torch.nn.Parameter(torch.zeros(8, device=DEVICE))
        total = PrivateSum([param], noise=NoiseSource(), backend="triton", **vars(Setting()))
        total.add([torch.zeros(2, 8, device=DEVICE)])
        capturing(True)
        with pytest.raises(ValueError, match="capture the whole step, or none of it"):
            total.release()

    @pytest.mark.skipif(DEVICE.type != "cuda", reason="needs a GPU")
    def test_a_real_graph(self):
        """Replays differ from each other, and are the reference's steps 0 and 1 of the graph's key."""
        param = torch.nn.Parameter(torch.zeros(4096, device=DEVICE))
        grads, noise = torch.zeros(4, 4096, device=DEVICE), NoiseSource.seeded_for_tests(0)

        def step():
            fused_rs_dp_step([param], noise=noise, grad_samples=[grads], backend="triton", **vars(Setting()))

        step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        outs = []
        for _ in range(2):
            graph.replay()
            outs.append(param.grad.cpu().clone())
        assert not torch.equal(*outs)
        assert noise.captured_steps() == 2
        key = noise._graph_states[param.device][0].cpu().numpy().tobytes()
        plan = Setting().plan(backend.Layout.of([(4096,)]))
        for i, out in enumerate(outs):
            expected = torch.zeros(4096)
            reference.release([expected], torch.zeros(4096, dtype=torch.int64), None, plan, key, i)
            assert torch.equal(out, expected)
