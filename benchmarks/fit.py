"""The exponent of growth: time = a size^b, fitted by least squares on logarithms."""

from __future__ import annotations

import math
from collections.abc import Sequence

CACHE = 32 * 2**20   # bytes: the L3 of the machine where this was written


def beyond_cache(axis: str, size: int, samples: int) -> bool:
    """Whether a point of `size` bytes is fitted; smaller ones are shown only. N: four times the cache, so that a read
    finds nothing of the last one there. D: one row fills it twice, so that neither its packed values nor the sums stay;
    what smaller rows leave there is another line than the one that is fitted.

    >>> beyond_cache("D", 16 * 2**26, samples=16), beyond_cache("D", 16 * 2**25, samples=16)
    (True, False)
    """
    return size > 4 * CACHE if axis == "N" else size // samples >= 2 * CACHE


def exponent(sizes: Sequence[float], times: Sequence[float]) -> float:
    """b of times = a sizes^b.

    >>> exponent([1, 2, 4], [3.0, 6.0, 12.0])
    1.0
    """
    if len(sizes) != len(times):
        raise ValueError(f"times: got {len(times)} for {len(sizes)} sizes; expected one per size")
    if len(set(sizes)) < 2:
        raise ValueError(f"sizes: got {list(sizes)}; a slope needs two different ones: run with --full for more")
    if min(*sizes, *times) <= 0:
        raise ValueError("sizes, times: expected positive numbers, since logarithms are fitted")
    x, y = [math.log(size) for size in sizes], [math.log(time) for time in times]
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    slope = sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / sum((a - mean_x) ** 2 for a in x)
    return round(slope, 12)   # beyond that it is rounding
