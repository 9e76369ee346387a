"""Gradients of kept rows only: bit for bit what the same mask gives as coordinates, from the kernels and from the
engine; dropped rows are neither made nor read; memory falls with them."""

import itertools
import math
import signal
import subprocess
import sys
import warnings
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

from dprs_kernels import ConstantRate, KeepMask, NoiseSource, PrivateSum, RSDPOptimizer
from dprs_kernels.grads import FunctionalSource, per_sample
from dprs_kernels.grads.arena import Arena
from dprs_kernels.grads.engine import Stream, StreamingEngine, kept_rows
from dprs_kernels.outer import OuterProducts
from dprs_kernels.paper.networks import dp_cnn, dp_cnn_s
from dprs_kernels.row_grads import RowGrads
from dprs_kernels.structure import RowSet
from tests.oracle import BACKENDS, DTYPES, ORDERS, Setting, assert_true, random_grads

needs_cpu = pytest.mark.skipif("cpu" not in BACKENDS, reason="needs the CPU kernels")
LOSS = partial(nn.functional.cross_entropy, reduction="sum")
# Rows that are aligned, longer than a tile, shorter than a block, odd, single values, and a group of a single row.
SHAPES = [(12, 64), (12,), (5, 2048), (40, 9, 3), (40,), (300,), (7, 517), (1, 30), (1,), (3, 100)]
structures = pytest.mark.parametrize("structure", ["row", "mixed"])


def drawn(shapes, rate, draw=0, structure="row"):
    return KeepMask.draw(shapes, drop_rate=rate, seed=0, draw=draw, structure=structure)


def as_rows(grads, keep):
    """Each gradient's kept rows, between NaN that nobody may read."""
    made = []
    for p, grad in enumerate(grads):
        rows = keep.kept_rows(p)
        if rows is None:
            made.append(grad)
            continue
        some = grad[:, rows.kept]
        guarded = torch.full((some.shape[0], some.shape[1] + 2, *some.shape[2:]), math.nan, dtype=some.dtype)
        guarded[:, 1:-1] = some
        made.append(RowGrads(guarded[:, 1:-1], rows))
    return made


def spoiled(grads, keep):
    """Whole gradients whose dropped coordinates are NaN."""
    return [torch.where(kept, grad, math.nan) for grad, kept in zip(grads, keep.dense(), strict=True)]


def run(backend, grads, keep, setting, cuts=()):
    params = [nn.Parameter(torch.zeros(g.shape[1:], dtype=torch.float64)) for g in grads]
    total = PrivateSum(params, keep=keep, noise=NoiseSource.seeded_for_tests(0), backend=backend, **vars(setting))
    edges = [0, *cuts, grads[0].shape[0]]
    for a, b in itertools.pairwise(edges):
        total.add([part(g, slice(a, b)) for g in grads])
    total.release()
    return [param.grad for param in params]


def part(grad, samples):
    if isinstance(grad, RowGrads):
        return RowGrads(grad.values[samples], grad.rows)
    return OuterProducts(grad.e[samples], grad.a[samples]) if isinstance(grad, OuterProducts) else grad[samples]


def equal(a, b):
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@structures
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.9])
def test_bits_of_the_same_mask_as_coordinates(backend, dtype, rate, structure):
    for sigma, clipping in ((1.0, "flat"), (1.0, "per_layer"), (0.001, "automatic"), (0.0, "flat")):
        keep, setting = drawn(SHAPES, rate, structure=structure), Setting(noise_multiplier=sigma, clipping=clipping)
        grads = random_grads(SHAPES, 11, dtype, scale=0.1 if clipping == "per_layer" else 1.0)
        coordinates = KeepMask.from_dense(keep.dense())
        expected = run(backend, spoiled(grads, keep), coordinates, setting)
        assert equal(run(backend, as_rows(grads, keep), keep, setting), expected)
        assert equal(run(backend, spoiled(grads, keep), keep, setting), expected)
        if sigma or backend != "reference":   # whose float64 sums are rounded by micro-batch
            assert equal(run(backend, as_rows(grads, keep), keep, setting, cuts=(3, 3, 8)), expected)
        assert not any(bool(g.isnan().any()) for g in expected)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rate", [0.3, 0.9])
