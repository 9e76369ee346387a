"""Norms, factors and sums of both designs against float64: every dtype, odd shapes, bad rows, masks."""

import math
from dataclasses import replace

import pytest
import torch

from dprs_kernels.backends import cpu, triton, tuning
from dprs_kernels.layout import Layout
from tests.oracle import Setting, random_grads
from tests.triton.common import DESIGNS, HALVES, A, B, assert_units, design_id, drawn, units
from tests.triton.conftest import DEVICE

designs = pytest.mark.parametrize("config", DESIGNS, ids=design_id)
SHAPES = [(1104,), (8,), (3, 3), (1,)]   # (3, 3) and (1,) are odd, and few: staged


@designs
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("drop_rate", [None, 0.5, 0.9])
def test_against_float64(config, dtype, drop_rate):
    with tuning.override(config):
        assert_units(random_grads(SHAPES, 5, dtype, scale=0.1), drawn(SHAPES, drop_rate))


@designs
@pytest.mark.parametrize("samples", [0, 1, 2, 9])
def test_any_number_of_samples(config, samples):
    for drop_rate in (0.0, 0.999):
        with tuning.override(config):
            assert_units(random_grads(SHAPES, samples), drawn(SHAPES, drop_rate))


@pytest.mark.parametrize("dtype", [*HALVES, torch.float64])
@pytest.mark.parametrize("shapes", [[(1101,)], [(17, 3), (5,)], [(1,)], [(4097,), (64,)]])
def test_large_odd_parameters_are_read_value_by_value(dtype, shapes):
    for drop_rate in (None, 0.9):
        assert_units(random_grads(shapes, 5, dtype), drawn(shapes, drop_rate))


@designs
@pytest.mark.parametrize("setting", [
    Setting(clipping="automatic"), Setting(clipping="per_layer"), Setting(loss_reduction="mean"),
    Setting(noise_multiplier=0.001), Setting(noise_multiplier=0.0), Setting(max_grad_norm=math.inf),
    Setting(max_grad_norm=2.0**-40), Setting(max_grad_norm=2.0**40),
], ids=str)   # fmt: skip
def test_every_clipping_and_every_way_to_hold_a_sum(config, setting):
    with tuning.override(config):
        assert_units(random_grads(SHAPES, 6, scale=0.1), drawn(SHAPES, 0.5), setting)


@designs
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning", "ignore:overflow:RuntimeWarning")
def test_bad_values_kept_and_dropped(config, dtype):
    """A bad kept value removes its sample; a bad dropped one is not there."""
    keep = drawn(SHAPES, 0.5)
    grads = random_grads(SHAPES, 5, dtype, scale=0.1)
    dense = keep.dense()
    spoiled = [grad.masked_fill(~kept, math.nan) for grad, kept in zip(grads, dense, strict=True)]
    with tuning.override(config):
        clean, _, _ = units(grads, keep)
        assert torch.equal(units(spoiled, keep)[0], clean)
        place = int(dense[0].nonzero()[-1])
        for bad, row in ((math.nan, 0), (math.inf, 2), (-math.inf, 4)):
            spoiled = [grad.clone() for grad in grads]
            spoiled[0][row, place] = bad
            without = [torch.cat([grad[:row], grad[row + 1 :]]) for grad in grads]
            assert torch.equal(units(spoiled, keep)[0], units(without, keep)[0])


@pytest.mark.parametrize("dtype", HALVES)
def test_units_equal_the_cpu_kernels_where_norms_do(dtype):
    """Nothing is clipped: factors are the same number, so the integers must be the same, in every design."""
    grads, keep = random_grads(SHAPES, 6, dtype, scale=0.001), drawn(SHAPES, 0.5)
    plan = replace(Setting().plan(keep.layout), noise_std=0.0, grid=0.0, expected_batch_size=1.0)   # releases the sum
    total = torch.zeros(cpu.sums(keep.layout, keep.bits), dtype=torch.int64)
    expected = [torch.empty(shape, dtype=torch.float64) for shape in SHAPES]
    cpu.accumulate_(total, grads, keep.bits, plan)
    cpu.release(expected, total, keep.bits, plan, bytes(32), 0)
    assert expected[0].any()
    for config in DESIGNS:
        with tuning.override(config):
            found = keep.layout.split(units(grads, keep)[0].double().cpu() * plan.unit)
            assert all(map(torch.equal, found, expected)), config


def test_a_sum_does_not_depend_on_the_split_or_the_order():
    grads = random_grads(SHAPES, 9)
    keep = drawn(SHAPES, 0.5)
    for config in (A, B):
        with tuning.override(config):
            whole, _, _ = units(grads, keep)
            parts = [units([grad[a:b] for grad in grads], keep)[0] for a, b in ((0, 1), (1, 4), (4, 4), (4, 9))]
            assert torch.equal(sum(parts), whole)
            assert torch.equal(units([grad.flip(0) for grad in grads], keep)[0], whole)
            assert torch.equal(units(grads, keep)[0], whole)


