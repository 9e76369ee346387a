"""Per-sample weight gradients of convolutions (csrc/conv.h) against float64, one sample at a time."""

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dprs_kernels import native

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.reason())
LEVELS = [level for level in range(3) if native.library() is not None and native.loaded().dprs_levels() >> level & 1]
TOLERANCE = 2.0**-18   # of sum |e x|: at most 64 roundings of 2^-24

# (in, out, map, kernel, stride, padding)
DP_CNN = [(3, 32, 32, 3, 1, 1), (32, 32, 32, 3, 1, 1), (32, 64, 16, 3, 1, 1), (64, 64, 16, 3, 1, 1),
          (64, 128, 8, 3, 1, 1), (128, 128, 8, 3, 1, 1)]   # fmt: skip
DP_CNN_S = [(1, 16, 28, 8, 2, 2), (16, 32, 13, 4, 2, 0), (16, 32, 6, 4, 2, 0)]


@pytest.fixture(params=LEVELS, ids=lambda level: native.loaded().dprs_level_name(level).decode())
def level(request):
    before = native.loaded().dprs_set_level(request.param)
    yield request.param
    native.loaded().dprs_set_level(before)


@pytest.fixture
def threads():
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


def truth(x, e, shape, *, kernel, stride, padding, dilation, groups):
    """[n, *shape] float64."""
    each = zip(x.double().split(1), e.double().split(1), strict=True) if len(x) else ()
    rows = [torch.nn.grad.conv2d_weight(xi, shape, ei, stride, padding, dilation, groups) for xi, ei in each]
    return torch.stack(rows) if rows else torch.zeros(0, *shape, dtype=torch.float64)


def geometry(kernel, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1):
    return dict(kernel=kernel, stride=stride, padding=padding, dilation=dilation, groups=groups)


