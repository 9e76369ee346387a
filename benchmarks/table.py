"""Markdown tables from benchmarks/data/*.csv alone: python -m benchmarks table

One machine, the one that raced last; machines.py has all of them. Losses are listed by name, not left to the reader.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from fit import beyond_cache, exponent
from names import LIMIT, OURS
from rows import DATA, QUESTIONS, Row, newest_machine, read_rows, standing


def markdown(folder: Path = DATA) -> str:
    """All questions that have a file."""
    parts = []
    for question in QUESTIONS:
        path = folder / f"{question}.csv"
        rows = newest_machine(read_rows(path)) if path.exists() else []
        if rows:
            parts += [f"## {TITLES[question]}", origin(rows), "\n".join(TABLES[question](rows)), losses(rows)]
    if not parts:
        raise ValueError(f"{folder}: no results; make them with: pytest benchmarks/ --benchmark-only")
    return "\n\n".join(part for part in parts if part)


TITLES = {
    "step": "The fused step, given the gradients: time over one read of them",
    "training_step": "Whole training steps: time over non-private SGD",
    "rows": "Masks of whole rows: time of a training step over non-private SGD",
    "mask": "Drawing a mask, half of the coordinates dropped: milliseconds",
    "noise": "One normal, on one core: nanoseconds",
    "scaling": "Growth of the fused step",
}


def origin(rows: Sequence[Row]) -> str:
    """Which machine and code; the contenders' libraries."""
    libraries = sorted({row.library for row in rows})
    commits = ", ".join(dict.fromkeys(row.commit for row in rows))
    threads = ", ".join(str(k) for k in sorted({row.threads for row in rows}))
    return (f"{rows[-1].cpu}, {rows[-1].device}, {threads} threads, commit {commits}; {', '.join(libraries)}. "
            "Best of interleaved rounds.")   # fmt: skip


def grid(head: Sequence[str], lines: Sequence[Sequence[str]]) -> list[str]:
    rule = ["---"] + ["---:"] * (len(head) - 1)
    return ["| " + " | ".join(line) + " |" for line in (head, rule, *lines)]


def matrix(rows: Sequence[Row], cases: Sequence[str], cell: Callable[[Row], str], heads: Sequence[str]) -> list[str]:
    """Contenders by cases, ours first and bold, then by their first ratio."""

    def first(contender: str) -> tuple[bool, float]:
        found = [row for case in cases if (row := standing(rows, case, contender)) is not None]
        return contender != OURS, found[0].x_ours or found[0].best_ms

    names = {row.contender for row in rows if row.case in cases}
    lines = []
    for name in sorted(names, key=first):
        cells = ["not raced" if (row := standing(rows, case, name)) is None else cell(row) for case in cases]
        lines.append([f"**{text}**" for text in (name, *cells)] if name == OURS else [name, *cells])
    return grid(["", *heads], lines)


def training_table(rows: Sequence[Row]) -> list[str]:
    def cell(row: Row) -> str:
        ratio = row.x_sgd if row.x_sgd is not None else 0.0
        peak = "" if row.peak_mib is None else f" ({row.peak_mib:.0f} MiB)"
        return f"{ratio:.2f} x{peak}"

    raced = [row for row in rows if row.contender != LIMIT]
    cases = list(dict.fromkeys(row.case for row in raced))
    note = "Ours at the micro-batch that its engine chooses, the others at their best; (MiB): peak memory of a step."
    return [*matrix(raced, cases, cell, cases), "", note]


def rows_table(rows: Sequence[Row]) -> list[str]:
    raced = [row for row in rows if row.contender != LIMIT and row.role != "other"]
    lines = []
    for row in sorted(raced, key=lambda row: (row.contender != "non-private SGD", row.contender != OURS, row.rate)):
        peak = "" if row.peak_mib is None else f"{row.peak_mib:.0f}"
        lines.append([row.contender, f"{row.rate:g}", f"{row.best_ms:.4g}", f"{row.x_sgd or 0.0:.2f} x", peak])
    return grid(["", "r", "ms", "over SGD", "peak MiB"], lines)


