"""What a session found: rows of races, figures with their targets, notes; and the tables printed at its end."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from harness import Case, dtype_name
from names import LIMIT, OURS
from racing import Bystanders, Contender
from rows import SCHEMA, Row, commit, cpu_name, library, standing

from dprs_kernels import __version__

DISTURBED = 0.10   # share of the CPUs taken by others, from which on a race is not worth keeping
LIBRARIES = {"Opacus": "opacus", "BackPACK": "backpack-for-pytorch", "numpy": "numpy", "fastDP": "fastDP"}


@dataclass(frozen=True)
class Subject:
    """What is raced: the columns that all rows of a race share."""

    question: str
    case: str
    N: int
    D: int
    bytes: int           # what the limit reads once
    rate: float = 0.0
    dtype: str = "fp32"
    tensors: int = 1
    device: str = "cpu"


def step_subject(case: Case, device: str = "cpu") -> Subject:
    return Subject(
        "step", case.id, case.shape.samples, case.shape.size, case.bytes, case.rate, dtype_name(case.dtype),
        len(case.shape.shapes), device,
    )   # fmt: skip


@dataclass(frozen=True)
class Figure:
    """A number that the project set itself a target for."""

    name: str
    value: float
    at_most: float | None = None
    at_least: float | None = None
    form: str = "{:.2f} x"
    case: str = ""       # of the race that it comes from

    @property
    def met(self) -> bool:
        low = self.at_least is None or self.value >= self.at_least
        return low and (self.at_most is None or self.value <= self.at_most)

    @property
    def target(self) -> str:
        low = "" if self.at_least is None else f">= {self.at_least:g}"
        high = "" if self.at_most is None else f"<= {self.at_most:g}"
        return f"{self.at_least:g} to {self.at_most:g}" if low and high else low or high


@dataclass
class Results:
    rows: list[Row] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)                 # who was left out and why; what was read, not timed
    watched: dict[str, Bystanders] = field(default_factory=dict)   # by case
    took: dict[str, float] = field(default_factory=dict)           # seconds, by bench file
    commit: str = field(default_factory=commit)
    date: str = field(default_factory=lambda: f"{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%dT%H:%MZ}")

    def watch(self, case: str) -> Bystanders:
        """Used around everything that is timed: with results.watch(case): ..."""
        return self.watched.setdefault(case, Bystanders())

    def disturbed(self) -> dict[str, float]:
        return {case: found.share for case, found in self.watched.items() if found.share > DISTURBED}

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def kept(self) -> list[Row]:
        """Rows that are worth a file: not those of disturbed races."""
        disturbed = self.disturbed()
        return [row for row in self.rows if row.case not in disturbed]

    def add(
        self,
        subject: Subject,
        contenders: Sequence[Contender],
        *,
        limit: Contender | dict[str, Contender],
        ours: Contender | None = None,
        sgd: Contender | None = None,
    ) -> list[Row]:
        """limit: of the race, or by setting where settings have limits of their own."""
        rows = []
        for c in contenders:
            base = limit if isinstance(limit, Contender) else limit[c.setting]
            columns: dict[str, Any] = dict(
                N=subject.N, D=subject.D, tensors=subject.tensors, dtype=subject.dtype, bytes=subject.bytes,
                rate=subject.rate if c.masked else 0.0, threads=torch.get_num_threads(),
            )   # fmt: skip
            columns.update(c.point)
            rows.append(Row(
                schema=SCHEMA, question=subject.question, commit=self.commit, date=self.date, device=subject.device,
                cpu=cpu_name(), torch=torch.__version__, case=subject.case, contender=c.name,
                library=library_of(c.name), setting=c.setting, role=c.role, best_ms=_digits(c.best * 1e3),
                median_ms=_digits(c.median * 1e3), spread_ms=_digits(c.spread * 1e3), rounds=len(c.trials),
                x_limit=_digits(c.over(base)), x_sgd=_digits(c.over(sgd)) if sgd else None,
                x_ours=_digits(c.over(ours)) if ours else None, ratio_spread=_digits(c.ratio_spread(sgd or base)),
                **columns,
            ))   # fmt: skip
        self.rows += rows
        return rows

    def add_memory(self, case: str, peaks: dict[str, float | None]) -> None:
        """MiB by contender; goes to the row that stands for it."""
        for contender, peak in peaks.items():
            row = standing(self.rows, case, contender)
            if row is not None and peak is not None:
                row.peak_mib = _digits(peak)


def _digits(value: float) -> float:
    """Four digits that mean something: no timing here has more."""
    return float(f"{value:.4g}")


@functools.cache
def library_of(contender: str) -> str:
    """By the first word of its name; what is nobody's is written in torch."""
    if contender.startswith(OURS):
        return f"{OURS} {__version__}"
    return library(LIBRARIES.get(contender.split()[0].rstrip(","), "torch"))


