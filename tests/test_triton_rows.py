"""Row masks on the Triton backend: RowGrads give what the same mask, as coordinates, gives on whole gradients.

Without a GPU this needs Triton's interpreter, whose variable must be set before the import (tests/triton/conftest.py):
there the file starts itself again in a process of its own."""

import gc
import math
import os
import subprocess
import sys

import pytest
import torch

from dprs_kernels import KeepMask, NoiseSource, NonPrivateDiagnostics, PrivateSum, reference
from dprs_kernels.backends import row_tiles, tables, tuning
from dprs_kernels.backends import triton as backend
from dprs_kernels.layout import Layout
from dprs_kernels.row_grads import RowGrads
from dprs_kernels.structure import RowSet
from tests.oracle import Setting, random_grads
from tests.triton.common import A, B, design_id
from tests.triton.conftest import DEVICE, INTERPRETED, USABLE
from tests.triton.recorder import LOAD, recorded, rows

SECONDS = 400
EVEN = [(8, 32, 3, 3), (8,), (16, 64), (16,)]      # a convolution and a Linear: 288 and 64 coordinates a row
ODD = [*EVEN, (6, 27), (6,)]                       # 27 is no multiple of 32
LARGE = 1e4                                        # no sample is clipped
both_designs = pytest.mark.parametrize("config", [A, B], ids=design_id)
pytestmark = pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")   # a dropped NaN meets a conversion


@pytest.mark.skipif(USABLE, reason="the tests below run in this process")
def test_the_file_in_a_process_that_interprets():
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


@pytest.fixture(autouse=True)
def _device(request):
    if not USABLE and request.function is not test_the_file_in_a_process_that_interprets:
        pytest.skip("run by test_the_file_in_a_process_that_interprets")


def row_mask(shapes, drop_rate, draw=0):
    return KeepMask.draw(shapes, drop_rate=drop_rate, seed=0, draw=draw, structure="row")


def as_rows(grads, keep):
    """RowGrads of each parameter that has rows."""
    sets = [keep.kept_rows(p) for p in range(len(grads))]
    return [g if s is None else RowGrads(g.index_select(1, s.kept), s) for g, s in zip(grads, sets, strict=True)]


def poisoned(grads, keep):
    """Whole gradients with NaN where they are dropped."""
    return [torch.where(kept, grad, math.nan) for grad, kept in zip(grads, keep.dense(), strict=True)]


def as_coordinates(keep):
    return KeepMask.from_dense(keep.dense())


def moved(grad):
    return RowGrads(grad.values.to(DEVICE), grad.rows) if isinstance(grad, RowGrads) else grad.to(DEVICE)


def opened(grads, keep, setting, name="triton", seen=None):
    """A PrivateSum whose parameters have NaN gradients: whatever is not written shows."""
    device = DEVICE if name == "triton" else torch.device("cpu")
    params = [torch.nn.Parameter(torch.zeros(grad.shape[1:], device=device)) for grad in grads]
    for param in params:
        param.grad = torch.full_like(param, math.nan)
    noise = NoiseSource.seeded_for_tests(0)
    return PrivateSum(params, keep=keep, noise=noise, backend=name, non_private_diagnostics=seen, **vars(setting))


def run(grads, keep, setting, config, name="triton"):
    """p.grad of the fused step."""
    total = opened(grads, keep, setting, name)
    with tuning.override(config):
        total.step([moved(grad) for grad in grads])
    return [param.grad.cpu() for param in total.params]


def units(batches, keep, setting, config, seen=None):
    """S in units, before the release (noise is most of a step's time in the interpreter)."""
    total = opened(batches[0], keep, setting, seen=seen)
    with tuning.override(config):
        for batch in batches:
            total.add([moved(grad) for grad in batch])
    return total._sum().cpu()


def launched(grads, setting, config):
    """How the launcher sees a micro-batch."""
    plan = setting.plan(Layout.of([grad.shape[1:] for grad in grads]))
    with tuning.override(config):
        return backend._Batch.of([moved(grad) for grad in grads], plan)