def test_splits_of_the_rows_do_not_matter(monkeypatch):
    grads, keep = random_grads(SHAPES, 40), drawn(SHAPES, 0.5)
    totals = []
    for split in (1, 3, 10):
        monkeypatch.setattr(tuning, "splits", lambda *_, split=split: split)
        with tuning.override(A):
            totals.append(units(grads, keep)[0])
    assert torch.equal(totals[0], totals[1])
    assert torch.equal(totals[0], totals[2])


def test_strided_mixed_and_empty_parameters():
    wide = torch.randn(6, 64, 3, generator=torch.Generator().manual_seed(0))
    grads = [
        wide[:, ::2],                                        # no row-major rows: copied
        wide[:, :, 0].to(torch.bfloat16).expand(6, 64),
        torch.zeros(6, 0),
        wide[:, 3:9].reshape(6, 18)[:, 1:].to(torch.float16),
        wide[:1].expand(6, 64, 3),                           # distance 0 between samples
        wide.transpose(1, 2),
        wide[:, :4, 0].double(),
    ]   # fmt: skip
    for drop_rate in (None, 0.5):
        for setting in (Setting(), Setting(clipping="per_layer")):
            assert_units(grads, drawn([grad.shape[1:] for grad in grads], drop_rate), setting)


def adversarial_rows(size):
    """Rows whose fp32 norms go wrong when they are added in sequence."""
    j = torch.arange(size, dtype=torch.float64)
    return torch.stack([
        torch.full((size,), 1.0), torch.cat([torch.tensor([1.0]), torch.full((size - 1,), 2.0**-12)]),
        (1 + 2.0**-12 * (j % 7)).float(), torch.exp(-8 * j / size).float(), torch.where(j % 2 == 0, 1.0, 1e-7).float(),
        torch.randn(size, generator=torch.Generator().manual_seed(0)) * 1e18,
        torch.randn(size, generator=torch.Generator().manual_seed(1)) * 1e-17,
    ])   # fmt: skip


@pytest.mark.parametrize(("config", "size"), [(A, 9001), (A, 9008), (B, 4112)], ids=["odd rows", "A", "B"])
@pytest.mark.parametrize("sigma", [0.0, 1.0])
def test_clipped_norms_stay_under_the_bound(config, size, sigma):
    """The norm of a contribution, in float64, is at most C: exactly without noise, and with it to the rounding of
    every coordinate to the unit, which plan.sensitivity charges."""
    for bound in (1.0, 3e-5):
        for row in adversarial_rows(size):
            setting = Setting(max_grad_norm=bound, noise_multiplier=sigma, expected_batch_size=1)
            with tuning.override(config):
                total, norms, plan = units([row.unsqueeze(0)], None, setting)
            contribution = float((total.double() * (plan.unit or 1.0)).norm())
            assert contribution <= bound + math.sqrt(size) * plan.unit / 2
            true = float(row.double().norm())
            assert abs(float(norms[0, 0]) - true) <= 2.0**-21 * true + 2.0**-24 * bound


def test_tiles_are_added_in_float64():
    """R5: one tile holds 2^-1 and 78 others 2^-31 each (all exact), which an fp32 sum over tiles would lose."""
    grad = torch.full((2, 79 * 512), 2.0**-20)
    grad[:, :512] = 2.0**-5
    with tuning.override(B):
        _, norms, _ = units([grad], None)
    assert ((norms[:, 0] ** 2 - (0.5 + 78 * 2.0**-31)).abs() <= 2.0**-45).all()


def test_rows_beyond_two_to_the_31(tmp_path):
    """Distances between samples in int64: a sparse file of 2^33 values, of which two rows are touched."""
    stride = 2**32 + 16
    with open(tmp_path / "sparse", "wb") as file:
        file.truncate(4 * (stride + 1024))
    flat = torch.from_file(str(tmp_path / "sparse"), shared=True, size=stride + 1024, dtype=torch.float32)
    rows = torch.randn(2, 1024, generator=torch.Generator().manual_seed(0)) * 0.01
    flat[:1024], flat[stride:] = rows[0], rows[1]
    grads = flat.as_strided((2, 1024), (stride, 1))
    if DEVICE.type == "cuda":
        pytest.skip("a sparse file cannot be moved to a GPU")
    for config in (A, B):
        with tuning.override(config):
            assert torch.equal(units([grads], None)[0], units([rows], None)[0])


def test_grids_beyond_int32_fall_back_to_two_passes():
    """The ticket counter is an int32; no allocation is needed to see that the launcher minds. Every parameter has a
    tile to itself, however small."""
    for shapes, samples in (([(2**21,)], 2**21), ([(4,)] * 1100, 2**21)):
        layout = Layout.of(shapes)
        plan = Setting().plan(layout)
        grads = [torch.zeros(1, size).expand(samples, size) for size in layout.sizes]
        with tuning.override(tuning.Config("B", columns=512, warps=4, group=2, lag=1)):
            assert triton._Batch.of(grads, plan).one_pass is None
            assert triton._Batch.of([grad[:100] for grad in grads], plan).one_pass is not None
