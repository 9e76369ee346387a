"""Subject: the step function under audit, called as a user calls it, and how large the suites are."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from dprs_kernels.mask import KeepMask
from dprs_kernels.noise import NoiseSource
from dprs_kernels.row_grads import RowGrads
from dprs_kernels.structure import WIDE, RowSet

BATCH = 64   # expected_batch_size: not 1, so that a wrong divisor shows; a power of two, so that dividing is exact
Step = Callable[..., None]
Shapes = Sequence[tuple[int, ...]]
NARROW = (6, 32)   # where mixed masks drop coordinates
HELD = ("NaN", "none", "zeros", "numbers", "strided")                       # what p.grad is before the step
GIVEN = ("list", "dict", "grad_sample", "grad_batch", "strided list")       # how one micro-batch comes


@dataclass(frozen=True)
class Size:
    """How much each suite does."""

    field_steps: int          # S2, even: half of them under a mask, half under its complement
    field_shapes: Shapes
    replay_shapes: Shapes     # S1
    replay_rows: int
    replay_cases: int         # of 63 canaries; 7 have every scale, kind and row
    clip_size: int            # coordinates of a row in the clip search
    clip_rows: int            # of 132 rows
    canaries: int             # S3
    canary_steps: int
    attack_steps: int         # S6: trials = steps times blocks
    attack_blocks: int
    many_rows: int            # S1: of one batch, each alone on its coordinate
    long_row: int             # S1, S5: coordinates
    many_tensors: int         # S1, S5

    @property
    def few(self) -> bool:
        """Whether a suite should leave out what costs a step and shows little: where a step takes very long."""
        return self.field_steps < 16


SIZES = {
    # What PRIVACY.md describes: 256 steps of 65,537 coordinates, 1e7 clip inputs, 8,000 attacks; and 2^21 + 5
    # coordinates, which no counter of 16 or 20 bits reaches.
    "full": Size(256, ((128, 256), (32_768,), (1,)), ((40, 25), (1,), (2000,)), 67, 63, 80_000, 132, 512, 400,
                 8, 1000, 2048, 2**21 + 5, 150),
    # A second on the CPU; sees what is wrong by 2 %.
    "small": Size(64, ((64, 128), (8192,), (1,)), ((20, 15), (1,), (700,)), 67, 63, 2000, 132, 128, 100,
                  2, 1000, 768, 2**18 + 5, 100),
    # Triton's interpreter takes a fifth of a second for any step, and for each of its tensors.
    "tiny": Size(8, ((64, 128), (8191,)), ((15, 23),), 5, 7, 600, 4, 64, 4, 1, 32, 40, 5000, 3),
}   # fmt: skip


class StepError(Exception):
    """The step under audit raised where no step may: on inputs that differ in private data only."""


@dataclass(frozen=True)
class Subject:
    step: Step
    backend: str
    seed: int
    size: Size
    device: torch.device
    structure: str = "coordinate"   # of the masks

    @property
    def replay_shapes(self) -> Shapes:
        """Row masks: also with rows of 32 coordinates, which the Triton kernels read where they lie."""
        more = {"coordinate": (), "row": (NARROW,), "mixed": ((WIDE, 32), NARROW)}
        return (*self.size.replay_shapes, *more[self.structure])

    @property
    def field_shapes(self) -> Shapes:
        return (*self.size.field_shapes, NARROW) if self.structure == "mixed" else self.size.field_shapes

    @property
    def ways(self) -> tuple[str, ...]:
        """How gradients are given (GIVEN) where what is dropped matters: under a row mask without the dropped rows, and
        whole."""
        return ("list",) if self.structure == "coordinate" else ("list", "grad_sample")

    def derived(self, purpose: str) -> int:
        """A 63-bit seed for one purpose."""
        digest = hashlib.sha256(f"dprs_kernels audit {self.seed} {purpose}".encode()).digest()
        return int.from_bytes(digest[:8], "little") >> 1

    def source(self, purpose: str) -> NoiseSource:
        return NoiseSource.seeded_for_tests(self.derived(purpose))

    def generator(self, purpose: str) -> torch.Generator:
        """Of data and coin flips; not of noise."""
        return torch.Generator().manual_seed(self.derived(f"{purpose} data"))

    def mask(self, shapes: Shapes, purpose: str, drop_rate: float = 0.5) -> KeepMask:
        seed = self.derived(f"{purpose} mask")
        return KeepMask.draw(shapes, drop_rate=drop_rate, seed=seed, draw=0, structure=self.structure)

    def released(
        self,
        batches: Sequence[Sequence[torch.Tensor]],
        *,
        noise: NoiseSource,
        keep: KeepMask | None = None,
        max_grad_norm: float | Sequence[float] = 1.0,
        noise_multiplier: float = 1.0,
        dtype: torch.dtype = torch.float64,
        loss_reduction: str = "sum",
        clipping: str = "flat",
        held: str = "NaN",
        given: str = "list",
    ) -> torch.Tensor:
        """One step: what it released, times the batch size; NaN where it wrote nothing. float64 [D]

        batches: micro-batches of [n, *shape] per parameter. One is passed as `given` says (GIVEN), several as lists in
        p.grad_sample, as accumulated backward passes leave them. Under a row mask a list holds the kept rows only, as
        sources that leave the others out make it. dtype: of the parameters. held: see HELD.
        """
        shapes = [tuple(grad.shape[1:]) for grad in batches[0]]
        params = [torch.nn.Parameter(torch.zeros(s, dtype=dtype, device=self.device)) for s in shapes]
        for param in params:
            param.grad = _held(param, held)
        placed: list[list[Any]] = [[grad.to(self.device) for grad in batch] for batch in batches]
        if given == "list" and keep is not None:
            placed = [[_kept_rows(grad, keep.kept_rows(p)) for p, grad in enumerate(batch)] for batch in placed]
        listed, handed = _handed(params, placed, given)
        try:
            self.step(
                listed, keep=keep, max_grad_norm=max_grad_norm, noise_multiplier=noise_multiplier,
                expected_batch_size=BATCH, noise=noise, grad_samples=handed, loss_reduction=loss_reduction,
                clipping=clipping, backend=self.backend,
            )   # fmt: skip
        except Exception as error:
            raise StepError(f"{type(error).__name__}: {error}") from error
        written = [torch.full_like(p, math.nan) if p.grad is None else p.grad for p in params]
        return torch.cat([grad.detach().reshape(-1).cpu() for grad in written]).double() * BATCH


def _held(param: torch.Tensor, held: str) -> torch.Tensor | None:
    """p.grad before the step: NaN, where whatever is not written shows; None, as zero_grad leaves it; numbers, as the
    step before left them; NaN in every other place of a buffer."""
    assert held in HELD
    if held == "none":
        return None
    if held == "strided":
        return torch.full((*param.shape, 2), math.nan, dtype=param.dtype, device=param.device)[..., 0]
    return torch.full_like(param, {"NaN": math.nan, "zeros": 0.0, "numbers": 3.0}[held])


def _kept_rows(grad: torch.Tensor, rows: RowSet | None) -> Any:
    return grad if rows is None else RowGrads(grad.index_select(1, rows.kept_on(grad.device)), rows)


def _handed(params: list[torch.nn.Parameter], batches: list[list[Any]], given: str) -> tuple[list[Any], Any]:
    """The arguments params and grad_samples."""
    assert given in GIVEN
    if len(batches) > 1 or given in ("grad_sample", "grad_batch"):
        for p, param in enumerate(params):
            held = [batch[p] for batch in batches]
            setattr(param, "grad_batch" if given == "grad_batch" else "grad_sample", held if len(held) > 1 else held[0])
        return [*params], None
    if given == "dict":   # in another order: the names say which is which
        names = [f"layer.{p}" for p in range(len(params))]
        return [*zip(names, params, strict=True)], dict(reversed([*zip(names, batches[0], strict=True)]))
    if given == "strided list":   # samples last, as some convolutions leave them
        return [*params], [grad.movedim(0, -1).contiguous().movedim(-1, 0) for grad in batches[0]]
    return [*params], batches[0]


def rows_of(flat: torch.Tensor, shapes: Shapes) -> list[torch.Tensor]:
    """[N, D] -> [N, *shape] per parameter."""
    parts = flat.split([math.prod(shape) for shape in shapes], dim=1)
    return [part.reshape(flat.shape[0], *shape) for part, shape in zip(parts, shapes, strict=True)]


def kept_of(keep: KeepMask) -> torch.Tensor:
    """bool [D]"""
    return torch.cat([part.reshape(-1).cpu() for part in keep.dense()])
