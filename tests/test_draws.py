"""One draw, one step: what an attached ledger refuses and notes, with plain loops, loaders and workers."""

import doctest
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from dprs_kernels import NoiseSource, PrivateSum, fused_rs_dp_step
from dprs_kernels.optimizer import RSDPOptimizer
from dprs_kernels.privacy import draws as draws_module
from dprs_kernels.privacy import history as history_module
from dprs_kernels.privacy.accounting import composed_epsilon
from dprs_kernels.privacy.ledger import Ledger
from dprs_kernels.privacy.sampling import PoissonBatchSampler, empty_safe_collate

pytest.importorskip("opacus")
SIZE, DELTA = 40, 1e-5


class Run:
    def __init__(self, path: Path | None = None, *, steps: int = 8, noise: NoiseSource | None = None) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Linear(3, 2)
        self.inner = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.optimizer = RSDPOptimizer(
            self.inner, max_grad_norm=1.0, noise_multiplier=1.3, expected_batch_size=4, noise=noise
        )
        self.sampler = PoissonBatchSampler(SIZE, sample_rate=0.1, steps=steps)
        self.ledger = Ledger(path)
        self.ledger.attach(self.optimizer, sampler=self.sampler)

    def accumulate(self, batch: Any) -> None:
        self.optimizer.accumulate(grads(len(batch)))

    def step(self, batch: Any) -> None:
        self.optimizer.step(grad_samples=grads(len(batch)))

    def refused(self, message: str) -> None:
        """A step that must not come through."""
        before = [param.detach().clone() for param in self.model.parameters()]
        charged = self.ledger.steps
        with pytest.raises(ValueError, match=message):
            self.optimizer.step(grad_samples=grads(2))
        assert all(torch.equal(a, b) for a, b in zip(before, self.model.parameters(), strict=True))
        assert all(param.grad is None for param in self.model.parameters())
        assert self.ledger.steps == charged


def grads(samples: int) -> list[torch.Tensor]:
    return [torch.randn(samples, 2, 3), torch.randn(samples, 2)]


def loader_of(sampler: Any, workers: int) -> DataLoader[Any]:
    data = TensorDataset(torch.randn(SIZE, 3))
    return DataLoader(data, batch_sampler=sampler, num_workers=workers, collate_fn=empty_safe_collate(data))


def test_one_draw_one_step() -> None:
    run = Run()
    for _ in range(3):
        for batch in run.sampler:
            run.step(batch)
    assert run.ledger.steps == 24
    assert {charge.unused_draws for charge in run.ledger.records()} == {0}
    assert run.ledger.epsilon(DELTA) > composed_epsilon([(1.3, 0.1, 24)], delta=DELTA)   # the grid's charge


def test_micro_batches_of_one_draw_are_one_step() -> None:
    run = Run()
    for batch in run.sampler:
        for part in (batch[:2], batch[2:4], batch[4:]):
            run.accumulate(part)
        run.optimizer.step()
    assert run.ledger.steps == 8
    assert run.ledger.epsilon(DELTA) > 0


def test_gradient_accumulation_over_draws_is_refused() -> None:
    """100 draws at q = 0.01 in 10 steps: charged as 10 steps it said 0.38 (PLD) where at least 2.75 was true."""
    run = Run()
    batches = iter(run.sampler)
    run.step(next(batches))
    run.accumulate(next(batches))
    run.accumulate(next(batches))
    run.refused(r"^step: 1 batches were drawn while this logical batch was open: .*; one draw, one step: a larger")
    run.step(next(batches))   # the refused draws were given up
    with pytest.raises(ValueError, match=r"^ledger: 2 batches were drawn and have no step of their own"):
        run.ledger.epsilon(DELTA)
    assert run.ledger.epsilon(DELTA, unused_draws=2) > 0


def test_several_steps_on_one_batch_are_refused() -> None:
    run = Run()
    batches = iter(run.sampler)
    for _ in range(2):
        run.step(next(batches))
        run.refused(r"^step: no batch was drawn since the last step")
    for batch in batches:
        run.step(batch)
    run.refused(r"^step: no batch was drawn since the last step, or fewer than steps were taken")   # the pass is over


def test_steps_without_any_draw_are_refused() -> None:
    run = Run()
    run.refused("^step: no batch was drawn")


def test_batches_joined_by_hand_are_noted(tmp_path: Path) -> None:
    run = Run(tmp_path / "l")
    for _ in range(2):
        batches = iter(run.sampler)
        for batch in batches:
            run.step(batch + next(batches))
    # 3 of each pass as they come; that the first step of a pass was two draws shows when the next one begins.
    assert [charge.unused_draws for charge in run.ledger.records()] == [0, 1, 1, 1, 1, 1, 1, 1]
    for ledger in (run.ledger, Ledger.read(tmp_path / "l")):
        with pytest.raises(ValueError, match=r"^ledger: 7 batches were drawn and have no step"):
            ledger.epsilon(DELTA)


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_may_draw_ahead_and_loops_may_be_left(workers: int) -> None:
    run = Run(steps=12)
    loader = loader_of(run.sampler, workers)
    next(iter(loader))   # looked at, and thrown away
    for stop in (12, 5, 12):
        for taken, (x,) in enumerate(loader, start=1):
            run.step(x)
            assert run.ledger.epsilon(DELTA) > 0   # also while batches are drawn ahead
            if taken == stop:
                break
    assert run.ledger.steps == 29
    assert run.ledger.epsilon(DELTA) > 0


