"""TrainingState: what a checkpoint holds and does not hold, bit-equal resumes, ledgers that do not fit, torn files."""

import logging
import os
import pickle
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR, OneCycleLR, StepLR
from torch.utils.data import DataLoader, TensorDataset

from dprs_kernels import GradualCooling, NoiseSource
from dprs_kernels.grads import FunctionalSource
from dprs_kernels.optimizer import RSDPOptimizer
from dprs_kernels.privacy import checkpoint
from dprs_kernels.privacy.checkpoint import TrainingState
from dprs_kernels.privacy.ledger import Ledger
from dprs_kernels.privacy.sampling import PoissonBatchSampler, ShuffledPartitionNominal, empty_safe_collate

EPOCHS, STEPS, SIZE, RATE = 3, 4, 60, 0.1
INNER = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
}


class Run:
    """A tiny private run, built the same way each time. seed: of noise and batches; None: secure."""

    def __init__(
        self,
        folder: Path | None = None,
        *,
        seed: int | None = None,
        inner: str = "sgd",
        workers: int = 0,
        partition: bool = False,
        **overrides: Any,
    ) -> None:
        generator = torch.Generator().manual_seed(0)
        x, y = torch.randn(SIZE, 5, generator=generator), torch.randint(3, (SIZE,), generator=generator)
        data = TensorDataset(x, y, torch.arange(SIZE))
        self.model = nn.Sequential(nn.Linear(5, 24), nn.Tanh(), nn.Linear(24, 3))
        with torch.no_grad():
            for param in self.model.parameters():
                param.copy_(torch.randn(param.shape, generator=generator) / 4)
        settings = dict(max_grad_norm=1.0, noise_multiplier=1.5, expected_batch_size=6.0, seed=3)
        settings["schedule"] = GradualCooling(0.8, epochs=EPOCHS)
        settings["noise"] = NoiseSource() if seed is None else NoiseSource.seeded_for_tests(seed)
        self.optimizer = RSDPOptimizer(INNER[inner](self.model.parameters()), **{**settings, **overrides})
        arguments: dict[str, Any] = dict(batch_size=15) if partition else dict(sample_rate=RATE, steps=STEPS)
        kind = ShuffledPartitionNominal if partition else PoissonBatchSampler
        self.sampler = kind(SIZE, **arguments) if seed is None else kind.seeded_for_tests(SIZE, seed=seed, **arguments)
        self.loader = DataLoader(
            data, batch_sampler=self.sampler, num_workers=workers, collate_fn=empty_safe_collate(data)
        )
        self.scheduler = StepLR(self.optimizer, step_size=1, gamma=0.7)
        self.ledger = None if folder is None else Ledger(folder / "ledger.jsonl")
        if self.ledger is not None:
            self.ledger.attach(self.optimizer, sampler=self.sampler, adjacency="add_remove")
        self.state = TrainingState(
            self.model, self.optimizer, sampler=self.sampler, ledger=self.ledger, schedulers=[self.scheduler]
        )
        self.source = FunctionalSource(self.model)
        self.batches: list[list[int]] = []
        self.masks: list[str] = []

    def gradients(self, x: torch.Tensor, y: torch.Tensor) -> list[torch.Tensor]:
        return list(self.source.grads(nn.CrossEntropyLoss(), x, y).values())

    def step(self, x: torch.Tensor, y: torch.Tensor) -> None:
        self.optimizer.step(grad_samples=self.gradients(x, y))

    def train(self, epoch: int = 0, stop: int | None = None) -> "Run":
        """To the end, or until this object has taken `stop` steps."""
        for number in range(epoch, EPOCHS):
            self.optimizer.set_epoch(number)
            for x, y, index in self.loader:
                self.step(x, y)
                self.batches.append(index.tolist())
                self.masks.append(self.optimizer.keep.digest())
                if len(self.batches) == stop and stop % STEPS:
                    return self
            self.scheduler.step()
            if len(self.batches) == stop:
                return self
        return self

    def close(self) -> None:
        if self.ledger is not None:
            self.ledger.close()

    def tensors(self) -> list[torch.Tensor]:
        """Everything that training changed."""
        inner = self.optimizer.state_dict()["state"]
        return [*self.model.state_dict().values(), *(v for s in inner.values() for v in s.values() if v is not None)]


