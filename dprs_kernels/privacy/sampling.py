"""Who is in a batch, drawn with secret bits: the randomness that privacy amplification rests on (PRIVACY.md R3).

An accountant's sample_rate is worth something only while nobody can tell which samples were drawn, so the bits
come from the operating system (poisson_indices) or from ChaCha20 under a key of their own (the batch samplers): no
seed, no torch generator, no relation to the keys of noise and mask.
"""

from __future__ import annotations

import copy
import ctypes
import hashlib
import math
import numbers
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch.utils.data import Sampler, default_collate

from dprs_kernels import native, reference
from dprs_kernels.noise import NoiseSource

S = TypeVar("S", bound="SecretBatchSampler")
CHUNK_BLOCKS = 2**17   # 8 MB of words at a time, whatever the size of the data


def poisson_indices(size: int, sample_rate: float) -> torch.Tensor:
    """Each of 0 .. size-1 independently with probability floor(q 2^64) / 2^64, ascending. int64 [n]

    n is random and may be 0: an empty batch is a batch, and its step is taken and charged like any other. n is
    also private. The probability is never above q = sample_rate, so accounting with q is on the safe side.

    >>> poisson_indices(3, sample_rate=1.0)
    tensor([0, 1, 2])
    """
    _check_count(size, "size", 0, "the number of samples in the data")
    _check_rate(sample_rate)
    words = np.frombuffer(os.urandom(8 * int(size)), dtype="<u8")
    return torch.from_numpy(_drawn(words, sample_rate))


class Draws(NamedTuple):
    """What a ledger compares its charges with. Public numbers."""

    total: int         # batches drawn, by this object
    run: int           # which pass the newest came from, counted from 0 in this object
    in_run: int        # batches drawn in that pass
    exhausted: bool    # no more to come in it


