"""`dprs compare RUN RUN ...`: a table of runs, and a picture of them together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from dprs_kernels.paper.run_folder import Metrics, RunFolder

COLUMNS = ("run", "dataset", "model", "alg", "rate", "C", "lr", "mom", "B", "epochs", "seed", "accuracy", "epsilon",
           "s/epoch")   # fmt: skip


def add_parser(commands: Any) -> None:
    """The sub-command, for dprs_kernels.__main__."""
    parser = commands.add_parser("compare", help="a table and a picture of training runs")
    parser.add_argument("runs", nargs="+", metavar="RUN", help="a folder that dprs train made")
    parser.add_argument("--out", metavar="FILE", default="compare.png", help="the picture (default: compare.png)")
    parser.set_defaults(command=run)


def run(runs: list[str], out: str) -> None:
    from dprs_kernels.paper import plots

    plots.check()
    folders = [RunFolder.open(path) for path in runs]
    rows = {label: folder.metrics() for label, folder in zip(_labels(folders), folders, strict=True)}
    if len(rows) < len(folders):
        raise ValueError("runs: one is named twice; name each once")
    drawn = plots.figure(rows)
    try:
        drawn.savefig(out, dpi=plots.DPI)
    except (OSError, ValueError) as error:   # ValueError: a format that matplotlib does not know
        raise ValueError(f"out: cannot write {out} ({error}); name a .png file in a folder that exists") from error
    more = {label: _charged_since(folder, rows[label]) for label, folder in zip(rows, folders, strict=True)}
    print(table([_cells(label, folder, rows[label], more[label]) for label, folder in zip(rows, folders, strict=True)]))
    if any(row.claim == "nominal" for found in rows.values() for row in found):
        print("~ nominal: shuffled batches counted as Poisson samples, no proof")
    if any(more.values()):
        print("> more was spent: steps of an epoch that was not finished; dprs account ledger RUN/ledger.jsonl has all")
    print(f"picture {out}")


def table(rows: list[tuple[str, ...]]) -> str:
    """COLUMNS and rows, aligned: text to the left, numbers to the right."""
    widths = [max(len(row[i]) for row in (COLUMNS, *rows)) for i in range(len(COLUMNS))]

    def line(row: tuple[str, ...]) -> str:
        pairs = zip(row, widths, strict=True)
        return "  ".join(f"{cell:<{width}}" if i < 3 else f"{cell:>{width}}" for i, (cell, width) in enumerate(pairs))

    return "\n".join(line(row).rstrip() for row in (COLUMNS, *rows))


def _cells(label: str, folder: RunFolder, rows: list[Metrics], more: int) -> tuple[str, ...]:
    config = folder.config
    settings = (
        label, config.dataset, config.model, str(config.algorithm), f"{config.final_rate:g}", f"{config.clip:g}",
        f"{config.lr:g}", "adam" if config.optimizer == "adam" else f"{config.momentum:g}", str(config.batch),
    )   # fmt: skip
    if not rows:
        return (*settings, f"0/{config.epochs}", str(config.seed), "-", "-", "-")
    last = rows[-1]
    marks = f"{'>' if more else ''}{'~' if last.claim == 'nominal' else ''}"
    epsilon = "none" if last.epsilon is None else f"{marks}{last.epsilon:.2f}"
    seconds = sorted(row.seconds for row in rows)[len(rows) // 2]
    return (
        *settings, f"{last.epoch}/{config.epochs}", str(config.seed), f"{last.test_accuracy:.2%}", epsilon,
        f"{seconds:.1f}",
    )   # fmt: skip


def _charged_since(folder: RunFolder, rows: list[Metrics]) -> int:
    """Steps that were charged after the last row: of an epoch that was not finished. 0 where there is no row yet, and
    so no epsilon shown."""
    if not rows:
        return 0
    from dprs_kernels.privacy.ledger import Ledger

    return Ledger.read(folder.ledger).steps - rows[-1].charged


def _labels(folders: list[RunFolder]) -> list[str]:
    """Names of the folders; whole paths where two are the same."""
    names = [folder.path.resolve().name for folder in folders]
    return names if len(set(names)) == len(names) else [str(Path(folder.path)) for folder in folders]
