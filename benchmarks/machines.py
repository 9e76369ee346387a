"""The same few figures of every machine that has raced: the last table of python -m benchmarks table

Tables and pictures show the machine that raced last. What holds on one may not hold on another, whose memory is slower
or whose cores wait for something else: here they stand side by side, each with the commit that it raced.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from names import LIMIT, OURS
from rows import DATA, QUESTIONS, Row, read_rows, standing
from table import fitted, grid, markdown, nanoseconds, two_threads

USUAL = "-fp32-r0.5"   # of the cases of bench_step


@dataclass(frozen=True)
class Line:
    """One figure: what it is called, and its text from a machine's rows of one question; None where it did not race."""

    name: str
    question: str
    text: Callable[[Sequence[Row]], str | None]


def everything(folder: Path = DATA) -> str:
    """All of the tables: the questions of the machine that raced last, then the machines side by side."""
    others = machines_table(folder)
    return "\n\n".join([markdown(folder), *(["## Machines side by side", "\n".join(others)] if others else [])])


def machines_table(folder: Path) -> list[str]:
    """Markdown; nothing where fewer than two machines have raced."""
    rows = {q: read_rows(folder / f"{q}.csv") for q in QUESTIONS if (folder / f"{q}.csv").exists()}
    latest: dict[tuple[str, str], str] = {}
    for row in (row for found in rows.values() for row in found):
        latest[row.device, row.cpu] = max(row.date, latest.get((row.device, row.cpu), ""))
    machines = sorted(latest, key=lambda machine: latest[machine], reverse=True)
    if len(machines) < 2:
        return []
    of = [{q: [row for row in found if (row.device, row.cpu) == machine] for q, found in rows.items()}
          for machine in machines]   # fmt: skip
    lines = [[line.name, *(line.text(found.get(line.question, ())) or "" for found in of)] for line in LINES]
    commits = ["commit", *map(_commits, of)]
    return grid(["", *(cpu if device == "cpu" else device for device, cpu in machines)], [commits, *lines])


def _commits(rows: Mapping[str, Sequence[Row]]) -> str:
    """Those of the races that LINES look at, newest first."""
    found = {row.commit: row.date for line in LINES for row in rows.get(line.question, ()) if _shown(row)}
    return ", ".join(sorted(found, key=lambda commit: found[commit], reverse=True))


def _shown(row: Row) -> bool:
    return row.question != "step" or row.case.endswith(USUAL)


def _bandwidth(rows: Sequence[Row]) -> str | None:
    row = standing(rows, f"DP-CNN{USUAL}", LIMIT)
    return None if row is None else f"{row.bytes / row.best_ms / 1e6:.0f} GB/s"


def _step(case: str) -> Callable[[Sequence[Row]], str | None]:
    def text(rows: Sequence[Row]) -> str | None:
        row = standing(rows, case + USUAL, OURS)
        return None if row is None else f"{row.x_limit:.2f}"

    return text


def _peer(rows: Sequence[Row]) -> str | None:
    row = standing(rows, f"DP-CNN{USUAL}", "Opacus, no mask")
    return None if row is None else f"{row.x_ours:.1f}"


def _training(case: str) -> Callable[[Sequence[Row]], str | None]:
    def text(rows: Sequence[Row]) -> str | None:
        ours = standing(rows, case, OURS)
        peers = {row.contender for row in rows if row.case == case} - {LIMIT, OURS, "non-private SGD"}
        ratios = [row.x_ours for peer in peers if (row := standing(rows, case, peer)) is not None and row.x_ours]
        return None if ours is None or not ratios else f"{ours.x_sgd:.2f} ({min(ratios):.1f})"

    return text


def _row_masks(rows: Sequence[Row]) -> str | None:
    found = [row for row in rows if row.contender == f"{OURS}, rows, r = 0.9" and row.role != "other"]
    return f"{found[-1].x_sgd:.2f}" if found else None


def _noise(rows: Sequence[Row]) -> str | None:
    found = [row for row in rows if row.contender == OURS]
    return f"{nanoseconds(min(found, key=lambda row: row.D)):.1f} ns" if found else None


def _growth(axis: str) -> Callable[[Sequence[Row]], str | None]:
    def text(rows: Sequence[Row]) -> str | None:
        slopes = [fitted([row for row in rows if row.contender == name], axis) for name in (OURS, LIMIT)]
        return " ".join(form.format(slope) for form, slope in zip(("{:.2f}", "({:.2f})"), slopes, strict=True)
                        if slope is not None) or None   # fmt: skip

    return text


def _threads(rows: Sequence[Row]) -> str | None:
    ratios = two_threads(rows)
    return None if ratios is None else "{:.2f} ({:.2f})".format(*ratios)


LINES = (
    Line("one read of DP-CNN's gradients", "step", _bandwidth),
    Line("fused step over one read: DP-CNN, N = 256", "step", _step("DP-CNN")),
    Line("... DP-CNN/S, N = 2048", "step", _step("DP-CNN/S")),
    Line("... one tensor of 11M, N = 16", "step", _step("one-tensor-16")),
    Line("Opacus without mask over ours, DP-CNN", "step", _peer),
    Line("whole step over SGD (strongest peer over ours): DP-CNN", "training_step", _training("DP-CNN, 256")),
    Line("... DP-CNN/S", "training_step", _training("DP-CNN/S, 2048")),
    Line("... transformer", "training_step", _training("transformer, 64")),
    Line("... ResNet-20", "training_step", _training("ResNet-20, 64")),
    Line("... DP-CNN with row masks, r = 0.9", "rows", _row_masks),
    Line("one normal, one core, release included", "noise", _noise),
    Line("time grows as N^ (a read as)", "scaling", _growth("N")),
    Line("time grows as D^ (a read as)", "scaling", _growth("D")),
    Line("two threads over one (a read)", "scaling", _threads),
)
