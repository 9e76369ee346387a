"""Masked norms of Linear layers without their gradients, against float64."""

import pytest
import torch

from dprs_kernels import KeepMask
from dprs_kernels.backends.triton_linear import DTYPES, linear_position_squares, linear_squares
from tests.triton.conftest import DEVICE

TOLERANCE = 2.0**-19   # of a squared norm: 32 roundings of 2^-24


def gradient(activations, errors):
    """g_i = sum_t e_it a_it^T in float64. [N, out, in]"""
    return torch.einsum("nto,ntc->noc", errors.double(), activations.double())


def truth(activations, errors, keep):
    """q_i = || keep o g_i ||^2: the float64 gradient, the kept selected, squared and added; inf if not finite."""
    if activations.dim() == 2:
        activations, errors = activations.unsqueeze(1), errors.unsqueeze(1)
    squares = torch.where(keep, gradient(activations, errors), 0.0).square().sum((1, 2))
    return torch.where(squares.isfinite(), squares, float("inf"))


class Weight:
    """A weight [out, in] in the middle of a layout, and its mask."""

    def __init__(self, out, columns, rate=0.5, dense=None):
        if dense is None:
            self.mask = KeepMask.draw([(7, 5), (out, columns), (3,)], drop_rate=rate, seed=0, draw=1)
        else:
            ones = torch.ones(35, dtype=torch.bool)
            self.mask = KeepMask.from_dense([ones, dense, ones])
        self.keep, self.start = self.mask.dense()[1], self.mask.layout.starts[1]
        self.bits = self.mask.bits.to(DEVICE)

    def squares(self, activations, errors):
        verb = linear_squares if activations.dim() == 2 else linear_position_squares
        return verb(activations.to(DEVICE), errors.to(DEVICE), self.bits, start=self.start).cpu()


