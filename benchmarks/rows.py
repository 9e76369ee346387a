"""The rows that benchmarks leave behind: benchmarks/data/<question>.csv, one schema for all of them.

Rows of one case come from one race, so its ratios belong together: a newer race of the same machine, threads and case
replaces the older one as a whole. `schema` stands in every row, so that a file says by itself how to be read.
"""

from __future__ import annotations

import csv
import importlib.metadata
import io
import platform
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, get_type_hints

# 4: the limit is the fastest of four ways to read (limit.py), in the CPU's widest loads. In rows of schema 3 it read
# eight places at once on each thread, 16 bytes a load, in those of schema 2 one: up to twice as long, and x_limit is to
# that.
SCHEMA = 4
DATA = Path(__file__).parent / "data"
QUESTIONS = ("step", "training_step", "rows", "mask", "noise", "scaling")


@dataclass
class Row:
    schema: int
    question: str                # the file's stem
    commit: str
    date: str
    device: str                  # "cpu", or the GPU's name
    cpu: str
    threads: int
    torch: str                   # version
    case: str                    # the race
    N: int                       # samples, or the logical batch
    D: int
    tensors: int                 # that D is spread over
    dtype: str
    rate: float                  # dropped share; 0 where the contender has no mask
    contender: str
    library: str                 # the contender's, with its version
    setting: str                 # "micro-batch 32", "N = 256"
    role: str                    # training steps: "default" (our engine's micro-batch), "best", "other"
    best_ms: float
    median_ms: float
    spread_ms: float             # width of the middle half of the rounds
    rounds: int | None
    bytes: int                   # what the limit reads once
    x_limit: float | None        # best / best of the limit, as all three over the rounds that both were in
    x_sgd: float | None          # best / best of non-private SGD
    x_ours: float | None         # best / best of ours: how many times faster ours is
    ratio_spread: float | None   # middle half of x_sgd, or of x_limit, round by round, over its median
    peak_mib: float | None = None   # highest resident memory during one step above that before it, fresh process

    @property
    def race(self) -> tuple[str, ...]:
        """What a newer race replaces."""
        return self.device, self.cpu, str(self.threads), self.case

    @property
    def key(self) -> tuple[str, ...]:
        """The same measurement on any machine. Our engine's choice stays itself when the micro-batch changes."""
        return self.question, self.case, self.contender, "default" if self.role == "default" else self.setting

    @property
    def ratio(self) -> float | None:
        """What machines of different speed share: over non-private SGD where that was raced, else over the limit."""
        return self.x_limit if self.x_sgd is None else self.x_sgd


COLUMNS = tuple(column.name for column in fields(Row))
_TYPES = get_type_hints(Row)


def read_rows(path: Path) -> list[Row]:
    """ValueError for what is no file of this schema, and what to do about it."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); expected a CSV written by benchmarks/") from error
    reader = csv.DictReader(io.StringIO(text))
    found = reader.fieldnames or []
    if "schema" not in found:
        raise ValueError(f"{path}: no column 'schema', so it is not from these benchmarks, or older than schema "
                         f"{SCHEMA}; make it again with: pytest benchmarks/ --benchmark-only")   # fmt: skip
    rows = []
    for line, values in enumerate(reader, 2):
        if values["schema"] != str(SCHEMA):
            raise ValueError(f"{path}, line {line}: schema {values['schema']!r}, this code reads {SCHEMA}; make the "
                             "file again, or compare with the commit that its rows name")   # fmt: skip
        if missing := [name for name in COLUMNS if values.get(name) is None]:
            raise ValueError(f"{path}, line {line}: no value for {', '.join(missing)}; is the file cut off?")
        try:
            rows.append(Row(**{name: _parse(values[name], _TYPES[name]) for name in COLUMNS}))
        except ValueError as error:
            raise ValueError(f"{path}, line {line}: {error}; was it edited by hand?") from error
    return rows


def _parse(text: str, kind: Any) -> Any:
    if kind is str:
        return text
    optional = kind not in (int, float)
    if optional and text == "":
        return None
    return int(text) if kind in (int, int | None) else float(text)


def merged(old: Iterable[Row], new: Sequence[Row]) -> list[Row]:
    """Races that `new` has again are replaced, the others stay."""
    again = {row.race for row in new}
    return [row for row in old if row.race not in again] + list(new)


def write_rows(path: Path, rows: Iterable[Row]) -> None:
    from dprs_kernels.files import written_whole  # here, since the package brings torch along

    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    path.parent.mkdir(parents=True, exist_ok=True)
    with written_whole(path) as file:
        file.write(text.getvalue().encode())


def save(rows: Sequence[Row], folder: Path = DATA) -> list[Path]:
    """Each row to its question's file; which files were written."""
    written = []
    for question in dict.fromkeys(row.question for row in rows):
        path = folder / f"{question}.csv"
        old = read_rows(path) if path.exists() else []
        write_rows(path, merged(old, [row for row in rows if row.question == question]))
        written.append(path)
    return written


def standing(rows: Sequence[Row], case: str, contender: str) -> Row | None:
    """The row that stands for a contender in a race: ours at its default, others at their best."""
    found = [row for row in rows if (row.case, row.contender) == (case, contender)]
    return min(found, key=lambda row: ("default", "best", "", "other").index(row.role), default=None)


def newest_machine(rows: Sequence[Row]) -> list[Row]:
    """The rows of the machine that raced last: tables and pictures show one machine, never a mix."""
    if not rows:
        return []
    last = max(rows, key=lambda row: row.date)
    return [row for row in rows if (row.device, row.cpu) == (last.device, last.cpu)]


def cpu_name(info: Path = Path("/proc/cpuinfo")) -> str:
    """With family and model: a hypervisor may call a Zen 4 and a Zen 5 by the same name, "AMD EPYC"."""
    lines = info.read_text().splitlines() if info.exists() else []
    told = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in lines)}   # the last CPU's
    if "model name" not in told:
        return platform.processor() or platform.machine()
    family = f" (family {told['cpu family']}, model {told['model']})" if {"cpu family", "model"} <= told.keys() else ""
    return told["model name"] + family


def commit() -> str:
    """With "-dirty" where files differ from it; "unknown" outside a checkout."""
    command = ["git", "describe", "--always", "--dirty"]
    done = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def library(package: str) -> str:
    """Name and version; what runs from a source tree says its version itself, or has none."""
    try:
        return f"{package} {importlib.metadata.version(package)}"
    except importlib.metadata.PackageNotFoundError:
        return f"{package} {getattr(sys.modules.get(package), '__version__', '')}".rstrip()