def assert_zero_where_dropped(outs, keep):
    for out, kept in zip(outs, keep.dense(), strict=True):
        assert torch.equal(out[~kept], torch.zeros_like(out[~kept]))
        assert not out[~kept].signbit().any()


def assert_equal(outs, others):
    for out, other in zip(outs, others, strict=True):
        assert torch.equal(out, other)


def assert_close(got, other, grads, keep, setting):
    """2^-20 of sum |f g|, and a unit for every contribution that rounds the other way."""
    plan = setting.plan(keep.layout)
    kept = [torch.where(part, grad.double(), 0.0) for grad, part in zip(grads, keep.dense(), strict=True)]
    squares = torch.stack([grad.flatten(1).square().sum(1) for grad in kept], 1)                     # [N, P]
    norms = squares.sqrt() if setting.clipping == "per_layer" else squares.sum(1, keepdim=True).sqrt()
    f = (torch.tensor(plan.bounds, dtype=torch.float64) / norms).clamp(max=1.0)
    assert (f < 1).any()
    parts = [plan.layout.split(total.double()) for total in (got, other)]
    for p, (one, two) in enumerate(zip(*parts, strict=True)):
        fp = f[:, plan.segment_of[p]].reshape(-1, *[1] * one.dim())
        assert ((one - two).abs() <= 2.0**-20 * (fp * kept[p]).abs().sum(0) / plan.unit + len(fp)).all()
        assert (one[keep.dense()[p]] != 0).any()


@pytest.mark.parametrize(
    ("config", "dtype", "shapes"),
    [(A, torch.float32, ODD), (A, torch.bfloat16, ODD), (A, torch.float64, ODD), (B, torch.float32, EVEN),
     (B, torch.bfloat16, EVEN)],
    ids=["A-fp32", "A-bf16", "A-fp64", "B-fp32", "B-bf16"],
)   # fmt: skip
@pytest.mark.parametrize("drop_rate", [0.3, 0.9])
def test_rows_are_the_same_mask_given_as_coordinates(config, dtype, shapes, drop_rate):
    """Bit for bit in p.grad where nothing is clipped, and in S to the last bits of the norms where it is."""
    keep, grads = row_mask(shapes, drop_rate), random_grads(shapes, 5, dtype)
    given, whole, coordinates = as_rows(grads, keep), poisoned(grads, keep), as_coordinates(keep)
    batch = launched(given, Setting(), config)
    assert batch.by_rows
    assert (batch.one_pass is not None) == (config is B)
    setting = Setting(max_grad_norm=LARGE)
    outs = run(given, keep, setting, config)
    assert_equal(outs, run(whole, coordinates, setting, config))
    for out, kept in zip(outs, keep.dense(), strict=True):
        assert not out[~kept].any()
        assert not out[~kept].signbit().any()
    setting = Setting()
    got, expected = units([given], keep, setting, config), units([whole], coordinates, setting, config)
    assert_close(got, expected, grads, keep, setting)


def test_odd_rows_are_staged_beside_design_b():
    """5 % of the values: stored whole, then copied to where 128-bit loads can read them."""
    keep, grads, setting = row_mask(ODD, 0.1), random_grads(ODD, 5), Setting(max_grad_norm=LARGE)
    given = as_rows(grads, keep)
    assert launched(given, setting, B).one_pass is not None
    assert_equal(run(given, keep, setting, B), run(poisoned(grads, keep), keep, setting, B, "reference"))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_per_layer_clipping(dtype):
    keep, grads = row_mask(ODD, 0.5), random_grads(ODD, 5, dtype)
    given, whole = as_rows(grads, keep), poisoned(grads, keep)
    for bound in (1.0, LARGE):
        setting = Setting(clipping="per_layer", max_grad_norm=bound)
        seen, of_whole = NonPrivateDiagnostics(), NonPrivateDiagnostics()
        got = units([given], keep, setting, A, seen)
        expected = units([whole], as_coordinates(keep), setting, A, of_whole)
        stored = [1, 3, 4, 5]   # whole, for their odd rows: the same tiles, the same bits
        assert torch.equal(seen.norms[:, stored], of_whole.norms[:, stored])
        assert ((seen.norms - of_whole.norms).abs() <= 2.0**-21 * of_whole.norms).all()
        if bound == LARGE:
            assert torch.equal(got, expected)
        else:
            assert_close(got, expected, grads, keep, setting)


