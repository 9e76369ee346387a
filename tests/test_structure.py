"""Row masks: which coordinates drop together, how many, how often each, and that the draw is a function of public
numbers only."""

import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dprs_kernels import ConstantRate, KeepMask, RSDPOptimizer
from dprs_kernels.structure import WIDE, RowSet, groups_of

KNOWN_BITS = [0x0F0F000F, 0x51]   # rows 0, 4 and 6 of 8


def rows(shapes, rate, draw=0, seed=0, structure="row"):
    return KeepMask.draw(shapes, drop_rate=rate, seed=seed, draw=draw, structure=structure)


class TestGroups:
    def test_a_weight_and_its_bias(self):
        model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(2, 8), nn.Linear(8, 4, bias=False), nn.Embedding(9, 2))
        expected = (0, 0, 1, 1, 2, 3)
        assert groups_of(list(model.named_parameters())) == expected
        assert groups_of(list(model.parameters())) == expected
        assert groups_of([tuple(p.shape) for p in model.parameters()]) == expected

    def test_names_tell_modules_apart(self):
        """A Linear without a bias before a norm of as many channels: only names know whose vector it is."""
        model = nn.Sequential(nn.Linear(5, 8, bias=False), nn.LayerNorm(8))
        assert groups_of(list(model.named_parameters())) == (0, 1, 1)
        assert groups_of(list(model.parameters())) == (0, 0, 1)

    def test_names_find_a_bias_wherever_it_stands(self):
        """As where weights and biases are two groups of an optimizer; without names, neighbours decide."""
        named = dict(nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 4)).named_parameters())
        apart = [(name, named[name]) for name in ("0.weight", "1.weight", "0.bias", "1.bias")]
        assert groups_of(apart) == (0, 1, 0, 1)
        keep = KeepMask.draw(apart, drop_rate=0.5, seed=0, draw=0, structure="row")
        for weight, bias in ((0, 2), (1, 3)):
            assert torch.equal(keep.for_param(weight).all(1), keep.for_param(bias))
            assert torch.equal(keep.for_param(weight).any(1), keep.for_param(bias))

    def test_attention_and_recurrent_weights(self):
        assert groups_of(list(nn.MultiheadAttention(8, 2).named_parameters())) == (0, 0, 1, 1)
        assert groups_of(list(nn.LSTM(3, 5).named_parameters())) == (0, 1, 1, 1)

    def test_parameters_of_the_model_itself(self):
        shapes = {"a": (4, 3), "b": (5,), "c": (), "d": (2,)}
        assert groups_of([(name, torch.zeros(shape)) for name, shape in shapes.items()]) == (0, 1, 2, 3)


def test_whole_rows_drop_and_a_bias_with_its_weight():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Linear(6, 10))
    for draw in range(20):
        keep = rows(model.named_parameters(), 0.6, draw)
        weight, bias, second, last = keep.dense()
        assert torch.equal(weight.flatten(1).any(1), weight.flatten(1).all(1))
        assert torch.equal(weight.flatten(1).any(1), bias)
        assert torch.equal(second.all(1), last)
        assert int(last.sum()) == 4                  # 0.6 * 10, exactly
        assert int(bias.sum()) in (3, 4)             # 0.6 * 8 = 4.8: 4 or 5 drop
        assert keep.count == sum(int(part.sum()) for part in keep.dense())
        for p, part in enumerate(keep.dense()):
            kept = keep.kept_rows(p)
            assert kept is not None
            assert torch.equal(kept.kept, part.reshape(len(part), -1).any(1).nonzero()[:, 0])
        assert keep.kept_rows(0) is keep.kept_rows(1)


def test_a_mixed_mask_drops_rows_where_there_are_many_and_coordinates_elsewhere():
    model = nn.Sequential(nn.Linear(9, WIDE), nn.Linear(WIDE, WIDE - 1))
    whole = 0
    for draw in range(20):
        keep = rows(model.named_parameters(), 0.7, draw, structure="mixed")
        weight, bias, narrow, last = keep.dense()
        assert torch.equal(weight.any(1), weight.all(1))
        assert torch.equal(weight.all(1), bias)
        assert int(bias.sum()) in (9, 10)                        # 0.3 * 32 = 9.6
        assert torch.equal(keep.kept_rows(0).kept, bias.nonzero()[:, 0])
        size = narrow.numel() + last.numel()
        assert size - int(narrow.sum()) - int(last.sum()) in {math.floor(0.7 * size) + more for more in (0, 1)}
        assert keep.kept_rows(2) is None
        whole += int((narrow.any(1) == narrow.all(1)).sum())
    assert whole == 0                                            # 620 rows of 32 coordinates, none all or nothing
    assert (keep.structure, pickle.loads(pickle.dumps(keep))) == ("mixed", keep)
    assert pickle.loads(pickle.dumps(keep)).structure == "mixed"
    assert "mixed" in repr(keep)