def step_table(rows: Sequence[Row]) -> list[str]:
    """Columns: fp32 at r = 0.5. What is left (other rates, bf16) in a second table, ours and its strongest peer."""

    def cell(row: Row) -> str:
        slower = "" if row.contender == OURS else f" ({row.x_ours:.2f} x ours)"
        peak = "" if row.peak_mib is None else f", {row.peak_mib * 2**20 / (4 * row.D):.1f} D floats"
        return f"{row.x_limit:.2f} x{slower}{peak}"

    raced = [row for row in rows if row.contender != LIMIT]
    cases = list(dict.fromkeys(row.case for row in raced))
    usual = [case for case in cases if case.endswith("-fp32-r0.5")]
    lines = matrix(raced, usual, cell, [_head(raced, case) for case in usual]) if usual else []
    lines += ["", "D floats: peak extra memory, p.grad included.", ""] if usual else []
    rest = []
    for case in (case for case in cases if case not in usual and case != "DP-CNN, rates"):
        ours = standing(raced, case, OURS)
        peers = [row for row in raced if row.case == case and row.contender != OURS]
        if ours is not None and peers:
            peer = min(peers, key=lambda row: row.best_ms)
            rest.append([case, f"{ours.x_limit:.2f} x", f"{peer.contender}: {peer.x_ours:.2f} x ours"])
    return lines + (grid(["other cases", "ours over one read", "strongest peer"], rest) if rest else [])


def _head(rows: Sequence[Row], case: str) -> str:
    row = next(row for row in rows if row.case == case)
    return f"{case.removesuffix('-fp32-r0.5')}, N = {row.N}, D = {row.D:,}"


def mask_table(rows: Sequence[Row]) -> list[str]:
    cases = list(dict.fromkeys(row.case for row in sorted(rows, key=lambda row: row.D)))

    def cell(row: Row) -> str:
        return f"{row.best_ms:.3g}" + ("" if row.peak_mib is None else f" ({row.peak_mib:.0f} MiB)")

    return matrix(rows, cases, cell, [case.removeprefix("mask, ") for case in cases])


def noise_table(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in sorted(rows, key=lambda row: (row.D, row.best_ms)):
        text = [row.contender, f"{row.D:,}", f"{nanoseconds(row):.2f}", f"{row.spread_ms * 1e6 / row.D:.2f}"]
        lines.append([f"**{part}**" for part in text] if row.contender == OURS else text)
    return grid(["", "normals", "ns each", "spread"], lines)


def nanoseconds(row: Row) -> float:
    return row.best_ms * 1e6 / row.D


def scaling_table(rows: Sequence[Row]) -> list[str]:
    ours = [row for row in rows if row.contender == OURS]
    lines = [
        [row.case, row.setting, f"{row.best_ms:.3g}", f"{row.x_limit:.2f} x",
         "" if row.peak_mib is None else f"{row.peak_mib:.1f}"] for row in ours
    ]   # fmt: skip
    table = grid(["", "point", "ms", "over one read", "peak MiB"], lines)
    for axis in ("N", "D"):
        if (slope := fitted(ours, axis)) is not None:
            read = fitted([row for row in rows if row.contender == LIMIT], axis)
            table += ["", f"Time grows as {axis}^{slope:.3f} beyond the cache (one read: {axis}^{read:.3f})."]
    if (two := two_threads(rows)) is not None:
        table += ["", "Two threads over one: the step {:.2f} x, one read {:.2f} x.".format(*two)]
    return table


def two_threads(rows: Sequence[Row]) -> tuple[float, float] | None:
    """How many times faster two threads are than one: ours, and one read."""
    times = [[row.best_ms for k in (1, 2) for row in rows if (row.setting, row.contender) == (f"threads = {k}", name)]
             for name in (OURS, LIMIT)]   # fmt: skip
    return (times[0][0] / times[0][1], times[1][0] / times[1][1]) if [len(t) for t in times] == [2, 2] else None


def fitted(rows: Sequence[Row], axis: str) -> float | None:
    """The exponent in N or D of rows with one contender; None where too few sizes are beyond the cache."""
    chosen = [row for row in rows if row.case == f"against {axis}" and beyond_cache(axis, row.bytes, row.N)]
    sizes = [float(getattr(row, axis)) for row in chosen]
    return exponent(sizes, [row.best_ms for row in chosen]) if len(set(sizes)) > 1 else None


def losses(rows: Sequence[Row]) -> str:
    """Peers that were faster than ours, by name."""
    found = []
    for row in rows:
        peer = not row.contender.startswith((OURS, "read ")) and row.contender != "non-private SGD"
        if peer and row.role != "other" and row.x_ours is not None and row.x_ours < 1:
            found.append(f"{row.contender} in {row.case} takes {row.x_ours:.2f} of our time")
    return f"Where ours loses: {'; '.join(found)}." if found else ""


TABLES: dict[str, Callable[[Sequence[Row]], list[str]]] = {
    "step": step_table,
    "training_step": training_table,
    "rows": rows_table,
    "mask": mask_table,
    "noise": noise_table,
    "scaling": scaling_table,
}
