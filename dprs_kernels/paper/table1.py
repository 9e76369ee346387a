"""The paper's Table 1 (tab:acc) as data: its rows, the runs that remake them, their results in a CSV file, the means.

A row's settings are a small part of the paper's grid, which is C in {0.1, 0.5, 1}, E in {E*, 1.2 E*, 1.5 E*}, final
rate in {0.5, 0.7, 0.9}, with C / (1 - momentum) kept. The first setting of each method is the one to run (config.py);
the paper names its choice for CIFAR-10's DP-CNN at epsilon 3 only, the others are ours.
"""

from __future__ import annotations

import csv
import io
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from dprs_kernels.files import read_text
from dprs_kernels.paper.config import PAPER, TrainConfig, baseline, sparse

METHODS = ("baseline", "rs")
RATES = (0.5, 0.7, 0.9)


@dataclass(frozen=True)
class Setting:
    """What the paper's grid chooses from. batch: expected batch size B; clip: C; final_rate: 0 for the baseline. And
    what it does not: masks an epoch, and their structure.

    >>> Setting(epochs=48, lr=4.0, momentum=0.0, clip=1.0, final_rate=0.7, batch=2048).label
    'e48-lr4-m0-c1-r0.7-b2048'
    """

    epochs: int
    lr: float
    momentum: float
    clip: float
    final_rate: float
    batch: int
    refresh: int = 1
    structure: str = "coordinate"

    @property
    def label(self) -> str:
        numbers = f"e{self.epochs}-lr{self.lr:g}-m{self.momentum:g}-c{self.clip:g}-r{self.final_rate:g}-b{self.batch}"
        refreshed = "" if self.refresh == 1 else f"-k{self.refresh}"
        return numbers + refreshed + ("" if self.structure == "coordinate" else f"-{self.structure}")


@dataclass(frozen=True)
class Row:
    """One line of Table 1. paper: test accuracy in percent and its standard error over 5 seeds, by method."""

    name: str
    dataset: str
    model: str
    epsilon: float
    paper: Mapping[str, tuple[float, float]]
    settings: Mapping[str, tuple[Setting, ...]]
    note: str = ""


def _settings(dataset: str, model: str, epsilon: float) -> dict[str, tuple[Setting, ...]]:
    """config.py's first: the baseline's, and with sparsification; then a few neighbours in the paper's grid."""
    paper = {name: value for name, value in baseline(dataset, model, epsilon).items() if name != "normalise"}
    start = Setting(final_rate=0.0, **paper)
    first = replace(start, **sparse(dataset, model, epsilon))
    lengths = [start.epochs, round(1.2 * start.epochs)]
    others = [replace(first, final_rate=other) for other in RATES if other != first.final_rate]
    return {
        "baseline": (start, replace(start, epochs=lengths[1]), replace(start, clip=0.5, momentum=0.5)),
        "rs": (first, *others, replace(first, epochs=lengths[first.epochs == start.epochs])),
    }


def _rows() -> dict[str, Row]:
    published = "the paper with Poisson batches (tab:sample): {} -> {}"
    unnamed = "neither the paper nor its sources name this row's settings: those of CIFAR-10"
    table: list[tuple[str, str, tuple[tuple[float, float], ...], tuple[str, str]]] = [
        # dataset, model, (baseline, RS at epsilon 3, baseline, RS at 1), notes at 3 and at 1
        ("fmnist", "dp-cnn-s", ((86.6, 0.09), (87.4, 0.10), (83.2, 0.10), (84.5, 0.16)), ("", "")),
        ("fmnist", "h-cnn-s", ((88.9, 0.09), (89.2, 0.07), (85.8, 0.17), (87.0, 0.08)), ("", "")),
        ("cifar10", "dp-cnn", ((62.8, 0.10), (64.3, 0.17), (52.5, 0.25), (55.1, 0.11)),
         (published.format("62.8 (0.27)", "64.6 (0.25)"), published.format("52.8 (0.24)", "55.2 (0.25)"))),
        ("cifar10", "h-cnn", ((69.7, 0.19), (70.0, 0.11), (62.4, 0.13), (63.2, 0.10)), ("", "")),
        ("svhn", "dp-cnn", ((83.4, 0.11), (84.5, 0.14), (76.0, 0.05), (79.1, 0.13)), (unnamed, unnamed)),
        ("svhn", "h-cnn", ((85.9, 0.06), (86.8, 0.13), (80.7, 0.15), (82.2, 0.19)), (unnamed, unnamed)),
    ]   # fmt: skip
    rows = []
    for dataset, model, numbers, notes in table:
        for epsilon, paper, note in ((3.0, numbers[:2], notes[0]), (1.0, numbers[2:], notes[1])):
            means, settings = dict(zip(METHODS, paper, strict=True)), _settings(dataset, model, epsilon)
            rows.append(Row(f"{dataset}-{model}-eps{epsilon:g}", dataset, model, epsilon, means, settings, note))
    return {row.name: row for row in rows}


ROWS = _rows()


class Key(NamedTuple):
    """What makes two results the same run."""

    row: str
    method: str
    setting: Setting
    sampler: str
    accountant: str
    seed: int


