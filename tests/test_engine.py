"""Whole models through the hooks, and the streaming engine around them."""

import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch
from torch import nn

from dprs_kernels import KeepMask, NoiseSource, PrivateSum, allocator
from dprs_kernels.grads.arena import Arena
from dprs_kernels.grads.engine import Stream, StreamingEngine, micro_batch_size
from dprs_kernels.grads.hooks import per_sample
from dprs_kernels.outer import OuterProducts
from tests.test_hooks import Scale, agree


class Block(nn.Module):
    def __init__(self, inputs, outputs, stride):
        super().__init__()
        self.first, self.norm = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False), nn.GroupNorm(2, outputs)
        self.second, self.last = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False), nn.GroupNorm(2, outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride) if inputs != outputs else nn.Identity()

    def forward(self, x):
        return torch.relu(self.last(self.second(torch.relu_(self.norm(self.first(x))))) + self.short(x))


class ResNet(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.out = nn.Conv2d(3, 4, 3, 1, 1, bias=False), nn.Linear(8, 3)
        self.blocks = nn.Sequential(Block(4, 4, 1), Block(4, 8, 2))

    def forward(self, x):
        return self.out(self.blocks(self.stem(x)).mean((2, 3)))


class Transformer(nn.Module):
    """Tied embeddings, positions as a parameter of the model itself."""

    def __init__(self):
        super().__init__()
        self.embed, self.positions = nn.Embedding(11, 8), nn.Parameter(torch.zeros(6, 8))
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, index):
        return self.out(self.layers(self.embed(index) + self.positions))


def test_a_resnet_with_group_norm():
    agree(ResNet(), torch.randn(3, 3, 8, 8).double())


def test_a_small_transformer():
    agree(Transformer(), torch.randint(0, 11, (3, 6)))


def test_autocast_gives_fp32_gradients_of_a_bf16_pass():
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2))
    x, y = torch.randn(4, 1, 6, 6), torch.randn(4, 2)
    with per_sample(model) as source:
        exact = source.grads(nn.MSELoss(), x, y)
        with torch.autocast("cpu", torch.bfloat16):
            grads = source.grads(nn.MSELoss(), x, y)
    for name, grad in grads.items():
        assert grad.dtype == torch.float32
        assert (grad - exact[name]).abs().max() <= 2.0**-5 * exact[name].abs().max()


def test_only_one_micro_batch_is_in_memory():
    """Gradients of a micro-batch are folded and gone before the next are made, whatever the logical batch."""
    model = nn.Linear(3, 2)
    alive = []

    class Watched:
        def __init__(self, source):
            self.source, self.params = source, source.params

        def grads(self, loss_fn, x, y):
            assert all(reference() is None for reference in alive)
            grads = self.source.grads(loss_fn, x, y)
            assert all(grad.shape[0] <= 4 for grad in grads.values())
            alive[:] = [weakref.ref(grad) for grad in grads.values()]
            return grads

    with per_sample(model) as source:
        engine = StreamingEngine(Watched(source), max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=30,
                                 noise=NoiseSource(), max_physical_batch_size=4)   # fmt: skip
        engine.step(nn.MSELoss(), torch.ones(30, 3), torch.ones(30, 2))
    assert model.weight.grad is not None


