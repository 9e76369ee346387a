"""What moved between two result files, as ratios: python -m benchmarks compare OLD.csv NEW.csv

A ratio is to the limit of the same race (one read of the data), for training steps to non-private SGD, so machines of
different speed can be compared. It moved if it changed by more than either file's spread of that ratio, round by
round, and by more than FLOOR. A report, not a test: whoever reads it decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rows import Row, newest_machine, read_rows

FLOOR = 0.05   # relative; on two hyperthreads of one core the same commit gives ratios that differ by as much


@dataclass(frozen=True)
class Change:
    row: Row             # the new one
    old: float           # ratios
    new: float
    spread: float        # relative, the larger of the two files', at least FLOOR

    @property
    def relative(self) -> float:
        return self.new / self.old - 1

    @property
    def moved(self) -> bool:
        """Symmetric: swapping the files swaps slower and faster, nothing else."""
        return max(self.new / self.old, self.old / self.new) > 1 + self.spread


@dataclass(frozen=True)
class Comparison:
    changes: list[Change]
    only_old: list[Row]
    only_new: list[Row]


def compare_rows(old: Sequence[Row], new: Sequence[Row]) -> Comparison:
    """What ratios are taken to (limits; non-private SGD at its best, 1 by definition) is left out: over non-private SGD
    a plain read would say how two machines differ, not two commits."""
    before, after = _by_key(old), _by_key(new)
    changes = []
    for key in before.keys() & after.keys():
        a, b = before[key], after[key]
        if a.contender.startswith("read "):
            continue
        if a.ratio is not None and b.ratio is not None and not a.ratio == b.ratio == 1:
            spread = max(a.ratio_spread or 0.0, b.ratio_spread or 0.0, FLOOR)
            changes.append(Change(b, a.ratio, b.ratio, spread))
    changes.sort(key=lambda change: change.relative, reverse=True)
    only = [[row for key, row in one.items() if key not in other] for one, other in ((before, after), (after, before))]
    return Comparison(changes, *only)


def _by_key(rows: Sequence[Row]) -> dict[tuple[str, ...], Row]:
    return {row.key: row for row in sorted(rows, key=lambda row: row.date)}   # the newest of each


def compare_files(old_path: Path, new_path: Path) -> list[str]:
    """The report. ValueError where the files have nothing in common, or are no result files."""
    old, new = (_one_machine(path) for path in (old_path, new_path))
    found = compare_rows(old, new)
    if not found.changes:
        questions = [", ".join(sorted({row.question for row in rows})) for rows in (old, new)]
        raise ValueError(
            f"{old_path} ({questions[0]}) and {new_path} ({questions[1]}) have no case and contender in common; "
            "compare files of the same question, made by the same selection (-k, --full)"
        )
    base = "non-private SGD" if new[0].question == "training_step" else "one read of the data"
    lines = [f"OLD {old_path}: {_origin(old)}", f"NEW {new_path}: {_origin(new)}", f"Ratios are to {base}.", ""]
    moved = [change for change in found.changes if change.moved]
    for change in moved:
        row, word = change.row, "slower" if change.relative > 0 else "faster"
        name = " ".join(part for part in (row.contender, row.setting) if part)
        lines.append(
            f"{word}  {row.case:<28}{name:<42}{change.old:>9.3g} -> {change.new:<9.3g}{change.relative:>+8.1%}   "
            f"spread {change.spread:.0%}"
        )
    lines.append(f"{len(moved) or 'Nothing'} moved by more than the spread; {len(found.changes) - len(moved)} did not.")
    for word, rows in (("OLD", found.only_old), ("NEW", found.only_new)):
        if rows:
            cases = sorted({row.case for row in rows})
            lines.append(f"Only in {word}: {len(rows)} rows ({', '.join(cases[:6])}{', ...' if cases[6:] else ''}).")
    return lines


def _one_machine(path: Path) -> list[Row]:
    rows = newest_machine(read_rows(path))
    if not rows:
        raise ValueError(f"{path}: no rows; were all races disturbed? run the benchmark again on a quiet machine")
    return rows


def _origin(rows: Sequence[Row]) -> str:
    commits = ", ".join(sorted({row.commit for row in rows}))
    threads = ", ".join(str(k) for k in sorted({row.threads for row in rows}))
    return f"commit {commits}; {rows[-1].cpu}, {threads} threads, {rows[-1].device}; torch {rows[-1].torch}"