def resumed(path: Path, folder: Path | None = None, **arguments: Any) -> Run:
    run = Run(folder, **arguments)
    run.train(epoch=run.state.load(path).epoch)
    return run


# ---- seeded: the interrupted run is the uninterrupted one, bit for bit


@pytest.mark.parametrize(
    ("taken", "options"),
    [
        *((taken, {}) for taken in (0, 1, 3, 4, 6, 8, 11)),
        (6, dict(inner="adam")),
        (5, dict(workers=2)),
        (8, dict(workers=2)),
        (6, dict(partition=True)),
    ],
)
def test_an_interrupted_seeded_run_equals_the_uninterrupted_one(
    taken: int, options: dict[str, Any], tmp_path: Path
) -> None:
    whole = Run(seed=4, **options).train()
    first = Run(seed=4, **options)
    if taken:
        first.train(stop=taken)
    first.state.save(tmp_path / "run.pt")
    second = resumed(tmp_path / "run.pt", seed=4, **options)
    assert first.batches + second.batches == whole.batches
    assert first.masks + second.masks == whole.masks
    assert len(set(whole.masks)) == EPOCHS
    assert len(whole.tensors()) == len(second.tensors()) > 4
    assert all(torch.equal(a, b) for a, b in zip(whole.tensors(), second.tensors(), strict=True))
    assert whole.scheduler.get_last_lr() == second.scheduler.get_last_lr()
    assert whole.sampler.state_dict() == second.sampler.state_dict()
    assert whole.optimizer.noise.step == second.optimizer.noise.step == EPOCHS * STEPS


def test_a_seeded_resume_says_so(tmp_path: Path) -> None:
    Run(seed=4).train(stop=6).state.save(tmp_path / "run.pt")
    run = Run(seed=4)
    report = run.state.load(tmp_path / "run.pt")
    assert (report.epoch, report.step, report.rekeyed) == (1, 6, False)
    assert report.notes == ("seeded for tests: noise and batches go on bit for bit; no privacy claim",)


def test_an_open_logical_batch_is_drawn_again(tmp_path: Path) -> None:
    first = Run(seed=4).train(stop=4)
    x, y, _ = next(iter(first.loader))
    first.optimizer.accumulate(first.gradients(x, y))
    first.state.save(tmp_path / "run.pt")
    whole, second = Run(seed=4).train(), resumed(tmp_path / "run.pt", seed=4)
    assert second.batches == whole.batches[4:]
    assert all(torch.equal(a, b) for a, b in zip(whole.tensors(), second.tensors(), strict=True))


# ---- secure: a fresh key, and it says so


def test_a_secure_resume_is_rekeyed_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    first = Run().train(stop=6)
    first.state.save(tmp_path / "run.pt")
    second = Run()
    with caplog.at_level(logging.INFO, logger="dprs_kernels"):
        report = second.state.load(tmp_path / "run.pt")
    assert (report.epoch, report.step, report.rekeyed, report.later_steps) == (1, 6, True, 0)
    keys = (second.optimizer.noise.key_id, second.sampler.key_id)
    assert report.notes == (
        f"re-keyed: noise goes on at step 6 under key {keys[0]}, batches are drawn under key {keys[1]}; the "
        "distribution is the interrupted run's, the bits are not",
    )
    assert caplog.messages == list(report.notes)
    assert len({*keys, first.optimizer.noise.key_id, first.sampler.key_id}) == 4
    assert all(torch.equal(a, b) for a, b in zip(first.tensors(), second.tensors(), strict=True))
    second.train(epoch=report.epoch)
    assert len(second.batches) == 6


def test_no_key_and_no_sum_in_the_file(tmp_path: Path) -> None:
    run = Run()
    run.train(stop=5)
    keys = [run.optimizer.noise._key, run.sampler._source._key]
    x, y, _ = next(iter(DataLoader(run.loader.dataset, batch_size=7)))
    run.optimizer.accumulate(run.gradients(x, y))
    total = run.optimizer._total._total.clone()
    assert total.abs().sum() > 0
    run.state.save(tmp_path / "run.pt")
    with zipfile.ZipFile(tmp_path / "run.pt") as archive:
        files = [archive.read(name) for name in archive.namelist()]
    raw = (tmp_path / "run.pt").read_bytes()
    for secret in [*keys, *(key.hex().encode() for key in keys), total.numpy().tobytes()[:64]]:
        assert secret not in raw
        assert not any(secret in file for file in files)
    assert run.optimizer.noise.key_id.encode() in raw   # the search would find text


