"""python -m dprs_kernels audit: the suites on this machine's backends, or the attacks side by side."""

from __future__ import annotations

from typing import Any


def add_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "audit",
        help="try to catch the private step in a fault: suites S1-S6, with figures and verdicts",
        description="Exit code: 0 if every suite passed, 1 if one failed, 2 for wrong arguments.",
    )
    parser.add_argument("--backend", metavar="NAME", default="auto", help="auto, reference, cpu or triton")
    parser.add_argument("--suite", metavar="S", dest="suites", nargs="+", help="some of S1 to S6 (default: all)")
    parser.add_argument("--seed", type=int, metavar="N", default=0, help="of data, coins and noise (default: 0)")
    parser.add_argument("--size", metavar="NAME", help="full, small or tiny (default: full; tiny where interpreted)")
    parser.add_argument("--structure", metavar="NAME", default="coordinate", help="coordinate, row or mixed masks")
    parser.add_argument(
        "--attack", action="store_true",
        help="instead: the lattice and the precision attack on torch.normal, on the sum of four, and on this library",
    )   # fmt: skip
    parser.set_defaults(command=run)


def run(
    *, backend: str, suites: list[str] | None, seed: int, size: str | None, structure: str, attack: bool
) -> int:
    """Prints the report, or the table of attacks. 1 if a suite failed, else 0; ValueError for wrong arguments."""
    import torch

    from dprs_kernels.privacy.audit import attack_table, audit

    if attack and suites is not None:
        raise ValueError(f"--attack: got --suite {' '.join(suites)}, too; give one of them (the attacks' suite is S6)")
    if attack and structure != "coordinate":
        raise ValueError(f"--attack: got --structure {structure}, too; the attacks look at noise, whatever the mask is")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)   # as quick for so small shapes, and much quicker beside other work
    try:
        if attack:
            print(attack_table(backend=backend, seed=seed, size=size))
            return 0
        report = audit(backend=backend, suites=suites, seed=seed, size=size, structure=structure)
    finally:
        torch.set_num_threads(threads)
    print(report)
    return 0 if report.passed else 1