shape_lists = st.lists(st.lists(st.integers(0, 12), max_size=3), min_size=1, max_size=5)


@given(shape_lists, st.floats(0, 0.999), st.integers(0, 9))
@settings(max_examples=80, deadline=None)
def test_counts_of_every_group(shapes, rate, draw):
    if sum(math.prod(shape) for shape in shapes) == 0:
        return
    keep = rows(shapes, rate, draw)
    groups = groups_of(shapes)
    for group in set(groups):
        members = [p for p, g in enumerate(groups) if g == group]
        dense = [keep.for_param(p) for p in members]
        first = shapes[members[0]]
        count = first[0] if first else 1
        if count == 1:   # no rows to choose among
            size = sum(part.numel() for part in dense)
            kept = sum(int(part.sum()) for part in dense)
            assert size == 0 or size - kept in {min(math.floor(rate * size) + more, size - 1) for more in (0, 1)}
        elif dense[0].numel():
            kept = int(dense[0].reshape(count, -1).all(1).sum())
            assert count - kept in {min(math.floor(rate * count) + more, count - 1) for more in (0, 1)}
            assert kept >= 1


@pytest.mark.parametrize("structure", ["row", "mixed"])
@pytest.mark.parametrize("rate", [0.1, 0.37, 0.5, 0.85])
def test_each_coordinate_is_kept_with_probability_1_minus_r(rate, structure):
    """Of 7 rows the count itself is drawn; chi-square of every row's frequency, alpha about 1e-7 each."""
    draws, shapes = 4000, [(7, 3), (7,), (10, 2), (1, 40), (33, 2)]
    masks = (rows(shapes, rate, draw, structure=structure).dense() for draw in range(draws))
    kept = np.stack([torch.cat([part.reshape(-1) for part in mask]).numpy() for mask in masks])
    z = (kept.mean(0) - (1 - rate)) / math.sqrt(rate * (1 - rate) / draws)
    assert np.abs(z).max() < 5.5


def test_rows_of_a_group_and_groups_are_independent():
    draws = 6000
    kept = np.stack([rows([(16, 2), (16,), (16, 2), (16,)], 0.5, draw).for_param(i).numpy()
                     for draw in range(draws) for i in (1, 3)]).reshape(draws, 2, 16).astype(float)   # fmt: skip
    within = (kept[:, 0, :8] * kept[:, 0, 8:]).mean(0)          # 8 of 16: both with (1/2)(7/15)
    across = (kept[:, 0] * kept[:, 1]).mean(0)
    in_time = (kept[1:, 0] * kept[:-1, 0]).mean(0)
    for found, expected in ((within, 7 / 30), (across, 0.25), (in_time, 0.25)):
        assert np.abs(found - expected).max() < 5.5 * math.sqrt(expected * (1 - expected) / draws)


@pytest.mark.parametrize("structure", ["coordinate", "row"])
def test_the_variance_of_what_is_kept(structure):
    """paper/STRUCTURE.md: of rho^2 = |m o u|^2 / |u|^2 for a fixed u; its mean is 1 - r in both."""
    rows_, length, rate, draws = 20, 8, 0.4, 4000
    share = np.random.default_rng(0).exponential(size=(rows_, length)) ** 2
    share /= share.sum()
    kept = np.array([
        (KeepMask.draw([(rows_, length)], drop_rate=rate, seed=1, draw=draw, structure=structure).for_param(0).numpy()
         * share).sum() for draw in range(draws)
    ])   # fmt: skip
    parts = share.reshape(-1) if structure == "coordinate" else share.sum(1)
    n = len(parts)
    variance = rate * (1 - rate) * n / (n - 1) * (float((parts**2).sum()) - 1 / n)
    assert abs(kept.mean() - (1 - rate)) < 5 * math.sqrt(variance / draws)
    assert abs(kept.var() / variance - 1) < 5 * math.sqrt(2.5 / draws)


