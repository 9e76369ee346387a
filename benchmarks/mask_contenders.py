"""Who draws masks in bench_mask.py: D coordinates, half of them dropped. Shared with memory.py."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from limit import fastest_read
from names import OURS
from racing import Contender

from dprs_kernels import KeepMask

RATE = 0.5
READ, PERMUTATION, BERNOULLI = "read D floats once (limit)", "torch.randperm", "torch.rand < r"


def contenders(size: int) -> list[Contender]:
    """The limit is a pass over D floats: what touching every weight once costs. torch.randperm is the paper's way (its
    first r D entries are dropped); torch.rand < r does less: the number of dropped coordinates is not exact."""
    floats, dropped, draws = torch.ones(size), math.floor(RATE * size), itertools.count()
    read = fastest_read([floats])
    return [
        Contender(READ, lambda sigma: read(), masked=False, peer=False),
        Contender(OURS, lambda sigma: KeepMask.draw([(size,)], drop_rate=RATE, seed=0, draw=next(draws)), peer=False),
        Contender(PERMUTATION, lambda sigma: torch.randperm(size)[:dropped]),
        Contender(BERNOULLI, lambda sigma: torch.rand(size) < RATE),
    ]


def wrong(contender: Contender, size: int) -> str:
    """Why the drawn mask is wrong, or "": the number dropped, and how many of them lie in the first half (six standard
    deviations of a draw without putting back)."""
    gone = _dropped(contender.run(1.0), size)
    count, half, expected = int(gone.sum()), size // 2, math.floor(RATE * size)
    slack = 6 * math.sqrt(size * RATE * (1 - RATE)) if contender.name == BERNOULLI else 0.0
    if abs(count - expected) > slack:
        return f"{count} coordinates dropped, expected {expected}"
    first, deviation = int(gone[:half].sum()), math.sqrt(size * RATE * (1 - RATE)) / 2
    if abs(first - count / 2) > 6 * deviation:
        return f"{first} of {count} dropped coordinates lie in the first half"
    return ""


def _dropped(drawn: Any, size: int) -> torch.Tensor:
    """Bool [D], whatever form the contender's mask has."""
    if isinstance(drawn, KeepMask):
        return ~drawn.dense()[0]
    if drawn.dtype == torch.bool:
        return drawn
    return torch.zeros(size, dtype=torch.bool).index_fill_(0, drawn, True)
