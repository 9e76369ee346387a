"""KeepMask: exact, uniform, independent between draws, the same bits everywhere."""

import math
import pickle
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dprs_kernels import KeepMask, native, reference
from dprs_kernels.layout import Layout
from dprs_kernels.mask import drop_count, mask_key

needs_native = pytest.mark.skipif(native.library() is None, reason=native.reason())
KNOWN_BITS = [0x7FE50B64, 0x85, 0x62]
KNOWN_KEY = 0xA9225086E4B4A486
SHAPES = [(33, 7), (5,), (), (2, 3, 4), (64,), (1025,)]


shape_lists = st.lists(st.lists(st.integers(0, 40), max_size=3), min_size=1, max_size=5)


@given(shape_lists, st.floats(0, 0.999), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_exactly_floor_rate_times_size_are_dropped(shapes, rate, draw):
    size = sum(math.prod(shape) for shape in shapes)
    if size == 0:
        return
    keep = KeepMask.draw(shapes, drop_rate=rate, seed=3, draw=draw)
    dropped = min(math.floor(rate * size), size - 1)
    assert keep.size == size
    assert keep.count == size - dropped
    dense = keep.dense()
    assert [tuple(part.shape) for part in dense] == [tuple(shape) for shape in shapes]
    assert sum(int(part.sum()) for part in dense) == keep.count
    assert torch.equal(keep.indices(), torch.cat([part.reshape(-1) for part in dense]).nonzero().reshape(-1))
    for i, part in enumerate(dense):
        assert torch.equal(keep.for_param(i), part)


@needs_native
@pytest.mark.parametrize("rate", [0.0, 0.001, 0.3, 0.5, 0.9, 0.9999])
@pytest.mark.parametrize("threads", [1, 2])
def test_native_bits_equal_the_reference(rate, threads):
    layout = Layout.of([*SHAPES, (70_001,)])
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        for draw in range(3):
            dropped, key = drop_count(rate, layout.size), mask_key(11, draw)
            bits, tau = native.draw_mask(layout, dropped, key)
            expected, expected_tau = reference.draw_mask(layout, dropped, key)
            assert torch.equal(bits, expected)
            assert tau == expected_tau
    finally:
        torch.set_num_threads(before)


def test_known_bits():
    """Frozen: a mask drawn by any version on any platform is this one."""
    keep = KeepMask.draw([(40,), (7,)], drop_rate=0.5, seed=2023, draw=1)
    assert [word & 0xFFFFFFFF for word in keep.bits.tolist()] == KNOWN_BITS
    assert mask_key(2023, 1)[0] == KNOWN_KEY


def test_mix_is_a_bijection_on_samples_and_spreads():
    h = reference.mix(np.arange(200_000, dtype=np.uint64), mask_key(0, 0))
    assert len(np.unique(h)) == len(h)
    for bit in range(64):
        ones = int(((h >> np.uint64(bit)) & np.uint64(1)).sum())
        assert abs(ones - 100_000) < 5.5 * math.sqrt(50_000)   # alpha about 4e-8 a bit


def _draws(size, rate, count, seed=0):
    masks = (KeepMask.draw([(size,)], drop_rate=rate, seed=seed, draw=draw) for draw in range(count))
    return np.stack([mask.dense()[0].numpy() for mask in masks])


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_marginals_are_uniform(rate):
    """Each coordinate is kept (1-r) T times in T draws: chi-square over coordinates, alpha 1e-6 two-sided."""
    size, draws = 1000, 2000
    kept = _draws(size, rate, draws)
    p = kept.mean()
    assert round(p * size) == size - math.floor(rate * size)
    chi = float((((kept.sum(0) - draws * p) ** 2) / (draws * p * (1 - p))).sum())
    # Exactly-k draws are slightly negatively correlated; the sum then has mean `size`, variance below 2 size.
    assert abs(chi - size) < 5.5 * math.sqrt(2 * size)


def test_pairs_are_independent():
    """Kept together as often as chance: neighbours at many distances, and random pairs."""
    size, draws = 4096, 600
    kept = _draws(size, 0.5, draws).astype(np.int64)
    both = 0.25 * (1 - 1 / (size - 1))   # (k/D)((k-1)/(D-1)) for k = D/2
    for lag in [1, 2, 3, 4, 7, 8, 16, 31, 32, 33, 64, 256, 1024, 2048]:
        together = (kept[:, :-lag] & kept[:, lag:]).sum()
        n = draws * (size - lag)
        assert abs(together / n - both) < 5.5 * math.sqrt(both * (1 - both) / n * 2), lag
    order = np.random.default_rng(0).permutation(size)
    together = (kept[:, order[: size // 2]] & kept[:, order[size // 2 :]]).sum()
    n = draws * size // 2
    assert abs(together / n - both) < 5.5 * math.sqrt(both * (1 - both) / n)


@pytest.mark.parametrize("other", ["next draw", "next seed", "swapped"])
def test_draws_are_independent(other):
    """The overlap of two masks is hypergeometric: mean k^2/D, variance k^2 (D-k)^2 / (D^2 (D-1))."""
    size, rate, z = 2000, 0.5, []
    for i in range(300):
        a = KeepMask.draw([(size,)], drop_rate=rate, seed=7, draw=i).dense()[0]
        seed, draw = {"next draw": (7, i + 1), "next seed": (8, i), "swapped": (i, 7)}[other]
        if (seed, draw) == (7, i):
            continue
        b = KeepMask.draw([(size,)], drop_rate=rate, seed=seed, draw=draw).dense()[0]
        k = size - math.floor(rate * size)
        z.append((int((a & b).sum()) - k * k / size) / math.sqrt(k * k * (size - k) ** 2 / (size**2 * (size - 1))))
    assert abs(np.mean(z)) < 5 / math.sqrt(len(z))
    assert abs(np.var(z) - 1) < 5 * math.sqrt(2 / len(z))


def test_digest_and_equality():
    keep = KeepMask.draw(SHAPES, drop_rate=0.4, seed=0, draw=0)
    same = KeepMask.from_dense(keep.dense())
    assert keep == same
    assert keep.digest() == same.digest()
    assert len(keep.digest()) == 16
    assert keep.digest() != KeepMask.draw(SHAPES, drop_rate=0.4, seed=0, draw=1).digest()
    reshaped = KeepMask.draw([(7, 33), *SHAPES[1:]], drop_rate=0.4, seed=0, draw=0)
    assert torch.equal(reshaped.bits, keep.bits)
    assert reshaped.digest() != keep.digest()


def test_another_process_draws_the_same():
    code = "from dprs_kernels import KeepMask; print(KeepMask.draw([(9999,)], drop_rate=0.37, seed=5, draw=6).digest())"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert out == KeepMask.draw([(9999,)], drop_rate=0.37, seed=5, draw=6).digest()


def test_pickle_is_the_recipe_only():
    keep = KeepMask.draw([(100_000,)], drop_rate=0.5, seed=1, draw=2)
    data = pickle.dumps(keep)
    assert len(data) < 200   # the bits alone would be 12,500 bytes
    assert pickle.loads(data) == keep
    scored = KeepMask.from_dense([torch.tensor([True, False, True])])
    assert pickle.loads(pickle.dumps(scored)) == scored


def test_from_scores_keeps_the_largest_and_breaks_ties_by_coordinate():
    scores = [torch.tensor([[3.0, 1.0], [1.0, 5.0]]), torch.tensor([1.0, 0.5])]
    keep = KeepMask.from_scores(scores, drop_rate=0.5)
    assert keep.count == 3
    assert [part.tolist() for part in keep.dense()] == [[[True, False], [False, True]], [True, False]]
    assert keep.drop_rate == 0.5


def test_full_and_from_bits():
    keep = KeepMask.full([torch.zeros(3, 5), torch.zeros(2)])
    assert (keep.count, keep.size, keep.drop_rate) == (17, 17, 0.0)
    assert all(part.all() for part in keep.dense())
    assert KeepMask.from_bits([(3, 5), (2,)], keep.bits) == keep


def test_named_parameters_and_models():
    model = torch.nn.Linear(4, 3)
    a = KeepMask.draw(model.parameters(), drop_rate=0.5, seed=0, draw=0)
    assert a == KeepMask.draw(model.named_parameters(), drop_rate=0.5, seed=0, draw=0)
    assert a == KeepMask.draw([(3, 4), (3,)], drop_rate=0.5, seed=0, draw=0)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: KeepMask.draw([(3,)], drop_rate=1.0, seed=0, draw=0), r"drop_rate: got 1.0; expected .* \[0, 1\)"),
        (lambda: KeepMask.draw([(3,)], drop_rate=float("nan"), seed=0, draw=0), "drop_rate: got nan"),
        (lambda: KeepMask.draw([(3,)], drop_rate=0.5, seed=-1, draw=0), "seed: got -1; expected an integer"),
        (lambda: KeepMask.draw([(3,)], drop_rate=0.5, seed=0, draw=2**64), "draw: got 18446744073709551616"),
        (lambda: KeepMask.draw([], drop_rate=0.5, seed=0, draw=0), "params: got 0 parameters"),
        (lambda: KeepMask.draw(["x"], drop_rate=0.5, seed=0, draw=0), "params: item 0 is str"),
        (lambda: KeepMask.draw([(3,)], drop_rate=0.5, seed=0, draw=0, structure="tile"), "structure: got 'tile'"),
        (lambda: KeepMask.from_dense([torch.ones(3)]), "dense: item 0 is torch.float32; expected a bool tensor"),
        (lambda: KeepMask.from_scores([torch.tensor([1.0, math.nan])], drop_rate=0.5), "scores: contain NaN"),
        (lambda: KeepMask.from_bits([(3,)], torch.zeros(2, dtype=torch.int32)), r"bits: got torch.int32 \[2\]"),
        (lambda: KeepMask.from_bits([(3,)], torch.tensor([8], dtype=torch.int32)), "bits: set beyond the end"),
    ],
)
def test_bad_input_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