def normal(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def relative(got, expected):
    """Largest relative error; 0 expects exactly 0."""
    assert got.dtype == torch.float64
    assert got.shape == expected.shape
    assert torch.equal(got[expected == 0], expected[expected == 0])
    both = expected != 0
    return float(((got[both] - expected[both]) / expected[both]).abs().max()) if both.any() else 0.0


@pytest.mark.parametrize(
    ("samples", "columns", "out"), [(1, 1, 1), (3, 33, 5), (65, 31, 67), (2, 300, 1), (5, 64, 64), (1, 97, 130)]
)
@pytest.mark.parametrize("rate", [0.0, 0.5, 0.9, 0.999])
def test_one_position_equals_float64(samples, columns, out, rate):
    weight = Weight(out, columns, rate)
    a, e = normal(samples, columns), normal(samples, out, seed=1)
    assert relative(weight.squares(a, e), truth(a, e, weight.keep)) <= TOLERANCE
    if rate == 0:
        full = linear_squares(a.to(DEVICE), e.to(DEVICE), None).cpu()
        assert torch.equal(full, weight.squares(a, e))


@pytest.mark.parametrize(("positions", "columns", "out"), [(2, 33, 5), (16, 65, 3), (17, 1, 70), (40, 31, 66)])
@pytest.mark.parametrize("rate", [0.0, 0.5, 0.999])
def test_positions_equal_float64(positions, columns, out, rate):
    """T 2^-24 sum_t |e a| bounds each coordinate's error, hence the norm's."""
    weight = Weight(out, columns, rate)
    a, e = normal(3, positions, columns), normal(3, positions, out, seed=1)
    got, expected = weight.squares(a, e), truth(a, e, weight.keep)
    spread = positions * 2.0**-24 * truth(a.abs(), e.abs(), weight.keep).sqrt()
    assert ((got.sqrt() - expected.sqrt()).abs() <= spread).all()
    if rate == 0:
        assert torch.equal(linear_position_squares(a.to(DEVICE), e.to(DEVICE), None).cpu(), got)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("positions", [1, 3])
def test_dtypes(dtype, positions):
    weight = Weight(9, 45)
    a, e = normal(4, positions, 45, dtype=dtype), normal(4, positions, 9, dtype=dtype, seed=1)
    assert relative(weight.squares(a, e), truth(a, e, weight.keep)) <= TOLERANCE
    mixed = weight.squares(a, e.float())   # autocast leaves errors in another dtype
    assert torch.equal(mixed, weight.squares(a, e))


@pytest.mark.parametrize("value", [1.0, 1.1, 1.3333334, 0.7])
def test_equal_values_do_not_drift(value):
    """Equal terms round the same way each time: the worst case of a long fp32 sum (2^-15 at 3000 of them)."""
    a, e = torch.full((1, 3000), value), torch.full((1, 2), value)
    got = linear_squares(a.to(DEVICE), e.to(DEVICE), None).cpu()
    assert relative(got, truth(a, e, torch.ones(2, 3000, dtype=torch.bool))) <= TOLERANCE


@pytest.mark.parametrize("positions", [1, 3])
def test_extreme_scales(positions):
    """One sample a pair of scales: neither squares nor products leave the range, subnormals included."""
    scales = [1e-42, 1e-30, 1e-20, 1.0, 1e18, 1e30, 5e37]
    pairs = torch.tensor([(x, y) for x in scales for y in scales])
    weight = Weight(5, 37)
    a = normal(len(pairs), positions, 37) * pairs[:, :1, None]
    e = normal(len(pairs), positions, 5, seed=1) * pairs[:, 1:, None]
    assert a.isfinite().all()
    assert relative(weight.squares(a, e), truth(a, e, weight.keep)) <= 2.0**-17
    ordinary = (pairs > 1e-37).all(1)   # subnormals have few bits, which is not the kernel's doing
    assert relative(weight.squares(a, e)[ordinary], truth(a, e, weight.keep)[ordinary]) <= TOLERANCE


@pytest.mark.parametrize("positions", [1, 2])
@pytest.mark.parametrize("ratio", [1e-10, 1e-20, 1e-30, 1e-38])
def test_a_small_kept_value_beside_a_large_dropped_one_is_never_lost(positions, ratio):
    """Kept is only the product of the two small ones. A norm taken for 0 would go unclipped."""
    weight = Weight(2, 2, dense=torch.tensor([[False, True], [False, False]]))
    a = torch.tensor([1e18, 1e18 * ratio]).expand(1, positions, 2).clone()
    e = torch.tensor([1e18 * ratio, 1e18]).expand(1, positions, 2).clone()
    got, expected = weight.squares(a, e), truth(a, e, weight.keep)
    assert got >= expected * (1 - TOLERANCE)
    if ratio >= 1e-18:
        assert relative(got, expected) <= TOLERANCE


@pytest.mark.parametrize("positions", [1, 2])
def test_zero_stays_zero(positions):
    weight = Weight(3, 40)
    a, e = normal(3, positions, 40), normal(3, positions, 3, seed=1)
    a[0], e[1] = 0, 0
    got = weight.squares(a, e)
    assert got[:2].tolist() == [0, 0]
    assert got[2] > 0


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("positions", [1, 2])
def test_only_a_kept_coordinate_that_is_not_finite_counts(bad, positions):
    """Every activation and every error in turn, in a sample of its own; zeros beside it (0 * NaN is NaN), one row
    and several columns wholly dropped."""
    out, columns = 6, 40
    dense = torch.rand(out, columns, generator=torch.Generator().manual_seed(0)) < 0.3
    dense[2] = False
    dense[:, [0, 31, 32, 39]] = False
    weight = Weight(out, columns, dense=dense)
    samples = out + columns
    a, e = normal(samples, positions, columns) * 1e18, normal(samples, positions, out, seed=1)
    e[:, :, ::2] = 0
    a[:, :, 1::2] = 0
    for c in range(columns):
        a[c, -1, c] = bad
    for o in range(out):
        e[columns + o, 0, o] = bad
    a[columns + out // 2 :] = 0
    got, expected = weight.squares(a, e), truth(a, e, weight.keep)
    assert torch.equal(got.isinf(), expected.isinf())
    assert 5 <= int(expected.isfinite().sum()) < samples
    assert not got.isnan().any()
    finite = expected.isfinite()
    assert relative(got[finite], expected[finite]) <= TOLERANCE


@pytest.mark.parametrize("positions", [1, 5])
def test_same_bits_alone_in_a_batch_and_again(positions):
    weight = Weight(20, 300)
    a, e = normal(67, positions, 300), normal(67, positions, 20, seed=1)
    if positions > 1:
        a, e = a[:4], e[:4]
    together = weight.squares(a, e)
    assert torch.equal(together, weight.squares(a, e))
    last = len(a) - 1
    for i in (0, last):
        assert torch.equal(weight.squares(a[i : i + 1], e[i : i + 1]), together[i : i + 1])


def test_any_strides():
    weight = Weight(6, 35)
    a, e = normal(4, 3, 35), normal(4, 3, 6, seed=1)
    expected = weight.squares(a, e)
    turned = a.permute(2, 1, 0).contiguous().permute(2, 1, 0), e.transpose(1, 2).contiguous().transpose(1, 2)
    assert not turned[0].is_contiguous()
    assert torch.equal(weight.squares(*turned), expected)
    same = a[:, :1].expand(4, 3, 35)
    assert torch.equal(weight.squares(same, e), weight.squares(same.contiguous(), e))
    assert torch.equal(weight.squares(turned[0][:, 1], turned[1][:, 1]), weight.squares(a[:, 1], e[:, 1]))


@pytest.mark.skipif(DEVICE.type != "cpu", reason="a sparse file stands in for 4 GB")
def test_samples_further_apart_than_32_bits(tmp_path):
    far = 2**31 + 64
    file = torch.from_file(str(tmp_path / "sparse"), shared=True, size=far + 64, dtype=torch.float16)
    weight, e = Weight(3, 33), normal(2, 3)
    a = file.as_strided((2, 33), (far, 1))
    a.copy_(normal(2, 33))
    assert relative(weight.squares(a, e), truth(a, e, weight.keep)) <= TOLERANCE
    columns = file.as_strided((2, 33), (33, far // 32))
    columns.copy_(normal(2, 33))
    assert relative(weight.squares(columns, e), truth(columns, e, weight.keep)) <= TOLERANCE


def test_nothing_to_add_up():
    weight = Weight(3, 8)
    assert weight.squares(torch.zeros(0, 8), torch.zeros(0, 3)).shape == (0,)
    assert weight.squares(torch.zeros(0, 2, 8), torch.zeros(0, 2, 3)).shape == (0,)
    assert weight.squares(torch.zeros(4, 0, 8), torch.zeros(4, 0, 3)).tolist() == [0] * 4
    assert linear_squares(torch.zeros(2, 0), torch.zeros(2, 3), None).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(errors=torch.zeros(5, 3)), r"errors: got \[5, 3\] with activations \[4, 8\]"),
        (dict(errors=torch.zeros(4, 2, 3)), r"expected \[N, out\] with \[N, in\]"),
        (dict(activations=torch.zeros(4, 8).double()), "activations: got torch.float64"),
        (dict(bits=torch.zeros(3)), r"bits: got torch.float32 \[3\]"),
        (dict(start=5), "start: got 5 .* expected a multiple of 32"),
        (dict(start=96), "start: got 96 for 24 coordinates in 3 words"),
    ],
)
def test_bad_input_is_named(change, message):
    arguments = dict(
        activations=torch.zeros(4, 8), errors=torch.zeros(4, 3), bits=torch.zeros(3, dtype=torch.int32), start=0
    )
    with pytest.raises(ValueError, match=message):
        linear_squares(**{**arguments, **change})
