"""The lattice and the precision attack, on whatever released something, and S6, which tries both on a step.

Both tell whether a sample was in a sum from the low bits of the release, without a look at its size. Against exact
Gaussian noise they are coin tosses; against floating-point noise they are not, at any sigma:

    lattice     torch.normal makes pairs (r cos a, r sin a), 8 places apart, from words of 24 bits. Subtract the right
                hypothesis from the release, and a / 2 pi and exp(-r^2/2) are multiples of 2^-24; subtract the wrong
                one, and they are anywhere.
    precision   1 + z in fp32 is a multiple of 2^-24 whatever z is; z alone need not be: an event that has probability
                0 with the sample and 16 to 26 % without.

The remedy is a grid for sum and noise (noise.grid_of): every release is then a multiple of it, whoever is in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch

from dprs_kernels.layout import Layout
from dprs_kernels.plan import make_plan
from dprs_kernels.privacy.audit import levels
from dprs_kernels.privacy.audit.report import Finding, table
from dprs_kernels.privacy.audit.subject import BATCH, Subject

# (known rest of the data [D], what trials add to it [D], noise std) -> the released sum, fp32 or a float64 of it [D]
Releaser = Callable[[torch.Tensor, torch.Tensor, float], torch.Tensor]

LATTICE_STD = 1000.0       # of noise, over the sample's norm of 1/2: epsilon allows a success of 50.01 %
LATTICE_BLOCK = 256        # coordinates of a trial
PRECISION_BLOCK = 32       # values of a trial, each a release of one coordinate with sigma = 1 and a sample of norm 1
CHANCE = 0.03              # how far from 50 % is still chance
SUCCESS = 0.99
CONTROL = (2, 1000)        # steps, blocks of the attacks on stock noise: 3 misses of 2,000 are expected, 20 allowed
PAIRS = ("8 apart", "adjacent")   # torch's layout and ours


class Precision(NamedTuple):
    success: float       # share of right guesses
    without: float       # how often a value is no multiple of 2^-24 without the sample,
    with_sample: float   # and with it
    off_grid: int        # values off the grid of noise with std 1


def torch_normal(generator: torch.Generator) -> Releaser:
    """Noise as most libraries add it: fp32, torch.normal."""

    def release(rest: torch.Tensor, added: torch.Tensor, std: float) -> torch.Tensor:
        return (rest + added) + torch.normal(0.0, std, rest.shape, generator=generator)

    return release


def four_gaussians(generator: torch.Generator) -> Releaser:
    """The "secure mode" of other libraries: the sum of four torch.normal over 2."""

    def release(rest: torch.Tensor, added: torch.Tensor, std: float) -> torch.Tensor:
        parts = [torch.normal(0.0, std, rest.shape, generator=generator) for _ in range(4)]
        return (rest + added) + (parts[0] + parts[1] + parts[2] + parts[3]) / 2

    return release


def audited(subject: Subject) -> Releaser:
    """The step under audit. The trials' samples lie side by side in one row, under a C of the norm of all."""
    noise = subject.source("S6")

    def release(rest: torch.Tensor, added: torch.Tensor, std: float) -> torch.Tensor:
        bound = math.sqrt(rest.numel())
        return subject.released([[torch.stack([rest, added])]], noise=noise, max_grad_norm=bound,
                                noise_multiplier=std / bound, dtype=torch.float32)   # fmt: skip

    return release


def lattice_attack(
    released: torch.Tensor, rest: torch.Tensor, sample: torch.Tensor, std: float, pairs: str = PAIRS[0]
) -> torch.Tensor:
    """Was the sample in? bool [trials]; of released, rest, sample [trials, coordinates], a multiple of 16.

    >>> generator = torch.Generator().manual_seed(0)
    >>> rest, sample = torch.randn(2, 9, 256, generator=generator) / 16
    >>> released = torch_normal(generator)(rest, sample, 20.0)
    >>> int(lattice_attack(released, rest, sample, 20.0).sum())
    9
    """
    out = released.double() - rest.double()
    return _off_lattice(out - sample.double(), std, pairs) < _off_lattice(out, std, pairs)


def _off_lattice(noise: torch.Tensor, std: float, pairs: str) -> torch.Tensor:
    """Mean distance of angle and radius words from integers: 1/4 each if they are anywhere. [trials]"""
    if pairs == "8 apart":
        split = noise.reshape(noise.shape[0], -1, 2, 8)
        a, b = split[:, :, 0].flatten(1), split[:, :, 1].flatten(1)
    else:
        a, b = noise[:, 0::2], noise[:, 1::2]
    words = torch.stack([torch.atan2(b, a) / (2 * math.pi), torch.exp(-(a * a + b * b) / (2 * std * std))]) * 2.0**24
    return (words - words.round()).abs().sum(0).mean(1)


def precision_attack(released: torch.Tensor) -> torch.Tensor:
    """Was a sample in that adds 1 to every value? bool [trials], of released [trials, values]: no, for certain, if
    any value is no multiple of 2^-24."""
    return ~off_multiples(released, 2.0**-24).any(1)


def off_multiples(released: torch.Tensor, grid: float) -> torch.Tensor:
    """Which values are no multiples of a power of two. NaN is none."""
    scaled = released.double() / grid
    return ~(scaled == scaled.round())