@pytest.mark.parametrize("sigma", [0.0, 1e-12])
def test_float_and_wide_sums(sigma):
    """Without noise sums are float64, with tiny noise 64-bit integers."""
    keep, grads = row_mask(EVEN, 0.5), random_grads(EVEN, 5)
    setting = Setting(max_grad_norm=LARGE, noise_multiplier=sigma)
    got = units([as_rows(grads, keep)], keep, setting, A)
    assert got.any()
    assert torch.equal(got, units([poisoned(grads, keep)], as_coordinates(keep), setting, A))


@both_designs
def test_a_nan_in_a_kept_row_removes_its_sample(config):
    keep, grads, setting = row_mask(EVEN, 0.5), random_grads(EVEN, 5), Setting()
    spoiled = [grad.clone() for grad in grads]
    spoiled[2][3, keep.kept_rows(2).kept[-1], 63] = math.nan
    others = [torch.cat([grad[:3], grad[4:]]) for grad in grads]
    got = units([as_rows(spoiled, keep)], keep, setting, config)
    assert torch.equal(got, units([as_rows(others, keep)], keep, setting, config))
    assert not torch.equal(got, units([as_rows(grads, keep)], keep, setting, config))


@both_designs
def test_micro_batches_give_the_same_bits(config):
    """Clipped, so that the norms are the same bits too."""
    keep, grads, setting = row_mask(EVEN, 0.5), random_grads(EVEN, 6), Setting()
    parts = [as_rows([grad[a:b] for grad in grads], keep) for a, b in ((0, 1), (1, 4), (4, 4), (4, 6))]
    whole = as_rows(grads, keep)
    assert torch.equal(units(parts, keep, setting, config), units([whole], keep, setting, config))


def test_the_fused_step_is_add_and_release():
    keep, grads, setting = row_mask(EVEN, 0.5), random_grads(EVEN, 4), Setting()
    total = opened(grads, keep, setting)
    with tuning.override(B):
        total.add([moved(grad) for grad in as_rows(grads, keep)])
        total.release()
    assert_equal(run(as_rows(grads, keep), keep, setting, B), [param.grad.cpu() for param in total.params])


@both_designs
def test_every_row_kept(config):
    """No bits, and the tiles and the single launch of any other gradient; 27 a row is not stored again either."""
    keep, grads = row_mask(ODD, 0.0), random_grads(ODD, 3)
    given = [moved(grad) for grad in as_rows(grads, keep)]
    assert not launched(given, Setting(), config).by_rows
    for grad in given:
        assert row_tiles.rows_of(grad).held.data_ptr() == grad.values.data_ptr()
    assert_equal(run(given, keep, Setting(), config), run(grads, None, Setting(), config))


@both_designs
@pytest.mark.parametrize(("draw", "left"), [(0, 0), (8, 1)])
def test_a_bias_with_no_row_left(config, draw, left):
    """Linear(64, 1): its coordinates drop one by one, and the bias, a row by itself, may be gone."""
    shapes, setting = [(1, 64), (1,)], Setting(max_grad_norm=LARGE)
    grads, keep = random_grads(shapes, 5), row_mask(shapes, 0.5, draw)
    given = as_rows(grads, keep)
    assert isinstance(given[1], RowGrads)
    assert given[1].values.shape[1] == left
    assert_equal(run(given, keep, setting, config), run(poisoned(grads, keep), as_coordinates(keep), setting, config))