def test_whole_gradients_under_a_row_mask_are_the_oracles(backend, rate):
    assert_true(backend, random_grads(SHAPES, 9), drawn(SHAPES, rate, 3), Setting())


@needs_cpu
@pytest.mark.skipif(sys.platform != "linux", reason="mprotect's constants")
def test_no_byte_beside_the_kept_rows_is_read():
    """Vectors are wider than rows: tests/guard_pages.py has rows of every kind beside pages that cannot be read."""
    command = [sys.executable, "-m", "tests.guard_pages"]
    root = Path(__file__).parents[1]
    assert subprocess.run(command, cwd=root).returncode == 0
    for side in ("before", "after"):   # the pages do guard
        assert subprocess.run([*command, side], cwd=root).returncode == -signal.SIGSEGV


@needs_cpu
def test_threads_and_order_do_not_matter():
    keep, setting = drawn(SHAPES, 0.6), Setting()
    grads = as_rows(random_grads(SHAPES, 21), keep)
    expected, before = run("cpu", grads, keep, setting), torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            for which, order in enumerate(ORDERS):
                with order():
                    assert equal(run("cpu", grads, keep, setting), expected), (threads, which)
    finally:
        torch.set_num_threads(before)


@needs_cpu
@pytest.mark.parametrize("rate", [0.4, 0.95])
def test_outer_products_under_a_row_mask(rate):
    shapes = [(40, 300), (40,), (8, 2100)]
    keep, factors = drawn(shapes, rate), random_grads([(40,), (300,), (8,), (2100,)], 9)
    e, a, e2, a2 = factors
    for p, left in ((0, e), (2, e2)):   # an output unit that is dropped may hold anything
        left[:, keep.kept_rows(p).places < 0] = math.nan
    made = [OuterProducts(e, a), torch.nan_to_num(e), OuterProducts(e2, a2)]
    stored = [grad.dense() if isinstance(grad, OuterProducts) else grad for grad in made]
    assert equal(run("cpu", made, keep, Setting()), run("cpu", stored, KeepMask.from_dense(keep.dense()), Setting()))


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_kept_row_that_is_not_finite_removes_its_sample(backend):
    shapes = [(6, 40), (6,)]
    keep, grads = drawn(shapes, 0.5), random_grads([(6, 40), (6,)], 5)
    made = as_rows(grads, keep)
    made[0].values[2, 1, 7] = math.inf
    without = [part(grad, torch.tensor([0, 1, 3, 4])) for grad in made]
    assert equal(run(backend, made, keep, Setting()), run(backend, without, keep, Setting()))