class SecretBatchSampler(Sampler[list[int]]):
    """What both samplers share: a key of their own, and a position in passes of `steps` batches.

    size, sample_rate, steps, rank, world_size are fixed: the ledger charges what batches were drawn with.

    A NoiseSource keeps key and counter, with its life cycle: fresh in copies and forked children, saved nowhere. The
    generator's key is SHA-256 of a domain and that key, so no word of it is a word of noise, whatever source is used.
    """

    kind = "unknown"

    def __init__(self, size: int, *, sample_rate: float, steps: int, rank: int, world_size: int) -> None:
        self._size, self._sample_rate, self._steps = int(size), float(sample_rate), int(steps)
        self._rank, self._world_size = int(rank), int(world_size)
        self._draws = Draws(0, -1, 0, exhausted=False)
        self._source = NoiseSource()
        self._followed: NoiseSource | None = None
        self._epoch, self._first, self._drawn = 0, 0, 0   # of the pass in course: its number, first batch, next batch
        self._base = 0        # the source's step at batch 0 of this pass
        self._seen = 0        # steps of the followed source when this pass began
        self._fresh = True    # the next pass is the one that this position describes, not a new one
        self._pass = object()

    @classmethod
    def seeded_for_tests(cls: Callable[..., S], size: int, *, seed: int, **arguments: Any) -> S:
        """The same batches every time, for tests and debugging. Who knows the seed knows the batches: no privacy
        claim, and the ledger's epsilon refuses its name."""
        sampler = cls(size, **arguments)
        sampler._source = NoiseSource.seeded_for_tests(seed)
        return sampler

    size = property(lambda self: self._size, doc="Samples in the whole data, on all ranks; private.")
    sample_rate = property(lambda self: self._sample_rate, doc="q, what an accountant is given.")
    steps = property(lambda self: self._steps, doc="Batches in a pass.")
    rank = property(lambda self: self._rank)
    world_size = property(lambda self: self._world_size)

    @property
    def draws(self) -> Draws:
        """How many batches were drawn so far: one draw, one step."""
        return self._draws

    @property
    def name(self) -> str:
        """For the ledger. A seeded sampler has another name, which no accountant accepts."""
        return self.kind if self.private else f"{self.kind}_seeded_for_tests"

    @property
    def private(self) -> bool:
        """False for a seeded sampler."""
        return self._source.private

    @property
    def key_id(self) -> str:
        """Public fingerprint of the key."""
        return self._source.key_id

    @property
    def expected_batch_size(self) -> float:
        """q times the size of the data, over all ranks. Where data sets differ by one sample the size is private:
        give the step a public number near it, and do not print this one."""
        return self.sample_rate * self.size

    @property
    def epoch(self) -> int:
        """Passes completed or left: the number of the pass that comes next, or that a checkpoint was taken in."""
        return self.state_dict()["epoch"]

    def follow(self, noise: NoiseSource) -> None:
        """Positions count the steps that `noise` made from here on, one a batch. A DataLoader with workers draws
        batches ahead; a checkpoint must hold those that were used."""
        self._followed = noise
        self._seen = _steps_of(noise) - (self._drawn - self._first)

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[list[int]]:
        """A pass: `steps` batches of indices, or what is left of the pass that a loaded state was taken in. It begins
        with its first batch: a DataLoader with workers makes two iterators and uses one."""
        if not self._fresh:
            self._epoch, self._first, self._base = self._epoch + 1, 0, self._source.step
        self._fresh, self._drawn = False, self._first
        self._seen = 0 if self._followed is None else _steps_of(self._followed)
        epoch, self._pass = self._epoch, object()
        this = self._pass
        self._draws = Draws(self._draws.total, self._draws.run + 1, 0, exhausted=False)
        for index in range(self._first, self.steps):
            stream = self._source.claim()   # counted before it is used, as for noise
            assert isinstance(stream.key, bytes)
            total, run, in_run, exhausted = self._draws
            if this is self._pass:          # not an old pass that somebody goes on with
                self._drawn, in_run, exhausted = index + 1, in_run + 1, index + 1 == self.steps
            self._draws = Draws(total + 1, run, in_run, exhausted)
            yield self._batch(stream.key, stream.step, epoch, index)

    def _batch(self, key: bytes, step: int, epoch: int, index: int) -> list[int]:
        raise NotImplementedError

    def _derived(self, key: bytes) -> bytes:
        return hashlib.sha256(f"dprs_kernels {self.kind} {self.rank}/{self.world_size} ".encode() + key).digest()

    def state_dict(self) -> dict[str, Any]:
        """The position, in public numbers: never the key, never the size of the data. The same on every rank."""
        batch = self._drawn
        if self._followed is not None and not self._fresh:
            used = _steps_of(self._followed) - self._seen
            batch = self._first + min(max(used, 0), self._drawn - self._first)
        whole = batch >= self.steps   # a finished pass is the start of the next one
        return {
            "version": 1, "name": self.name, "sample_rate": self.sample_rate, "steps": self.steps,
            "world_size": self.world_size, "epoch": self._epoch + whole, "batch": 0 if whole else batch,
            "source": {**self._source.state_dict(), "step": self._base + batch},
        }   # fmt: skip

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continues at the saved position: the next pass is the rest of the one that was saved. Secure: under a fresh
        key, so with other batches of the same distribution. Seeded: with the same batches, on as many ranks."""
        expected = {"name": self.name, "sample_rate": self.sample_rate, "steps": self.steps}
        if not self.private:
            expected["world_size"] = self.world_size
        for name, value in expected.items():
            if state[name] != value:
                raise ValueError(f"{name}: saved with {state[name]!r}, got {value!r}; construct with the saved value")
        for name, end in (("epoch", math.inf), ("batch", self.steps)):
            value = state[name]
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < end:
                raise ValueError(f"state: {name} is {value!r}; expected an integer in [0, {end})")
        self._source.load_state_dict(state["source"])
        self._epoch, self._first, self._drawn = state["epoch"], state["batch"], state["batch"]
        self._base, self._fresh, self._pass = self._source.step - self._first, True, object()


class PoissonBatchSampler(SecretBatchSampler):
    """Each sample is in each batch with probability floor(q 2^64) / 2^64, independently of everything else.

    For DataLoader(data, batch_sampler=sampler, collate_fn=empty_safe_collate(data)), any number of workers: batches
    are drawn in the process that iterates. A batch may be empty; it is delivered, and its step is taken and charged.

    size: samples in the whole data, on all ranks.
    sample_rate: q, what an accountant is given. The probability is never above it.
    steps: batches in a pass, a public number; each pass draws anew.
    rank, world_size: of torch.distributed where it is initialised, else 0 of 1. Rank r draws from its own part of the
        data, samples [r size/W, (r+1) size/W), under its own key: together the ranks draw a Poisson sample of the
        whole at q. All take `steps` steps, also on empty batches, so that collectives never wait.

    >>> sampler = PoissonBatchSampler(1000, sample_rate=0.1, steps=3)
    >>> len(sampler), sampler.name, sampler.expected_batch_size
    (3, 'poisson', 100.0)
    >>> all(0 <= i < 1000 for batch in sampler for i in batch)
    True
    """

    kind = "poisson"

    def __init__(
        self,
        size: int,
        *,
        sample_rate: float,
        steps: int,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        _check_count(size, "size", 0, "the number of samples in the data")
        _check_rate(sample_rate)
        _check_count(steps, "steps", 1, "the number of batches in a pass")
        if (rank is None) != (world_size is None):
            raise ValueError(f"rank, world_size: got {rank!r}, {world_size!r}; give both, or neither")
        if rank is None or world_size is None:
            here = torch.distributed.is_available() and torch.distributed.is_initialized()
            rank = torch.distributed.get_rank() if here else 0
            world_size = torch.distributed.get_world_size() if here else 1
        _check_count(world_size, "world_size", 1, "the number of ranks")
        _check_count(rank, "rank", 0, "below world_size")
        if rank >= world_size:
            raise ValueError(f"rank: got {rank}; expected an integer below world_size = {world_size}")
        super().__init__(size, sample_rate=sample_rate, steps=steps, rank=rank, world_size=world_size)

    def _batch(self, key: bytes, step: int, epoch: int, index: int) -> list[int]:
        start, end = (self.size * r // self.world_size for r in (self.rank, self.rank + 1))
        key, batch = self._derived(key), []
        for at in range(0, end - start, 8 * CHUNK_BLOCKS):
            words = _words(key, step, at // 8, min(end - start - at, 8 * CHUNK_BLOCKS))
            batch += (_drawn(words, self.sample_rate) + (start + at)).tolist()
        return batch


class ShuffledPartitionNominal(SecretBatchSampler):
    """The paper's batches: the data in a new secret order in each pass, cut into batches of batch_size; the last may be
    shorter.

    NOMINAL: an accountant fed with sample_rate = batch_size / size answers for Poisson sampling. The true epsilon of
    this scheme is larger, in bad cases many times (PRIVACY.md, Accounting), and the number of batches tells the size
    of the data. For comparison with published figures only, in one process. A resumed pass may have a new order.

    >>> sampler = ShuffledPartitionNominal(10, batch_size=4)
    >>> [len(batch) for batch in sampler], sampler.name, sampler.sample_rate
    ([4, 4, 2], 'shuffled_partition_nominal', 0.4)
    """

    kind = "shuffled_partition_nominal"

    def __init__(self, size: int, *, batch_size: int) -> None:
        _check_count(size, "size", 1, "the number of samples in the data")
        _check_count(batch_size, "batch_size", 1, "at most size")
        if batch_size > size:
            raise ValueError(f"batch_size: got {batch_size}; expected at most size = {size}")
        super().__init__(size, sample_rate=batch_size / size, steps=-(-size // batch_size), rank=0, world_size=1)
        self._batch_size = int(batch_size)
        self._order: tuple[int, np.ndarray] = (-1, np.empty(0, np.int64))   # of which pass

    batch_size = property(lambda self: self._batch_size)

    def _batch(self, key: bytes, step: int, epoch: int, index: int) -> list[int]:
        if self._order[0] != epoch:   # sorted by 64-bit words: a tie, of probability size^2 2^-65, keeps its order
            self._order = epoch, np.argsort(_words(self._derived(key), epoch, 0, self.size), kind="stable")
        return self._order[1][index * self.batch_size : (index + 1) * self.batch_size].tolist()


class empty_safe_collate:   # used like the function that it stands for
    """A collate_fn that also makes a batch of no samples: tensors [0, ...] in the structure of an ordinary batch, with
    the shapes and dtypes of data[0] (only these are kept). Works in DataLoader workers.

    >>> data = torch.utils.data.TensorDataset(torch.zeros(5, 3), torch.zeros(5, dtype=torch.int64))
    >>> x, y = empty_safe_collate(data)([])
    >>> x.shape, y.shape, y.dtype
    (torch.Size([0, 3]), torch.Size([0]), torch.int64)
    """

    def __init__(self, dataset: Any, collate: Callable[[list[Any]], Any] = default_collate) -> None:
        if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__") or len(dataset) == 0:
            raise ValueError(
                f"dataset: got {type(dataset).__name__} without samples to index; expected one with data[0], whose "
                "shapes an empty batch takes"
            )
        self.collate, self.empty = collate, _without_samples(collate([dataset[0]]))

    def __call__(self, samples: list[Any]) -> Any:
        return self.collate(samples) if samples else copy.deepcopy(self.empty)


def _without_samples(batch: Any) -> Any:
    """A batch of one, as a batch of none. New tensors: a slice would keep the sample's memory."""
    if isinstance(batch, torch.Tensor) and batch.shape[:1] == (1,):
        return batch.new_empty(0, *batch.shape[1:])
    if isinstance(batch, Mapping):
        return {key: _without_samples(value) for key, value in batch.items()}
    if isinstance(batch, (list, tuple)):
        if all(isinstance(value, (str, bytes)) for value in batch):   # how default_collate leaves text
            return type(batch)()
        parts = [_without_samples(value) for value in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    got = f"shape {tuple(batch.shape)}" if isinstance(batch, torch.Tensor) else type(batch).__name__
    raise ValueError(f"collate: made {got} of one sample; expected tensors [1, ...] in lists, tuples and dicts")


def _words(key: bytes, step: int, first_block: int, count: int) -> np.ndarray:
    """ChaCha20 as uint64 [count], 8 a block: the CPU kernels' where they are built, else the reference's (the same)."""
    blocks = -(-count // 8)
    library = native.library()
    if library is None:
        words = reference.words(key, step, first_block, blocks)
    else:
        words = np.empty((blocks, 16), dtype=np.uint32)
        library.dprs_words(key, step, first_block, blocks, words.ctypes.data_as(ctypes.c_void_p))
    return words.astype("<u4", copy=False).reshape(-1).view("<u8")[:count]


def _drawn(words: np.ndarray, sample_rate: float) -> np.ndarray:
    """Where words < floor(q 2^64): integers decide. int64 [n]"""
    threshold = math.floor(math.ldexp(float(sample_rate), 64))   # exact: a float times a power of two
    if threshold == 2**64:   # q = 1: every word is below it, and it is no 64-bit word itself
        return np.arange(len(words), dtype=np.int64)
    return np.flatnonzero(words < np.uint64(threshold)).astype(np.int64, copy=False)


def _steps_of(noise: NoiseSource) -> int:
    return noise.step + noise.captured_steps()


def _check_count(value: object, name: str, least: int, what: str) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or int(value) < least:
        raise ValueError(f"{name}: got {value!r}; expected an integer of at least {least}, {what}")


def _check_rate(value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Real) or not 0 < float(value) <= 1:
        raise ValueError(f"sample_rate: got {value!r}; expected a number in (0, 1], a sample's chance to be drawn")
