"""`dprs train`: a private training run from the command line, and its resumption. torch is imported after parsing.

Exit codes: 0; 1 the run failed; 2 wrong arguments, missing data or a missing extra; 130 interrupted, can be resumed.
"""

from __future__ import annotations

import argparse
import shlex
import signal
import sys
import time
from pathlib import Path
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from dprs_kernels.paper.config import DATASETS, MODELS, TrainConfig

if TYPE_CHECKING:
    from dprs_kernels.paper.data import Data
    from dprs_kernels.paper.progress import Progress

QUICK_EPOCHS = {"fmnist": 12, "digits": 60}   # of 6 s and 0.3 s on one core with two hyperthreads
DESCRIPTION = f"""A private training run: DP-SGD with random sparsification. Without --dataset a short one, of about two
minutes: Fashion-MNIST where it is found, else scikit-learn's digits. With --dataset the paper's settings for it, but
for what is given. Datasets: {', '.join(DATASETS)}. Models: {', '.join(MODELS)}."""
EPILOG = """The folder holds config.json, ledger.jsonl, metrics.csv, checkpoint.pt and plot.png. Ctrl-C finishes the
step and saves; also after kill -9, --resume FOLDER goes on. Exit codes: 0; 1 the run failed; 2 wrong arguments or
missing data; 130 interrupted."""


def add_parser(commands: Any) -> None:
    """The sub-command, for dprs_kernels.__main__. What is not given is left to TrainConfig.of."""
    parser = commands.add_parser(
        "train", help="a private training run, of the paper's settings or yours", description=DESCRIPTION,
        epilog=EPILOG, argument_default=argparse.SUPPRESS,
    )   # fmt: skip
    add = parser.add_argument
    add("--dataset", choices=tuple(DATASETS), help="default: fmnist if found, else digits, in a short run")
    add("--model", metavar="NAME", help="default: the paper's for the dataset")
    add("--algorithm", type=int, choices=(1, 2, 3, 4), metavar="1..4",
        help="of the paper: 1 DP-SGD + RS, 2 no clipping, 3 no noise, 4 ranked (default: 1)")   # fmt: skip
    add("--epsilon", type=float, metavar="EPS", help="the budget, which the noise is found for (default: 3)")
    add("--sigma", type=float, metavar="S", help="the noise multiplier itself, in place of --epsilon")
    add("--delta", type=float, metavar="D", help="default: 1e-5")
    add("--accountant", choices=("rdp", "prv", "pld"), help="default: rdp, as the published numbers")
    add("--final-rate", type=float, metavar="R", help="drop rate of the last epoch; 0 is plain DP-SGD")
    add("--cooling", choices=("gradual", "constant"), help="gradual: from 0 up to the final rate (default)")
    add("--refresh", type=int, metavar="K", help="masks an epoch (default: 1)")
    add("--structure", metavar="NAME", help="coordinate (default); row, mixed: whole output rows drop, at less cost")
    add("--epochs", type=int, metavar="E")
    add("--batch", type=int, metavar="B", help="expected batch size")
    add("--lr", type=float, metavar="LR")
    add("--momentum", type=float, metavar="M")
    add("--optimizer", choices=("sgd", "adam"), help="default: sgd")
    add("--clip", type=float, metavar="C", help="max_grad_norm")
    add("--sampler", choices=("poisson", "shuffled-nominal"),
        help="shuffled-nominal: the paper's batches, accounted as if Poisson's (default: poisson)")   # fmt: skip
    add("--normalise", choices=("group", "channels"),
        help="of ScatterNet features; channels: privately estimated statistics, which cost epsilon")   # fmt: skip
    add("--seed", type=int, metavar="S", help="of weights and masks; noise and batches are secret (default: 0)")
    add("--insecure-seeded-noise", action="store_true", help="noise and batches from the seed: NO PRIVACY, for tests")
    add("--data", metavar="DIR", help="searched for the dataset before $DPRS_DATA")
    add("--download", action="store_true", help="through torchvision, where the dataset is not found")
    add("--backend", metavar="NAME", help="auto, reference, cpu or triton (default: auto)")
    add("--threads", type=int, metavar="N", help="of torch (default: torch's or 1, the quicker)")
    add("--out", metavar="DIR", help="the run's folder, made (default: runs/DATASET-MODEL-...)")
    add("--resume", metavar="DIR", help="goes on with that run, under its own settings")
    add("--compare-plain", action="store_true", help="times the first epoch without privacy, too")
    add("--no-progress", dest="progress", action="store_false", help="print the result only")
    parser.set_defaults(command=run)