class TestRefusals:
    def setup_method(self):
        self.shapes = [(6, 4), (6,)]
        self.keep = drawn(self.shapes, 0.5)
        self.grads = as_rows(random_grads(self.shapes, 3), self.keep)

    @pytest.mark.parametrize("backend", BACKENDS)
    def test_rows_of_another_mask(self, backend):
        others = (drawn(self.shapes, 0.5, 1), drawn(self.shapes, 0.7), KeepMask.from_dense(self.keep.dense()), None)
        for other in others:
            params = [nn.Parameter(torch.zeros(shape)) for shape in self.shapes]
            total = PrivateSum(params, keep=other, noise=NoiseSource(), backend=backend, **vars(Setting()))
            with pytest.raises(ValueError, match=r"params\[0\]: gradients of 3 of 6 rows, made for another mask"):
                total.add(self.grads)

    def test_the_same_rows_from_another_draw_are_fine(self):
        again = drawn(self.shapes, 0.5)
        assert equal(run(BACKENDS[0], self.grads, again, Setting()), run(BACKENDS[0], self.grads, self.keep, Setting()))

    def test_values_that_are_not_the_rows(self):
        with pytest.raises(ValueError, match=r"values: got shape \[5, 3\]; expected \[n, 2, ...\]"):
            RowGrads(torch.zeros(5, 3), RowSet(torch.tensor([0, 1]), 4))

    def test_used_once(self):
        params = [nn.Parameter(torch.zeros(shape)) for shape in self.shapes]
        inner = torch.optim.SGD(params, lr=0.1)
        optimizer = RSDPOptimizer(
            inner, max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=3, structure="row",
            schedule=ConstantRate(0.5, 1),
        )   # fmt: skip
        grads = [g if isinstance(g, torch.Tensor) else RowGrads(g.values, g.rows) for g in self.grads]
        optimizer.step(grad_samples=grads)
        again = [g if isinstance(g, torch.Tensor) else RowGrads(g.values, g.rows) for g in grads]   # other wrappers
        for repeated in (grads, again):
            with pytest.raises(ValueError, match="already used by an earlier step"):
                optimizer.step(grad_samples=repeated)

    def test_a_sum_takes_the_values_once_in_whatever_wrapper(self):
        params = [nn.Parameter(torch.zeros(shape)) for shape in self.shapes]
        total = PrivateSum(params, keep=self.keep, max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=3,
                           noise=NoiseSource())   # fmt: skip
        total.add(self.grads)
        rows = next(g for g in self.grads if isinstance(g, RowGrads))
        other = [g if isinstance(g, RowGrads) else g.clone() for g in self.grads]
        again = [RowGrads(g.values, g.rows) if g is rows else g for g in other]
        with pytest.raises(ValueError, match="already added to this sum"):
            total.add(again)


