"""Part of S2: noise under keys from the operating system, which no seed repeats, as every private run has it.

Two sources, one empty step each: present, of the right scale, and different. The report says whether, not what: its
figures would differ from run to run.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch

from dprs_kernels.noise import NoiseSource
from dprs_kernels.privacy.audit import levels
from dprs_kernels.privacy.audit.field import BOUND, SIGMA
from dprs_kernels.privacy.audit.report import Finding
from dprs_kernels.privacy.audit.subject import Subject


def run(subject: Subject) -> Iterator[Finding]:
    empty = [torch.zeros(0, *shape) for shape in subject.size.field_shapes]
    first, second = (
        subject.released([empty], noise=NoiseSource(), max_grad_norm=BOUND, noise_multiplier=SIGMA,
                         dtype=torch.float32, held="none") / (SIGMA * BOUND)
        for _ in range(2)
    )   # fmt: skip
    n = first.numel()
    low, high = (math.sqrt(bound / n) for bound in levels.chi_square(n, 2))
    stds = [float(x.square().mean().sqrt()) for x in (first, second)]
    wrong = [std for std in stds if not low <= std <= high]
    yield Finding("S2", "std under two secure keys, in sigma C", f"{wrong[0]:.5g}" if wrong else "within",
                  f"{low:.5g} .. {high:.5g}", not wrong)   # fmt: skip
    share = abs(float(first @ second)) / float(levels.products(torch.tensor(n), 1))
    fresh = share <= 1
    yield Finding("S2", "correlation of two secure keys", "within" if fresh else f"{share:.3g} thresholds",
                  "1 threshold", fresh)   # fmt: skip