def run(**options: Any) -> int:
    """The command; its exit code. ValueError and ImportError are code 2, by main."""
    compare_plain = options.pop("compare_plain", False)
    threads = options.pop("threads", None)
    if threads is not None and threads < 1:
        raise ValueError(f"threads: got {threads}; expected an integer of at least 1")
    from dprs_kernels.paper.progress import Progress, Silent

    progress = Progress() if options.pop("progress", True) else Silent()
    folder, config = options.pop("resume", None), None
    if folder is not None:
        if options:
            given = ", ".join(f"--{name.replace('_', '-')}" for name in options)
            raise ValueError(f"resume: got {given} too; a resumed run keeps its settings: leave them out")
        from dprs_kernels.paper.run_folder import RunFolder

        dataset, data = RunFolder.open(folder).config.dataset, None
    else:
        out = options.pop("out", None)
        config, data = _configured(options, progress)
        dataset, folder = config.dataset, Path(out) if out is not None else _new_folder(config)
    return _train(folder, config, data, progress, compare_plain, threads or (1 if dataset == "digits" else "quicker"))


def _configured(options: dict[str, Any], progress: Progress) -> tuple[TrainConfig, Data | None]:
    download = options.pop("download", False)
    if "data" in options:
        options["data"] = str(Path(options["data"]).expanduser().resolve())   # a run may be resumed from elsewhere
    if "epsilon" in options and "sigma" in options:
        raise ValueError("epsilon, sigma: got both; give the budget, or the noise multiplier")
    data = None
    if "dataset" not in options:
        if "model" in options:
            raise ValueError(f"model: got {options['model']!r} without a dataset; give --dataset, too")
        options["dataset"], data = _found(options.get("data"), progress)
        options = {"epochs": QUICK_EPOCHS[options["dataset"]], **options}
    config = TrainConfig.of(**options)
    if download and data is None:
        from dprs_kernels.paper.data import load

        load(config.dataset, config.data, download=True)
    return config, data


def _found(root: str | None, progress: Progress) -> tuple[str, Data | None]:
    """Fashion-MNIST, or digits with the reason, where no folder was named."""
    from dprs_kernels.paper.data import load

    try:
        return "fmnist", load("fmnist", root)
    except ValueError as error:
        if root is not None:   # asked for: no other data in its place
            raise
        progress.note(f"taking scikit-learn's digits, since Fashion-MNIST cannot be read: {error}")
        return "digits", None


def _new_folder(config: TrainConfig) -> Path:
    name = f"{config.dataset}-{config.model}-a{config.algorithm}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder, number = Path("runs") / name, 2
    while folder.exists():
        folder, number = Path("runs") / f"{name}-{number}", number + 1
    return folder


def _train(
    folder: str | Path, config: TrainConfig | None, data: Data | None, progress: Progress, compare_plain: bool,
    threads: int | str,
) -> int:   # fmt: skip
    from dprs_kernels.allocator import keep_freed_memory
    from dprs_kernels.paper.train import RunFailed, resume, train

    keep_freed_memory()   # this process is ours
    again = f"go on with: dprs train --resume {shlex.quote(str(folder))}"
    try:
        with Interrupt(progress) as interrupt:
            common: dict[str, Any] = dict(
                progress=progress, stop=interrupt.asked, compare_plain=compare_plain, threads=threads
            )
            result = resume(folder, **common) if config is None else train(config, out=folder, data=data, **common)
    except RunFailed as error:
        print(f"dprs_kernels: the run failed {error}; {again}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        begun = (Path(folder) / "config.json").exists()
        print(f"dprs_kernels: interrupted{'; ' + again if begun else ', nothing was trained'}", file=sys.stderr)
        return 130
    if result.ended == "interrupted":
        at = f"step {result.steps} of {result.planned}"
        print(f"dprs_kernels: interrupted after {at}, saved; {again}", file=sys.stderr)
        return 130
    if result.ended == "budget":
        print(
            f"dprs_kernels: the budget is spent after {result.steps} of {result.planned} steps: steps that were taken "
            "twice are charged twice; the model is that of the last affordable step",
            file=sys.stderr,
        )
    print(result.summary())
    return 0


class Interrupt:
    """Ctrl-C or a SIGTERM once: the step is finished and saved. Twice: KeyboardInterrupt, as ever."""

    def __init__(self, progress: Progress) -> None:
        self._progress, self._asked = progress, False

    def asked(self) -> bool:
        return self._asked

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self._asked:
            raise KeyboardInterrupt
        self._asked = True
        self._progress.note("interrupted: finishing this step and saving; Ctrl-C again stops at once")

    def __enter__(self) -> Interrupt:
        self._before = {number: signal.signal(number, self._handle) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