def test_what_is_asked_for_above_1_minus_1_over_rows_keeps_one_row():
    for draw in range(50):
        assert int(rows([(3, 4)], 0.99, draw).for_param(0).all(1).sum()) == 1


def test_known_bits():
    """Frozen: a mask drawn by any version on any platform is this one."""
    keep = KeepMask.draw([(8, 4), (8,)], drop_rate=0.7, seed=2023, draw=1, structure="row")
    assert [word & 0xFFFFFFFF for word in keep.bits.tolist()] == KNOWN_BITS


def test_another_process_draws_the_same():
    drawn = "KeepMask.draw([(99, 31), (99,)], drop_rate=0.37, seed=5, draw=6, structure='row')"
    code = f"from dprs_kernels import KeepMask; print({drawn}.digest())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert out == rows([(99, 31), (99,)], 0.37, 6, 5).digest()


def test_the_same_bits_are_the_same_mask_and_travel_as_a_recipe():
    model = nn.Sequential(nn.Linear(300, 400, bias=False), nn.LayerNorm(400))
    keep = rows(model.named_parameters(), 0.5, 2, 1)
    same = KeepMask.from_dense(keep.dense())
    assert keep == same
    assert keep.digest() == same.digest()
    assert (keep.structure, same.structure) == ("row", "coordinate")
    assert same.kept_rows(0) is None
    data = pickle.dumps(keep)
    assert len(data) < 250                       # the bits alone would be 15,100 bytes
    back = pickle.loads(data)
    assert back == keep                          # names are not sent: how they group is
    assert back.structure == "row"
    assert torch.equal(back.kept_rows(0).kept, keep.kept_rows(0).kept)
    assert "by rows" in repr(keep)


@pytest.mark.parametrize("kept", [[-1, 2], [1, 1], [2, 1], [0, 4]])
def test_a_set_of_rows_is_ascending_and_inside(kept):
    with pytest.raises(ValueError, match=r"kept: got torch.int64 .*; expected int64, ascending, each row once"):
        RowSet(torch.tensor(kept), 4)


def test_kept_rows_that_were_written_to_are_noticed():
    keep = rows([(4, 3)], 0.5, 0)
    assert keep.unchanged()
    keep.kept_rows(0).kept[0] = 0
    assert not keep.unchanged()


def test_rate_zero_keeps_all():
    keep = rows([(5, 3), (5,)], 0.0)
    assert keep.count == keep.size == 20
    assert keep.kept_rows(0).all


@pytest.mark.parametrize("structure", ["rows", "block", None])
def test_unknown_structures_are_named(structure):
    with pytest.raises(ValueError, match=f"structure: got {structure!r}; expected one of 'coordinate', 'row'"):
        KeepMask.draw([(3, 2)], drop_rate=0.5, seed=0, draw=0, structure=structure)
    with pytest.raises(ValueError, match=f"structure: got {structure!r}; expected one of"):
        optimizer(structure=structure)


def optimizer(structure, named=True, schedule=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.LayerNorm(6))
    inner = torch.optim.SGD(model.named_parameters() if named else model.parameters(), lr=0.1)
    return RSDPOptimizer(
        inner, max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=4, structure=structure,
        schedule=schedule or ConstantRate(0.5, 3),
    )   # fmt: skip


def test_an_optimizer_draws_by_rows_and_knows_modules_by_their_names():
    for named, expected in ((True, (0, 1, 1)), (False, (0, 0, 1))):
        wrapped = optimizer("row", named)
        wrapped.set_epoch(2)
        assert wrapped.keep.structure == "row"
        assert wrapped.keep._groups == expected
        assert wrapped.keep != optimizer("coordinate", named).keep


def test_a_checkpoint_belongs_to_its_structure():
    state = optimizer("row").state_dict()
    optimizer("row").load_state_dict(state)
    with pytest.raises(ValueError, match="structure: saved with 'row', got 'coordinate'; construct with the saved"):
        optimizer("coordinate").load_state_dict(state)
    del state["dprs_kernels"]["structure"]       # saved before there were row masks
    with pytest.raises(ValueError, match="structure: saved with 'coordinate', got 'row'"):
        optimizer("row").load_state_dict(state)
