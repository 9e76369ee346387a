"""What races of one step need: the cases, the tensors, the float64 truth, and the check.

A contender is checked before it is timed; a wrong one is never timed. All contenders of a case work on the same
tensors.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from racing import SIGMA, Contender

from dprs_kernels import KeepMask, NoiseSource, fused_rs_dp_step

BOUND = 1.0          # C
SEED = 0             # of masks, and of the seeded noise that ours is checked with
RATES = (0.0, 0.5, 0.9)
MOMENTS_UP_TO = 10**6   # coordinates; the lines that make a peer's noise are the same for every shape
OURS_TOLERANCE = 5e-6   # of the truth's largest value, for every input dtype: 80 fp32 roundings, C' = C (1 - 2^-20)


def peer_tolerance(dtype: torch.dtype, size: int) -> float:
    """Also a share of the truth's largest value, plus what torch's fp32 norm may lose: it adds squares up in a
    running sum of some 32 lanes, 2^-24 a term, halved by the root (1 % at D = 11M; 0.04 % seen). bf16 peers round
    norms, products or sums to 8 bits, 2^-9 each, four times."""
    return (2.0**-7 if dtype == torch.bfloat16 else 5e-6) + size / 32 * 2.0**-25


@dataclass(frozen=True)
class Shape:
    """A list of parameters and the N that the paper trains it with."""

    name: str
    samples: int
    shapes: tuple[tuple[int, ...], ...]
    rounds: int = 11

    @property
    def size(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)


def _layers(*weights: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return tuple(shape for weight in weights for shape in (weight, weight[:1]))   # weight, bias


SHAPES = {
    shape.name: shape
    for shape in (
        Shape(
            "DP-CNN", 256,
            _layers((32, 3, 3, 3), (32, 32, 3, 3), (64, 32, 3, 3), (64, 64, 3, 3), (128, 64, 3, 3), (128, 128, 3, 3),
                    (128, 2048), (10, 128)),
        ),
        Shape("DP-CNN/S", 2048, _layers((16, 1, 8, 8), (32, 16, 4, 4), (32, 512), (10, 32))),
        Shape("one tensor", 64, ((11_000_000,),), rounds=6),
        Shape("one tensor, 16", 16, ((11_000_000,),)),
        Shape("tiny", 6, ((40, 5), (40,)), rounds=1),   # warms up the memory measurement, is never reported
    )
}   # fmt: skip
REPORTED = ("DP-CNN", "DP-CNN/S", "one tensor, 16")
FULL_ONLY = ("one tensor",)   # 2.8 GB; a copy of a peer's besides


@dataclass(frozen=True)
class Case:
    shape: Shape
    dtype: torch.dtype
    rate: float

    @property
    def id(self) -> str:
        return f"{self.shape.name.replace(', ', '-').replace(' ', '-')}-{dtype_name(self.dtype)}-r{self.rate:g}"

    @property
    def bytes(self) -> int:
        """Of G, [N, D]: what the limit reads."""
        return self.shape.samples * self.shape.size * self.dtype.itemsize


def dtype_name(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]


class Workload:
    """The tensors of one shape and dtype, shared by its rates: gradients, masks, truths.

    Row i is one normal vector, shifted by 7919 i and scaled so that norms spread over about [0.3, 3] C: some
    samples are clipped, some are not. (Fresh normals for all of [N, D] would take longer than the race.)
    """

    def __init__(
        self, shape: Shape, dtype: torch.dtype, device: str = "cpu", rates: Sequence[float] = RATES
    ) -> None:
        self.shape, self.dtype, self.device, self.rates = shape, dtype, torch.device(device), tuple(rates)
        random = torch.Generator().manual_seed(SEED)
        spread = torch.empty(shape.samples).uniform_(-1.2, 1.2, generator=random).exp()
        scales = (spread / math.sqrt(shape.size / 2)).tolist()
        self.grads = []
        for part in shape.shapes:
            size = math.prod(part)
            base = torch.empty(size).normal_(generator=random)
            grad = torch.empty(shape.samples, *part, dtype=dtype)
            for i, row in enumerate(grad.view(shape.samples, size)):
                at = 7919 * i % size
                torch.mul(base[at:], scales[i], out=row[: size - at])
                torch.mul(base[:at], scales[i], out=row[size - at :])
            self.grads.append(grad.to(self.device))
        self.keeps = {r: KeepMask.draw(shape.shapes, drop_rate=r, seed=SEED, draw=0) for r in self.rates}
        self.dense = {r: keep.dense() for r, keep in self.keeps.items()}
        self._truths: dict[float, torch.Tensor] = {}

    def params(self) -> list[torch.nn.Parameter]:
        """Fresh fp32 parameters: with bf16 gradients the usual mixed precision."""
        return [torch.nn.Parameter(torch.zeros(part, device=self.device)) for part in self.shape.shapes]

    def flat_keep(self, rate: float) -> torch.Tensor:
        return torch.cat([part.reshape(-1) for part in self.dense[rate]])   # [D] bool

    def truth(self, rate: float) -> torch.Tensor:
        """sum_i min(1, C/n_i) keep g_i / B, B = N, in float64. [D]"""
        if not self._truths:
            self._truths = self._all_truths()
        return self._truths[rate]

    def _all_truths(self) -> dict[float, torch.Tensor]:
        """All rates in two sweeps over G, some columns at a time, widened in one buffer of 32 MB."""
        samples = self.shape.samples
        columns = 2**22 // samples
        grads = [grad.cpu() for grad in self.grads]
        blocks = [block for grad in grads for block in grad.view(samples, -1).split(columns, 1)]
        masks = []   # as blocks: [columns, rates]
        for parts in zip(*(self.dense[r] for r in self.rates), strict=True):
            masks += torch.stack([part.reshape(-1) for part in parts], 1).double().split(columns)
        squares = torch.zeros(samples, len(self.rates), dtype=torch.float64)
        buffer = torch.empty(samples * columns, dtype=torch.float64)   # fresh memory each time took 5 times as long

        def wide(block: torch.Tensor) -> torch.Tensor:
            return buffer[: block.numel()].view(block.shape).copy_(block)

        for block, mask in zip(blocks, masks, strict=True):
            squares += wide(block).square_() @ mask
        factors = (BOUND / squares.sqrt()).clamp(max=1) / samples   # [N, rates]
        sums = torch.cat([factors.T @ wide(block) for block in blocks], 1)   # [rates, D]
        return {r: torch.where(self.flat_keep(r), sums[k], 0.0) for k, r in enumerate(self.rates)}


@functools.lru_cache(maxsize=1)   # the dtypes of a shape share it
def spec_noise(shape: Shape) -> torch.Tensor:
    """What the specification (reference backend) releases for an empty batch: the noise of step 0. [D]"""
    params = [torch.nn.Parameter(torch.zeros(part)) for part in shape.shapes]
    fused_rs_dp_step(
        params, max_grad_norm=BOUND, noise_multiplier=SIGMA, expected_batch_size=shape.samples,
        noise=NoiseSource.seeded_for_tests(SEED), backend="reference",
        grad_samples=[torch.empty(0, *part) for part in shape.shapes],
    )   # fmt: skip
    return flatten([p.grad for p in params])


def flatten(parts: Sequence[torch.Tensor | None]) -> torch.Tensor:
    return torch.cat([part.detach().reshape(-1).cpu().double() for part in parts if part is not None])


def check(contender: Contender, work: Workload, rate: float) -> str:
    """Why the contender is wrong, or "". Ours is compared with its noise on, the path that is timed, because the
    specification says which noise; a peer without noise, then its noise by moments."""
    rate = rate if contender.masked else 0.0
    keep, truth = work.flat_keep(rate), work.truth(rate)
    scale, deviation = float(truth.abs().max()), SIGMA * BOUND / work.shape.samples
    if contender.seeded:
        expected = truth + torch.where(keep, spec_noise(work.shape), 0.0)
        # Rounding to the grid (2^-21 of sigma C or finer), and to fp32 at the size of the noise.
        allowed = OURS_TOLERANCE * scale + 2.0**-20 * deviation
        out = flatten(contender.run(SIGMA))
        return _distance(out, expected, allowed) or _dropped(out, keep)
    out = flatten(contender.run(0.0))
    wrong = _distance(out, truth, peer_tolerance(work.dtype, work.shape.size) * scale) or _dropped(out, keep)
    if wrong or work.shape.size > MOMENTS_UP_TO:
        return wrong
    out = flatten(contender.run(SIGMA))
    noise = ((out - truth) / deviation)[keep]
    kept = noise.numel()
    # Six standard errors: mean 1/sqrt(K), mean square sqrt(2/K). bf16 peers round the noised sum: 1 % on top.
    slack = 0.01 if work.dtype == torch.bfloat16 else 0.0
    if abs(float(noise.mean())) > 6 / math.sqrt(kept) + slack:
        return f"noise has mean {float(noise.mean()):.2e} standard deviations"
    if abs(float(noise.square().mean()) - 1) > 6 * math.sqrt(2 / kept) + slack:
        return f"noise has variance {float(noise.square().mean()):.5f}, expected 1"
    return _dropped(out, keep)


def _distance(out: torch.Tensor, expected: torch.Tensor, allowed: float) -> str:
    worst = float((out - expected).abs().max())
    return "" if worst <= allowed else f"off by {worst:.3e}, allowed {allowed:.3e}"   # NaN is not <=


def _dropped(out: torch.Tensor, keep: torch.Tensor) -> str:
    return "" if bool((out[~keep] == 0).all()) else "a dropped coordinate is not 0"
