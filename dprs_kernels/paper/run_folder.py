"""RunFolder: where a run lives, and what it needs to go on after kill -9.

    config.json      TrainConfig
    ledger.jsonl     every release, written before it has an effect (privacy/ledger.py); with ledger.jsonl.tail
    metrics.csv      a row an epoch: public numbers only, no training loss
    checkpoint.pt    privacy/checkpoint.py: replaced whole
    plot.png         accuracy, epsilon and drop rate over epochs
    error.txt        the traceback, where a run failed
"""

from __future__ import annotations

import csv
import os
from dataclasses import dataclass, fields
from pathlib import Path

from dprs_kernels.files import read_text, written_whole
from dprs_kernels.paper.config import TrainConfig


@dataclass(frozen=True)
class Metrics:
    """The state after an epoch, or after its last step where a run stopped inside it."""

    epoch: int                 # from 1
    steps: int                 # taken, of those that made this model
    charged: int               # in the ledger: more, where steps were taken again
    drop_rate: float           # of the last mask
    test_accuracy: float
    epsilon: float | None      # spent; None: no claim
    claim: str                 # "poisson", "nominal", "none"
    seconds: float             # of this epoch's steps, since the run was last resumed
    steps_per_second: float


class RunFolder:
    """Make one with create or open.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     folder = RunFolder.create(Path(parent) / "run", TrainConfig.of("digits"))
    ...     RunFolder.open(folder.path).config.dataset
    'digits'
    """

    def __init__(self, path: Path, config: TrainConfig) -> None:
        self.path, self.config = path, config

    @classmethod
    def create(cls, path: str | os.PathLike[str], config: TrainConfig) -> RunFolder:
        """A new one. A folder that holds anything is refused: it may be a run's."""
        path = Path(path)
        if path.exists() and (not path.is_dir() or any(path.iterdir())):
            what = "holds a run already" if (path / "config.json").exists() else "exists and is not an empty folder"
            remedy = f"go on with it (--resume {path}), or name another" if what.startswith("holds") else "name another"
            raise ValueError(f"out: {path} {what}; {remedy}")
        try:
            path.mkdir(parents=True, exist_ok=True)
            _write_whole(path / "config.json", config.to_json())
        except OSError as error:
            raise ValueError(f"out: cannot write {path} ({error}); name a folder that you may write to") from error
        return cls(path, config)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> RunFolder:
        path = Path(path)
        file = path / "config.json"
        if not file.is_file():
            raise ValueError(f"run folder: {path} has no config.json; expected a folder that dprs train made")
        return cls(path, TrainConfig.from_json(read_text(file), str(file)))

    @property
    def ledger(self) -> Path:
        return self.path / "ledger.jsonl"

    @property
    def checkpoint(self) -> Path:
        return self.path / "checkpoint.pt"

    @property
    def plot(self) -> Path:
        return self.path / "plot.png"

    @property
    def error(self) -> Path:
        return self.path / "error.txt"

    def note_error(self, text: str) -> str:
        """Writes a traceback; what to say of it. A full disk is no reason to lose the error itself."""
        try:
            self.error.write_text(text)
        except OSError as error:
            return f" (its traceback cannot be written: {error})"
        return f" (traceback: {self.error})"

    def metrics(self) -> list[Metrics]:
        """The rows so far; a torn last line, of a process killed while writing, is left out."""
        file = self.path / "metrics.csv"
        if not file.exists():
            return []
        whole, _, _ = read_text(file).rpartition("\n")
        rows = []
        for number, row in enumerate(csv.DictReader(whole.splitlines()), start=2):
            try:
                rows.append(_parsed(row))
            except (KeyError, TypeError, ValueError) as error:
                raise ValueError(f"{file}: line {number} is no row of metrics ({error}); delete the line") from error
        return rows

    def append(self, row: Metrics) -> None:
        """On the disk when it returns. Rows of the same and of later epochs, from before a resume, give way."""
        rows = [before for before in self.metrics() if before.epoch < row.epoch]
        lines = [",".join(field.name for field in fields(Metrics)), *map(_line, [*rows, row])]
        _write_whole(self.path / "metrics.csv", "\n".join(lines) + "\n")


def _line(row: Metrics) -> str:
    values = [getattr(row, field.name) for field in fields(Metrics)]
    return ",".join("" if v is None else f"{v:.6g}" if isinstance(v, float) else str(v) for v in values)


def _parsed(row: dict[str, str]) -> Metrics:
    return Metrics(
        epoch=int(row["epoch"]), steps=int(row["steps"]), charged=int(row["charged"]),
        drop_rate=float(row["drop_rate"]), test_accuracy=float(row["test_accuracy"]),
        epsilon=float(row["epsilon"]) if row["epsilon"] else None, claim=row["claim"], seconds=float(row["seconds"]),
        steps_per_second=float(row["steps_per_second"]),
    )   # fmt: skip


def _write_whole(target: Path, text: str) -> None:
    with written_whole(target) as file:
        file.write(text.encode())
