"""Life cycle of a run: whatever happens to it, no (key, step, coordinate) makes noise twice, nothing is released
without noise, and the ledger holds at least what reached the parameters.

Recorded, not believed: NoiseSource.claim and the backends' releases are wrapped and write a line for every use of a
key, into a file that outlives a killed process. `python -m tests.test_life_cycle drive FOLDER SEED` is the process that
starts training processes and kills them.
"""

import copy
import dataclasses
import hashlib
import json
import math
import os
import pickle
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from dprs_kernels import NoiseSource, PrivateSum
from dprs_kernels.backends import cpu, reference
from dprs_kernels.noise import Stream
from dprs_kernels.privacy import journal
from dprs_kernels.privacy.accounting import epsilon
from dprs_kernels.privacy.ledger import Ledger
from tests.oracle import BACKENDS
from tests.test_checkpoint import EPOCHS, RATE, STEPS, Run

PLANNED, SAVE_EVERY, KILLS, DELTA = EPOCHS * STEPS, 3, 8, 1e-5
needs_fork = pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this platform")


class Recorder:
    """Appends JSON lines to a file. hit: called at each event, so that a test can kill the process there."""

    def __init__(self, path: Path, hit: Callable[[str], None] = lambda event: None) -> None:
        self.path, self.hit = path, hit

    def __call__(self, event: str, **content: Any) -> None:
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.write(handle, (json.dumps({"event": event, "pid": os.getpid(), **content}) + "\n").encode())
        os.close(handle)
        self.hit(event)

    def of(self, event: str) -> list[dict[str, Any]]:
        lines = self.path.read_text().splitlines() if self.path.exists() else []
        return [line for line in map(json.loads, lines) if line["event"] == event]

    @contextmanager
    def watching(self) -> Iterator["Recorder"]:
        claim = NoiseSource.claim

        def claimed(source: NoiseSource, device: torch.device | None = None) -> Stream:
            stream = claim(source, device)
            self("claim", key=key_id(stream.key), step=stream.step)
            return stream

        with (
            mock.patch.object(NoiseSource, "claim", claimed),
            mock.patch.object(cpu, "step_", self.released(cpu.step_)),
            mock.patch.object(cpu, "release", self.released(cpu.release)),
            mock.patch.object(reference, "release", self.released(reference.release)),
        ):
            yield self

    def released(self, release: Callable[..., Any]) -> Callable[..., Any]:
        """What a release, alone or in one call with the sum, added to the exact sum, in standard deviations: [kept
        coordinates]."""

        def watched(outs: Any, *arguments: Any) -> Any:
            *inputs, plan, key, step = arguments
            place = dict(key=key_id(key), step=step, coordinates=plan.layout.padded)
            self("use", **place)
            sums = [torch.empty_like(out, dtype=torch.float64) for out in outs]
            release(sums, *inputs, dataclasses.replace(plan, noise_std=0.0, grid=0.0), key, step)
            result = release(outs, *inputs, plan, key, step)
            noise = [(out - part) * plan.expected_batch_size for out, part in zip(outs, sums, strict=True)]
            z = torch.cat([n[out != 0] for n, out in zip(noise, outs, strict=True)]) / plan.noise_std
            self("release", **place, kept=z.numel(), square=float(z.square().sum()), least=float(z.abs().min()))
            return result

        return watched


def key_id(key: Any) -> str:
    return hashlib.sha256(b"dprs_kernels key id" + key).hexdigest()[:16]


def assert_clean(recorder: Recorder) -> None:
    """No word twice, no coordinate without noise, noise of the right size."""
    for event in ("claim", "use"):
        times = Counter((line["key"], line["step"]) for line in recorder.of(event))
        assert times
        assert max(times.values()) == 1, f"{event}: a (key, step) was used twice"
    assert len({line["coordinates"] for line in recorder.of("use")}) == 1   # each use is of all coordinates
    claims = {(line["key"], line["step"]) for line in recorder.of("claim")}
    assert {(line["key"], line["step"]) for line in recorder.of("use")} <= claims
    releases = recorder.of("release")
    # |z| is below 2^-20, the grid, with probability 2^-20 a coordinate; two such in a release never happen.
    assert all(line["kept"] > 40 for line in releases)
    assert sum(line["least"] < 2.0**-21 for line in releases) <= 1
    count = sum(line["kept"] for line in releases)
    assert abs(sum(line["square"] for line in releases) / count - 1) < 6 * math.sqrt(2 / count)


