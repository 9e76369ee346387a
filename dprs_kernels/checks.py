"""Questions that every room asks about its arguments."""

from __future__ import annotations

import numbers
from typing import TypeGuard


def is_number(value: object) -> TypeGuard[float]:
    """A real number that fits a float, and not True or False, which Python counts among the integers."""
    if not isinstance(value, numbers.Real) or isinstance(value, bool):
        return False
    try:
        float(value)
    except OverflowError:   # an integer beyond 2^1024
        return False
    return True
