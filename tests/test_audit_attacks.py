"""The attacks of S6: success on stock noise, chance on ours, in the same test; and what each needs to work."""

import re
from functools import lru_cache

import pytest
import torch

from dprs_kernels import fused_rs_dp_step
from dprs_kernels.privacy.audit import attack_table, attacks
from dprs_kernels.privacy.audit.subject import SIZES, Subject
from tests.oracle import BACKENDS

TRIALS = dict(steps=2, blocks=1000)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def ours(backend, seed=0):
    return attacks.audited(Subject(fused_rs_dp_step, backend, seed, SIZES["small"], CPU))


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


@lru_cache
def on_torch_normal():
    return attacks.lattice_success(attacks.torch_normal(generator()), generator=generator(1), **TRIALS)


@pytest.mark.parametrize("backend", BACKENDS)
def test_lattice_attack(backend):
    """2,000 trials each: at least 99 % on torch.normal, a coin on ours with either layout of pairs."""
    assert on_torch_normal()["8 apart"] >= 0.99
    step = attacks.lattice_success(ours(backend), generator=generator(1), **TRIALS)
    for success in step.values():
        assert 0.47 <= success <= 0.53


@pytest.mark.parametrize("backend", BACKENDS)
def test_precision_attack(backend):
    """The event of probability 16.3 % without the sample on the sum of four Gaussians, and 0 with it."""
    for maker, rate in ((attacks.torch_normal, 0.257), (attacks.four_gaussians, 0.163)):
        stock = attacks.precision_success(maker(generator()), generator=generator(1), **TRIALS)
        assert stock.success >= 0.99
        assert stock.without == pytest.approx(rate, abs=0.01)
        assert stock.with_sample == 0
        assert stock.off_grid > 0
    step = attacks.precision_success(ours(backend), generator=generator(1), **TRIALS)
    assert 0.47 <= step.success <= 0.53
    assert step[1:] == (0, 0, 0)


@pytest.mark.parametrize("std", [1.0, 20.0, 1000.0])
def test_the_lattice_shows_at_any_sigma(std):
    made = generator(2)
    rest, sample = torch.randn(2, 500, 256, generator=made) / 32
    coins = torch.rand(500, generator=made) < 0.5
    released = attacks.torch_normal(made)(rest, torch.where(coins[:, None], sample, 0.0), std)
    right = attacks.lattice_attack(released, rest, sample, std) == coins
    assert right.double().mean() >= 0.98
    wrong_pairs = attacks.lattice_attack(released, rest, sample, std, "adjacent") == coins
    assert 0.39 <= wrong_pairs.double().mean() <= 0.61   # 500 coins, 5 standard errors


def test_off_multiples():
    values = torch.tensor([[0.0, 2.0**-24, -3 * 2.0**-24, 1.0], [2.0**-25, 0.0, 0.0, float("nan")]])
    assert attacks.off_multiples(values, 2.0**-24).tolist() == [[False] * 4, [True, False, False, True]]
    assert attacks.precision_attack(values).tolist() == [True, False]


def test_the_table_shows_three_noises_side_by_side():
    lines = attack_table(backend="reference", size="small").splitlines()
    rows = {line[:24].strip(): [float(v) for v in re.findall(r"([0-9.]+)%", line)] for line in lines if "%" in line}
    rows = {name: values for name, values in rows.items() if len(values) == 4}
    assert len(rows) == 3
    stock, four, step = rows["torch.normal"], rows["sum of four torch.normal"], rows["fused_rs_dp_step, refere"]
    assert stock[0] >= 99
    assert stock[1] >= 99
    assert four[1] >= 99
    for chance in (four[0], step[0], step[1]):
        assert 45 <= chance <= 55
    assert stock[3] == four[3] == step[2] == step[3] == 0
    assert stock[2] > four[2] > 10
