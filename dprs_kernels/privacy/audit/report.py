"""Finding and Report: what an audit tried, what it saw, what it allows, and the verdict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Finding:
    """One line of the report. figure and threshold are text, in the same unit."""

    suite: str
    tried: str
    figure: str
    threshold: str
    passed: bool


@dataclass(frozen=True)
class Report:
    """All findings of an audit. str() is a table; `passed` is whether every finding passed.

    >>> report = Report("my_step", "cpu", 0, (Finding("S4", "zero gradients", "identical", "identical", True),))
    >>> report.passed, report.failed
    (True, ())
    """

    step: str
    backend: str
    seed: int
    findings: tuple[Finding, ...]
    structure: str = "coordinate"   # of the masks

    @property
    def passed(self) -> bool:
        return not self.failed

    @property
    def failed(self) -> tuple[str, ...]:
        """The suites with a failed finding, in order, each once."""
        return tuple(dict.fromkeys(finding.suite for finding in self.findings if not finding.passed))

    def __str__(self) -> str:
        rows = [
            (f.suite, f.tried, f.figure, f.threshold, "passed" if f.passed else "FAILED") for f in self.findings
        ]   # fmt: skip
        suites = dict.fromkeys(finding.suite for finding in self.findings)
        end = (
            f"passed: {len(rows)} findings in {', '.join(suites)}" if self.passed
            else f"FAILED: {', '.join(self.failed)}"
        )   # fmt: skip
        masks = "" if self.structure == "coordinate" else f", {self.structure} masks"
        title = f"audit of {self.step}, backend {self.backend}, seed {self.seed}{masks}"
        return "\n".join([title, "", table(("suite", "tried", "seen", "allowed", "verdict"), rows), "", end])


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns as wide as their widest entry, two spaces apart.

    >>> print(table(("a", "b"), [("long", "1")]))
    a     b
    long  1
    """
    widths = [max(len(row[c]) for row in [head, *rows]) for c in range(len(head))]
    lines = ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in [head, *rows]]
    return "\n".join(lines)