MEMORY = """
import sys
from pathlib import Path
import torch
from torch import nn
from dprs_kernels import NoiseSource
from dprs_kernels.grads import StreamingEngine, per_sample

def highest():
    return next(int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if "VmHWM" in line)

torch.set_num_threads(1)
model = nn.Sequential(nn.Conv2d(8, 256, 3), nn.Tanh(), nn.Conv2d(256, 64, 3), nn.Flatten(), nn.Linear(64 * 16, 64))
x, y = torch.randn(1024, 8, 8, 8), torch.randint(0, 64, (1024,))
engine = StreamingEngine(per_sample(model), max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=64,
                         noise=NoiseSource(), max_physical_batch_size=16)
before = highest()
for n in (64, 1024):
    engine.step(nn.CrossEntropyLoss(), x[:n], y[:n])
    print(highest() - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc to read the peak from")
def test_peak_memory_does_not_grow_with_the_logical_batch():
    child = subprocess.run([sys.executable, "-c", MEMORY], capture_output=True, text=True, check=True, timeout=300)
    small, large = map(int, child.stdout.split())   # KB; a row of 230,000 values is 0.9 MB, 1024 of them are 0.9 GB
    assert small > 10_000
    assert large <= 1.1 * small


def test_an_arena_is_written_again_and_two_uses_are_added():
    """Tied weights need two buffers in one pass; another dtype or more samples another buffer."""
    model = nn.Sequential(nn.Conv2d(2, 2, 3, padding=1), nn.Tanh())
    arena, weight = Arena(4), model[0].weight
    first = arena.empty(weight, 3, torch.float32)
    assert first.shape == (3, 2, 2, 3, 3)
    assert arena.empty(weight, 3, torch.float32).data_ptr() != first.data_ptr()
    arena.recycle()
    assert arena.empty(weight, 4, torch.float32).data_ptr() == first.data_ptr()
    assert arena.nbytes() == 4 * weight.nbytes
    arena.recycle()
    assert arena.empty(weight, 2, torch.float64).dtype == torch.float64
    assert arena.nbytes() == 8 * weight.nbytes
    twice = nn.Sequential(model[0], nn.Tanh(), model[0], nn.Flatten(), nn.Linear(32, 1))
    x, y = torch.randn(5, 2, 4, 4), torch.randn(5, 1)
    with per_sample(twice) as source:
        for _ in range(2):
            arena.recycle()
            found = source.grads_into(arena, nn.MSELoss(), x, y)
            for name, grad in source.grads(nn.MSELoss(), x, y).items():
                same = found[name]
                assert torch.equal(same.dense() if isinstance(same, OuterProducts) else same, grad)
        assert isinstance(found["4.weight"], OuterProducts)


class Fails(nn.Module):
    """failing: (error, k): the k-th forward of a pass raises it, once."""

    def __init__(self, layer):
        super().__init__()
        self.layer, self.failing = layer, None

    def forward(self, x):
        if self.failing is not None and torch.is_grad_enabled():
            error, left = self.failing
            self.failing = None if left == 1 else (error, left - 1)
            if left == 1:
                raise error("out of memory")
        return self.layer(x)


@pytest.mark.parametrize("last", [nn.Linear(6, 2), Scale(6)])   # with a rule, and without
def test_activations_are_let_go_as_backward_goes_on(last):
    """As in plain autograd: hooks that held them to the end of the pass cost memory, and new pages for what follows."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Sigmoid(), nn.Linear(6, 6), nn.Sigmoid(), last)
    held, alive = [], []

    def watch(module, args, output):
        held.append(weakref.ref(output.untyped_storage()))

    def look(module, args, output):
        if output.requires_grad:
            output.register_hook(lambda e: alive.append(held[-1]()))

    model[3].register_forward_hook(watch)   # what the last layer takes
    model[1].register_forward_hook(look)    # its gradient comes after
    with per_sample(model) as source:
        source.grads(nn.CrossEntropyLoss(), torch.randn(4, 6), torch.tensor([0, 1, 0, 1]))
    assert alive[-1] is None


