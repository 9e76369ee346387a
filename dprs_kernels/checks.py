"""Questions that every room asks about its arguments."""

from __future__ import annotations

import numbers
from typing import TypeGuard


def is_number(value: object) -> TypeGuard[float]:
    """A real number, and not True or False, which Python counts among the integers."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