def race_table(results: Results) -> list[str]:
    """Fastest first within a race."""
    lines = [
        f"{cpu_name()}, {torch.get_num_threads()} threads, torch {torch.__version__}, commit {results.commit}",
        "x limit: best over best of one read of the data. x SGD: over non-private SGD. ours is: best over ours (* is "
        "ours at its default).",
        "spread: middle half of the rounds. peak: MiB during one step above what was there before, in a fresh process.",
        "",
    ]
    races: dict[tuple[str, str], list[Row]] = {}
    for row in results.rows:
        races.setdefault((row.question, row.case), []).append(row)
    for (question, case), rows in races.items():
        first = rows[0]
        lines.append(f"{question}: {case}   N = {first.N:,}, D = {first.D:,}, one read is {first.bytes / 1e6:,.1f} MB")
        lines.append(
            f"  {'contender':<30}{'setting':<17}{'best ms':>10}{'median':>10}{'spread':>9}{'x limit':>9}{'x SGD':>8}"
            f"{'ours is':>16}{'peak':>8}"
        )
        order = list(dict.fromkeys(row.setting for row in rows)) if question == "scaling" else [""]
        lines += map(_line, sorted(rows, key=lambda row: (order.index(row.setting) if order[1:] else 0, row.best_ms)))
        lines.append("")
    for case, share in results.disturbed().items():
        lines.append(f"Disturbed: other processes took {share:.0%} of the CPUs during {case}; not in the CSV, "
                     "run it again.")   # fmt: skip
    return lines + results.notes


def _line(row: Row) -> str:
    word = "" if row.x_ours is None else "faster" if row.x_ours >= 1 else "(slower)"
    peer = row.contender not in (LIMIT, OURS) or row.role in ("best", "other")
    faster = f"{row.x_ours:.2f} x {word}" if row.x_ours is not None and peer and row.role != "default" else ""
    setting = f"{row.setting}{' *' if row.role == 'default' else ''}"
    limit, sgd = ("" if x is None else f"{x:.2f}" for x in (row.x_limit, row.x_sgd))
    peak = "" if row.peak_mib is None else f"{row.peak_mib:.1f}"
    return (
        f"  {row.contender:<30}{setting:<17}{row.best_ms:>10.4g}{row.median_ms:>10.4g}{row.spread_ms:>9.3g}{limit:>9}"
        f"{sgd:>8}{faster:>16}{peak:>8}"
    ).rstrip()


def target_table(results: Results) -> list[str]:
    """Figures that the project set itself, against this session."""
    disturbed = results.disturbed()
    lines = [f"{'figure':<78}{'target':>14}{'measured':>13}"]
    for figure in results.figures:
        verdict = "" if not figure.target else "met" if figure.met else "MISSED"
        verdict = "disturbed" if figure.case in disturbed else verdict
        lines.append(f"{figure.name:<78}{figure.target:>14}{figure.form.format(figure.value):>13}   {verdict}".rstrip())
    return lines