class TestEngine:
    """Streaming: any split gives the same p.grad, and memory for one micro-batch."""

    def run(self, split, clipping="flat", reduction="mean", n=10, drop_rate=0.5):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.ReLU(), nn.Flatten(), nn.Linear(48, 2))
        with per_sample(model) as source:
            engine = StreamingEngine(
                source, max_grad_norm=0.5, noise_multiplier=1.0, expected_batch_size=8, clipping=clipping,
                noise=NoiseSource.seeded_for_tests(0), max_physical_batch_size=split,
            )   # fmt: skip
            engine.keep = KeepMask.draw(engine.params, drop_rate=drop_rate, seed=0, draw=0)
            engine.step(nn.MSELoss(reduction=reduction), torch.randn(n, 1, 6, 6), torch.randn(n, 2))
        return [p.grad for p in model.parameters()]

    @pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
    @pytest.mark.parametrize("reduction", ["mean", "sum"])
    def test_any_split(self, clipping, reduction):
        whole = self.run(None, clipping, reduction)
        for split in (1, 3, 10):
            for a, b in zip(self.run(split, clipping, reduction), whole, strict=True):
                assert torch.allclose(a, b, rtol=1e-5, atol=1e-6)

    def test_an_empty_batch_is_pure_noise(self):
        assert all(bool((g != 0).any()) for g in self.run(None, n=0))

    def test_misuse(self):
        model = nn.Linear(3, 2)
        settings = dict(max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=4, noise=NoiseSource())
        with pytest.raises(ValueError, match="max_physical_batch_size: got 0"):
            StreamingEngine(per_sample(model), max_physical_batch_size=0, **settings)
        with pytest.raises(ValueError, match="max_grad_norm: got -1"):
            StreamingEngine(per_sample(model), **{**settings, "max_grad_norm": -1.0})
        engine = StreamingEngine(per_sample(model), **settings)
        with pytest.raises(ValueError, match="release: nothing was accumulated"):
            engine.release()
        engine.accumulate(nn.MSELoss(), torch.ones(3, 3), torch.ones(3, 2))
        with pytest.raises(ValueError, match="keep: fixed while samples are accumulated"):
            engine.keep = None
        engine.accumulate(nn.MSELoss(reduction="sum"), torch.ones(3, 3), torch.ones(3, 2))   # own gradients too
        engine.release()
        with pytest.raises(ValueError, match="keep: made for parameters of other shapes"):
            engine.keep = KeepMask.full([(5,)])

    def test_a_failed_pass_is_given_up_whole(self):
        """Run again, it counts every sample once: one large gradient gives a release of norm C, not 2 C."""
        layer = nn.Linear(4, 1, bias=False)
        model = Fails(layer)
        x, y = torch.zeros(6, 4), torch.full((6, 1), -1e3)
        x[0, 0] = 1e3
        engine = StreamingEngine(per_sample(model), max_grad_norm=1.0, noise_multiplier=1e-6, expected_batch_size=1,
                                 noise=NoiseSource(), max_physical_batch_size=3)   # fmt: skip
        given = nn.MSELoss(reduction="sum"), x, y
        for error in (RuntimeError, KeyboardInterrupt):
            model.failing = error, 2   # in the second micro-batch
            with pytest.raises(error):
                engine.step(*given)
            with pytest.raises(ValueError, match="release: nothing was accumulated"):
                engine.release()
        engine.step(*given)
        assert float(layer.weight.grad.norm()) == pytest.approx(1.0, abs=1e-3)
        engine.accumulate(*given)
        engine.discard()
        engine.keep = None   # nothing is open
        engine.step(*given)
        assert float(layer.weight.grad.norm()) == pytest.approx(1.0, abs=1e-3)

    def test_after_a_failed_release_nothing_is_left_to_release(self, monkeypatch):
        model = nn.Linear(3, 2)
        engine = StreamingEngine(per_sample(model), max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=4,
                                 noise=NoiseSource())   # fmt: skip
        engine.accumulate(nn.MSELoss(), torch.ones(3, 3), torch.ones(3, 2))

        def failing(self):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(PrivateSum, "release", failing)
            with pytest.raises(KeyboardInterrupt):
                engine.release()
        with pytest.raises(ValueError, match="release: nothing was accumulated"):
            engine.release()

    def test_a_mask_that_is_refused_is_not_in_force(self):
        engine = StreamingEngine(per_sample(nn.Linear(3, 2)), max_grad_norm=1.0, noise_multiplier=1.0,
                                 expected_batch_size=4, noise=NoiseSource())   # fmt: skip
        engine.keep = keep = KeepMask.draw(engine.params, drop_rate=0.5, seed=0, draw=0)
        with pytest.raises(ValueError, match="keep: made for parameters of other shapes"):
            engine.keep = KeepMask.full([(5,)])
        assert engine.keep is keep
        engine.step(nn.MSELoss(), torch.ones(3, 3), torch.ones(3, 2))

    def test_a_micro_batch_is_gone_when_the_next_is_asked_for(self):
        stream = Stream(per_sample(nn.Conv1d(1, 2, 3)), max_physical_batch_size=2)
        kept = list(stream(nn.MSELoss(), torch.randn(4, 1, 5), torch.zeros(4, 2, 3)))
        assert kept == [{}, {}]   # their memory was written again

    def test_one_sample_more_changes_the_last_micro_batch_only(self):
        stream = Stream(per_sample(nn.Linear(3, 2)), max_physical_batch_size=44)
        for samples in (0, 1, 43, 44, 45, 64, 88, 89):
            grads = stream(nn.MSELoss(), torch.ones(samples, 3), torch.ones(samples, 2))
            sizes = [len(part["bias"]) for part in grads]
            assert sizes[:-1] == [44] * ((samples - 1) // 44)
            assert sum(sizes) == samples

    @pytest.mark.parametrize(("kept", "expected"), [(0, (32, 724, 1)), (2**30, (44, 964, 1))])
    def test_the_micro_batch_follows_from_the_size_of_a_row(self, monkeypatch, kept, expected):
        monkeypatch.setattr(allocator, "_kept", kept)
        sizes = 550_570, 26_010, 10**8
        assert tuple(micro_batch_size([("w", nn.Parameter(torch.empty(size)))]) for size in sizes) == expected