@both_designs
@pytest.mark.parametrize("beside", [[], [(40,)]], ids=["alone", "beside another"])
def test_a_matrix_with_no_row_left(config, beside):
    """No mask does that to a matrix; the verb works all the same."""
    plan = Setting().plan(Layout.of([(4, 64), *beside]))
    others = random_grads(beside, 3)
    total = torch.zeros(plan.layout.padded, dtype=reference.total_dtype(plan), device=DEVICE)
    none = RowGrads(torch.zeros(3, 0, 64, device=DEVICE), RowSet(torch.zeros(0, dtype=torch.int64), 4))
    with tuning.override(config):
        norms = backend.accumulate_(total, [none, *(grad.to(DEVICE) for grad in others)], None, plan)
    assert not total[:256].any()
    expected = others[0].double().norm(dim=1) if others else torch.zeros(3, dtype=torch.float64)
    assert torch.allclose(norms.cpu()[:, 0], expected, rtol=1e-6)


def between_guards(grad):
    """The same values as part of a larger buffer, a row of NaN before and after those of each sample."""
    n, k = grad.values.shape[:2]
    big = torch.full((n, k + 2, *grad.values.shape[2:]), math.nan, dtype=grad.dtype)
    big[:, 1 : 1 + k] = grad.values
    return RowGrads(big[:, 1 : 1 + k], grad.rows)


@both_designs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_rows_are_read_where_they_lie_and_nothing_else(config, dtype, monkeypatch):
    """Norms and sums request each kept value once, and no byte of what lies around it: not of a dropped row, not of an
    empty tile. The last shape has 22 runs, and 24 tiles in design B."""
    shapes = [(8, 32, 3, 3), (16, 64), (64, 32)]
    keep, setting = row_mask(shapes, 0.6), Setting(max_grad_norm=LARGE)
    given = as_rows(random_grads(shapes, 5, dtype), keep)
    expected = units([given], keep, setting, config)
    guarded = [between_guards(grad) for grad in given]
    monkeypatch.setattr(RowGrads, "dense", lambda self: pytest.fail("stored whole"))
    assert torch.equal(units([guarded], keep, setting, config), expected)
    if not INTERPRETED:
        pytest.skip("requests are counted in the interpreter")
    plan = setting.plan(keep.layout)
    total = torch.zeros(plan.layout.padded, dtype=reference.total_dtype(plan))
    values = [grad.values for grad in guarded]
    with tuning.override(config), recorded(rows("G", values)) as log:
        backend.accumulate_(total, guarded, keep.bits, plan)
    assert log.outside() == []
    assert log.requested(LOAD)["G"] == 2 * sum(part.numel() * part.element_size() for part in values)
    programs = {access.program for access in log.accesses if access.kernel == "_one_pass_kernel"}
    tiles = launched(guarded, setting, config).tiles((0, 1, 2), 512, plan)
    if config is B:
        assert tiles.count > tiles.ranges[2][1]           # some are empty
        assert len(programs) == 2 * 3 * tiles.count       # two touches of 3 groups of 2 samples


@both_designs
def test_values_that_are_not_aligned_or_not_row_major(config):
    """One value off a multiple of 16 bytes; and rows whose values are not neighbours. 5 x 64 of 1984 values are few
    enough to be staged at one, too many at the other."""
    shapes, setting = [(8, 288), (16, 64)], Setting(max_grad_norm=LARGE)
    keep, grads = row_mask(shapes, 0.4), random_grads(shapes, 5)
    given = as_rows(grads, keep)
    expected = units([given], keep, setting, config)
    for p in (0, 1):
        values = given[p].values
        shifted = torch.full((values.numel() + 1,), math.nan, device=DEVICE)[1:].view(values.shape).copy_(values)
        crossed = torch.full((5, *values.shape[:0:-1]), math.nan, device=DEVICE).transpose(1, 2).copy_(values)
        for other in (shifted, crossed):
            mixed = [RowGrads(other, grad.rows) if q == p else grad for q, grad in enumerate(given)]
            assert torch.equal(units([mixed], keep, setting, config), expected)


