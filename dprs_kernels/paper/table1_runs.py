"""Runs what Table 1 lacks: job by job, each in a folder of its own, a line of the CSV file when it is done.

Nothing is lost to Ctrl-C or kill -9: run_all with the same jobs resumes the folder that was cut, and skips what the CSV
file has. A run that ended but was cut before its line was written gets the line, and takes no further step.
"""

from __future__ import annotations

import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path

import torch

from dprs_kernels.paper import table1
from dprs_kernels.paper.data import Data, load
from dprs_kernels.paper.networks import network_for
from dprs_kernels.paper.prepare import load_data
from dprs_kernels.paper.progress import Progress, Silent
from dprs_kernels.paper.result import Result
from dprs_kernels.paper.run_folder import Metrics, RunFolder
from dprs_kernels.paper.table1 import Job, Record
from dprs_kernels.paper.train import RunFailed, resume, train
from dprs_kernels.paper.train_command import Interrupt
from dprs_kernels.version import __version__

AGAIN = "the same command goes on"


def run_all(
    planned: Sequence[Job], *, out: Path, csv: Path, data: str | None = None, threads: int | None = None,
    talk: bool = True,
) -> int:   # fmt: skip
    """The jobs that csv lacks, in their order. Exit code: 0; 1 a run failed; 130 interrupted.

    out: the folder of the runs' folders. data: searched first for datasets. threads: of torch; None: the quicker.
    ValueError: before anything was trained, or where a folder or the file holds something else.
    """
    there = {record.key for record in table1.read(csv)}
    missing = [job for job in planned if job.key not in there]
    log = _SessionLog(talk)
    log.note(f"{len(planned)} runs, {len(planned) - len(missing)} of them in {csv} already")
    inputs = _Inputs(data, log if talk else Silent())
    with Interrupt(log) as interrupt:
        _check_data(missing, data)
        for number, job in enumerate(missing, start=1):
            log.note(f"run {number} of {len(missing)}: {out / job.name}")
            log.file = out / f"{job.name}.sessions"
            try:
                result = _run(job, out / job.name, inputs.of(job), data, log, interrupt, threads)
                if result.ended != "interrupted":
                    _write_down(job, result, csv, log)
            except RunFailed as error:
                print(f"dprs_kernels: {job.name} failed {error}; {AGAIN}", file=sys.stderr)
                return 1
            except KeyboardInterrupt:
                print(f"dprs_kernels: interrupted; {AGAIN}", file=sys.stderr)
                return 130
            if interrupt.asked():
                print(f"dprs_kernels: interrupted; {AGAIN}", file=sys.stderr)
                return 130
    return 0


class _SessionLog(Progress):
    """Progress that writes down under which code and with how many threads a run was started or resumed: a line
    "commit threads" in `file`, beside the run's folder. train chooses the threads, hence here."""

    def __init__(self, talk: bool) -> None:
        super().__init__(live=None if talk else False)
        self.talk, self.commit = talk, commit()
        self.file = Path()

    def start(self, *, epochs: int, steps: int, last: Metrics | None = None) -> None:
        if last is None or last.steps < steps:   # else the run is at its end already
            with open(self.file, "a") as file:
                file.write(f"{self.commit} {torch.get_num_threads()}\n")
        super().start(epochs=epochs, steps=steps, last=last)

    def note(self, text: str) -> None:
        if self.talk:
            super().note(text)

    def sessions(self) -> tuple[str, str]:
        """Commits and numbers of threads, each once, separated by spaces."""
        lines = self.file.read_text().splitlines() if self.file.exists() else []
        commits, threads = ([line.split(" ")[place] for line in lines] for place in (0, 1))
        return " ".join(dict.fromkeys(commits)) or "unknown", " ".join(dict.fromkeys(threads)) or "unknown"


class _Inputs:
    """The data of the row at hand; one at a time, since CIFAR-10's features are 3.7 GB."""

    def __init__(self, root: str | None, progress: Progress) -> None:
        self._root, self._progress, self._key = root, progress, ("", "", "")
        self._data: Data | None = None

    def of(self, job: Job) -> Data:
        network = network_for(job.row.model, job.row.dataset)
        key = (job.row.dataset, network.features, job.config().normalise)
        if self._data is None or key != self._key:
            self._data = None   # before the next is read
            self._data, self._key = load_data(job.config(self._root), network, self._progress), key
        return self._data


def _check_data(missing: Sequence[Job], root: str | None) -> None:
    """A dataset that is not there is missed now, not after hours of other rows."""
    rows = {job.row.dataset: job.row.name for job in reversed(missing)}   # the first of each
    for dataset, row in rows.items():
        try:
            load(dataset, root)
        except ValueError as error:
            raise ValueError(f"row {row}: {error}") from error


def _run(
    job: Job, folder: Path, data: Data, root: str | None, log: _SessionLog, interrupt: Interrupt, threads: int | None
) -> Result:   # fmt: skip
    """From the start, on from what the folder holds, or at once where it holds the end."""
    config, stop = job.config(root), interrupt.asked
    many = threads or (1 if job.row.dataset == "digits" else "quicker")
    if not (folder / "config.json").exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        return train(config, out=folder, data=data, progress=log, stop=stop, threads=many)
    found = RunFolder.open(folder).config
    if replace(found, data=None) != replace(config, data=None):   # data may have moved
        raise ValueError(f"out: {folder} holds a run of other settings; move it away, or name another folder (--out)")
    return resume(folder, data=data, progress=log, stop=stop, threads=many)


def _write_down(job: Job, result: Result, csv: Path, log: _SessionLog) -> None:
    config, (commits, threads) = result.config, log.sessions()
    assert result.folder is not None
    assert result.accuracy is not None   # a run that ended has at least one row of metrics
    assert result.epsilon is not None    # and a claim
    record = Record(
        date=time.strftime("%Y-%m-%d"), commit=commits, row=job.row.name, method=job.method, seed=job.seed,
        **asdict(job.setting), sampler=config.sampler, accountant=config.accountant, sigma=result.sigma,
        epsilon=result.epsilon, delta=config.delta, test_accuracy=result.accuracy, ended=result.ended,
        steps=result.steps, seconds=sum(row.seconds for row in RunFolder.open(result.folder).metrics()),
        threads=threads, version=__version__, torch=torch.__version__, opacus=metadata.version("opacus"),
        python=platform.python_version(),
    )   # fmt: skip
    table1.append(csv, record)
    spent = f"{'' if config.claim == 'poisson' else 'nominal '}epsilon {record.epsilon:.3f}"
    print(f"{job.name}: test accuracy {record.test_accuracy:.2%}, {spent}, {record.seconds:.0f} s", flush=True)


def commit() -> str:
    """Of the working tree that this code lies in, with "-dirty" where the code differs from it; else "unknown"."""
    root = Path(__file__).resolve().parents[2]

    def git(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = ["git", "--no-optional-locks", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=False)

    try:
        head, ours = git("rev-parse", "--short=12", "HEAD"), git("ls-files", "--error-unmatch", "dprs_kernels/step.py")
        if head.returncode or ours.returncode:   # no repository, or one that only surrounds an installed package
            return "unknown"
        dirty = git("diff", "--quiet", "HEAD", "--", "dprs_kernels", "csrc").returncode
    except FileNotFoundError:
        return "unknown"
    return head.stdout.strip() + ("-dirty" if dirty else "")
