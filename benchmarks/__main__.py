"""From result files to something to look at, from the repository's root:

    python -m benchmarks table                     Markdown, to standard output
    python -m benchmarks plot                      PNG and SVG, beside the CSVs
    python -m benchmarks compare OLD.csv NEW.csv   what moved by more than the spread

Running them is pytest's: pytest benchmarks/ --benchmark-only
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str] | None = None) -> int:
    """Exit code 0, whatever moved; 2 where the caller can mend it, with the reason on stderr."""
    from rows import DATA

    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="Results of the benchmarks, to look at.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, help_text in (("table", "Markdown tables"), ("plot", "pictures, PNG and SVG")):
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
    if options.command == "compare":
        from compare import compare_files

        return compare_files(options.old, options.new)
    if options.command == "table":
        from table import markdown

        return [markdown(options.data)]
    from plot import draw

    return [str(path) for path in draw(options.data)]


if __name__ == "__main__":
    sys.exit(main())