@dataclass(frozen=True)
class Job:
    """One training run of the table."""

    row: Row
    method: str
    setting: Setting
    seed: int
    sampler: str = "poisson"

    @property
    def name(self) -> str:
        """Of its folder."""
        return f"{self.row.name}-{self.method}-{self.setting.label}-{self.sampler}-seed{self.seed}"

    def config(self, data: str | None = None) -> TrainConfig:
        return TrainConfig(
            dataset=self.row.dataset, model=self.row.model, epsilon=self.row.epsilon, sampler=self.sampler,
            seed=self.seed, data=data, normalise=PAPER[self.row.dataset, self.row.model].get("normalise", "group"),
            **asdict(self.setting),
        )   # fmt: skip

    @property
    def key(self) -> Key:
        return Key(self.row.name, self.method, self.setting, self.sampler, self.config().accountant, self.seed)


def jobs(
    rows: Iterable[Row], *, seeds: int, methods: Sequence[str] = METHODS, sampler: str = "poisson", grid: bool = False
) -> list[Job]:
    """Row by row, setting by setting, seed by seed; baseline and RS of one seed are neighbours, so that a table that
    is cut short compares equals. grid: all settings of a row, not the first of each method only.

    >>> [f"{job.method} {job.seed}" for job in jobs([ROWS["fmnist-dp-cnn-s-eps3"]], seeds=2)]
    ['baseline 0', 'rs 0', 'baseline 1', 'rs 1']
    """
    return [
        Job(row, method, row.settings[method][place], seed, sampler)
        for row in rows
        for place in range(max(len(row.settings[method]) for method in methods) if grid else 1)
        for seed in range(seeds)
        for method in METHODS
        if method in methods and place < len(row.settings[method])
    ]


@dataclass(frozen=True)
class Record:
    """A finished run: a line of the CSV file, in this order. commit, threads: more than one, separated by spaces, where
    a run was resumed under others. ended: "finished", or "budget" where steps taken twice left too little for the last.
    """

    date: str
    commit: str
    row: str
    method: str
    seed: int
    epochs: int
    lr: float
    momentum: float
    clip: float
    final_rate: float
    batch: int
    refresh: int
    structure: str
    sampler: str
    accountant: str
    sigma: float
    epsilon: float               # spent; nominal with shuffled batches
    delta: float
    test_accuracy: float         # a share, after the last epoch
    ended: str
    steps: int
    seconds: float               # of the steps, without evaluation
    threads: str
    version: str
    torch: str
    opacus: str
    python: str

    @property
    def setting(self) -> Setting:
        return Setting(**{field.name: getattr(self, field.name) for field in fields(Setting)})

    @property
    def key(self) -> Key:
        return Key(self.row, self.method, self.setting, self.sampler, self.accountant, self.seed)


COLUMNS = tuple(field.name for field in fields(Record))
_PARSERS: dict[str, Any] = {"int": int, "float": float, "str": str}


def read(path: str | os.PathLike[str]) -> list[Record]:
    """The file's records, [] where there is none yet; a torn last line, of a process killed while writing, is left out.
    The first result of a Key counts, so that no run can be replaced by a luckier one."""
    path = Path(path)
    if not path.exists():
        return []
    whole, newline, _ = read_text(path).rpartition("\n")
    lines = list(csv.reader(io.StringIO(whole + newline)))
    if lines and tuple(lines[0]) != COLUMNS:
        raise ValueError(f"csv: {path} has columns {', '.join(lines[0])}; expected {', '.join(COLUMNS)}")
    found: dict[Key, Record] = {}
    for number, line in enumerate(lines[1:], start=2):
        try:
            cells = zip(fields(Record), line, strict=True)
            record = Record(**{field.name: _PARSERS[str(field.type)](cell) for field, cell in cells})
        except ValueError as error:
            raise ValueError(f"csv: line {number} of {path} is no result ({error}); mend or delete the line") from error
        found.setdefault(record.key, record)
    return list(found.values())


def append(path: str | os.PathLike[str], record: Record) -> None:
    """One line more, on the disk when it returns; several processes may write one file."""
    import fcntl  # Linux, macOS: as the ledger of every run

    path = Path(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a+", newline="") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            before = file.read()
            file.truncate(len(before[: before.rfind("\n") + 1].encode()))
            writer = csv.writer(file, lineterminator="\n")
            if "\n" not in before:
                writer.writerow(COLUMNS)
            writer.writerow(f"{value:.6g}" if isinstance(value, float) else value for value in asdict(record).values())
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        raise ValueError(f"csv: cannot write {path} ({error}); name a file that you may write (--csv FILE)") from error


@dataclass(frozen=True)
class Mean:
    """Of n results: mean and standard error s / sqrt(n), s the sample's standard deviation; None with one result.

    >>> Mean.of([86.0, 87.0, 88.0])
    Mean(n=3, mean=87.0, error=0.5773502691896258)
    """

    n: int
    mean: float
    error: float | None

    @classmethod
    def of(cls, values: Sequence[float]) -> Mean:
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(len(values), statistics.fmean(values), error)


def by_setting(records: Iterable[Record]) -> dict[tuple[str, str, str], dict[Setting, list[Record]]]:
    """(row, sampler, method) -> setting -> records."""
    found: dict[tuple[str, str, str], dict[Setting, list[Record]]] = {}
    for record in records:
        place = found.setdefault((record.row, record.sampler, record.method), {})
        place.setdefault(record.setting, []).append(record)
    return found


def accuracy(records: Sequence[Record]) -> Mean:
    """In percent."""
    return Mean.of([100 * record.test_accuracy for record in records])


def chosen(tried: Mapping[Setting, list[Record]]) -> Setting:
    """The setting that stands for a method: of those with the most seeds, the one with the best mean accuracy. It is
    chosen on the test set, as the paper's, and by that flatters."""
    return max(tried, key=lambda setting: (len(tried[setting]), accuracy(tried[setting]).mean))