class TestTables:
    layout = Layout.of([(40,), (8, 64)])

    def tiles(self, kept, columns=128, device=DEVICE, rounded=False):
        rows_ = RowSet(torch.tensor(kept, dtype=torch.int64), 8)
        held = [tables.rows_of(torch.zeros(1, 40)), row_tiles.rows_of(RowGrads(torch.zeros(1, len(kept), 64), rows_))]
        return row_tiles.tiles_of(self.layout, held, (0, 1), columns, device, rounded)

    def test_neighbours_make_a_run(self):
        """Of 64 columns a row, in words of 32; the second parameter starts at word 2."""
        tiles = self.tiles([1, 2, 3, 6])
        assert tiles.table.tolist() == [[0, 0, 40, 0], [1, 0, 128, 4], [1, 4, 64, 8], [1, 6, 64, 14]]
        assert tiles.ranges == {0: (0, 1), 1: (1, 4)}
        assert tiles.count == 4

    def test_all_and_none(self):
        assert torch.equal(self.tiles(range(8)).table, tables.tiles_of(self.layout, (0, 1), 128, DEVICE).table)
        assert self.tiles([]).table.tolist() == [[0, 0, 40, 0]]

    def test_few_counts_for_design_b(self):
        """It is compiled for the number of tiles: 60 masks, at every rate, have 15 numbers at most, not 30."""
        shapes = [(64, 96)]
        layout, counts, exact = Layout.of(shapes), set(), set()
        for draw in range(60):
            keep = row_mask(shapes, 0.02 + draw / 62, draw)
            held = [row_tiles.rows_of(RowGrads(torch.zeros(1, len(keep.kept_rows(0).kept), 96), keep.kept_rows(0)))]
            tiles = row_tiles.tiles_of(layout, held, (0,), 512, DEVICE, True)
            first, last = tiles.ranges[0]
            assert (first, tiles.table[last:, 2].tolist()) == (0, [0] * (tiles.count - last))
            assert last <= tiles.count <= last * 9 / 8
            assert tiles.count <= row_tiles.most_tiles(held, 512)
            counts.add(tiles.count)
            exact.add(last)
        assert all(count < 16 or count % 2 == 0 for count in counts)
        assert len(counts) < len(exact)

    def test_tables_are_made_once_a_mask_and_do_not_pile_up(self):
        gc.collect()
        before = len(row_tiles._words)
        first = self.tiles([0, 5])
        assert self.tiles([0, 5]) is first                       # an equal set is the same mask
        assert self.tiles([0, 6]) is not first
        for bits in range(1, 200):
            self.tiles([row for row in range(8) if bits >> row & 1])
        gc.collect()
        assert len(row_tiles._words) == before
        assert row_tiles._row_tiles.cache_info().currsize <= 16

    def test_no_table_is_made_inside_a_capture(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(RuntimeError, match="ordinary step of the same shapes and mask on cuda:0 before capturing"):
            self.tiles([2, 7], device=torch.device("cuda:0"))

    @both_designs
    def test_a_captured_graph_keeps_its_tables(self, config, monkeypatch):
        """After one ordinary step the tables are there; captured, they stay when newer masks push them out."""
        keep, plan = row_mask(EVEN, 0.5), Setting().plan(Layout.of(EVEN))
        given = [moved(grad) for grad in as_rows(random_grads(EVEN, 3), keep)]
        bits = keep.bits_on(DEVICE)
        totals = [torch.zeros(plan.layout.padded, dtype=torch.int64, device=DEVICE) for _ in range(2)]
        held = []
        monkeypatch.setattr(tables, "_held_by_graphs", held)
        with tuning.override(config):
            backend.accumulate_(totals[0], given, bits, plan)
            made = row_tiles._row_tiles.cache_info().misses
            monkeypatch.setattr(tables, "capturing", lambda device: True)
            backend.accumulate_(totals[1], given, bits, plan)
            columns = [512] if config is B else [tuning.NORM_COLUMNS, tuning.SUM_COLUMNS]
            batch = launched(given, Setting(), config)
            mine = [batch.tiles((0, 1, 2, 3), width, plan).table for width in columns]
        assert row_tiles._row_tiles.cache_info().misses == made
        assert torch.equal(*totals)
        assert all(any(table is other for other in held) for table in mine)
