"""`dprs paper table1`: runs rows of the paper's Table 1, and shows ours beside the paper's.

    paper table1 --rows fmnist-dp-cnn-s-eps3 --seeds 3     the runs that the CSV file lacks; after Ctrl-C the same
    paper table1 --show                                    means and standard errors
    paper structures --rows fmnist-dp-cnn-s-eps1           its rows with masks of each structure

Exit codes: 0; 1 a run failed; 2 wrong arguments, missing data or a missing extra; 130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dprs_kernels.paper import structures as of_structures
from dprs_kernels.paper import table1, table1_text
from dprs_kernels.paper.table1 import METHODS, Job, Row
from dprs_kernels.structure import STRUCTURES

CSV = "benchmarks/data/table1.csv"
EPILOG = f"""Rows: {', '.join(table1.ROWS)}. A run takes minutes (dp-cnn-s) to hours (dp-cnn) of one core. After Ctrl-C
or a kill the same command goes on; a kill may cost the last steps of a run, since up to a minute of them is charged
twice. Exit codes: 0; 1 a run failed; 2 wrong arguments or missing data; 130 interrupted."""


def add_parser(commands: Any) -> None:
    """The sub-command, for dprs_kernels.__main__."""
    paper = commands.add_parser("paper", help="the paper's tables, run again")
    tables = paper.add_subparsers(required=True, metavar="table")
    parser = tables.add_parser(
        "table1", help="test accuracy with and without random sparsification", epilog=EPILOG,
        description="Runs rows of the paper's Table 1, several seeds each, or shows the results beside the paper's.",
    )   # fmt: skip
    add = parser.add_argument
    add("--methods", nargs="+", choices=METHODS, default=list(METHODS), help="default: both")
    add("--grid", action="store_true", help="all settings of a row, not its first only: 3 of the baseline, 4 of RS")
    add("--sampler", choices=("poisson", "shuffled-nominal"), default="poisson",
        help="shuffled-nominal: the paper's batches, whose epsilon is no proof; shown apart (default: poisson)")
    _add_shared(parser)
    parser.set_defaults(command=run)
    parser = tables.add_parser(
        "structures", help="test accuracy with masks of coordinates, of rows, and without", epilog=EPILOG,
        description="Runs rows of Table 1 with masks of each structure, or shows the results side by side.",
    )   # fmt: skip
    add = parser.add_argument
    add("--structures", nargs="+", metavar="NAME", default=[of_structures.NONE, *STRUCTURES],
        help=f"some of {of_structures.NONE}, {', '.join(STRUCTURES)} (default: all)")
    add("--rates", nargs="+", type=float, metavar="R", default=list(table1.RATES), help="final drop rates")
    add("--refresh", type=int, default=1, metavar="K", help="masks an epoch (default: 1)")
    _add_shared(parser)
    parser.set_defaults(command=run_structures)


def _add_shared(parser: Any) -> None:
    add = parser.add_argument
    add("--rows", nargs="+", metavar="ROW", help="names as below; with --show: default all")
    add("--seeds", type=int, default=3, metavar="N", help="runs of each: seeds 0 to N - 1 (default: 3)")
    add("--out", default="runs/table1", metavar="DIR", help="of the runs' folders (default: runs/table1)")
    add("--csv", default=None, metavar="FILE", help=f"of the results (default: {CSV})")
    add("--data", metavar="DIR", help="searched for the datasets before $DPRS_DATA")
    add("--threads", type=int, metavar="N", help="of torch (default: torch's or 1, the quicker)")
    add("--no-progress", dest="progress", action="store_false", help="print results only")
    add("--show", action="store_true", help="runs nothing: ours beside the paper's")
    add("--markdown", action="store_true", help="with --show: tables in Markdown")


def run(
    *, rows: list[str] | None, seeds: int, methods: list[str], grid: bool, sampler: str, out: str, csv: str | None,
    data: str | None, threads: int | None, progress: bool, show: bool, markdown: bool,
) -> int:   # fmt: skip
    """The command; its exit code. ValueError and ImportError are code 2, by main."""
    def plan(chosen: list[Row]) -> list[Job]:
        return table1.jobs(chosen, seeds=seeds, methods=methods, sampler=sampler, grid=grid)

    return _run(plan, table1_text.shown, rows, seeds, out, csv, data, threads, progress, show, markdown)


def run_structures(
    *, rows: list[str] | None, seeds: int, structures: list[str], rates: list[float], refresh: int, out: str,
    csv: str | None, data: str | None, threads: int | None, progress: bool, show: bool, markdown: bool,
) -> int:   # fmt: skip
    """The command; its exit code, as run."""
    known = (of_structures.NONE, *STRUCTURES)
    wrong = [name for name in structures if name not in known]
    if wrong:
        raise ValueError(f"structures: got {', '.join(wrong)}; expected some of {', '.join(known)}")

    def plan(chosen: list[Row]) -> list[Job]:
        return of_structures.jobs(chosen, seeds=seeds, structures=structures, rates=rates, refresh=refresh)

    return _run(plan, of_structures.shown, rows, seeds, out, csv, data, threads, progress, show, markdown)


def _run(
    plan: Callable[[list[Row]], list[Job]], text: Callable[..., str], rows: list[str] | None, seeds: int, out: str,
    csv: str | None, data: str | None, threads: int | None, progress: bool, show: bool, markdown: bool,
) -> int:   # fmt: skip
    wrong = [name for name in rows or () if name not in table1.ROWS]
    if wrong:
        raise ValueError(f"rows: got {', '.join(wrong)}; expected some of {', '.join(table1.ROWS)}")
    if show:
        if csv is not None and not Path(csv).is_file():
            raise ValueError(f"csv: {csv} is not a file; expected one that dprs paper table1 wrote")
        if csv is None and not Path(CSV).is_file():
            print(f"{CSV} is not here: nothing was run from this folder; --csv FILE names another", file=sys.stderr)
        print(text(table1.read(csv or CSV), [table1.ROWS[name] for name in rows or table1.ROWS], markdown=markdown))
        return 0
    if markdown:
        raise ValueError("markdown: got it without --show; leave it out, or add --show")
    if not rows:
        raise ValueError(f"rows: got none; expected some of {', '.join(table1.ROWS)}; or give --show")
    for name, value in (("seeds", seeds), ("threads", threads)):
        if value is not None and value < 1:
            raise ValueError(f"{name}: got {value}; expected an integer of at least 1")
    chosen = [table1.ROWS[name] for name in dict.fromkeys(rows)]
    planned = plan(chosen)
    root = None if data is None else str(Path(data).expanduser().resolve())   # a run may be resumed from elsewhere
    from dprs_kernels.allocator import keep_freed_memory
    from dprs_kernels.paper.table1_runs import run_all

    keep_freed_memory()   # this process is ours
    code = run_all(planned, out=Path(out), csv=Path(csv or CSV), data=root, threads=threads, talk=progress)
    if code == 0:
        print(text(table1.read(csv or CSV), chosen))
    return code
