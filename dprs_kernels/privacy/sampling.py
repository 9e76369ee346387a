"""Poisson sampling with secret bits: the randomness that privacy amplification rests on (PRIVACY.md R3).

An accountant's sample_rate is worth something only while nobody can tell which samples were drawn, so the bits
come from the operating system: no seed, no torch generator, no relation to the keys of noise and mask.
"""

from __future__ import annotations

import math
import numbers
import os

import numpy as np
import torch


def poisson_indices(size: int, sample_rate: float) -> torch.Tensor:
    """Each of 0 .. size-1 independently with probability floor(q 2^64) / 2^64, ascending. int64 [n]

    n is random and may be 0: an empty batch is a batch, and its step is taken and charged like any other. n is
    also private. The probability is never above q = sample_rate, so accounting with q is on the safe side.

    >>> poisson_indices(3, sample_rate=1.0)
    tensor([0, 1, 2])
    """
    if isinstance(size, bool) or not isinstance(size, numbers.Integral) or size < 0:
        raise ValueError(f"size: got {size!r}; expected an integer of at least 0, the number of samples in the data")
    if isinstance(sample_rate, bool) or not isinstance(sample_rate, numbers.Real) or not 0 < sample_rate <= 1:
        raise ValueError(
            f"sample_rate: got {sample_rate!r}; expected a number in (0, 1], the probability that a sample is drawn"
        )
    threshold = math.floor(math.ldexp(float(sample_rate), 64))   # exact: a float times a power of two
    if threshold == 2**64:   # q = 1: every word is below it, and it is no 64-bit word itself
        return torch.arange(int(size))
    words = np.frombuffer(os.urandom(8 * int(size)), dtype="<u8")
    return torch.from_numpy(np.flatnonzero(words < np.uint64(threshold)).astype(np.int64))