def lattice_success(release: Releaser, steps: int, blocks: int, generator: torch.Generator) -> dict[str, float]:
    """Share of right guesses over steps x blocks coin flips, by layout of the pairs."""
    right = dict.fromkeys(PAIRS, 0)
    for _ in range(steps):
        rest, sample = torch.randn(2, blocks, LATTICE_BLOCK, generator=generator)
        rest, sample = rest / math.sqrt(blocks * LATTICE_BLOCK), sample / (2 * sample.norm(dim=1, keepdim=True))
        coins = torch.rand(blocks, generator=generator) < 0.5
        added = torch.where(coins[:, None], sample, 0.0)
        released = release(rest.reshape(-1), added.reshape(-1), LATTICE_STD).reshape(blocks, LATTICE_BLOCK)
        for pairs in PAIRS:
            right[pairs] += int((lattice_attack(released, rest, sample, LATTICE_STD, pairs) == coins).sum())
    return {pairs: count / (steps * blocks) for pairs, count in right.items()}


def precision_success(release: Releaser, steps: int, blocks: int, generator: torch.Generator) -> Precision:
    """Over steps x blocks coin flips, of PRECISION_BLOCK values each."""
    events, right, off_grid = [0, 0], 0, 0
    flips = torch.zeros(2, dtype=torch.int64)
    grid = _grid(1.0)
    for _ in range(steps):
        coins = torch.rand(blocks, generator=generator) < 0.5
        added = coins.float()[:, None].expand(blocks, PRECISION_BLOCK).reshape(-1)
        released = release(torch.zeros_like(added), added, 1.0).reshape(blocks, PRECISION_BLOCK)
        off = off_multiples(released, 2.0**-24)
        right += int((precision_attack(released) == coins).sum())
        off_grid += int(off_multiples(released, grid).sum())
        for side in (0, 1):
            events[side] += int(off[coins == bool(side)].sum())
        flips += torch.bincount(coins.long(), minlength=2)
    rates = [count / max(int(n) * PRECISION_BLOCK, 1) for count, n in zip(events, flips, strict=True)]
    return Precision(right / (steps * blocks), rates[0], rates[1], off_grid)


def _grid(std: float) -> float:
    return make_plan(Layout.of([(1,)]), max_grad_norm=1.0, noise_multiplier=std, expected_batch_size=BATCH).grid


def run(subject: Subject) -> Iterator[Finding]:
    """S6. Both sides: the step must resist, and the attacks must still work on stock noise, or they prove nothing."""
    steps, blocks = subject.size.attack_steps, subject.size.attack_blocks
    generator, step = subject.generator("S6"), audited(subject)
    trials = steps * blocks
    chance = max(CHANCE, levels.two_sided() / (2 * math.sqrt(trials)))
    for pairs, success in lattice_success(step, steps, blocks, generator).items():
        yield _chance(f"lattice attack on the step, pairs {pairs}, {trials:,} trials", success, chance)
    seen = precision_success(step, steps, blocks, generator)
    yield _chance(f"precision attack on the step, {trials:,} trials", seen.success, chance)
    yield Finding("S6", "released values off the grid", str(seen.off_grid), "0", seen.off_grid == 0)
    stock = lattice_success(torch_normal(generator), *CONTROL, generator)[PAIRS[0]]
    yield _works("control: lattice attack on torch.normal", stock)
    for name, maker in (("torch.normal", torch_normal), ("the sum of four", four_gaussians)):
        yield _works(f"control: precision attack on {name}",
                     precision_success(maker(generator), *CONTROL, generator).success)   # fmt: skip


def compare(subject: Subject) -> str:
    """The demonstration: three kinds of noise and both attacks, side by side, as a table."""
    steps, blocks = subject.size.attack_steps, subject.size.attack_blocks
    generator = subject.generator("attack")
    name = getattr(subject.step, "__name__", "the step")
    rows = []
    for maker, release in (
        ("torch.normal", torch_normal(generator)),
        ("sum of four torch.normal", four_gaussians(generator)),
        (f"{name}, {subject.backend}", audited(subject)),
    ):
        lattice = max(lattice_success(release, steps, blocks, generator).values(), key=lambda s: abs(s - 0.5))
        seen = precision_success(release, steps, blocks, generator)
        shares = (lattice, seen.success, seen.without, seen.with_sample)
        rows.append((maker, *(f"{share:.1%}" for share in shares)))
    head = ("noise", "lattice", "precision", "odd bits, sample out", "odd bits, sample in")
    return "\n".join([
        f"Was the sample in? Right guesses of {steps * blocks:,}; a coin has 50 %.", "", table(head, rows), "",
        f"lattice: one release of {LATTICE_BLOCK} coordinates, noise 2,000 times the sample; privacy allows 50.01 %.",
        f"precision: {PRECISION_BLOCK} releases of one coordinate, sigma = 1. odd bits: values that are no multiple of "
        "2^-24;",
        "one such value proves that the sample is out, which no epsilon allows with that probability.",
    ])   # fmt: skip


def _chance(tried: str, success: float, allowed: float) -> Finding:
    return Finding("S6", tried, f"{success:.1%} right", f"50 +- {allowed:.1%}", abs(success - 0.5) <= allowed)


def _works(tried: str, success: float) -> Finding:
    return Finding("S6", tried, f"{success:.1%} right", f">= {SUCCESS:.0%}", success >= SUCCESS)
