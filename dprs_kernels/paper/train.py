"""train(config): one private training run, from data to a model, its epsilon and its pictures; resume(folder) goes on.

    sampler -> per-sample gradients, streamed (per_sample hooks) -> mask, clip, sum, noise -> ledger -> torch optimizer
    after each epoch: accuracy on the test set, a row of metrics, a checkpoint

What is written or printed is public under the run's epsilon: training loss, norms and sizes of batches are not there.
Times are, and a batch's size has a part in them: not covered.
The number of training images counts as public (q = B/N). Test images are not protected.
"""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Callable
from functools import partial

import torch
from torch.nn import functional

from dprs_kernels.grads import per_sample
from dprs_kernels.grads.engine import micro_batch_size
from dprs_kernels.layout import Layout
from dprs_kernels.paper import budget, channel_statistics, plots
from dprs_kernels.paper.config import TrainConfig
from dprs_kernels.paper.data import Data
from dprs_kernels.paper.networks import Network, network_for
from dprs_kernels.paper.plain import PlainRatio, PlainTwin
from dprs_kernels.paper.prepare import accuracy_of, fill_statistics, load_data, make_model, with_statistics
from dprs_kernels.paper.progress import Progress, Silent
from dprs_kernels.paper.recipes import Recipe
from dprs_kernels.paper.result import Result
from dprs_kernels.paper.run_folder import Metrics, RunFolder
from dprs_kernels.paper.threads import quicker, threads_of
from dprs_kernels.privacy.checkpoint import TrainingState
from dprs_kernels.privacy.ledger import Ledger

LOSS = partial(functional.cross_entropy, reduction="sum")
SAVE_SECONDS = 60.0   # between checkpoints inside an epoch: a kill costs at most that much budget


class RunFailed(RuntimeError):
    """Something broke after the first step could be taken: what was charged stays charged."""


def train(
    config: TrainConfig,
    *,
    out: str | os.PathLike[str] | None = None,
    data: Data | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] = lambda: False,
    compare_plain: bool = False,
    threads: int | str | None = None,
) -> Result:
    """Trains from the start.

    out: the run's folder, made; None leaves no trace, and nothing to resume.
    data: loaded already (and features made); None loads what the config names.
    progress: None says nothing. stop: asked before each step; True saves and ends the run.
    compare_plain: the first epoch is also timed without privacy, beside it.
    threads: of torch, while it trains; "quicker" tries (threads.py); None leaves them. Seeded runs are bit-equal only
        with equal numbers.
    ValueError or ImportError: before anything was trained. RunFailed: later.

    >>> config = TrainConfig.of("digits", epochs=1, epsilon=8.0)
    >>> result = train(config)
    >>> result.ended, result.steps, result.epsilon <= 8.0
    ('finished', 6, True)
    """
    run = _Run(config, data, progress or Silent(), stop, compare_plain)
    with threads_of(run.threads(threads)):
        return run.go(None if out is None else RunFolder.create(out, config))


def resume(
    folder: str | os.PathLike[str],
    *,
    data: Data | None = None,
    progress: Progress | None = None,
    stop: Callable[[], bool] = lambda: False,
    compare_plain: bool = False,
    threads: int | str | None = None,
) -> Result:
    """Goes on with a run that was interrupted or killed, as train. Steps since the last checkpoint are taken again, and
    charged again; where that is more than the budget has, the run ends at the last step that it affords."""
    found = RunFolder.open(folder)
    run = _Run(found.config, data, progress or Silent(), stop, compare_plain)
    with threads_of(run.threads(threads)):
        return run.go(found)