def random_case(n, inputs, outputs, size, g, seed=0, offset=0.0):
    """x, e and an arena with a margin of NaN on both sides of each row; the view that conv_weight_grads fills."""
    random = torch.Generator().manual_seed(seed)
    out = [(size[d] + 2 * g["padding"][d] - g["dilation"][d] * (g["kernel"][d] - 1) - 1) // g["stride"][d] + 1
           for d in (0, 1)]   # fmt: skip
    x = torch.randn(n, inputs, *size, generator=random) + offset
    e = torch.randn(n, outputs, *out, generator=random) + offset
    shape = (outputs, inputs // g["groups"], *g["kernel"])
    arena = torch.full((n, 3 + math.prod(shape) + 2), math.nan)
    return x, e, arena, arena[:, 3:-2].view(n, *shape)


def assert_true(x, e, arena, view, g):
    native.conv_weight_grads(x, e, view, **g)
    shape = view.shape[1:]
    bound = TOLERANCE * truth(x.abs(), e.abs(), shape, **g)
    assert ((view.double() - truth(x, e, shape, **g)).abs() <= bound).all()
    assert arena[:, :3].isnan().all()
    assert arena[:, -2:].isnan().all()


def pair(low, high):
    return st.tuples(st.integers(low, high), st.integers(low, high))


@settings(max_examples=150, deadline=None)
@given(
    n=st.sampled_from([0, 1, 3]),
    groups=st.sampled_from([1, 1, 2, 3]),
    channels=st.tuples(st.sampled_from([1, 2, 3, 4, 5, 8, 13]), st.sampled_from([1, 2, 5, 8, 9, 16, 17, 33])),
    kernel=st.one_of(st.sampled_from([(1, 1), (3, 3), (5, 5), (8, 8), (1, 3)]), pair(1, 8)),
    stride=pair(1, 3),
    padding=pair(0, 4),
    dilation=pair(1, 3),
    size=pair(1, 17),
    level=st.sampled_from(LEVELS or [0]),
    seed=st.integers(0, 2**20),
)
def test_any_shape(n, groups, channels, kernel, stride, padding, dilation, size, level, seed):
    g = geometry(kernel, stride, padding, dilation, groups)
    assume(all(size[d] + 2 * padding[d] > dilation[d] * (kernel[d] - 1) for d in (0, 1)))
    case = random_case(n, groups * channels[0], groups * channels[1], size, g, seed)
    before = native.loaded().dprs_set_level(level)
    try:
        assert_true(*case, g)
    finally:
        native.loaded().dprs_set_level(before)


@pytest.mark.parametrize("layer", DP_CNN + DP_CNN_S, ids=str)
def test_layers_of_the_paper(layer, level):
    inputs, outputs, size, kernel, stride, padding = layer
    g = geometry((kernel,) * 2, (stride,) * 2, (padding,) * 2)
    assert_true(*random_case(2, inputs, outputs, (size, size), g), g)


@pytest.mark.parametrize("rows", range(1, 18))
def test_any_number_of_rows_in_a_tile(rows, level):
    """Of a tile's input channels, and turned, of its output channels; below four input channels of its taps."""
    for inputs, outputs in ((rows, 40), (40, rows)):
        g = geometry((2, 3), padding=(1, 1))
        assert_true(*random_case(2, inputs, outputs, (5, 9), g), g)


@pytest.mark.parametrize("size", [(3, 300), (70, 70), (1, 5000), (2500, 1), (8, 8), (33, 65)])
@pytest.mark.parametrize("inputs", [1, 4])
def test_long_sums_of_one_sign(size, inputs, level):
    """All products near 1/3: a plain fp32 sum would drift with the map's size."""
    g = geometry((1, 1))
    _, _, arena, view = random_case(1, inputs, 3, size, g)
    x = torch.linspace(0.33, 0.34, inputs).view(1, -1, 1, 1).expand(1, inputs, *size).contiguous()
    assert_true(x, torch.ones(1, 3, *size), arena, view, g)


@pytest.mark.parametrize("groups", [24, 8])
def test_depthwise(groups, level):
    g = geometry((3, 3), (2, 1), (1, 1), (1, 2), groups)
    assert_true(*random_case(3, 24, 48, (9, 12), g), g)


@pytest.mark.parametrize("n", [1, 2, 7])
def test_threads_do_not_change_a_bit(n, level, threads):
    for layer in [(13, 70, (9, 11), geometry((3, 3), padding=(1, 1))), (6, 12, (8, 8), geometry((2, 3), groups=6))]:
        x, e, _, one = random_case(n, *layer)
        _, _, _, more = random_case(n, *layer)
        threads(1)
        native.conv_weight_grads(x, e, one, **layer[3])
        for count in (2, 5):
            threads(count)
            native.conv_weight_grads(x, e, more.fill_(math.nan), **layer[3])
            assert torch.equal(one, more)


def test_a_sample_does_not_depend_on_its_companions(level):
    g = geometry((3, 3), padding=(1, 1))
    x, e, _, together = random_case(9, 8, 16, (8, 8), g)
    _, _, _, alone = random_case(1, 8, 16, (8, 8), g)
    native.conv_weight_grads(x, e, together, **g)
    native.conv_weight_grads(x[4:5], e[4:5], alone, **g)
    assert torch.equal(together[4:5], alone)


@pytest.mark.parametrize("some", [1, 3, 6, 7, 8, 11, 13, 16, 40])   # turned and upright tiles (conv.h)
@pytest.mark.parametrize(("inputs", "size"), [(5, (9, 9)), (32, (16, 16)), (40, (70, 3))])
def test_an_output_channel_does_not_depend_on_which_others_are_made(some, inputs, size, level):
    """Row masks leave channels out, and promise the bits of the whole."""
    g = geometry((3, 3), padding=(1, 1))
    x, e, _, whole = random_case(2, inputs, 64, size, g)
    native.conv_weight_grads(x, e, whole, **g)
    chosen = torch.randperm(64, generator=torch.Generator().manual_seed(some))[:some]
    for add in (False, True):
        part = torch.zeros(2, some, *whole.shape[2:])
        native.conv_weight_grads(x, e[:, chosen].contiguous(), part, **g, accumulate=add)
        assert torch.equal(part, whole[:, chosen])


def test_signs_that_torch_has_only_noted_are_seen():
    g = geometry((3, 3))
    x, e, _, view = random_case(2, 3, 4, (6, 6), g)
    native.conv_weight_grads(x, e, view, **g)
    expected = view.clone()
    native.conv_weight_grads(torch._neg_view(-x), e, view, **g)
    assert torch.equal(view, expected)


def test_accumulate_adds_once(level):
    g = geometry((3, 2), padding=(1, 0))
    x, e, arena, view = random_case(3, 5, 18, (7, 6), g)
    native.conv_weight_grads(x, e, view, **g)
    once = view.clone()
    before = torch.randn(view.shape, generator=torch.Generator().manual_seed(1))
    view.copy_(before)
    native.conv_weight_grads(x, e, view, **g, accumulate=True)
    assert torch.equal(view, before + once)
    assert arena[:, :3].isnan().all()


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_bad_sample_stays_alone(bad, level, threads):
    threads(1)   # one scratch for all samples
    for inputs, outputs in ((8, 20), (2, 5)):
        g = geometry((3, 3), padding=(1, 1))
        x, e, _, view = random_case(4, inputs, outputs, (8, 8), g)
        native.conv_weight_grads(x, e, view, **g)
        good = view.clone()
        x[1], e[2] = bad, bad
        native.conv_weight_grads(x, e, view, **g)
        assert torch.equal(view[[0, 3]], good[[0, 3]])
        assert not view[1:3].isfinite().any()


def test_conv1d_is_a_map_of_height_one(level):
    random = torch.Generator().manual_seed(0)
    x, weight = torch.randn(3, 4, 50, generator=random), torch.randn(6, 2, 5, generator=random, requires_grad=True)
    e = torch.randn(3, 6, 25, generator=random)
    out = torch.empty(3, 6, 2, 1, 5)
    native.conv_weight_grads(x.unsqueeze(2), e.unsqueeze(2), out, **geometry((1, 5), (1, 2), (0, 2), groups=2))
    y = torch.nn.functional.conv1d(x, weight, stride=2, padding=2, groups=2)
    (together,) = torch.autograd.grad(y, weight, e)
    torch.testing.assert_close(out.sum(0).squeeze(2), together, rtol=1e-4, atol=1e-4)


def arguments(**changes):
    g = geometry((3, 3), padding=(1, 1), groups=2)
    x, e, _, out = random_case(2, 4, 6, (5, 5), g)
    return {"x": x, "e": e, "out": out, **g, **changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x": torch.zeros(2, 4, 5)}, "x: expected 4 dimensions, .* got 3 dimensions"),
        ({"x": torch.zeros(2, 4, 5, 5).double()}, "x: expected .*float32 .*got .*float64"),
        ({"e": torch.zeros(2, 6, 5, 5, device="meta")}, "e: expected .* on the CPU, got .* on meta"),
        ({"x": torch.zeros(2, 5, 5, 4).permute(0, 3, 1, 2)}, "x: expected a contiguous tensor"),
        ({"e": torch.zeros(2, 6, 5, 4)}, r"e: expected shape \(2, 6, 5, 5\)"),
        ({"e": torch.zeros(3, 6, 5, 5)}, r"e: expected shape \(2, 6, 5, 5\)"),
        ({"kernel": (3,)}, "kernel: expected two integers"),
        ({"stride": (0, 1)}, "stride: expected two integers of at least 1"),
        ({"padding": (1, -1)}, "padding: expected two integers of at least 0"),
        ({"dilation": (1, 0)}, "dilation: expected two integers of at least 1"),
        ({"groups": 3}, "groups: expected a divisor of 4 input and 6 output channels, got 3"),
        ({"kernel": (9, 1)}, r"kernel: \(9, 1\) .* does not fit"),
        ({"out": torch.zeros(2, 6, 4, 3, 3)}, r"out: expected shape \(2, 6, 2, 3, 3\)"),
        ({"out": torch.zeros(2, 6, 3, 3, 2).permute(0, 1, 4, 2, 3)}, "out: expected contiguous rows"),
        ({"out": torch.zeros(1, 6, 2, 3, 3).expand(2, 6, 2, 3, 3)}, "out: expected .* rows that do not overlap"),
    ],
)
def test_misuse_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        native.conv_weight_grads(**arguments(**changes))
