"""The audit: suites S1-S6, which try to catch a step function in anything that would make its epsilon untrue.

    S1  replay: what a canary changes, under the same noise, is its clipped part, for every clipping, dtype and size;
        the clip search
    S2  the noise field: scale, shape and freshness of the noise of empty steps; secure sources
    S3  canaries: epsilon bounded from below, against the accountant
    S4  zero gradients: the release does not depend on their number, nor on how gradients are handed over
    S5  words: ChaCha20's known answers, the transform, the step's noise against its key, also far from the start
    S6  the lattice and the precision attack

A passed audit is no proof: it is the absence of every fault that the suites know.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain

import torch

from dprs_kernels import backends
from dprs_kernels.privacy.audit import (
    attacks,
    canaries,
    clip_search,
    field,
    handover,
    keyed,
    reach,
    replay,
    secure,
    variants,
    words,
    zeros,
)
from dprs_kernels.privacy.audit.report import Finding, Report
from dprs_kernels.privacy.audit.subject import SIZES, Step, StepError, Subject
from dprs_kernels.step import fused_rs_dp_step
from dprs_kernels.structure import STRUCTURES

__all__ = ["SUITES", "Finding", "Report", "attack_table", "audit"]


Suite = Callable[[Subject], Iterator[Finding]]


def _chained(*parts: Suite) -> Suite:
    return lambda subject: chain.from_iterable(part(subject) for part in parts)


SUITES: dict[str, Suite] = {
    "S1": _chained(replay.run, variants.run, reach.run, clip_search.run),
    "S2": _chained(field.run, secure.run),
    "S3": canaries.run,
    "S4": _chained(zeros.run, handover.run),
    "S5": _chained(words.run, keyed.run),
    "S6": attacks.run,
}


def audit(
    step: Step = fused_rs_dp_step,
    *,
    backend: str = "auto",
    suites: Sequence[str] | None = None,
    seed: int = 0,
    size: str | None = None,
    structure: str = "coordinate",
) -> Report:
    """Runs the suites on a step function and reports what was tried, seen, allowed, and the verdict of each.

    step: any function with fused_rs_dp_step's signature, e.g. a modified one. Its noise must come from the
        NoiseSource that it is given, since most suites replay a key.
    backend: handed to the step, and what S5 takes words from.
    suites: some of S1 .. S6, None for all. seed: of data, coins and noise: the same seed gives the same report.
    size: "full" (PRIVACY.md's figures), "small" (a tenth), "tiny"; None is full, or tiny in Triton's interpreter.
    structure: of the masks. "row", "mixed": whole rows drop; gradients come with and without them.

    A sound step fails a statistical test with probability 1e-6 (levels.py). An exception of the step is a failure:
    whether one is raised must not depend on private data.

    >>> audit(backend="reference", suites=["S4"], size="tiny").passed
    True
    """
    subject = _subject(step, backend, seed, size, structure)
    findings: list[Finding] = []
    for suite in _suites(suites):
        try:
            findings.extend(SUITES[suite](subject))
        except StepError as error:
            findings.append(Finding(suite, "the step runs", f"raised {error}", "no exception", False))
    return Report(getattr(step, "__name__", repr(step)), subject.backend, seed, tuple(findings), structure)


def attack_table(
    step: Step = fused_rs_dp_step, *, backend: str = "auto", seed: int = 0, size: str | None = None
) -> str:
    """The attacks of S6 on torch.normal, on the sum of four Gaussians and on the step, side by side."""
    return attacks.compare(_subject(step, backend, seed, size))


def _subject(step: Step, backend: str, seed: int, size: str | None, structure: str = "coordinate") -> Subject:
    if not callable(step):
        raise ValueError(f"step: got {type(step).__name__}; expected a function with fused_rs_dp_step's signature")
    if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
        raise ValueError(f"seed: got {seed!r}; expected an integer of at least 0")
    if size is not None and size not in SIZES:
        raise ValueError(f"size: got {size!r}; expected one of {', '.join(SIZES)}")
    if structure not in STRUCTURES:
        raise ValueError(f"structure: got {structure!r}; expected one of {', '.join(map(repr, STRUCTURES))}")
    device, interpreted = torch.device("cpu"), False
    if backend == "triton":
        from dprs_kernels.backends import triton

        interpreted = triton.interpreted()
        if not interpreted and torch.cuda.is_available():
            device = torch.device("cuda")
    name = backends.resolve(backend, device).__name__.rpartition(".")[2]
    return Subject(step, name, seed, SIZES[size or ("tiny" if interpreted else "full")], device, structure)


def _suites(suites: Sequence[str] | None) -> list[str]:
    """In order, each once."""
    if suites is None:
        return list(SUITES)
    if isinstance(suites, str) or not suites:
        raise ValueError(f"suites: got {suites!r}; expected a list with some of {', '.join(SUITES)}, or None for all")
    unknown = [suite for suite in suites if suite not in SUITES]
    if unknown:
        raise ValueError(f"suites: got {unknown[0]!r}; expected some of {', '.join(SUITES)}")
    return [suite for suite in SUITES if suite in suites]
