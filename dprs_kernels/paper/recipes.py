"""The paper's four algorithms as settings of the core.

    1  DP-SGD with random sparsification          RSDPOptimizer
    2  noisy SGD with random sparsification       the same with max_grad_norm = inf; noise of std sigma on the sum
    3  clipped SGD with random sparsification     the same with noise_multiplier = 0
    4  DP-SGD with ranked sparsification          RankedOptimizer (ranked.py)

2 and 3 are ablations: nothing bounds a sample, or nothing hides it. No epsilon holds for them, and a ledger refuses
to name one. Each algorithm goes with SGD, momentum or Adam, masks of an epoch or refreshed within it, gradual cooling
or a constant rate, Poisson samples or shuffled partitions.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from dprs_kernels.checks import is_number
from dprs_kernels.noise import NoiseSource
from dprs_kernels.optimizer import RSDPOptimizer
from dprs_kernels.paper.ranked import RankedOptimizer
from dprs_kernels.privacy.sampling import PoissonBatchSampler, SecretBatchSampler, ShuffledPartitionNominal
from dprs_kernels.schedule import ConstantRate, CustomRate, GradualCooling
from dprs_kernels.structure import STRUCTURES

ALGORITHMS = {
    1: "DP-SGD + random sparsification",
    2: "noisy SGD + random sparsification",
    3: "clipped SGD + random sparsification",
    4: "DP-SGD + ranked sparsification",
}
COOLING = ("gradual", "constant")
OPTIMIZERS = ("sgd", "adam")
SAMPLERS = ("poisson", "shuffled-nominal")
RANKING_SEED = 2**63   # added to a test's seed: the ranking noise is another stream


@dataclass(frozen=True)
class Recipe:
    """One run's algorithm and its numbers.

    final_rate: drop rate of the last epoch under gradual cooling, of every epoch under "constant".
    max_grad_norm: C; Algorithm 2 does not use it. noise_multiplier: sigma; Algorithm 3 does not use it.
    structure: which coordinates drop together (structure.py); Algorithm 4 ranks them one by one.
    seed: of the masks, public. Batches and noise are secret, unless a seed is given where they are made.

    >>> recipe = Recipe(algorithm=3, epochs=3, final_rate=0.5, lr=0.1, max_grad_norm=1.0, noise_multiplier=2.0,
    ...                 expected_batch_size=16)
    >>> recipe.optimizer_for(torch.nn.Linear(3, 1).parameters()).noise_multiplier, recipe.private
    (0.0, False)
    >>> recipe.sampler_for(160).steps
    10
    """

    algorithm: int
    epochs: int
    lr: float
    max_grad_norm: float
    noise_multiplier: float
    expected_batch_size: int
    final_rate: float = 0.0
    cooling: str = "gradual"
    refresh: int = 1
    structure: str = "coordinate"
    optimizer: str = "sgd"
    momentum: float = 0.0
    sampler: str = "poisson"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.algorithm not in ALGORITHMS:
            listed = ", ".join(f"{number} ({name})" for number, name in ALGORITHMS.items())
            raise ValueError(f"algorithm: got {self.algorithm!r}; expected one of {listed}")
        choices_of = {"cooling": COOLING, "optimizer": OPTIMIZERS, "sampler": SAMPLERS, "structure": STRUCTURES}
        for name, choices in choices_of.items():
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}: got {getattr(self, name)!r}; expected {' or '.join(map(repr, choices))}")
        if self.algorithm == 4 and self.structure != "coordinate":
            raise ValueError(f"structure: got {self.structure!r} with algorithm 4, which ranks each coordinate")
        if not is_number(self.lr) or not 0 < self.lr < math.inf:
            raise ValueError(f"lr: got {self.lr!r}; expected a positive number, the learning rate")
        if not is_number(self.momentum) or not 0 <= self.momentum < 1:
            raise ValueError(f"momentum: got {self.momentum!r}; expected a number in [0, 1)")
        if self.momentum and self.optimizer == "adam":
            raise ValueError(f"momentum: got {self.momentum!r} with Adam, which has its own; leave it at 0")
        batch = self.expected_batch_size
        if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
            raise ValueError(f"expected_batch_size: got {batch!r}; expected an integer of at least 1")
        self.schedule()   # its checks: epochs, rates, refresh

    @property
    def private(self) -> bool:
        """Whether the algorithm can carry a privacy claim."""
        return self.algorithm in (1, 4)

    def schedule(self) -> CustomRate:
        kind = GradualCooling if self.cooling == "gradual" else ConstantRate
        return kind(self.final_rate, self.epochs, self.refresh)

    def sampler_for(self, size: int, *, seed_for_tests: int | None = None) -> SecretBatchSampler:
        """Batches of `size` samples. Poisson: q = B/N, and the number of steps in a pass that is nearest to N/B."""
        batch = self.expected_batch_size
        if batch > size:
            raise ValueError(f"expected_batch_size: got {batch}; expected at most {size}, the size of the data")
        kind: type[SecretBatchSampler]
        arguments: dict[str, Any]
        if self.sampler == "poisson":
            kind, arguments = PoissonBatchSampler, dict(sample_rate=batch / size, steps=round(size / batch))
        else:
            kind, arguments = ShuffledPartitionNominal, dict(batch_size=batch)
        if seed_for_tests is not None:
            return kind.seeded_for_tests(size, seed=seed_for_tests, **arguments)
        return kind(size, **arguments)

    def optimizer_for(
        self, params: Iterable[Any], *, seed_for_tests: int | None = None, backend: str = "auto"
    ) -> RSDPOptimizer:
        """params: parameters, or (name, parameter) pairs, whose names then appear in errors. The loss is a sum.
        seed_for_tests: of the noise; None draws fresh keys, and only then can a privacy claim hold."""
        params = list(params)
        if self.optimizer == "adam":
            inner: torch.optim.Optimizer = torch.optim.Adam(params, lr=self.lr)
        else:
            inner = torch.optim.SGD(params, lr=self.lr, momentum=self.momentum)
        settings: dict[str, Any] = dict(
            max_grad_norm=math.inf if self.algorithm == 2 else self.max_grad_norm,
            noise_multiplier=0.0 if self.algorithm == 3 else self.noise_multiplier,
            expected_batch_size=self.expected_batch_size, noise=noise_for(seed_for_tests), schedule=self.schedule(),
            seed=self.seed, structure=self.structure, loss_reduction="sum", backend=backend,
        )   # fmt: skip
        if self.algorithm == 4:
            return RankedOptimizer(inner, ranking_noise=noise_for(seed_for_tests, RANKING_SEED), **settings)
        return RSDPOptimizer(inner, **settings)


def noise_for(seed: int | None, stream: int = 0) -> NoiseSource:
    """A fresh key; or, for tests, the stream's of a seed: each use of noise in a run has its own."""
    return NoiseSource() if seed is None else NoiseSource.seeded_for_tests(seed + stream)
