"""StepPlan: the public numbers of one logical step, checked once and frozen (PRIVACY.md R7).

Every backend gets its constants from here, so that they cannot disagree on a bound, a grid or a unit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from dprs_kernels.checks import is_number
from dprs_kernels.layout import Layout
from dprs_kernels.noise import grid_of

MARGIN = 2.0**-20          # C' = C (1 - margin) leaves room for the rounding of norms
AUTOMATIC_GAMMA = 0.01     # automatic clipping scales by C'/(n + gamma)
RANGE = 60                 # C and noise_std lie in [2^-60, 2^60]: far from the ends of fp32
NORM_SCALE = -36           # norms are taken of 2^-36/bound times the gradient (csrc/norms.h)
NORM_LIMIT = 2.0**61       # such a scaled norm, and above, counts as not finite
CLIPPING = ("flat", "per_layer", "automatic")
REDUCTIONS = ("sum", "mean")
PLAIN = {int, float, str}


@dataclass(frozen=True, eq=False)   # tables are looked up by identity: steps of a run have one plan (make_plan)
class StepPlan:
    layout: Layout
    max_grad_norm: float               # C, of all segments together
    noise_multiplier: float            # sigma
    expected_batch_size: float
    loss_reduction: str
    clipping: str
    segment_of: tuple[int, ...]        # [P] what shares a norm: all parameters (flat), or each its own
    bounds: tuple[float, ...]          # [segments] C'
    noise_std: float                   # sigma C; sigma where C is inf (Algorithm 2)
    grid: float                        # g; 0 without noise
    unit: float                        # h: contributions are integers times h; 0: float64 sums
    small: bool                        # a contribution is at most 2^29 units

    @property
    def gamma(self) -> float:
        return AUTOMATIC_GAMMA if self.clipping == "automatic" else -1.0

    def loss_scale(self, samples: int) -> float:
        """A mean loss divides each gradient by the micro-batch's n: undo it."""
        return float(max(samples, 1)) if self.loss_reduction == "mean" else 1.0

    def norm_scales(self, loss_scale: float) -> list[float]:
        """[segments] powers of two, 2^-36 over what the norm is compared with."""
        compared = [AUTOMATIC_GAMMA if self.gamma > 0 else b if math.isfinite(b) else 1.0 for b in self.bounds]
        return [math.ldexp(1.0, NORM_SCALE - math.frexp(c / loss_scale)[1]) for c in compared]

    def sensitivity(self, kept: int) -> float:
        """How far one sample can move the snapped sum, in L2, when `kept` coordinates are released: C, plus
        sqrt(K) (g + h) for rounding to the grid and to the unit."""
        return self.max_grad_norm + math.sqrt(kept) * (self.grid + self.unit)


@dataclass(frozen=True)
class StepRecord:
    """One release, in public numbers: what a ledger needs. PrivateSum.record makes it; step hooks get it."""

    step: int                    # of the noise key; a step that failed after its claim leaves a gap; -1: captured
    key_id: str
    private: bool                # False: seeded noise, no noise, or no bound; no epsilon holds
    noise_multiplier: float      # sigma, in units of max_grad_norm
    max_grad_norm: float         # C, of all parameters together
    expected_batch_size: float
    sensitivity: float           # C and the rounding of the sum (plan.sensitivity)
    drop_rate: float
    kept: int                    # K coordinates
    keep_digest: str


def make_plan(
    layout: Layout,
    *,
    max_grad_norm: float | Sequence[float],
    noise_multiplier: float,
    expected_batch_size: float,
    loss_reduction: str = "sum",
    clipping: str = "flat",
) -> StepPlan:
    """Checks every number a user can get wrong; ValueError names the argument, what was got and the remedy."""
    numbers = (max_grad_norm, noise_multiplier, expected_batch_size, loss_reduction, clipping)
    # The steps of a run have the same ones. By type, too: True is equal to 1. Lists are not looked up.
    return (_remembered if PLAIN.issuperset(map(type, numbers)) else _checked)(layout, *numbers)