def test_accumulation_over_a_loader_with_workers_is_refused() -> None:
    run = Run(steps=12)
    batches = iter(loader_of(run.sampler, 2))
    run.accumulate(next(batches)[0])
    run.accumulate(next(batches)[0])
    run.refused(r"drawn while this logical batch was open")


def test_what_loader_workers_drew_and_no_step_used_is_noted() -> None:
    """The last batches of a pass come out without a draw: two in one step show when the next pass begins."""
    run = Run(steps=6)
    loader = loader_of(run.sampler, 2)   # draws 4 ahead
    batches = iter(loader)
    for _ in range(4):
        run.step(next(batches)[0])
    run.accumulate(next(batches)[0])
    run.accumulate(next(batches)[0])
    run.optimizer.step()
    run.step(next(iter(loader))[0])
    with pytest.raises(ValueError, match=r"^ledger: 1 batches were drawn and have no step"):
        run.ledger.epsilon(DELTA)


def test_a_release_of_the_same_source_that_nobody_charged_is_noticed() -> None:
    """Live, before the next line shows the gap, and after."""
    run = Run()
    batches = iter(run.sampler)
    run.step(next(batches))
    for _ in range(3):
        fused_rs_dp_step(
            run.model.parameters(), max_grad_norm=1.0, noise_multiplier=1.3, expected_batch_size=4,
            noise=run.optimizer.noise, grad_samples=grads(4),
        )   # fmt: skip
    for _ in range(2):
        with pytest.raises(ValueError, match=r"^ledger: 3 steps of its noise keys have no line"):
            run.ledger.epsilon(DELTA)
        assert run.ledger.epsilon(DELTA, uncharged_steps=3) > 0
        run.step(next(batches))


def test_attach_refuses_a_source_that_has_made_steps() -> None:
    noise = NoiseSource()
    total = PrivateSum(
        [torch.zeros(3)], max_grad_norm=1.0, noise_multiplier=8.0, expected_batch_size=10, noise=noise
    )
    total.add([torch.randn(10, 3)])
    total.release()
    with pytest.raises(ValueError, match=r"^optimizer: its noise source made 1 steps that are not in this ledger"):
        Run(noise=noise)
    _, optimizer = Run().model, Run(noise=NoiseSource.seeded_for_tests(1)).optimizer   # no epsilon to protect
    assert optimizer.noise.step == 0
    ledger = Ledger()
    ledger.append(total.record(), sampler="poisson", sample_rate=1.0, adjacency="add_remove")
    model = torch.nn.Linear(3, 2)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    after = RSDPOptimizer(inner, max_grad_norm=1.0, noise_multiplier=1.3, expected_batch_size=4, noise=noise)
    sampler = PoissonBatchSampler(SIZE, sample_rate=0.1, steps=3)
    ledger.attach(after, sampler=sampler)   # what came before is charged here
    for batch in sampler:
        after.step(grad_samples=grads(len(batch)))
    assert [charge.record.step for charge in ledger.records()] == [0, 1, 2, 3]
    assert ledger.epsilon(DELTA) > 0


def test_a_loaded_position_is_no_gap() -> None:
    first = Run()
    for batch in first.sampler:
        first.step(batch)
    for attach_late in (False, True):
        run = Run()
        if attach_late:
            delattr(run.sampler, "_ledger")
            optimizer = RSDPOptimizer(run.inner, max_grad_norm=1.0, noise_multiplier=1.3, expected_batch_size=4)
            optimizer.load_state_dict(first.optimizer.state_dict())
            run.optimizer, run.ledger = optimizer, Ledger()
            run.ledger.attach(optimizer, sampler=run.sampler)
        else:
            run.optimizer.load_state_dict(first.optimizer.state_dict())
        for batch in run.sampler:
            run.step(batch)
        charges = list(run.ledger.records())
        assert (charges[0].record.step, charges[0].skipped_steps, charges[1].skipped_steps) == (8, 8, 0)
        assert run.ledger.epsilon(DELTA) == first.ledger.epsilon(DELTA)


def test_a_step_that_failed_is_no_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run()
    batches = iter(run.sampler)
    batch = next(batches)
    with monkeypatch.context() as patch:
        patch.setattr(PrivateSum, "record", lambda self: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.step(batch)
    assert all(param.grad is None for param in run.model.parameters())   # noise, and no line
    assert run.optimizer.noise.step == 1
    run.step(batch)   # nothing of it was released
    assert [charge.skipped_steps for charge in run.ledger.records()] == [1]
    assert run.ledger.epsilon(DELTA) > 0


def test_examples_in_docstrings_run() -> None:
    for module, attempted in ((draws_module, 4), (history_module, 1)):
        result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
        assert (result.failed, result.attempted) == (0, attempted)