class _Run:
    """Everything that can be wrong with a configuration is wrong here, before a file is written."""

    def __init__(
        self, config: TrainConfig, data: Data | None, progress: Progress, stop: Callable[[], bool], compare: bool
    ) -> None:
        self.config, self.progress, self.stop = config, progress, stop
        network = network_for(config.model, config.dataset)
        recipe_of = partial(
            Recipe, algorithm=config.algorithm, epochs=config.epochs, lr=config.lr, max_grad_norm=config.clip,
            expected_batch_size=config.batch, final_rate=config.final_rate, cooling=config.cooling,
            refresh=config.refresh, structure=config.structure, optimizer=config.optimizer, momentum=config.momentum,
            sampler=config.sampler, seed=config.seed,
        )   # fmt: skip
        recipe_of(noise_multiplier=1.0)   # wrong settings raise before data is read
        plots.check()
        if config.normalise == "channels":
            network = with_statistics(network)
        self.data = load_data(config, network, progress) if data is None else data
        self.network = network
        self.seed = config.seed if config.insecure_seeded_noise else None
        self.model = make_model(network, config.seed)
        self.source = per_sample(self.model)
        self.sampler = recipe_of(noise_multiplier=1.0).sampler_for(len(self.data.train_x), seed_for_tests=self.seed)
        self.planned = config.epochs * self.sampler.steps
        self.layout = Layout.of(self.model.parameters())
        self.recipe = recipe_of(noise_multiplier=self._sigma())
        self.optimizer = self.recipe.optimizer_for(
            self.model.named_parameters(), seed_for_tests=self.seed, backend=config.backend
        )
        self.twin = self._twin(network) if compare else None

    def threads(self, asked: int | str | None) -> int | None:
        if asked is None or isinstance(asked, int):
            return asked
        if asked != "quicker":
            raise ValueError(f"threads: got {asked!r}; expected an integer, 'quicker', or None")
        model = make_model(self.network, self.config.seed)
        return quicker(model, self.recipe, LOSS, self.data.test_x, self.data.test_y)

    def _sigma(self) -> float:
        config = self.config
        if config.algorithm == 3:
            return 0.0
        if config.sigma is not None:
            return config.sigma
        assert config.epsilon is not None
        return budget.sigma_for(
            self.layout, epsilon=config.epsilon, delta=config.delta, max_grad_norm=config.clip,
            sample_rate=self.sampler.sample_rate, steps=self.planned, accountant=config.accountant,
            besides=channel_statistics.cost(self.network.input_shape[0]) if config.normalise == "channels" else (),
        )   # fmt: skip

    def _twin(self, network: Network) -> PlainTwin:
        model = make_model(network, self.config.seed)
        inner = self.recipe.optimizer_for(model.parameters()).original_optimizer
        micro_batch = micro_batch_size(list(model.named_parameters()))
        return PlainTwin(model, inner, batch=self.config.batch, micro_batch=micro_batch)

    def go(self, folder: RunFolder | None) -> Result:
        try:
            ledger = Ledger(None if folder is None else folder.ledger)
        except OSError as error:
            raise ValueError(f"out: its ledger cannot be written ({error}); make room, or name another") from error
        try:
            ledger.attach(self.optimizer, sampler=self.sampler, adjacency="add_remove")
            state = TrainingState(self.model, self.optimizer, sampler=self.sampler, ledger=ledger)
            to_estimate = not self._restored(state, folder, ledger) and self.config.normalise == "channels"
            try:
                if to_estimate:
                    fill_statistics(self.model, self.data.train_x, ledger, seed_for_tests=self.seed)
                    if folder is not None:
                        state.save(folder.checkpoint)   # a run that goes on does not pay for them again
                ended, rows, plain = self._loop(state, folder, ledger)
                if folder is not None:
                    self._picture(folder, rows)
                return self._result(ended, rows, plain, folder, ledger)
            except Exception as error:
                at = f"after {ledger.steps} charged steps: {type(error).__name__}: {error}"
                raise RunFailed(at + ("" if folder is None else folder.note_error(traceback.format_exc()))) from error
        finally:
            ledger.close()
            self.progress.clear()

    def _restored(self, state: TrainingState, folder: RunFolder | None, ledger: Ledger) -> bool:
        """Whether there was a checkpoint. ValueError where the ledger has no epsilon to go on from, or where the budget
        does not pay for what a run without a checkpoint begins with."""
        self._spent(ledger)
        if folder is not None and folder.checkpoint.exists():
            for note in state.load(folder.checkpoint).notes:
                self.progress.note(note)
            return True
        config = self.config
        if ledger.steps:
            self.progress.note(
                f"no checkpoint yet: starting again; the {ledger.steps} steps in the ledger stay charged, and steps "
                "taken again are charged again"
            )
        if config.normalise == "channels" and config.epsilon is not None and config.claim != "none":
            budget.check_affordable(
                ledger, channel_statistics.cost(self.network.input_shape[0]), what="estimating channel statistics",
                epsilon=config.epsilon, delta=config.delta, accountant=config.accountant,
            )   # fmt: skip
        return False

    def _picture(self, folder: RunFolder, rows: list[Metrics]) -> None:
        if rows:
            target = self.config.epsilon if self.config.claim != "none" else None
            plots.plot({folder.path.name: rows}, folder.plot, budget=target)
        folder.error.unlink(missing_ok=True)   # of a failure that is over

    def _loop(
        self, state: TrainingState, folder: RunFolder | None, ledger: Ledger
    ) -> tuple[str, list[Metrics], PlainRatio | None]:
        epochs, steps = self.config.epochs, self.sampler.steps
        at = self.sampler.state_dict()
        done, plain = at["epoch"] * steps + at["batch"], None
        rows = [row for row in (folder.metrics() if folder else []) if row.steps <= done]
        affordable = self._affordable(ledger, self.planned - done)
        self.progress.start(epochs=epochs, steps=done + affordable, last=rows[-1] if rows else None)
        saved, ended = time.monotonic(), "finished"
        for epoch in range(at["epoch"], epochs):
            first = self.sampler.state_dict()["batch"] if epoch == at["epoch"] else 0
            if self.stop():
                ended = "interrupted"
                break
            batches, began, seconds = iter(self.sampler), done, 0.0
            for index in range(first, steps):
                if affordable == 0 or (index > first and self.stop()):
                    ended = "budget" if affordable == 0 else "interrupted"
                    break
                seconds += self._step(epoch, index, next(batches))
                done, affordable = done + 1, affordable - 1
                self.progress.step(epoch=epoch + 1, done=done, drop_rate=self.optimizer.keep.drop_rate)
                if folder and index + 1 < steps and time.monotonic() - saved > SAVE_SECONDS:
                    state.save(folder.checkpoint)
                    saved = time.monotonic()
            if ended != "interrupted" and (not rows or rows[-1].steps < done):
                row = self._row(epoch + 1, done, done - began, seconds, ledger)
                rows = [*(before for before in rows if before.epoch <= epoch), row]
                if folder:
                    folder.append(row)
                self.progress.epoch(row)
            if self.twin is not None:
                plain, self.twin = self.twin.result(steps * self.config.batch), None
            if folder:
                state.save(folder.checkpoint)
                saved = time.monotonic()
            if ended != "finished":
                break
        return ended, rows, plain

    def _step(self, epoch: int, index: int, batch: list[int]) -> float:
        """One logical batch; how long it took."""
        start = time.perf_counter()
        self.optimizer.set_epoch(epoch, self.recipe.schedule().tick(index, self.sampler.steps))
        rows = torch.tensor(batch, dtype=torch.int64)
        x, y = self.data.train_x[rows], self.data.train_y[rows]
        self.optimizer.backward(self.source, LOSS, x, y)
        self.optimizer.step()
        seconds = time.perf_counter() - start
        if self.twin is not None:
            self.twin.step(x, y, seconds)
        return seconds

    def _row(self, epoch: int, done: int, taken: int, seconds: float, ledger: Ledger) -> Metrics:
        return Metrics(
            epoch=epoch, steps=done, charged=ledger.steps, drop_rate=self.optimizer.keep.drop_rate,
            test_accuracy=accuracy_of(self.model, self.data.test_x, self.data.test_y), epsilon=self._spent(ledger),
            claim=self.config.claim, seconds=seconds, steps_per_second=taken / seconds if seconds else 0.0,
        )   # fmt: skip

    def _spent(self, ledger: Ledger) -> float | None:
        config = self.config
        return budget.spent(ledger, claim=config.claim, delta=config.delta, accountant=config.accountant)

    def _affordable(self, ledger: Ledger, planned: int) -> int:
        """Of the steps that are left; says so where it is fewer."""
        config, sigma = self.config, self.recipe.noise_multiplier
        if config.epsilon is None or config.claim == "none":
            return planned
        ratio = budget.sensitivity_ratio(self.layout, sigma=sigma, max_grad_norm=config.clip)
        left = budget.affordable(
            ledger, planned=planned, sigma=sigma, ratio=ratio, sample_rate=self.sampler.sample_rate,
            epsilon=config.epsilon, delta=config.delta, accountant=config.accountant,
        )   # fmt: skip
        if left < planned:
            self.progress.note(
                f"the budget, epsilon {config.epsilon:g}, affords {left} of the {planned} steps that are left, since "
                "steps were taken twice: the run ends there"
            )
        return left

    def _result(
        self, ended: str, rows: list[Metrics], plain: PlainRatio | None, folder: RunFolder | None, ledger: Ledger
    ) -> Result:
        config = self.config
        nominal = config.claim == "nominal" and ledger.steps > 0
        return Result(
            config=config, folder=None if folder is None else folder.path, ended=ended,
            accuracy=rows[-1].test_accuracy if rows else None, epsilon=self._spent(ledger),
            unamplified=ledger.epsilon(config.delta, config.accountant, amplification=False) if nominal else None,
            claim=config.claim, sigma=self.recipe.noise_multiplier, sample_rate=self.sampler.sample_rate,
            steps=self.optimizer.noise.step, charged=ledger.steps, planned=self.planned, plain=plain,
        )   # fmt: skip
