"""Rows of whole training steps, their table, and benchmarks/data/training_step.csv."""

from __future__ import annotations

import csv
import importlib.metadata
from collections.abc import Collection
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path

CSV = Path(__file__).parent / "data" / "training_step.csv"
KEY = ("device", "threads", "model", "batch", "contender", "micro_batch")   # what a newer measurement replaces


@dataclass
class TrainingRow:
    commit: str
    date: str
    device: str
    threads: int
    torch: str
    opacus: str
    backpack: str
    model: str
    D: int
    batch: int                 # logical
    rate: float                # 0: the contender has no mask
    contender: str
    micro_batch: int
    role: str                  # "default" (of our engine), "best" (of a contender's micro-batches), "other"
    best_s: float
    median_s: float
    spread_s: float            # width of the middle half of the turns
    turns: int
    x_plain: float             # best / best of non-private SGD
    x_ours: float              # best / best of ours at its default micro-batch
    peak_mb: float | None = None   # MiB during one step, see training_memory.py

    @property
    def race(self) -> str:
        """The name under which the session watched for bystanders."""
        return race_name(self.model)


@dataclass
class TrainingSession:
    rows: list[TrainingRow] = field(default_factory=list)
    left_out: list[tuple[str, str, str]] = field(default_factory=list)   # model, contender, why

    def find(self, model: str, contender: str) -> TrainingRow | None:
        """The row that stands for the contender: ours at its default micro-batch, others at their best."""
        found = [r for r in self.rows if (r.model, r.contender) == (model, contender)]
        order = ("default", "best", "other")
        return min(found, key=lambda row: order.index(row.role), default=None)


def race_name(model: str) -> str:
    return f"training {model}"


def version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def write_training_csv(session: TrainingSession, disturbed: Collection[str]) -> None:
    """Newer rows replace older ones of the same key; the others stay. Rows of disturbed races are not written."""
    rows: dict[tuple[str, ...], dict[str, object]] = {}
    if CSV.exists():
        with CSV.open(newline="") as file:
            for old in csv.DictReader(file):
                rows[tuple(old[k] for k in KEY)] = dict(old)
    for row in session.rows:
        if row.race not in disturbed:
            rows[tuple(str(getattr(row, k)) for k in KEY)] = asdict(row)
    if not rows:
        return
    CSV.parent.mkdir(exist_ok=True)
    with CSV.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(TrainingRow)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows.values())


def training_table(session: TrainingSession) -> list[str]:
    """Fastest first, within a model."""
    lines = [
        "Whole training steps: forward, backward, clip, mask, noise, SGD. x SGD: best over best of non-private SGD at "
        "its best",
        "micro-batch. ours is: best over best of ours at its default (*). peak: MiB during one step, weights and data "
        "not counted.",
        "",
        f"{'model':<12}{'batch':>6}  {'contender':<25}{'micro':>6}{'best s':>9}{'median':>9}{'spread':>8}{'x SGD':>8}"
        f"{'ours is':>16}{'peak':>8}",
    ]
    for model in dict.fromkeys([row.model for row in session.rows] + [name for name, _, _ in session.left_out]):
        head = model
        for row in sorted((r for r in session.rows if r.model == model), key=lambda r: r.best_s):
            word = "faster" if row.x_ours >= 1 else "(slower)"
            faster = "" if row.role == "default" else f"{row.x_ours:.2f} x {word}"
            micro = f"{row.micro_batch}{'*' if row.role == 'default' else ' '}"
            peak = "" if row.peak_mb is None else f"{row.peak_mb:.0f}"
            lines.append(
                f"{head:<12}{row.batch if head else '':>6}  {row.contender:<25}{micro:>6}{row.best_s:>9.3f}"
                f"{row.median_s:>9.3f}{row.spread_s:>8.3f}{row.x_plain:>8.2f}{faster:>16}{peak:>8}".rstrip()
            )
            head = ""
        for name, contender, why in session.left_out:
            if name == model:
                lines.append(f"{head:<12}{'':>6}  {contender:<25}left out: {why}")
                head = ""
        lines.append("")
    return lines