def test_no_memory_beside_a_tensor_is_written(tmp_path: Path) -> None:
    """torch.save writes whole storages: a parameter that is part of an arena would take its neighbours along."""
    run = Run()
    arena = torch.full((1000,), 1234.5)
    run.model[0].bias.data = arena[:24]
    with torch.no_grad():
        run.model[0].bias.zero_()
    run.state.save(tmp_path / "run.pt")
    needle = arena[24:32].numpy().tobytes()
    assert needle not in (tmp_path / "run.pt").read_bytes()
    torch.save(run.state.state_dict(), tmp_path / "plain.pt")
    assert needle in (tmp_path / "plain.pt").read_bytes()   # the test can fail


def test_the_size_of_the_data_is_not_in_the_state() -> None:
    run = Run()
    assert "size" not in run.state.state_dict()["sampler"]


def test_a_training_state_cannot_be_pickled() -> None:
    with pytest.raises(ValueError, match="it holds a noise key; use state_dict"):
        pickle.dumps(Run().state)


# ---- the ledger


def test_a_ledger_of_the_same_run_goes_on(tmp_path: Path) -> None:
    first = Run(tmp_path).train(stop=6)
    first.state.save(tmp_path / "run.pt")
    assert first.ledger.steps == 6
    first.close()
    second = Run(tmp_path)
    report = second.state.load(tmp_path / "run.pt")
    assert (report.charged_steps, report.later_steps, len(report.notes)) == (6, 0, 1)
    second.train(epoch=report.epoch)
    assert second.ledger.steps == EPOCHS * STEPS
    second.close()
    other_rank = Run()
    ledger = Ledger.read(tmp_path / "ledger.jsonl")
    state = TrainingState(
        other_rank.model, other_rank.optimizer, sampler=other_rank.sampler, ledger=ledger,
        schedulers=[other_rank.scheduler],
    )   # fmt: skip
    assert state.load(tmp_path / "run.pt").later_steps == 6


def test_steps_after_the_checkpoint_stay_charged_and_are_charged_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Run(tmp_path).train(stop=5)
    first.state.save(tmp_path / "run.pt")
    batches = iter(first.loader)
    for _ in range(3):   # released, then lost in a crash
        first.step(*next(batches)[:2])
    first.close()
    second = Run(tmp_path)
    report = second.state.load(tmp_path / "run.pt")
    note = (
        "3 steps in the ledger came after the checkpoint: they were released, or may have been, and stay charged; "
        "steps taken again are charged again"
    )
    assert (report.charged_steps, report.later_steps, report.notes[-1]) == (5, 3, note)
    assert [record.message for record in caplog.records if record.levelno == logging.WARNING] == [note]
    second.train(epoch=report.epoch)
    assert second.ledger.steps == EPOCHS * STEPS + 3
    second.close()


def test_a_ledger_that_does_not_fit_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    first = Run(tmp_path / "a").train(stop=5)
    first.state.save(tmp_path / "run.pt")
    first.close()
    cases = {"shorter": 2, "other": 7}
    for name, steps in cases.items():
        (tmp_path / name).mkdir()
        run = Run(tmp_path / name).train(stop=steps)
        before, key = [t.clone() for t in run.tensors()], run.optimizer.noise.key_id
        expected = (
            r"^ledger: has 2 steps, the checkpoint was taken at 5; it was cut, or is the ledger of another run"
            if name == "shorter"
            else r"^ledger: never had the head .{16} that the checkpoint was taken at \(5 steps\); it is the ledger of"
        )
        with pytest.raises(ValueError, match=expected):
            run.state.load(tmp_path / "run.pt")
        assert all(torch.equal(a, b) for a, b in zip(before, run.tensors(), strict=True))
        assert run.optimizer.noise.key_id == key
        run.close()


