"""Sampling: marginals, independence, the ends of the range, secrecy of the bits, loaders, positions, messages."""

import copy
import hashlib
import json
import math
import os
import pickle
import random
from collections import namedtuple
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from dprs_kernels import NoiseSource, native, reference
from dprs_kernels.privacy import sampling
from dprs_kernels.privacy.sampling import (
    PoissonBatchSampler,
    SecretBatchSampler,
    ShuffledPartitionNominal,
    empty_safe_collate,
    poisson_indices,
)

ALPHA = 1e-6


def binomial_bound(n: int, p: float, alpha: float) -> float:
    """|X - np| stays below this with probability 1 - alpha for X ~ Bin(n, p), by Bernstein's inequality."""
    log = math.log(2 / alpha)
    return math.sqrt(2 * n * p * (1 - p) * log + (log / 3) ** 2) + log / 3


@pytest.mark.parametrize("q", [0.01, 0.2, 0.5, 0.9])
def test_total_is_binomial(q: float) -> None:
    n = 1_000_000
    drawn = len(poisson_indices(n, q))
    assert abs(drawn - n * q) <= binomial_bound(n, q, ALPHA)


def test_each_index_has_the_same_marginal() -> None:
    size, draws, q = 64, 4000, 0.3
    counts = torch.zeros(size)
    for _ in range(draws):
        counts[poisson_indices(size, q)] += 1
    assert (counts - draws * q).abs().max() <= binomial_bound(draws, q, ALPHA / size)


def test_indices_and_draws_are_independent() -> None:
    """Neighbours in one draw, and one index in consecutive draws, are both drawn with probability q^2."""
    n, q = 400_000, 0.3
    first, second = torch.zeros(n, dtype=torch.bool), torch.zeros(n, dtype=torch.bool)
    first[poisson_indices(n, q)] = True
    second[poisson_indices(n, q)] = True
    assert abs(int((first & second).sum()) - n * q * q) <= binomial_bound(n, q * q, ALPHA)
    pairs = int((first[0::2] & first[1::2]).sum())
    assert abs(pairs - n / 2 * q * q) <= binomial_bound(n // 2, q * q, ALPHA)


def test_ascending_distinct_int64_in_range() -> None:
    drawn = poisson_indices(1000, 0.5)
    assert drawn.dtype == torch.int64
    assert drawn.dim() == 1
    assert bool((drawn[1:] > drawn[:-1]).all())
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) < 1000


def test_rate_one_draws_all() -> None:
    assert torch.equal(poisson_indices(1000, 1.0), torch.arange(1000))
    assert torch.equal(poisson_indices(5, 1), torch.arange(5))


@pytest.mark.parametrize(("size", "q"), [(0, 0.5), (0, 1.0), (1000, 1e-30), (1000, 2.0**-60)])
def test_empty_result(size: int, q: float) -> None:
    """2^-60 of 1000 samples is drawn once in 10^15 tests."""
    drawn = poisson_indices(size, q)
    assert drawn.shape == (0,)
    assert drawn.dtype == torch.int64


