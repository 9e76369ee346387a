"""A training run, its resumption, its budget, its threads: on a few images, in-process."""

import csv
import dataclasses
import doctest
import importlib
import io
import sys
from pathlib import Path

import pytest
import torch

from dprs_kernels.layout import Layout
from dprs_kernels.paper import budget, plots, prepare
from dprs_kernels.paper import train as train_module
from dprs_kernels.paper.config import TrainConfig
from dprs_kernels.paper.data import Data
from dprs_kernels.paper.networks import NETWORKS
from dprs_kernels.paper.plain import PlainTwin
from dprs_kernels.paper.prepare import accuracy_of, make_model
from dprs_kernels.paper.progress import Progress, Silent, duration
from dprs_kernels.paper.recipes import Recipe
from dprs_kernels.paper.run_folder import RunFolder
from dprs_kernels.paper.threads import quicker, threads_of
from dprs_kernels.paper.train import RunFailed, resume, train
from dprs_kernels.privacy.accounting import epsilon as epsilon_of
from dprs_kernels.privacy.checkpoint import TrainingState
from dprs_kernels.privacy.ledger import Ledger
from dprs_kernels.privacy.sampling import PoissonBatchSampler

pytest.importorskip("matplotlib")
pytest.importorskip("opacus")   # the accountant
STEPS = 4   # an epoch: 64 images in batches of 16


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)   # ten times quicker beside other work, on models this small
    yield
    torch.set_num_threads(before)


