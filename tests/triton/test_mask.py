"""Masks drawn on the device: the reference's bits, at every rate and from coordinates beyond 2^32."""

import numpy as np
import pytest
import torch

from dprs_kernels import native, reference
from dprs_kernels.backends import triton_mask
from dprs_kernels.layout import Layout
from dprs_kernels.mask import drop_count, mask_key
from tests.triton.conftest import DEVICE

SHAPES = [(33, 7), (5,), (), (0, 3), (2, 3, 4), (64,), (1,), (2049,)]


def drawn(layout, dropped, key, **options):
    bits, tau = triton_mask.draw_mask(layout, dropped, key, DEVICE, **options)
    assert (bits.dtype, bits.device.type, tau.device.type) == (torch.int32, DEVICE.type, DEVICE.type)
    return bits.cpu(), int(tau) % 2**64


@pytest.mark.parametrize("rate", [0.0, 0.5, 0.9, 0.999, 1 - 1e-9])   # the last: all but one
def test_bits_equal_the_reference(rate):
    layout = Layout.of(SHAPES)
    for draw in range(2):
        dropped, key = drop_count(rate, layout.size), mask_key(5, draw)
        bits, tau = drawn(layout, dropped, key)
        expected, expected_tau = reference.draw_mask(layout, dropped, key)
        assert torch.equal(bits, expected)
        assert tau == expected_tau
        if native.library() is not None:
            assert torch.equal(bits, native.draw_mask(layout, dropped, key)[0])
        kept = sum(int(part.sum()) for part in reference.unpack_bits(layout, bits))
        assert kept == layout.size - dropped


def test_every_rank_of_a_small_layout():
    """Each coordinate is the threshold once, so each digit of each pass is exercised."""
    layout = Layout.of([(3, 3), (2,)])
    for dropped in range(layout.size):
        bits, tau = drawn(layout, dropped, mask_key(1, dropped))
        expected, expected_tau = reference.draw_mask(layout, dropped, mask_key(1, dropped))
        assert torch.equal(bits, expected)
        assert tau == expected_tau


@pytest.mark.parametrize("key", [(0, 0, 0, 0), (2**64 - 1,) * 4, (2**63, 1, 2**63 - 1, 2**64 - 2)])
def test_extreme_keys(key):
    layout = Layout.of([(500,)])
    bits, tau = drawn(layout, 250, key)
    expected, expected_tau = reference.draw_mask(layout, 250, key)
    assert torch.equal(bits, expected)
    assert tau == expected_tau


def test_nothing_dropped_keeps_even_h_equal_to_tau():
    """tau is 0 then, and this key makes h_7 = 0."""
    layout, key = Layout.of([(40,)]), [1, 2, 3, 0]
    key[3] = int(reference.mix(np.array([7]), key)[0])
    assert torch.equal(drawn(layout, 0, key)[0], torch.tensor([-1, 255], dtype=torch.int32))
    bits, tau = drawn(layout, 1, key)
    assert (bits.tolist(), tau) == ([~(1 << 7), 255], 0)


@pytest.mark.parametrize("base", [2**31 - 100, 2**32 + 5, 2**40 + 1, 2**62])
def test_coordinates_beyond_32_bits(base):
    layout, dropped, key = Layout.of([(700,), (13, 3)]), 400, mask_key(2, 0)
    bits, tau = drawn(layout, dropped, key, base=base)
    h = reference.mix(base + np.arange(layout.size, dtype=np.uint64), key)
    expected = np.sort(h)[dropped - 1]
    keep = torch.from_numpy(h > expected).split(layout.sizes)
    assert tau == int(expected)
    assert torch.equal(bits, reference.pack_bits(layout, keep))


def test_programs_that_take_several_blocks(monkeypatch):
    layout, key = Layout.of([(9000,)]), mask_key(3, 1)
    monkeypatch.setattr(triton_mask, "MAX_PROGRAMS", 2)
    assert torch.equal(drawn(layout, 8000, key)[0], reference.draw_mask(layout, 8000, key)[0])


def test_repeats_are_equal_and_draws_are_not():
    layout = Layout.of(SHAPES)
    first, again, other = (drawn(layout, layout.size // 2, mask_key(0, draw))[0] for draw in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


@pytest.mark.skipif(DEVICE.type == "cpu", reason="needs a device")
def test_nothing_waits_and_nothing_comes_back():
    layout, key = Layout.of(SHAPES), mask_key(0, 0)
    drawn(layout, 5, key)   # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        triton_mask.draw_mask(layout, 7, key, DEVICE)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(dropped=4), r"dropped: got 4; expected 0 \.\. 3"),
        (dict(dropped=-1), "dropped: got -1"),
        (dict(key=(1, 2, 3)), "key: got .* expected four integers"),
        (dict(key=(1, 2, 3, 2**64)), "key: got .* expected four integers"),
        (dict(base=-1), "base: got -1"),
    ],
)
def test_bad_input_is_named(arguments, message):
    arguments = {"dropped": 1, "key": (1, 2, 3, 4), **arguments}
    with pytest.raises(ValueError, match=message):
        triton_mask.draw_mask(Layout.of([(4,)]), device=torch.device("cpu"), **arguments)