def _checked(
    layout: Layout,
    max_grad_norm: float | Sequence[float],
    noise_multiplier: float,
    expected_batch_size: float,
    loss_reduction: str,
    clipping: str,
) -> StepPlan:
    if clipping not in CLIPPING:
        raise ValueError(f"clipping: got {clipping!r}; expected one of {', '.join(CLIPPING)}")
    if loss_reduction not in REDUCTIONS:
        raise ValueError(
            f"loss_reduction: got {loss_reduction!r}; expected 'sum' (each sample's own gradient) or 'mean' "
            "(divided by the number of samples in the micro-batch)"
        )
    if not is_number(noise_multiplier) or not 0 <= noise_multiplier < math.inf:
        raise ValueError(
            f"noise_multiplier: got {noise_multiplier!r}; expected a finite number of at least 0 (0 switches noise "
            "off, and privacy with it)"
        )
    if not is_number(expected_batch_size) or not 0 < expected_batch_size < math.inf:
        raise ValueError(
            f"expected_batch_size: got {expected_batch_size!r}; expected a positive number, public and fixed in "
            "advance: the batch size you planned for, never the number of samples that happened to be drawn"
        )
    parts = len(layout.shapes)
    bounds = _bounds(max_grad_norm, clipping, parts)
    total = math.hypot(*bounds)
    if clipping == "automatic" and not math.isfinite(total):
        raise ValueError("max_grad_norm: got inf with clipping='automatic', which scales every sample to it; give C")
    std = noise_multiplier * (total if math.isfinite(total) else 1.0)
    if std > 0 and not 2.0**-RANGE <= std <= 2.0**RANGE:
        raise ValueError(
            f"noise_multiplier: times max_grad_norm is {std:g}; expected within [2^-{RANGE}, 2^{RANGE}], so that "
            "noise and gradients are ordinary fp32 numbers"
        )
    grid = grid_of(std)
    unit, small = _unit(grid, total)
    return StepPlan(
        layout=layout, max_grad_norm=total, noise_multiplier=float(noise_multiplier),
        expected_batch_size=float(expected_batch_size), loss_reduction=loss_reduction, clipping=clipping,
        segment_of=tuple(range(parts)) if clipping == "per_layer" else (0,) * parts,
        bounds=tuple(c * (1 - MARGIN) for c in bounds), noise_std=std, grid=grid, unit=unit, small=small,
    )   # fmt: skip


_remembered = lru_cache(maxsize=64, typed=True)(_checked)


def _bounds(max_grad_norm: float | Sequence[float], clipping: str, parts: int) -> list[float]:
    """C of each segment. per_layer splits one C evenly, C/sqrt(P) each, or takes a list."""
    if isinstance(max_grad_norm, (list, tuple)):
        if clipping != "per_layer" or len(max_grad_norm) != parts:
            raise ValueError(
                f"max_grad_norm: got {len(max_grad_norm)} numbers for {parts} parameters with clipping={clipping!r}; "
                "a list goes with clipping='per_layer', one bound per parameter"
            )
        bounds = list(max_grad_norm)
    else:
        bounds = [max_grad_norm]
    for c in bounds:
        if not is_number(c) or not (c == math.inf or 2.0**-RANGE <= c <= 2.0**RANGE):
            raise ValueError(
                f"max_grad_norm: got {c!r}; expected a positive number within [2^-{RANGE}, 2^{RANGE}], or inf for an "
                "ablation without clipping (and without privacy)"
            )
    if clipping == "per_layer" and len(bounds) == 1 and parts > 1:
        bounds = [bounds[0] / math.sqrt(parts)] * parts
    return [float(c) for c in bounds]


def _unit(grid: float, total: float) -> tuple[float, bool]:
    """h, and whether C is at most 2^29 h. Without noise or without a bound there is no unit: float64 sums.

    Ordinary noise: h = 2^-29 of C rounded up to a power of two, so that four contributions fit an int32; that
    is 2^-8 of the grid at sigma = 1. Tiny noise (h over g/16): h = 2^-16 g, int64 throughout.
    """
    if grid == 0 or not math.isfinite(total):
        return 0.0, False
    ceiling = math.frexp(total)[1]   # C < 2^ceiling
    unit = math.ldexp(1.0, ceiling - 29)
    if unit <= grid / 16:
        return unit, True
    return max(grid * 2.0**-16, math.ldexp(1.0, ceiling - 50)), False
