"""The command line: dprs, or python -m dprs_kernels, with train | compare | paper | advise | account | audit | info |
kernels."""

from __future__ import annotations

import argparse
import platform
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path

from dprs_kernels.paper import advise_command, compare_command, paper_command, train_command
from dprs_kernels.privacy import account_command, audit_command


def main(argv: Sequence[str] | None = None) -> int:
    """Exit code: 0, or 1 where an audit or a run failed, or 2 where the caller can mend it (wrong argument, missing
    data or extra), or 130 where a run was interrupted and can go on, with the reason on stderr."""
    options = vars(_parser().parse_args(argv))
    command = options.pop("command")
    try:
        code = command(**options)
    except (ValueError, ImportError) as error:
        print(f"dprs_kernels: {error}", file=sys.stderr)
        return 2
    return code or 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="dprs_kernels", description="Private SGD with random sparsification.")
    commands = parser.add_subparsers(required=True, metavar="command")
    for module in (train_command, compare_command, paper_command, advise_command, account_command, audit_command):
        module.add_parser(commands)
    kernels = commands.add_parser("kernels", help="what the GPU kernels compile to, with bounds; needs no GPU")
    kernels.add_argument("--target", metavar="NAME", help="sm_80, sm_90, sm_100 or gfx942 (default: all)")
    kernels.set_defaults(command=_kernels)
    info = commands.add_parser("info", help="versions, backends with the reason of each, CPU features, threads")
    info.set_defaults(command=_info)
    return parser


def _kernels(target: str | None) -> None:
    from dprs_kernels.backends.shipped import shipped
    from dprs_kernels.compiled import TARGETS, table

    launches = shipped()
    print("\n\n".join(table(launches, name) for name in ([target] if target else TARGETS)))


def _info() -> None:
    import torch

    from dprs_kernels import __version__, backends, native

    lines = {
        "dprs_kernels": __version__,
        "python": f"{platform.python_version()} ({platform.system()} {platform.machine()})",
        "torch": torch.__version__,
        "triton": _version_of("triton", "pytorch-triton"),
        "numpy": _version_of("numpy"),
    }
    lines["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    for name in backends.NAMES:
        device = torch.device("cuda" if name == "triton" and torch.cuda.is_available() else "cpu")
        why = backends.unavailable(name, device)
        lines[f"backend {name}"] = f"unavailable: {why}" if why else f"available on {device}"
    lines["cpu"] = _cpu_name()
    library = native.library()
    if library is None:
        lines["cpu features"] = lines["openmp"] = "unknown, the CPU kernels are not loaded"
    else:
        in_use = library.dprs_level_name(library.dprs_level()).decode()
        lines["cpu features"] = f"{', '.join(native.levels())}; in use: {in_use}"
        lines["openmp"] = "yes" if library.dprs_has_openmp() else "no"
    lines["threads"] = str(torch.get_num_threads())
    for name, value in lines.items():
        print(f"{name:<18} {value}")


def _version_of(*distributions: str) -> str:
    for distribution in distributions:
        try:
            return metadata.version(distribution)
        except metadata.PackageNotFoundError:
            continue
    return "not installed"


def _cpu_name() -> str:
    """As the kernel names it on Linux (platform.processor() is empty or just the architecture there)."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.lower().startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine() or "unknown"


if __name__ == "__main__":
    sys.exit(main())
