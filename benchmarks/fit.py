"""The exponent of growth: time = a size^b, fitted by least squares on logarithms."""

from __future__ import annotations

import math
from collections.abc import Sequence

BEYOND_CACHE = 64e6   # bytes: twice the L3 of the machine where this was written; smaller sizes are shown, not fitted


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