@pytest.mark.parametrize("q", [2.0**-64, 0.1, 0.5, 1 - 2.0**-53])
def test_threshold_is_floor_of_q_times_2_to_64(q: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """The word below floor(q 2^64) is drawn, that word itself is not: integers decide, not rounded floats."""
    threshold = math.floor(q * 2**64)
    words = np.array([0, threshold - 1, threshold, 2**64 - 1], dtype="<u8")
    monkeypatch.setattr(os, "urandom", lambda count: words.tobytes()[:count])
    assert poisson_indices(4, q).tolist() == [0, 1]


def test_torch_generator_plays_no_part() -> None:
    torch.manual_seed(0)
    before, first = torch.get_rng_state(), poisson_indices(1000, 0.5)
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(0)
    assert not torch.equal(poisson_indices(1000, 0.5), first)


@pytest.mark.parametrize("size", [-1, 1.5, True, "3", None])
def test_bad_size(size: object) -> None:
    with pytest.raises(ValueError, match=r"^size: got .*; expected an integer of at least 0"):
        poisson_indices(size, 0.5)  # type: ignore[arg-type]


@pytest.mark.parametrize("q", [0, -0.1, 1.0001, math.nan, math.inf, True, "0.5", None])
def test_bad_sample_rate(q: object) -> None:
    with pytest.raises(ValueError, match=r"^sample_rate: got .*; expected a number in \(0, 1\]"):
        poisson_indices(10, q)  # type: ignore[arg-type]


# ---- PoissonBatchSampler: the distribution


def chi_square_bounds(k: int) -> tuple[float, float]:
    """A chi-square of k degrees of freedom is outside with probability at most ALPHA (Laurent and Massart)."""
    x = math.log(2 / ALPHA)
    return k - 2 * math.sqrt(k * x), k + 2 * math.sqrt(k * x) + 2 * x


def assert_chi_square(values: torch.Tensor) -> None:
    """values ~ N(0, 1), uncorrelated: not too large, not too regular."""
    low, high = chi_square_bounds(values.numel())
    assert low < float(values.square().sum()) < high


def standardised(sampler: PoissonBatchSampler, low: int = 0, high: int | None = None) -> torch.Tensor:
    """One pass as [steps, samples low .. high), of mean 0 and variance 1."""
    drawn = torch.zeros(sampler.steps, sampler.size, dtype=torch.float64)
    for row, batch in zip(drawn, sampler, strict=True):
        row[batch] = 1
    q = sampler.sample_rate
    return ((drawn - q) / math.sqrt(q * (1 - q)))[:, low:high]


def samplers_of_a_kind(secure: bool, world_size: int, **arguments: Any) -> list[PoissonBatchSampler]:
    ranks = [dict(rank=rank, world_size=world_size, **arguments) for rank in range(world_size)]
    if secure:
        return [PoissonBatchSampler(64, **rank) for rank in ranks]
    return [PoissonBatchSampler.seeded_for_tests(64, seed=5, **rank) for rank in ranks]


@pytest.mark.parametrize("secure", [True, False])
@pytest.mark.parametrize("q", [0.1, 0.5])
def test_samples_and_steps_have_marginal_q(secure: bool, q: float) -> None:
    z = standardised(samplers_of_a_kind(secure, 1, sample_rate=q, steps=3000)[0])
    assert_chi_square(z.sum(0) / math.sqrt(3000))   # each sample, over the steps
    assert_chi_square(z.sum(1) / math.sqrt(64))     # each step, over the samples


@pytest.mark.parametrize("secure", [True, False])
def test_samples_and_steps_are_independent(secure: bool) -> None:
    """At q = 1/2, where z is +-1 and the squares of all correlations are pairwise independent."""
    z = standardised(samplers_of_a_kind(secure, 1, sample_rate=0.5, steps=3000)[0])
    assert_chi_square((z.T @ z / math.sqrt(3000))[torch.triu_indices(64, 64, 1).unbind()])
    assert_chi_square((z[:500] @ z[:500].T / math.sqrt(64))[torch.triu_indices(500, 500, 1).unbind()])


def test_the_chi_square_test_sees_a_repeated_batch() -> None:
    """The test above can fail: 1 step in 5 taken twice."""
    z = standardised(samplers_of_a_kind(False, 1, sample_rate=0.5, steps=500)[0])
    z[1::5] = z[0::5]
    with pytest.raises(AssertionError):
        assert_chi_square((z @ z.T / math.sqrt(64))[torch.triu_indices(500, 500, 1).unbind()])


def test_passes_are_independent() -> None:
    sampler = PoissonBatchSampler.seeded_for_tests(64, seed=1, sample_rate=0.5, steps=400)
    first, second = standardised(sampler), standardised(sampler)
    assert_chi_square((first @ second.T / math.sqrt(64)).reshape(-1))


@pytest.mark.parametrize("secure", [True, False])
def test_ranks_draw_their_own_parts_independently(secure: bool) -> None:
    """One seed on both ranks, as users write it: streams still differ."""
    first, second = samplers_of_a_kind(secure, 2, sample_rate=0.5, steps=1000)
    a, b = standardised(first, 0, 32), standardised(second, 32)
    assert_chi_square((a.T @ b / math.sqrt(1000)).reshape(-1))
    assert_chi_square((a[:200] @ b[:200].T / math.sqrt(32)).reshape(-1))


def test_the_union_over_ranks_is_a_poisson_sample_of_the_whole() -> None:
    ranks = samplers_of_a_kind(True, 3, sample_rate=0.3, steps=4000)
    assert [len(sampler) for sampler in ranks] == [4000] * 3
    counts = torch.zeros(64)
    ends = [(0, 21), (21, 42), (42, 64)]   # 64 samples on 3 ranks
    for batches in zip(*ranks, strict=True):   # equally many on all
        for batch, (low, high) in zip(batches, ends, strict=True):
            assert all(low <= i < high for i in batch)
            counts[batch] += 1
    assert (counts - 4000 * 0.3).abs().max() <= binomial_bound(4000, 0.3, ALPHA / 64)


def test_more_ranks_than_samples_still_take_every_step() -> None:
    sampler = PoissonBatchSampler(2, sample_rate=1.0, steps=3, rank=0, world_size=4)
    assert list(sampler) == [[], [], []]


def test_rank_comes_from_the_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("is_initialized", True), ("get_rank", 1), ("get_world_size", 4)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    sampler = PoissonBatchSampler(100, sample_rate=1.0, steps=1)
    assert (sampler.rank, sampler.world_size) == (1, 4)
    assert list(sampler) == [list(range(25, 50))]


# ---- its bits


@pytest.mark.parametrize("q", [2.0**-64, 0.1, 0.5, 1 - 2.0**-53])
def test_batches_compare_integers(q: float, monkeypatch: pytest.MonkeyPatch) -> None:
    threshold = math.floor(q * 2**64)
    words = np.array([0, threshold - 1, threshold, 2**64 - 1], dtype="<u8")
    monkeypatch.setattr(sampling, "_words", lambda key, step, block, count: words)
    assert list(PoissonBatchSampler(4, sample_rate=q, steps=1)) == [[0, 1]]


def test_batches_are_chacha20_under_a_key_of_their_own() -> None:
    seed, size = 7, 1000
    noise_key = NoiseSource.seeded_for_tests(seed).claim().key
    key = hashlib.sha256(b"dprs_kernels poisson 0/1 " + noise_key).digest()
    sampler = PoissonBatchSampler.seeded_for_tests(size, seed=seed, sample_rate=0.25, steps=3)
    for step, batch in enumerate(sampler):
        words = reference.words(key, step, 0, 125).astype("<u4").reshape(-1).view("<u8")
        assert batch == np.flatnonzero(words < np.uint64(2**62)).tolist()


def test_batches_do_not_depend_on_chunks_or_on_the_compiled_library(monkeypatch: pytest.MonkeyPatch) -> None:
    def batches() -> list[list[int]]:
        return list(PoissonBatchSampler.seeded_for_tests(1001, seed=3, sample_rate=0.5, steps=2))

    expected = batches()
    monkeypatch.setattr(sampling, "CHUNK_BLOCKS", 3)
    assert batches() == expected
    monkeypatch.setattr(native, "library", lambda: None)
    assert batches() == expected


def test_batches_are_secret() -> None:
    """No seed that a user can set plays a part, and two samplers agree on nothing."""

    def batches() -> list[list[int]]:
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        return list(PoissonBatchSampler(1000, sample_rate=0.5, steps=2))

    before = torch.get_rng_state()
    first, second = batches(), batches()
    assert first[0] != second[0]
    assert first[0] != first[1]
    torch.manual_seed(0)
    expected = torch.get_rng_state()
    list(PoissonBatchSampler(1000, sample_rate=0.5, steps=2))
    assert torch.equal(torch.get_rng_state(), expected)
    torch.set_rng_state(before)


def test_no_entropy_no_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "urandom", lambda n: (_ for _ in ()).throw(OSError("no entropy")))
    with pytest.raises(OSError, match="no entropy"):
        PoissonBatchSampler(10, sample_rate=0.5, steps=1)