def test_the_recorder_sees_a_release_without_noise(tmp_path: Path) -> None:
    """The checks can fail: a backend that forgets the noise, or takes another step's, is seen."""
    real = reference.release

    def silent(outs: Any, total: Any, bits: Any, plan: Any, key: bytes, step: int) -> None:
        real(outs, total, bits, plan, key, step)
        for out, part in zip(outs, plan.layout.split(total.double()), strict=True):
            out.copy_(part * plan.unit / plan.expected_batch_size)

    with mock.patch.object(reference, "release", silent), Recorder(tmp_path / "log").watching() as recorder:
        Run(backend="reference").train(stop=3)
    with pytest.raises(AssertionError):
        assert_clean(recorder)
    with Recorder(tmp_path / "other").watching() as recorder:
        for _ in range(2):
            Run(seed=1).train(stop=1)
    with pytest.raises(AssertionError, match="used twice"):
        assert_clean(recorder)


# ---- in one process


def test_copies_never_repeat_noise(tmp_path: Path) -> None:
    run = Run()
    with Recorder(tmp_path / "log").watching() as recorder:
        run.train(stop=3)
        for copied in (copy.copy, copy.deepcopy, lambda noise: pickle.loads(pickle.dumps(noise))):
            Run(noise=copied(run.optimizer.noise)).train(stop=2)
        run.train(epoch=1, stop=7)
    assert_clean(recorder)


def test_nothing_that_holds_an_open_sum_can_be_copied() -> None:
    """Its accumulator has no noise yet: a pickle of it on a disk would be a release."""
    run = Run()
    total = PrivateSum(
        run.model.parameters(), max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=1, noise=NoiseSource()
    )
    total.add([torch.ones(2, *param.shape) for param in run.model.parameters()])
    run.optimizer.accumulate([torch.ones(2, *param.shape) for param in run.model.parameters()])
    for holder in (total, run.optimizer, run.state):
        for copied in (pickle.dumps, copy.deepcopy):
            with pytest.raises((ValueError, TypeError), match="cannot"):
                copied(holder)
    with pytest.raises(ValueError, match="cannot be pickled or copied, it holds a noise key"):
        copy.copy(run.optimizer)


def test_two_resumes_of_one_checkpoint(tmp_path: Path) -> None:
    with Recorder(tmp_path / "log").watching() as recorder:
        first = Run(tmp_path).train(stop=5)
        first.state.save(tmp_path / "run.pt")
        first.close()
        runs = []
        for _ in range(2):
            run = Run(tmp_path)
            runs.append(run.train(epoch=run.state.load(tmp_path / "run.pt").epoch))
            run.close()
    assert_clean(recorder)
    assert runs[0].batches != runs[1].batches
    assert Ledger.read(tmp_path / "ledger.jsonl").steps == 5 + 2 * (PLANNED - 5) == len(recorder.of("release"))


def test_a_roll_back_in_the_same_process(tmp_path: Path) -> None:
    """The same objects go back to the same step: without a fresh key they would repeat their noise."""
    with Recorder(tmp_path / "log").watching() as recorder:
        run = Run(tmp_path).train(stop=5)
        run.state.save(tmp_path / "run.pt")
        for later in (0, PLANNED - 5):
            report = run.state.load(tmp_path / "run.pt")
            assert (report.step, report.charged_steps, report.later_steps) == (5, 5, later)
            run.train(epoch=report.epoch)
    assert_clean(recorder)
    assert run.ledger.steps == 5 + 2 * (PLANNED - 5)
    run.close()


@pytest.mark.parametrize("backend", BACKENDS)
def test_an_exception_between_counter_and_use(backend: str, tmp_path: Path) -> None:
    """The step is wasted, not repeated; nothing is charged, because nothing was released; parameters do not move."""
    run = Run(tmp_path, backend=backend)
    module, verb = dict(reference=(reference, "release"), cpu=(cpu, "step_"))[backend]
    with Recorder(tmp_path / "log").watching() as recorder:
        run.train(stop=2)
        before = [t.clone() for t in run.tensors()]
        with mock.patch.object(module, verb, side_effect=MemoryError("in the kernel")), pytest.raises(MemoryError):
            run.step(*next(iter(run.loader))[:2])
        assert all(torch.equal(a, b) for a, b in zip(before, run.tensors(), strict=True))
        assert all(param.grad is None for param in run.model.parameters())
        assert run.ledger.steps == 2
        run.step(*next(iter(run.loader))[:2])
    assert_clean(recorder)
    assert [line["step"] for line in recorder.of("use")] == [0, 1, 3]
    assert [charge.record.step for charge in run.ledger.records()] == [0, 1, 3]
    run.close()