@pytest.fixture
def no_pictures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of the time of a run this short."""
    monkeypatch.setattr(plots, "plot", lambda *args, **more: None)


@pytest.fixture(scope="module")
def data() -> Data:
    """Squares in one of ten places, in noise."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(84) % 10
    images = 0.1 * torch.rand(84, 1, 8, 8, generator=generator)
    for image, label in zip(images, labels.tolist(), strict=True):
        image[0, label % 4 * 2 : label % 4 * 2 + 2, label // 4 * 2 : label // 4 * 2 + 2] += 1
    return Data("digits", images[:64], labels[:64], images[64:], labels[64:], 10, "the test")


def config(**changes: object) -> TrainConfig:
    settings = dict(epochs=3, batch=16, lr=0.5, sigma=1.0, final_rate=0.6)
    return TrainConfig.of("digits", **{**settings, **changes})


def seeded(**changes: object) -> TrainConfig:
    return config(insecure_seeded_noise=True, **changes)


def weights(folder: Path) -> torch.Tensor:
    state = torch.load(folder / "checkpoint.pt", weights_only=True)["model"]
    return torch.cat([value.reshape(-1) for value in state.values()])


class StopAfter:
    """stop() after so many steps."""

    def __init__(self, steps: int) -> None:
        self.left = steps

    def __call__(self) -> bool:
        self.left -= 1
        return self.left < 0


def test_a_run(tmp_path: Path, data: Data) -> None:
    before = torch.random.get_rng_state()
    result = train(config(sigma=None, epsilon=4.0), out=tmp_path / "run", data=data)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert (result.ended, result.steps, result.charged, result.planned) == ("finished", 12, 12, 12)
    assert 3.9 < result.epsilon <= 4.0
    assert {file.name for file in (tmp_path / "run").iterdir()} == {
        "config.json", "ledger.jsonl", "ledger.jsonl.tail", "metrics.csv", "checkpoint.pt", "plot.png"
    }   # fmt: skip
    assert Ledger.read(tmp_path / "run" / "ledger.jsonl").epsilon(1e-5) == result.epsilon
    text = result.summary()
    for part in (f"epsilon {result.epsilon:.3f} at delta 1e-05", "Poisson batches with secret bits", "plot.png",
                 "12 of 12, 12 charged", "not covered"):   # fmt: skip
        assert part in text


def test_metrics_are_public_numbers(tmp_path: Path, data: Data) -> None:
    train(config(refresh=2), out=tmp_path / "run", data=data)
    with open(tmp_path / "run" / "metrics.csv") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == ["epoch", "steps", "charged", "drop_rate", "test_accuracy", "epsilon", "claim", "seconds",
                             "steps_per_second"]   # no training loss, no norms, no sizes of batches
    assert [row["epoch"] for row in rows] == ["1", "2", "3"]
    assert [row["steps"] for row in rows] == ["4", "8", "12"]
    assert [float(row["drop_rate"]) for row in rows] == [0.0, 0.3, 0.6]
    spent = [float(row["epsilon"]) for row in rows]
    assert spent == sorted(spent)
    whole = epsilon_of(noise_multiplier=1.0, sample_rate=0.25, steps=12, delta=1e-5)
    assert spent[-1] == pytest.approx(whole, rel=1e-2)


def test_the_last_row_is_the_accuracy_of_the_model(tmp_path: Path, data: Data) -> None:
    result = train(seeded(), out=tmp_path / "run", data=data)
    model = make_model(NETWORKS["digits-cnn"], 1)
    model.load_state_dict(torch.load(tmp_path / "run" / "checkpoint.pt", weights_only=True)["model"])
    right = (model(data.test_x).argmax(1) == data.test_y).double().mean()
    assert result.accuracy == accuracy_of(model, data.test_x, data.test_y) == float(right)


def test_it_learns(data: Data) -> None:
    assert train(config(epochs=30, sigma=0.1, final_rate=0.0), data=data).accuracy > 0.8   # chance is 0.1


def test_empty_batches_take_their_steps(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    """Noise is added and charged as ever, and it moves the weights: who was sampled must not show."""
    models: list[torch.nn.Module] = []
    monkeypatch.setattr(train_module, "make_model", lambda *a: models.append(make_model(*a)) or models[-1])
    drawn = PoissonBatchSampler.__iter__
    monkeypatch.setattr(PoissonBatchSampler, "__iter__", lambda self: ([] for _ in drawn(self)))
    result = train(config(final_rate=0.0), data=data)
    assert (result.ended, result.steps, result.charged) == ("finished", 12, 12)
    for before, after in zip(make_model(NETWORKS["digits-cnn"], 0).parameters(), models[0].parameters(), strict=True):
        assert bool(after.isfinite().all())
        assert bool((before != after).all())


@pytest.mark.usefixtures("no_pictures")
def test_seed_is_of_weights_and_masks_only(tmp_path: Path, data: Data) -> None:
    """Two secure runs with one seed differ; two seeded ones are equal; another seed is another run."""
    for name, made in dict(a=config(), b=config(), c=seeded(), d=seeded(), e=seeded(seed=1)).items():
        train(made, out=tmp_path / name, data=data)
    ledgers = {name: Ledger.read(tmp_path / name / "ledger.jsonl") for name in "abe"}
    masks = {name: [charge.record.keep_digest for charge in ledger.records()] for name, ledger in ledgers.items()}
    assert not torch.equal(weights(tmp_path / "a"), weights(tmp_path / "b"))
    assert masks["a"] == masks["b"] != masks["e"]
    assert torch.equal(weights(tmp_path / "c"), weights(tmp_path / "d"))
    assert not torch.equal(weights(tmp_path / "c"), weights(tmp_path / "e"))


@pytest.mark.parametrize(
    ("steps", "changes"),
    [
        (3, dict()),         # inside the first epoch
        (STEPS, dict()),     # at its end
        (6, dict(algorithm=4, momentum=0.9, refresh=2)),
        (STEPS, dict(algorithm=4, cooling="constant", sampler="shuffled-nominal")),
        (6, dict(algorithm=2, optimizer="adam")),
        (6, dict(algorithm=3, momentum=0.5, sampler="shuffled-nominal")),
    ],
)
@pytest.mark.usefixtures("no_pictures")
def test_seeded_resume_is_bit_equal(steps: int, changes: dict, tmp_path: Path, data: Data) -> None:
    train(seeded(**changes), out=tmp_path / "whole", data=data)
    first = train(seeded(**changes), out=tmp_path / "parts", data=data, stop=StopAfter(steps))
    assert (first.ended, first.steps) == ("interrupted", steps)
    second = resume(tmp_path / "parts", data=data)
    assert (second.ended, second.steps, second.charged) == ("finished", 12, 12)   # nothing taken twice
    assert torch.equal(weights(tmp_path / "parts"), weights(tmp_path / "whole"))
    rows = [RunFolder.open(tmp_path / name).metrics() for name in ("whole", "parts")]
    public = [[dataclasses.replace(row, seconds=0, steps_per_second=0) for row in found] for found in rows]
    assert public[0] == public[1]


def broken_run(folder: Path, made: TrainConfig, data: Data, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """Dies at step `at`, after the last checkpoint: the ledger holds more than it."""
    real, taken = train_module._Run._step, [0]

    def step(self: object, *args: object) -> float:
        taken[0] += 1
        if taken[0] == at:
            raise OSError("the cable was pulled")
        return real(self, *args)   # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(train_module._Run, "_step", step)
        with pytest.raises(RunFailed, match=f"after {at - 1} charged steps: OSError: the cable was pulled"):
            train(made, out=folder, data=data)


def test_a_failed_run_keeps_its_traceback_and_goes_on(
    tmp_path: Path, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    train(seeded(), out=tmp_path / "whole", data=data)
    broken_run(tmp_path / "run", seeded(), data, monkeypatch, at=7)
    assert "the cable was pulled" in (tmp_path / "run" / "error.txt").read_text()
    stream = io.StringIO()
    result = resume(tmp_path / "run", data=data, progress=Progress(stream=stream))
    assert (result.ended, result.steps, result.charged) == ("finished", 12, 14)   # steps 5 and 6 twice
    assert not (tmp_path / "run" / "error.txt").exists()   # that is over
    assert torch.equal(weights(tmp_path / "run"), weights(tmp_path / "whole"))
    assert "2 steps in the ledger came after the checkpoint" in stream.getvalue()
    assert "steps taken again are charged again" in stream.getvalue()


def test_replayed_steps_end_the_run_at_the_last_affordable_step(
    tmp_path: Path, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken_run(tmp_path / "run", config(sigma=None, epsilon=4.0), data, monkeypatch, at=8)
    stream = io.StringIO()
    result = resume(tmp_path / "run", data=data, progress=Progress(stream=stream))
    assert (result.ended, result.steps, result.charged) == ("budget", 9, 12)   # 5, 6, 7 twice: 10, 11, 12 are not taken
    assert result.epsilon <= 4.0
    assert "affords 5 of the 8 steps that are left" in stream.getvalue()
    rows = RunFolder.open(tmp_path / "run").metrics()
    assert [row.epoch for row in rows] == [1, 2, 3]
    assert (rows[-1].steps, rows[-1].charged, rows[-1].epsilon) == (9, 12, pytest.approx(result.epsilon, rel=1e-5))
    again = resume(tmp_path / "run", data=data)   # takes no further step, and stays as it is
    assert (again.ended, again.steps, again.charged, again.accuracy) == ("budget", 9, 12, result.accuracy)
    assert RunFolder.open(tmp_path / "run").metrics() == rows


def test_killed_before_the_first_checkpoint(tmp_path: Path, data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    broken_run(tmp_path / "run", seeded(), data, monkeypatch, at=3)
    stream = io.StringIO()
    result = resume(tmp_path / "run", data=data, progress=Progress(stream=stream))
    assert (result.steps, result.charged) == (12, 14)
    assert "no checkpoint yet: starting again; the 2 steps in the ledger stay charged" in stream.getvalue()


def test_a_row_without_its_checkpoint_gives_way(
    tmp_path: Path, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the two: the epoch is taken again, and the row is of what was charged by then."""
    real, saves = TrainingState.save, []

    def save(self: TrainingState, path: Path) -> None:
        saves.append(path)
        if len(saves) == 2:
            raise OSError("killed")
        real(self, path)

    with monkeypatch.context() as patch:
        patch.setattr(TrainingState, "save", save)
        with pytest.raises(RunFailed, match="after 8 charged steps"):
            train(config(), out=tmp_path / "run", data=data)
    assert [row.charged for row in RunFolder.open(tmp_path / "run").metrics()] == [4, 8]
    resume(tmp_path / "run", data=data)
    rows = RunFolder.open(tmp_path / "run").metrics()
    assert [(row.epoch, row.steps, row.charged) for row in rows] == [(1, 4, 4), (2, 8, 12), (3, 12, 16)]


def test_asked_to_stop_before_the_first_step(tmp_path: Path, data: Data) -> None:
    """Ctrl-C while data is read: nothing is taken, nothing charged."""
    result = train(config(), out=tmp_path / "run", data=data, stop=lambda: True)
    assert (result.ended, result.steps, result.charged, result.epsilon) == ("interrupted", 0, 0, None)
    assert resume(tmp_path / "run", data=data).steps == 12


def test_a_full_disk_does_not_hide_the_error(tmp_path: Path, data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "error.txt").mkdir()   # it cannot be written
    monkeypatch.setattr(RunFolder, "create", lambda path, made: RunFolder(path, made))
    monkeypatch.setattr(train_module._Run, "_loop", lambda *args: 1 / 0)
    with pytest.raises(RunFailed, match=r"ZeroDivisionError: .* \(its traceback cannot be written: "):
        train(config(), out=tmp_path / "run", data=data)


def test_a_ledger_that_cannot_be_written(tmp_path: Path, data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path) -> None:
        raise OSError("No space left on device")

    monkeypatch.setattr(train_module, "Ledger", full)
    with pytest.raises(ValueError, match=r"out: its ledger cannot be written \(No space left on device\); make room"):
        train(config(), out=tmp_path / "run", data=data)


def test_a_ledger_without_an_epsilon_is_refused_before_a_step(
    tmp_path: Path, data: Data, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not after an epoch, whose steps would be charged and lost at every attempt."""
    train(config(), out=tmp_path / "run", data=data, stop=StopAfter(5))

    def refused(*args: object, **more: object) -> float:
        raise ValueError("noise key 1: 3 steps are not in the ledger")

    monkeypatch.setattr(Ledger, "epsilon", refused)
    with pytest.raises(ValueError, match="3 steps are not in the ledger"):
        resume(tmp_path / "run", data=data)
    assert Ledger.read(tmp_path / "run" / "ledger.jsonl").steps == 5


def test_the_ledger_is_closed(tmp_path: Path, data: Data) -> None:
    """Another process may go on, while this one lives."""
    train(config(), out=tmp_path / "run", data=data, stop=StopAfter(5))
    Ledger(tmp_path / "run" / "ledger.jsonl").close()


def test_long_epochs_are_saved_inside(tmp_path: Path, data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_module, "SAVE_SECONDS", 0.0)
    broken_run(tmp_path / "run", seeded(), data, monkeypatch, at=4)
    result = resume(tmp_path / "run", data=data)
    assert (result.steps, result.charged) == (12, 12)


def test_resuming_a_finished_run_changes_nothing(tmp_path: Path, data: Data) -> None:
    first = train(config(), out=tmp_path / "run", data=data)
    again = resume(tmp_path / "run", data=data)
    assert dataclasses.replace(again, plain=None) == first


def test_a_ledger_that_was_cut_is_refused(tmp_path: Path, data: Data) -> None:
    train(config(), out=tmp_path / "run", data=data, stop=StopAfter(5))
    for name in ("ledger.jsonl", "ledger.jsonl.tail"):
        (tmp_path / "run" / name).unlink()
    with pytest.raises(ValueError, match="ledger: has 0 steps, the checkpoint was taken at 5"):
        resume(tmp_path / "run", data=data)


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(
    ("changes", "claim", "text"),
    [
        (dict(sampler="shuffled-nominal"), "nominal", "NOMINAL epsilon"),
        (dict(algorithm=2), "none", "NO PRIVACY CLAIM: Algorithm 2 is an ablation"),
        (dict(algorithm=3), "none", "NO PRIVACY CLAIM: Algorithm 3 is an ablation"),
        (dict(sigma=0.0), "none", "NO PRIVACY CLAIM: no noise"),
        (dict(insecure_seeded_noise=True), "none", "NO PRIVACY CLAIM: seeded noise"),
        (dict(algorithm=4), "poisson", "epsilon"),
    ],
)
def test_claims(changes: dict, claim: str, text: str, tmp_path: Path, data: Data) -> None:
    result = train(config(epochs=1, **changes), out=tmp_path / "run", data=data)
    assert result.claim == claim == RunFolder.open(tmp_path / "run").metrics()[0].claim
    assert (result.epsilon is None) == (claim == "none")
    assert text in result.summary()
    if claim == "nominal":
        assert result.unamplified > result.epsilon
    ledger = Ledger.read(tmp_path / "run" / "ledger.jsonl")
    if claim != "poisson":   # the ledger itself refuses, whoever asks
        with pytest.raises(ValueError, match=r"no epsilon holds|shuffled partitions"):
            ledger.epsilon(1e-5)


def test_algorithm_2_takes_the_sigma_of_algorithm_1(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []
    monkeypatch.setattr(budget, "sigma_for", lambda layout, **run: asked.append(run) or 1.25)
    made = [config(epochs=1, algorithm=algorithm, sigma=None, epsilon=8.0) for algorithm in (1, 2, 3)]
    assert [train(one, data=data).sigma for one in made] == [1.25, 1.25, 0.0]
    assert len(asked) == 2
    assert asked[0] == asked[1]


def test_compare_plain(data: Data) -> None:
    plain = train(seeded(epochs=1, batch=8), data=data, compare_plain=True).plain
    assert plain.private > 0
    assert plain.plain > 0
    assert f"{plain.ratio:.2f} x the time of the same loop without privacy" in plain.summary()
    twin = PlainTwin(torch.nn.Linear(1, 1), torch.optim.SGD([torch.zeros(1)], lr=1), batch=1, micro_batch=2)
    assert twin.result(10) is None


def test_sigma_for_keeps_the_budget_and_no_more() -> None:
    layout, run = Layout.of([(550_570,)]), dict(sample_rate=0.02, steps=200)
    sigma = budget.sigma_for(layout, epsilon=2.0, delta=1e-5, max_grad_norm=0.1, **run)
    ratio = budget.sensitivity_ratio(layout, sigma=sigma, max_grad_norm=0.1)
    assert ratio > 1.0004   # rounding 550,570 coordinates costs something
    spent = [epsilon_of(noise_multiplier=s, delta=1e-5, sensitivity_ratio=ratio, **run) for s in (sigma, sigma - 0.001)]
    assert spent[0] <= 2.0 < spent[1]
    ledger, numbers = Ledger(), dict(sigma=sigma, ratio=ratio, sample_rate=0.02, epsilon=2.0, delta=1e-5)
    assert budget.affordable(ledger, planned=200, **numbers) == 200
    most = budget.affordable(ledger, planned=300, **numbers)
    assert 200 <= most < 204
    assert budget.affordable(ledger, planned=0, **numbers) == 0
    assert budget.spent(ledger, claim="poisson", delta=1e-5) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (dict(epsilon=0.0, sigma=None), "epsilon: got 0.0; expected a finite number above 0"),
        (dict(epsilon=3.0), "epsilon, sigma: got 3.0 and 1.0; expected one of them"),
        (dict(sigma=-1.0), "sigma: got -1.0; expected a finite number of at least 0"),
        (dict(delta=1.0), r"delta: got 1.0; expected a number in \(0, 1\)"),
        (dict(seed=-1), "seed: got -1; expected an integer in"),
        (dict(model="dp-cnn"), "network: dp-cnn takes cifar10"),
        (dict(lr=-1.0), "lr: got -1.0"),
        (dict(batch=65), "expected_batch_size: got 65; expected at most 64"),
        (dict(clip=0.0), "clip: got 0.0"),
        (dict(backend="abacus"), "backend: got 'abacus'"),
    ],
)
def test_settings_are_refused_before_a_folder_is_made(
    changes: dict, message: str, tmp_path: Path, data: Data
) -> None:
    with pytest.raises(ValueError, match=message):
        train(config(**changes), out=tmp_path / "run", data=data)
    assert not (tmp_path / "run").exists()


def test_settings_are_refused_before_data_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare, "load", lambda *args: pytest.fail("read"))
    for changes, message in ((dict(lr=0.0), "lr: got 0.0"), (dict(model="resnet20"), "network: resnet20 takes")):
        with pytest.raises(ValueError, match=message):
            train(config(**changes))


def test_silence(capsys: pytest.CaptureFixture[str], data: Data) -> None:
    train(seeded(epochs=1), data=data, progress=Silent())
    assert capsys.readouterr() == ("", "")
    assert duration(3599.6) == "1:00:00"


@pytest.mark.parametrize("slow", [1, 2])
def test_the_quicker_number_of_threads(slow: int, data: Data) -> None:
    now = [0.0]

    def clock() -> float:
        now[0] += 1.0 if torch.get_num_threads() == slow else 0.5
        return now[0]

    recipe = Recipe(algorithm=1, epochs=1, lr=1.0, max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=4)
    arguments = make_model(NETWORKS["digits-cnn"], 0), recipe, train_module.LOSS, data.test_x, data.test_y
    with threads_of(2):
        assert quicker(*arguments, clock=clock) == 3 - slow
        assert torch.get_num_threads() == 2
    with threads_of(1):
        assert quicker(*arguments, clock=clock) == 1


def test_threads_hold_while_it_trains(data: Data, tmp_path: Path) -> None:
    seen = []
    train(seeded(epochs=1), data=data, threads=2, stop=lambda: seen.append(torch.get_num_threads()))
    assert set(seen) == {2}
    assert torch.get_num_threads() == 1
    with threads_of(2):   # trying both does not move the model: the same weights as without
        for name, threads in (("tried", "quicker"), ("plain", None)):
            train(seeded(epochs=1), data=data, threads=threads, out=tmp_path / name)
    torch.testing.assert_close(weights(tmp_path / "tried"), weights(tmp_path / "plain"), rtol=1e-4, atol=1e-5)
    with pytest.raises(ValueError, match="threads: got 'many'; expected an integer, 'quicker', or None"):
        train(seeded(epochs=1), data=data, threads="many")


@pytest.mark.parametrize(
    "name", ["budget", "config", "progress", "ranked", "recipes", "run_folder", "threads", "train"]
)
def test_examples_in_docstrings_run(name: str) -> None:
    result = doctest.testmod(importlib.import_module(f"dprs_kernels.paper.{name}"))
    assert result.failed == 0
    assert result.attempted > 0


def test_missing_matplotlib_is_told_before_training(monkeypatch: pytest.MonkeyPatch, data: Data) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r'pip install "dprs_kernels\[train\]"'):
        train(config(), data=data)