def test_a_ledger_is_neither_dropped_nor_added_on_resume(tmp_path: Path) -> None:
    first = Run(tmp_path).train(stop=5)
    first.state.save(tmp_path / "with.pt")
    first.close()
    with pytest.raises(ValueError, match=r"^ledger: the state was saved with one, got a training state without"):
        Run().state.load(tmp_path / "with.pt")
    Run().train(stop=5).state.save(tmp_path / "without.pt")
    (tmp_path / "b").mkdir()
    run = Run(tmp_path / "b")
    with pytest.raises(ValueError, match=r"^ledger: the state was saved without one, got a training state with"):
        run.state.load(tmp_path / "without.pt")
    run.close()


def test_a_ledger_that_was_never_attached_is_noticed(tmp_path: Path) -> None:
    run = Run()
    ledger = Ledger(tmp_path / "ledger.jsonl")
    run.state = TrainingState(run.model, run.optimizer, sampler=run.sampler, ledger=ledger)
    run.state.save(tmp_path / "run.pt")   # no steps, nothing to charge
    run.train(stop=2)
    with pytest.raises(ValueError, match=r"^ledger: holds none of the 2 steps taken since it was given; call ledger"):
        run.state.save(tmp_path / "run.pt")
    ledger.close()


# ---- files


@pytest.mark.parametrize("stage", ["save", "fsync", "replace"])
def test_a_failed_save_leaves_the_old_checkpoint(stage: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run, path = Run(seed=1), tmp_path / "run.pt"
    run.state.save(path)
    old = path.read_bytes()
    run.train(stop=2)

    def failing(*_: Any) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(torch if stage == "save" else os, stage, failing)
    with pytest.raises(OSError, match="disk full"):
        run.state.save(path)
    monkeypatch.undo()
    assert path.read_bytes() == old
    assert os.listdir(tmp_path) == ["run.pt"]


def test_a_save_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """fsync of the draft, rename, fsync of the folder: in that order."""
    calls, fsync, replace = [], os.fsync, os.replace

    def synced(descriptor: int) -> None:
        calls.append("folder" if os.path.isdir(f"/proc/self/fd/{descriptor}") else "file")
        fsync(descriptor)

    def renamed(source: Any, target: Any) -> None:
        calls.append("rename")
        assert torch.load(source, weights_only=True)["format"] == checkpoint.FORMAT   # whole already
        replace(source, target)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(os, "replace", renamed)
    Run().state.save(tmp_path / "run.pt")
    assert calls == ["file", "rename", "folder"]


def test_the_model_keeps_the_versions_of_its_modules(tmp_path: Path) -> None:
    run = Run()
    run.state.save(tmp_path / "run.pt")
    saved = torch.load(tmp_path / "run.pt", weights_only=True)["model"]
    assert saved._metadata == run.model.state_dict()._metadata


class Harmful:
    """Unpickled, it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.folder),)


def test_damaged_and_foreign_files_are_refused(tmp_path: Path) -> None:
    run, path = Run(), tmp_path / "run.pt"
    run.state.save(path)
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ValueError, match=r"^path: .*run.pt is no checkpoint of TrainingState.save, or damaged"):
        run.state.load(path)
    torch.save({**run.state.state_dict(), "extra": Harmful(tmp_path / "made")}, path)
    with pytest.raises(ValueError, match=r"^path: .* is no checkpoint"):
        run.state.load(path)
    assert not (tmp_path / "made").exists()   # nothing in the file was executed
    torch.save([1], path)
    with pytest.raises(ValueError, match=r"^path: .* holds a list; expected a file of TrainingState.save"):
        run.state.load(path)
    torch.save(run.model.state_dict(), path)
    with pytest.raises(ValueError, match=r"^state: got None version None; expected 'dprs_kernels training state'"):
        run.state.load(path)
    with pytest.raises(FileNotFoundError):
        run.state.load(tmp_path / "nowhere.pt")


def test_states_of_other_shapes_are_refused() -> None:
    run = Run()
    state = run.state.state_dict()
    with pytest.raises(ValueError, match=r"^sampler: saved with one, got a training state without"):
        TrainingState(run.model, run.optimizer, schedulers=[run.scheduler]).load_state_dict(state)
    with pytest.raises(ValueError, match=r"^schedulers: saved 1, got 0"):
        TrainingState(run.model, run.optimizer, sampler=run.sampler).load_state_dict(state)
    plain = {**state, "optimizer": run.optimizer.original_optimizer.state_dict()}
    with pytest.raises(ValueError, match=r"^state: the optimizer's part has no noise position"):
        run.state.load_state_dict(plain)
    with pytest.raises(ValueError, match=r"^state: got .* version 2; expected"):
        run.state.load_state_dict({**state, "version": 2})


@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: MultiStepLR(o, milestones=[2, 5]),
        lambda o: LambdaLR(o, lambda epoch: 0.9**epoch),
        lambda o: OneCycleLR(o, max_lr=0.1, total_steps=20),
    ],
)
def test_torch_schedulers_are_saved_and_loaded_safely(scheduler: Any, tmp_path: Path) -> None:
    def make() -> tuple[TrainingState, Any]:
        run = Run(seed=1)
        own = scheduler(run.optimizer)
        for _ in range(3):
            run.step(torch.randn(2, 5), torch.tensor([0, 1]))
            own.step()
        return TrainingState(run.model, run.optimizer, schedulers=[own]), own

    state, first = make()
    state.save(tmp_path / "run.pt")
    first.step()
    other, second = make()
    second.step()
    other.load(tmp_path / "run.pt")
    assert second.last_epoch == 3
    second.step()
    assert first.get_last_lr() == second.get_last_lr()


def test_what_cannot_be_loaded_safely_is_not_saved(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"rates": [0.1, OrderedDict(f=print)]}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            raise AssertionError

    run = Run()
    state = TrainingState(run.model, run.optimizer, schedulers=[Odd()])
    message = r"^state\['schedulers'\]\[0\]\['rates'\]\[1\]\['f'\]: got builtin_function_or_method; expected numbers"
    with pytest.raises(ValueError, match=message):
        state.save(tmp_path / "run.pt")
    assert os.listdir(tmp_path) == []


def test_bad_arguments() -> None:
    run = Run()
    for wrong, message in (
        (dict(optimizer=run.optimizer.original_optimizer), "^optimizer: got SGD; expected an RSDPOptimizer or RSDPOp"),
        (dict(model=run.optimizer), "^model: got RSDPOptimizer; expected a torch.nn.Module"),
        (dict(sampler=[[1]]), "^sampler: got list; expected a PoissonBatchSampler, or None"),
        (dict(ledger="x.jsonl"), "^ledger: got str; expected a Ledger, or None"),
        (dict(schedulers=[3]), r"^schedulers\[0\]: got int; expected one with a state_dict"),
    ):
        with pytest.raises(ValueError, match=message):
            TrainingState(**{**dict(model=run.model, optimizer=run.optimizer), **wrong})


def test_opacus_optimizers_resume_too(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    from dprs_kernels.opacus_optimizer import RSDPOpacusOptimizer

    def make() -> tuple[nn.Module, Any, TrainingState]:
        model = nn.Linear(4, 3)
        nn.init.ones_(model.weight)
        nn.init.zeros_(model.bias)
        with pytest.warns(UserWarning, match="seeded for tests"):
            optimizer = RSDPOpacusOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), noise_multiplier=1.0, max_grad_norm=1.0,
                expected_batch_size=4, schedule=GradualCooling(0.8, epochs=3), steps_per_epoch=2,
                noise=NoiseSource.seeded_for_tests(1),
            )   # fmt: skip
        return model, optimizer, TrainingState(model, optimizer)

    def train(model: nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            generator = torch.Generator().manual_seed(step)
            for param in model.parameters():
                param.grad_sample = torch.randn(4, *param.shape, generator=generator)
            optimizer.step()
            optimizer.zero_grad()

    whole, optimizer, _ = make()
    train(whole, optimizer, range(6))
    first, optimizer, state = make()
    train(first, optimizer, range(3))
    state.save(tmp_path / "run.pt")
    second, optimizer, state = make()
    assert state.load(tmp_path / "run.pt").step == 3
    train(second, optimizer, range(3, 6))
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), second.parameters(), strict=True))
