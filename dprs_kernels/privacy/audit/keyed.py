"""Part of S5: a step's noise is what its key says, integer for integer:

    release / g = rint(sigma C z_j / g),   z_j from (key, step, padded coordinate j),   g = 2^floor(log2(sigma C 2^-20))

for empty steps and steps on zeros, other sigma and C, steps that need 64 bits, many coordinates, many tensors, and keys
from the operating system.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch

from dprs_kernels import reference
from dprs_kernels.layout import Layout
from dprs_kernels.mask import KeepMask
from dprs_kernels.noise import NoiseSource
from dprs_kernels.privacy.audit.reach import long_shapes, many_shapes
from dprs_kernels.privacy.audit.report import Finding
from dprs_kernels.privacy.audit.subject import Shapes, Subject, kept_of

# sigma, C, step: steps that 32 bits, a float64 and a signed integer do not hold.
CASES = ((1.0, 1.0, 0), (1.0, 1.0, 2**32 + 3), (0.02, 50.0, 2**53 + 1), (300.0, 0.01, 2**64 - 1))
# (seed, step, coordinate) of a far normal, found by trying 5e8: fp32 noise stops at 5.77 sigma, tl.randn's at 5.68.
FAR = (0, 133_149, 551)
FAR_NORMAL = -6.467816318503025


def run(subject: Subject) -> Iterator[Finding]:
    shapes = subject.size.replay_shapes
    for sigma, bound, step in CASES:
        source = moved(subject.source("S5"), step)
        got = _released(subject, shapes, source, noise_multiplier=sigma, max_grad_norm=bound)
        z = normals(shapes, _key(subject.source("S5")), step)
        yield _compared(f"sigma = {sigma:g}, C = {bound:g}, step {step:,}", [(got, z)], sigma * bound)
    yield _long(subject)
    many = many_shapes(subject.size.many_tensors)
    z = normals(many, _key(subject.source("S5")), 0)
    yield _compared(f"{len(many)} tensors", [(_released(subject, many, subject.source("S5")), z)])
    yield _secure(subject)
    yield _far(subject)


def normals(shapes: Shapes, key: bytes, step: int) -> torch.Tensor:
    """z of every coordinate, by the reference. float64 [D]"""
    layout = Layout.of(shapes)
    padded = torch.from_numpy(reference.normals(reference.words(key, step, 0, layout.padded // 8)))
    return torch.cat([part.reshape(-1) for part in layout.split(padded)])


def moved(source: NoiseSource, step: int) -> NoiseSource:
    """A seeded source, at another step."""
    source.load_state_dict({**source.state_dict(), "step": step})
    return source


def _key(source: NoiseSource) -> bytes:
    """Costs the source a step."""
    key = source.claim().key
    assert isinstance(key, bytes)
    return key


def _released(subject: Subject, shapes: Shapes, source: NoiseSource, rows: int = 0, **options: Any) -> torch.Tensor:
    return subject.released([[torch.zeros(rows, *shape) for shape in shapes]], noise=source, **options)


def _compared(where: str, pairs: list[tuple[torch.Tensor, torch.Tensor]], std: float = 1.0) -> Finding:
    """(released, z) each. libm may differ from a kernel in the last bit, which moves one value in 2^27 by one grid
    unit: three of 2^21 values is as rare as ALPHA. No value may be further off."""
    grid = 2.0 ** math.floor(math.log2(std * 2.0**-20))
    off = torch.cat([(got / grid - (z * (std / grid)).round()).abs() for got, z in pairs])
    far, near = int((~(off <= 1)).sum()), int((off == 1).sum())   # NaN is far
    allowed = 1 + off.numel() // 2**20
    return Finding("S5", f"a step's noise against its key, {where}, {off.numel():,} values", f"{far + near} differ",
                   f"<= {allowed}, by 1 unit", far == 0 and near <= allowed)   # fmt: skip


def _long(subject: Subject) -> Finding:
    """As many coordinates as no narrow counter reaches; also on a row of zeros, under a mask."""
    shapes = long_shapes(subject.size.long_row)
    z = normals(shapes, _key(subject.source("S5")), 0)
    keep: KeepMask = subject.mask(shapes, "S5")
    masked = _released(subject, shapes, subject.source("S5"), rows=1, keep=keep)
    pairs = [(_released(subject, shapes, subject.source("S5")), z), (masked, torch.where(kept_of(keep), z, 0.0))]
    return _compared(f"{z.numel():,} coordinates, all and half kept", pairs)


def _secure(subject: Subject) -> Finding:
    """Keys from the operating system, as in any private run: step 0 tells the key, the next ones are audited."""
    shapes, pairs = subject.size.replay_shapes, []
    for steps in ((1, 2), (1,)):
        source = NoiseSource()
        key = _key(source)
        for step in steps:
            pairs.append((_released(subject, shapes, source, held="none"), normals(shapes, key, step)))
    return _compared("2 secure sources", pairs)


def _far(subject: Subject) -> Finding:
    """One step in a million has a value so far out; where a tail is cut, it shows."""
    seed, step, place = FAR
    source = moved(NoiseSource.seeded_for_tests(seed), step)
    got = float(subject.released([[torch.zeros(0, place + 1)]], noise=source)[place])
    return Finding("S5", "a step's noise where it is -6.47 sigma", f"{got:.5f}", f"{FAR_NORMAL:.5f}",
                   abs(got - FAR_NORMAL) <= 2.0**-20)   # fmt: skip