class Text(nn.Module):
    """Embedding, norm, a Linear over positions, a grouped and a plain convolution, an output of one unit."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 16, padding_idx=0)
        self.norm = nn.LayerNorm(16)
        self.mix = nn.Linear(16, 24)
        self.grouped = nn.Conv1d(24, 12, 3, groups=2)
        self.conv = nn.Conv1d(12, 10, 3, padding=1, padding_mode="circular")
        self.out = nn.Linear(10, 3)
        self.one = nn.Linear(10, 1)

    def forward(self, x):
        x = self.mix(self.norm(self.embed(x))).tanh()
        x = self.conv(self.grouped(x.transpose(1, 2))).tanh().mean(2)
        return self.out(x) + self.one(x)


def models():
    torch.manual_seed(0)
    yield "dp_cnn", dp_cnn(), torch.randn(9, 3, 32, 32), torch.arange(9) % 10
    yield "dp_cnn_s", dp_cnn_s(), torch.randn(20, 1, 28, 28), torch.arange(20) % 10
    yield "text", Text(), torch.randint(0, 30, (9, 8)), torch.arange(9) % 3


@needs_cpu
@structures
@pytest.mark.parametrize("rate", [0.3, 0.9])
def test_the_engine_gives_the_bits_of_the_mask_as_coordinates(rate, structure):
    for name, model, x, y in models():
        keep, grads = drawn(model.named_parameters(), rate, 4, structure), []
        for mask in (keep, KeepMask.from_dense(keep.dense())):
            with per_sample(model) as source:
                engine = StreamingEngine(
                    source, max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=8, keep=mask,
                    noise=NoiseSource.seeded_for_tests(1), max_physical_batch_size=8,
                )   # fmt: skip
                engine.step(LOSS, x, y)
            grads.append([param.grad.clone() for param in model.parameters()])
        if name == "text":   # a matrix product over positions may round otherwise for fewer rows
            assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(*grads, strict=True))
            continue
        assert equal(*grads)


def test_dropped_rows_are_never_made():
    for _, model, x, y in models():
        named = list(model.named_parameters())
        keep = drawn(named, 0.75)
        with per_sample(model) as source:
            for grads in Stream(source)(LOSS, x, y, rows=kept_rows(keep, [p for _, p in named])):
                for p, (name, param) in enumerate(named):
                    module = model.get_submodule(name.rpartition(".")[0])
                    grad = grads[name]
                    if isinstance(module, (nn.Conv2d, nn.Conv1d)) and module.groups == 1:
                        assert isinstance(grad, RowGrads)
                    if isinstance(module, nn.Embedding) or (name == "mix.weight"):
                        assert isinstance(grad, RowGrads)
                    if isinstance(grad, RowGrads):
                        assert grad.rows is keep.kept_rows(p)
                        assert grad.values.shape[1] < param.shape[0] / 2


def test_memory_falls_with_the_rows():
    model = dp_cnn()
    named, held = list(model.named_parameters()), []
    stream = Stream(per_sample(model), max_physical_batch_size=4)
    for rate in (0.0, 0.5, 0.9):
        rows = kept_rows(drawn(named, rate), [p for _, p in named])
        for _ in stream(LOSS, torch.randn(4, 3, 32, 32), torch.arange(4), rows=rows):
            held.append(stream._arena.nbytes())
    assert held[1] <= 0.52 * held[0]
    assert held[2] <= 0.13 * held[0]


def test_an_arena_serves_new_rows_from_the_pages_that_it_has():
    param, arena = nn.Parameter(torch.zeros(8, 3)), Arena(2)
    first = arena.empty(param, 2, torch.float32, 5)
    arena.recycle()
    second = arena.empty(param, 2, torch.float32, 4)
    assert second.shape == (2, 4, 3)
    assert second.data_ptr() == first.data_ptr()
    arena.recycle()
    assert arena.empty(param, 2, torch.float32, 2).shape == (2, 2, 3)
    assert arena.nbytes() == 2 * 2 * 3 * 4


def test_a_source_that_makes_whole_gradients_works_and_says_so_once():
    torch.manual_seed(0)
    model, x, y = nn.Linear(5, 4), torch.randn(6, 5), torch.arange(6) % 4
    keep, grads = drawn(model.named_parameters(), 0.5), []
    for source in (FunctionalSource(model), per_sample(model)):
        engine = StreamingEngine(
            source, max_grad_norm=100.0, noise_multiplier=1.0, expected_batch_size=6, keep=keep,
            noise=NoiseSource.seeded_for_tests(1), max_physical_batch_size=2,
        )   # fmt: skip
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            engine.step(LOSS, x, y)
            engine.step(LOSS, x, y)
        told = [str(w.message) for w in said if "row mask" in str(w.message)]
        assert len(told) == (1 if isinstance(source, FunctionalSource) else 0)
        if told:
            assert told[0].startswith("structure: FunctionalSource makes whole gradients")
        grads.append([param.grad.clone() for param in model.parameters()])
    assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(*grads, strict=True))
    dropped = ~keep.for_param(0)
    assert bool((grads[0][0][dropped] == 0).all())


def test_an_optimizer_leaves_dropped_rows_out_of_backward():
    torch.manual_seed(0)
    model = dp_cnn_s()
    seen = []
    inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = RSDPOptimizer(
        inner, max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=4, structure="row",
        schedule=ConstantRate(0.75, 2),
    )   # fmt: skip
    accumulate = optimizer.accumulate
    optimizer.accumulate = lambda grads: (seen.extend(grads), accumulate(grads))   # type: ignore[method-assign]
    before = [param.detach().clone() for param in model.parameters()]
    optimizer.backward(per_sample(model), LOSS, torch.randn(4, 1, 28, 28), torch.arange(4))
    optimizer.step()
    assert sum(isinstance(grad, RowGrads) for grad in seen) == 4     # two convolutions and their biases
    for param, old, kept in zip(model.parameters(), before, optimizer.keep.dense(), strict=True):
        assert torch.equal(param[~kept], old[~kept])
        assert not bool((param[kept] == old[kept]).any())
