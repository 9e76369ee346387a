"""From result files to something to look at, from the repository's root:

    python -m benchmarks table                     Markdown, to standard output
    python -m benchmarks plot                      pictures (PNG, SVG) and tables.md, beside the CSVs
    python -m benchmarks compare OLD.csv NEW.csv   what moved by more than the spread

Running them is pytest's: pytest benchmarks/ --benchmark-only
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

HEAD = "# Results\n\nMade by `python -m benchmarks plot` from the CSVs beside it; how to read them: ../README.md."


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, whatever moved; 2 where the caller can mend it, with the reason on stderr."""
    from rows import DATA

    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Results of the benchmarks, to look at.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, help_text in (("table", "Markdown tables"), ("plot", "pictures, PNG and SVG, and tables.md")):
        command = commands.add_parser(name, help=help_text)
        command.add_argument("--data", type=Path, default=DATA, metavar="FOLDER", help="of the CSVs")
    both = commands.add_parser("compare", help="what moved by more than the spread, as ratios")
    both.add_argument("old", type=Path, metavar="OLD.csv")
    both.add_argument("new", type=Path, metavar="NEW.csv")
    options = parser.parse_args(arguments)
    try:
        for line in _lines(options):
            print(line)
    except (ValueError, ImportError) as error:
        print(f"benchmarks: {error}", file=sys.stderr)
        return 2
    return 0


def _lines(options: argparse.Namespace) -> list[str]:
    from machines import everything

    if options.command == "compare":
        from compare import compare_files

        return compare_files(options.old, options.new)
    if options.command == "table":
        return [everything(options.data)]
    from plot import draw

    tables = options.data / "tables.md"
    written = draw(options.data)   # first: it says so where there is nothing to show
    tables.write_text(f"{HEAD}\n\n{everything(options.data)}\n", encoding="utf-8")
    return [str(path) for path in (*written, tables)]


if __name__ == "__main__":
    sys.exit(main())