def test_a_step_that_cannot_be_charged_is_not_taken(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.train(stop=2)
    before = [t.clone() for t in run.tensors()]
    with mock.patch.object(os, "fsync", side_effect=OSError("disk full")), pytest.raises(OSError, match="disk full"):
        run.step(*next(iter(run.loader))[:2])
    assert all(torch.equal(a, b) for a, b in zip(before, run.tensors(), strict=True))
    assert all(param.grad is None for param in run.model.parameters())
    run.close()


# ---- in processes that are forked and killed


class Killed:
    """kill -9 of this process at the count-th time of a point."""

    def __init__(self, point: str, count: int) -> None:
        self.point, self.count = point, count

    def __call__(self, point: str) -> None:
        if point == self.point:
            self.count -= 1
            if self.count == 0:
                os.kill(os.getpid(), signal.SIGKILL)


class Paused:
    """Tells when the process is under way; stops it after some points, so that it does not end before it is killed."""

    def __init__(self, pipe: int, count: int) -> None:
        self.pipe, self.count = pipe, count

    def __call__(self, point: str) -> None:
        os.write(self.pipe, b".")
        self.count -= 1
        if self.count == 0:
            signal.pause()


@contextmanager
def points(hit: Callable[[str], None]) -> Iterator[None]:
    """Also reports the moments around what must be durable: before and after each fsync and rename, half a write."""

    def around(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def reported(*arguments: Any) -> Any:
            hit(f"before {name}")
            result = function(*arguments)
            hit(f"after {name}")
            return result

        return reported

    def torn(file: Any, data: bytes) -> None:
        file.write(data[: len(data) // 2])
        hit("half a line")
        file.write(data[len(data) // 2 :])

    with (
        mock.patch.object(os, "fsync", around("fsync", os.fsync)),
        mock.patch.object(os, "replace", around("rename", os.replace)),
        mock.patch.object(torch, "save", around("save", torch.save)),
        mock.patch.object(journal, "_write_all", torn),
    ):
        yield


def trained(folder: Path, hit: Callable[[str], None]) -> None:
    """A training process: resumes where a checkpoint is, saves every third step and after each epoch."""
    path, recorder = folder / "run.pt", Recorder(folder / "log", hit)
    with recorder.watching(), points(hit):
        run = Run(folder)
        epoch = 0
        if path.exists():
            report = run.state.load(path)
            epoch = report.epoch
            recorder("resume", later=report.later_steps, charged=report.charged_steps, steps=run.ledger.steps)
        inner = run.optimizer.original_optimizer
        inner.register_step_pre_hook(lambda *_: hit("before the inner step"))
        inner.register_step_post_hook(
            lambda *_: recorder("reached", key=run.optimizer.noise.key_id, step=run.optimizer.noise.step - 1)
        )
        for number in range(epoch, EPOCHS):
            run.optimizer.set_epoch(number)
            for x, y, _ in run.loader:
                run.step(x, y)
                if run.optimizer.noise.step % SAVE_EVERY == 0 and run.sampler.state_dict()["batch"]:
                    run.state.save(path)
            run.scheduler.step()
            run.state.save(path)
        recorder("done", epoch=run.sampler.epoch)
        run.close()


def forked(function: Callable[..., None], *arguments: Any) -> int:
    """The pid of a child that runs the function and ends."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            function(*arguments)
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    return child


def killed(child: int) -> bool:
    """Whether it was killed; ending by itself, it must have ended well."""
    code = os.waitpid(child, 0)[1]
    assert code in (0, signal.SIGKILL), f"a training process failed with status {code}"
    return code == signal.SIGKILL


def nothing(point: str) -> None:
    """Lets the process live."""


POINTS = [
    ("claim", 1), ("claim", 9),                              # between the counter and its use
    ("use", 5),
    ("release", 1), ("release", 6),                          # noise added, not charged yet
    ("half a line", 1), ("half a line", 2),                  # the ledger's header: in its tail, in the file
    ("half a line", 5), ("half a line", 8),                  # the second charge in the tail, the third in the file
    ("before fsync", 3), ("before fsync", 6),
    ("after fsync", 2), ("after fsync", 8),
    ("before the inner step", 1), ("before the inner step", 8),   # charged, parameters not moved
    ("reached", 2), ("reached", 7),
    ("before save", 2), ("after save", 1), ("before rename", 2), ("after rename", 1),
]   # fmt: skip


def drive(folder: Path, seed: int) -> None:
    """A run for every point, killed there and at another one, and a run killed at random moments; all resumed to their
    end. Last, a run that forks."""
    chosen = random.Random(seed)
    torch.set_num_threads(1)
    Run().train(stop=1)   # what torch imports at its first step takes seconds: once, not in every child
    for place, (point, count) in enumerate(POINTS):
        home = folder / f"points{place}"
        home.mkdir()
        assert killed(forked(trained, home, Killed(point, count))), f"{point} {count} was never reached"
        if killed(forked(trained, home, Killed(*chosen.choice(POINTS)))):
            assert not killed(forked(trained, home, nothing))
    home = folder / "moments"
    home.mkdir()
    for _ in range(KILLS):
        read, write = os.pipe()
        child = forked(trained, home, Paused(write, chosen.randint(10, 60)))
        os.close(write)
        os.read(read, 1)
        time.sleep(chosen.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        os.close(read)
        assert killed(child)
    assert not killed(forked(trained, home, nothing))
    fork_beside(folder)


def fork_beside(folder: Path) -> None:
    """A process forked in the middle of training goes on training, beside its parent."""
    home = folder / "forks"
    home.mkdir()
    with Recorder(home / "log").watching() as recorder:
        run = Run(home)
        run.train(stop=2)

        def beside() -> None:
            free = Run(noise=run.optimizer.noise)   # the forked source itself
            free.train(stop=3)
            refused = ""
            try:
                run.step(*next(iter(run.loader))[:2])
            except ValueError as error:
                refused = str(error)
            recorder("refused", message=refused, grads=[p.grad is not None for p in run.model.parameters()])

        children = [forked(beside) for _ in range(2)]
        run.train(epoch=1, stop=6)
        for child in children:
            assert not killed(child)
        run.close()


@pytest.fixture(scope="module")
def driven(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders that a driver left, once for all tests."""
    folder = tmp_path_factory.mktemp("driven")
    command = [sys.executable, "-m", "tests.test_life_cycle", "drive", str(folder), "0"]
    root = Path(__file__).parents[1]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    return folder


@needs_fork
def test_kill_9_and_resume_to_the_end(driven: Path) -> None:
    homes = [*driven.glob("points*"), driven / "moments"]
    assert len(homes) == len(POINTS) + 1
    planned = epsilon(noise_multiplier=1.5, sample_rate=RATE, steps=PLANNED, delta=DELTA)
    replayed = 0
    for home in homes:
        recorder, ledger = Recorder(home / "log"), Ledger.read(home / "ledger.jsonl")   # verified as it is read
        assert_clean(recorder)
        assert [line["epoch"] for line in recorder.of("done")] == [EPOCHS]
        reached, used = (
            [(line["key"], line["step"]) for line in recorder.of(event)] for event in ("reached", "use")
        )
        charged = [(charge.record.key_id, charge.record.step) for charge in ledger.records()]
        assert len(set(charged)) == len(charged) == ledger.steps
        assert set(reached) <= set(charged) <= set(used)
        assert ledger.steps >= len(reached) >= PLANNED
        for line in recorder.of("resume"):   # what a checkpoint knew, and what came after it: nothing is forgotten
            assert line["charged"] + line["later"] == line["steps"]
        assert ledger.epsilon(DELTA) > planned if ledger.steps > PLANNED else ledger.epsilon(DELTA) >= planned
        replayed += ledger.steps > PLANNED
    assert replayed > len(POINTS) // 4   # runs in which a charged step was taken again


@needs_fork
def test_a_killed_run_is_finished_by_another_process(driven: Path) -> None:
    """The files are all there is: this process continues what a killed one left, and the ledger goes on."""
    home = driven / "moments"
    run = Run(home)
    charged = run.ledger.steps
    report = run.state.load(home / "run.pt")
    assert (report.epoch, report.rekeyed, report.charged_steps + report.later_steps) == (EPOCHS, True, charged)
    run.close()


@needs_fork
def test_a_fork_in_the_middle_of_training(driven: Path) -> None:
    home = driven / "forks"
    recorder, ledger = Recorder(home / "log"), Ledger.read(home / "ledger.jsonl")
    assert_clean(recorder)
    assert len({line["pid"] for line in recorder.of("use")}) == 3
    refusals = recorder.of("refused")
    assert len(refusals) == 2
    for line in refusals:   # the parent's ledger is not the child's to write: no charge, no gradient
        assert "nothing can be appended" in line["message"] or "opened before a fork" in line["message"]
        assert not any(line["grads"])
    assert ledger.steps == 6


if __name__ == "__main__":
    assert sys.argv[1] == "drive"
    drive(Path(sys.argv[2]), int(sys.argv[3]))