def test_names_rates_and_lengths() -> None:
    sampler = PoissonBatchSampler(1000, sample_rate=0.05, steps=20)
    assert (sampler.name, sampler.sample_rate, sampler.size, len(sampler)) == ("poisson", 0.05, 1000, 20)
    assert sampler.expected_batch_size == 50
    seeded = PoissonBatchSampler.seeded_for_tests(10, seed=0, sample_rate=0.5, steps=1)
    assert seeded.name == "poisson_seeded_for_tests"   # no accountant takes it for Poisson sampling


# ---- in a DataLoader


class Numbered(Dataset[tuple[torch.Tensor, int, int]]):
    """Sample i is a [2, 3] tensor of i, i, and the process that read it."""

    def __len__(self) -> int:
        return 40

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int, int]:
        return torch.full((2, 3), float(index)), index, os.getpid()


@pytest.mark.parametrize("workers", [0, 2])
def test_a_loader_delivers_every_batch_and_empty_ones(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The sampler runs in this process, whatever the number of workers; the data is read in theirs."""
    data, arguments = Numbered(), dict(seed=2, sample_rate=0.03, steps=30)
    expected = list(PoissonBatchSampler.seeded_for_tests(40, **arguments))
    assert [] in expected
    assert any(expected)
    claimed, claim = [], NoiseSource.claim
    monkeypatch.setattr(NoiseSource, "claim", lambda self: claimed.append(os.getpid()) or claim(self))
    sampler = PoissonBatchSampler.seeded_for_tests(40, **arguments)
    loader = DataLoader(data, batch_sampler=sampler, num_workers=workers, collate_fn=empty_safe_collate(data))
    assert len(loader) == 30
    got, readers = [], set()
    for x, index, reader in loader:
        assert x.shape == (len(index), 2, 3)
        assert (x.dtype, index.dtype) == (torch.float32, torch.int64)
        got.append(index.tolist())
        readers.update(reader.tolist())
    assert got == expected
    assert claimed == [os.getpid()] * 30
    assert (os.getpid() in readers) == (workers == 0)


def test_without_the_collate_an_empty_batch_fails() -> None:
    """Why there is one: torch's own collate has nothing to look at."""
    loader = DataLoader(Numbered(), batch_sampler=PoissonBatchSampler(40, sample_rate=1e-9, steps=1))
    with pytest.raises((IndexError, RuntimeError)):
        next(iter(loader))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")
def test_a_forked_child_draws_other_batches() -> None:
    secure = PoissonBatchSampler(1000, sample_rate=0.5, steps=2)
    seeded = PoissonBatchSampler.seeded_for_tests(1000, seed=0, sample_rate=0.5, steps=2)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:   # pragma: no cover
        try:
            batch, refused = next(iter(secure)), False
            try:
                next(iter(seeded))
            except RuntimeError:
                refused = True
            os.write(write, json.dumps([batch, refused]).encode())
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    batch, refused = json.loads(os.read(read, 65536))
    assert batch != next(iter(secure))
    assert 300 < len(batch) < 700
    assert refused


Pair = namedtuple("Pair", ["x", "y"])


def test_empty_batches_take_the_structure_of_ordinary_ones() -> None:
    sample = {"x": torch.ones(3, dtype=torch.bfloat16), "pair": Pair(1.5, [2, torch.ones(2, 2)]), "text": "a"}
    empty = empty_safe_collate([sample])([])
    full = empty_safe_collate([sample])([sample, sample])
    assert empty.keys() == full.keys()
    assert (empty["x"].shape, empty["x"].dtype) == ((0, 3), torch.bfloat16)
    assert isinstance(empty["pair"], Pair)
    assert (empty["pair"].x.shape, empty["pair"].x.dtype) == ((0,), torch.float64)
    assert empty["pair"].y[0].dtype == torch.int64
    assert empty["pair"].y[1].shape == (0, 2, 2)
    assert empty["text"] == []
    assert empty["x"].untyped_storage().nbytes() == 0   # the probed sample is not kept


def test_an_empty_batch_is_nobody_elses() -> None:
    collate = empty_safe_collate([{"x": torch.ones(3)}])
    collate([])["x"] = None
    assert collate([])["x"].shape == (0, 3)


def test_collate_refuses_what_it_cannot_shape() -> None:
    with pytest.raises(ValueError, match=r"^dataset: got list without samples to index"):
        empty_safe_collate([])
    with pytest.raises(ValueError, match=r"^dataset: got generator"):
        empty_safe_collate(i for i in range(3))
    with pytest.raises(ValueError, match=r"^collate: made shape \(3,\) of one sample; expected tensors \[1, ...\]"):
        empty_safe_collate([torch.ones(3)], collate=lambda samples: samples[0])
    with pytest.raises(ValueError, match=r"^collate: made float of one sample"):
        empty_safe_collate([1.0], collate=lambda samples: samples[0])


# ---- position


def kinds(seed: int) -> list[SecretBatchSampler]:
    return [
        PoissonBatchSampler.seeded_for_tests(50, seed=seed, sample_rate=0.3, steps=4),
        ShuffledPartitionNominal.seeded_for_tests(50, seed=seed, batch_size=13),
    ]


@pytest.mark.parametrize("kind", [0, 1])
@pytest.mark.parametrize("taken", [0, 1, 3, 4, 5, 8])
def test_a_seeded_sampler_goes_on_where_it_was(kind: int, taken: int) -> None:
    whole, first, second = (kinds(seed=1)[kind] for _ in range(3))
    expected = [list(whole) for _ in range(3)]
    position = iter(first)
    for i in range(taken):
        if i == 4:
            position = iter(first)
        next(position)
    second.load_state_dict(first.state_dict())
    assert second.state_dict() == first.state_dict()
    assert second.epoch == first.epoch == taken // 4
    assert list(second) == expected[taken // 4][taken % 4 :]
    assert list(second) == (expected[1 + taken // 4] if taken < 8 else list(whole))


def test_a_pass_that_was_left_does_not_move_the_position() -> None:
    sampler = kinds(seed=1)[0]
    left = iter(sampler)
    next(left)
    state = sampler.state_dict()
    sampler.load_state_dict(state)
    next(left)   # a loader's iterator of before the load
    assert sampler.state_dict()["batch"] == 1
    assert len(list(sampler)) == 3


@pytest.mark.parametrize("workers", [0, 2])
def test_batches_that_a_loader_drew_ahead_are_not_lost(workers: int) -> None:
    def make() -> tuple[PoissonBatchSampler, NoiseSource, DataLoader[Any]]:
        sampler = PoissonBatchSampler.seeded_for_tests(40, seed=2, sample_rate=0.3, steps=12)
        noise = NoiseSource.seeded_for_tests(0)
        sampler.follow(noise)
        collate = empty_safe_collate(Numbered())
        return sampler, noise, DataLoader(Numbered(), batch_sampler=sampler, num_workers=workers, collate_fn=collate)

    expected = list(PoissonBatchSampler.seeded_for_tests(40, seed=2, sample_rate=0.3, steps=12))
    sampler, noise, loader = make()
    for batch, (_, index, _) in zip(expected[:5], loader, strict=False):
        assert index.tolist() == batch
        noise.claim()   # the step
    state = sampler.state_dict()
    assert state["batch"] == 5
    assert sampler._drawn == (5 if workers == 0 else 9)   # two ahead for each worker
    sampler, _, loader = make()
    sampler.load_state_dict(state)
    assert [index.tolist() for _, index, _ in loader] == expected[5:]


def test_a_secure_sampler_is_rekeyed_and_saves_no_secret() -> None:
    sampler = PoissonBatchSampler(123457, sample_rate=0.001, steps=4)
    batches = iter(sampler)
    for _ in range(2):
        next(batches)
    state = sampler.state_dict()
    key = sampler._source._key
    assert key not in pickle.dumps(state)
    assert key not in pickle.dumps(sampler)
    assert "123457" not in str(state)   # the size of the data is private
    resumed = [PoissonBatchSampler(123457, sample_rate=0.001, steps=4) for _ in range(2)]
    for one in resumed:
        one.load_state_dict(state)
    rest = [list(one) for one in (sampler, *resumed)]
    assert [len(batches) for batches in rest[1:]] == [2, 2]
    assert rest[1] != rest[2]
    assert len({sampler._source.key_id, *(one._source.key_id for one in resumed)}) == 3
    assert list(copy.deepcopy(sampler)) != list(sampler)


def test_states_of_other_samplers_are_refused() -> None:
    state = PoissonBatchSampler(10, sample_rate=0.5, steps=4).state_dict()
    with pytest.raises(ValueError, match=r"^sample_rate: saved with 0.5, got 0.25; construct with the saved value"):
        PoissonBatchSampler(10, sample_rate=0.25, steps=4).load_state_dict(state)
    with pytest.raises(ValueError, match=r"^steps: saved with 4, got 5"):
        PoissonBatchSampler(10, sample_rate=0.5, steps=5).load_state_dict(state)
    with pytest.raises(ValueError, match=r"^name: saved with 'poisson', got 'shuffled_partition_nominal'"):
        ShuffledPartitionNominal(10, batch_size=5).load_state_dict(state)
    with pytest.raises(ValueError, match=r"^name: saved with 'poisson', got 'poisson_seeded_for_tests'"):
        PoissonBatchSampler.seeded_for_tests(10, seed=0, sample_rate=0.5, steps=4).load_state_dict(state)
    for wrong in (dict(batch=4), dict(batch=-1), dict(epoch=-1), dict(epoch=True), dict(batch=1.0)):
        with pytest.raises(ValueError, match=rf"^state: {next(iter(wrong))} is .*; expected an integer in"):
            PoissonBatchSampler(10, sample_rate=0.5, steps=4).load_state_dict(state | wrong)


def test_another_number_of_ranks_may_resume_secure_runs_only() -> None:
    arguments = dict(sample_rate=0.5, steps=4)
    PoissonBatchSampler(10, rank=1, world_size=2, **arguments).load_state_dict(
        PoissonBatchSampler(10, **arguments).state_dict()
    )
    seeded = PoissonBatchSampler.seeded_for_tests(10, seed=0, rank=1, world_size=2, **arguments)
    with pytest.raises(ValueError, match=r"^world_size: saved with 1, got 2"):
        seeded.load_state_dict(PoissonBatchSampler.seeded_for_tests(10, seed=0, **arguments).state_dict())
    rank_0 = PoissonBatchSampler.seeded_for_tests(10, seed=0, rank=0, world_size=2, **arguments)
    seeded.load_state_dict(rank_0.state_dict())   # one checkpoint serves all ranks


# ---- the paper's shuffled partition


def test_shuffled_passes_are_partitions_in_uniform_order() -> None:
    sampler = ShuffledPartitionNominal(10, batch_size=4)
    assert (sampler.name, len(sampler), sampler.sample_rate) == ("shuffled_partition_nominal", 3, 0.4)
    assert sampler.expected_batch_size == 4
    places = torch.zeros(10, 10)   # sample, place in the pass
    passes = 3000
    for _ in range(passes):
        batches = list(sampler)
        assert [len(batch) for batch in batches] == [4, 4, 2]
        order = [i for batch in batches for i in batch]
        assert sorted(order) == list(range(10))
        places[order, range(10)] += 1
    # Pearson's sum over a random permutation matrix: 10/9 of a chi-square of 9 x 9 degrees of freedom.
    statistic = float(((places - passes / 10) ** 2 / (passes / 10)).sum()) * 9 / 10
    low, high = chi_square_bounds(81)
    assert low < statistic < high


def test_shuffled_orders_are_secret() -> None:
    torch.manual_seed(0)
    first = list(ShuffledPartitionNominal(1000, batch_size=100))
    torch.manual_seed(0)
    assert list(ShuffledPartitionNominal(1000, batch_size=100)) != first


# ---- messages


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(size=-1), r"^size: got -1; expected an integer of at least 0, the number of samples"),
        (dict(size=1.5), r"^size: got 1.5"),
        (dict(sample_rate=0), r"^sample_rate: got 0; expected a number in \(0, 1\]"),
        (dict(sample_rate=math.nan), r"^sample_rate: got nan"),
        (dict(sample_rate=1.01), r"^sample_rate: got 1.01"),
        (dict(steps=0), r"^steps: got 0; expected an integer of at least 1, the number of batches in a pass"),
        (dict(steps=True), r"^steps: got True"),
        (dict(rank=1), r"^rank, world_size: got 1, None; give both, or neither"),
        (dict(rank=2, world_size=2), r"^rank: got 2; expected an integer below world_size = 2"),
        (dict(rank=-1, world_size=2), r"^rank: got -1"),
        (dict(rank=0, world_size=0), r"^world_size: got 0"),
    ],
)
def test_bad_arguments_of_the_batch_sampler(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        PoissonBatchSampler(**{**dict(size=10, sample_rate=0.5, steps=1), **wrong})


@pytest.mark.parametrize(
    ("size", "batch_size", "message"),
    [(0, 1, "^size: got 0"), (10, 0, "^batch_size: got 0"), (10, 11, "^batch_size: got 11; expected at most size")],
)
def test_bad_arguments_of_the_partition(size: int, batch_size: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ShuffledPartitionNominal(size, batch_size=batch_size)


@pytest.mark.parametrize("name", ["size", "sample_rate", "steps", "rank", "world_size", "draws", "name", "private"])
@pytest.mark.parametrize(
    "sampler", [PoissonBatchSampler(30, sample_rate=0.5, steps=3), ShuffledPartitionNominal(30, batch_size=7)]
)
def test_what_batches_are_drawn_with_is_fixed(sampler, name):
    """A rate lowered between a draw and its step would be charged in the place of the true one."""
    before = getattr(sampler, name)
    with pytest.raises(AttributeError):
        setattr(sampler, name, 1e-4)
    assert getattr(sampler, name) == before
    with pytest.raises(AttributeError):
        ShuffledPartitionNominal(30, batch_size=7).batch_size = 1


def test_draws_are_counted():
    sampler = PoissonBatchSampler(30, sample_rate=0.5, steps=3)
    assert sampler.draws == (0, -1, 0, False)
    first = iter(sampler)
    assert sampler.draws.total == 0   # a DataLoader makes iterators that it does not use
    seen = []
    for _ in first:
        seen.append(sampler.draws)
    assert seen == [(1, 0, 1, False), (2, 0, 2, False), (3, 0, 3, True)]
    second = iter(sampler)
    next(second)
    assert sampler.draws == (4, 1, 1, False)
    third = iter(sampler)
    next(third)
    next(second)   # an old pass goes on: drawn, but not of the newest pass
    assert sampler.draws == (6, 2, 1, False)


def test_draws_of_a_resumed_pass():
    sampler = PoissonBatchSampler(30, sample_rate=0.5, steps=3)
    batches = iter(sampler)
    next(batches)
    resumed = PoissonBatchSampler(30, sample_rate=0.5, steps=3)
    resumed.load_state_dict(sampler.state_dict())
    assert [resumed.draws for _ in resumed] == [(1, 0, 1, False), (2, 0, 2, True)]   # what is left of it
