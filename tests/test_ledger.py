"""Ledger: one charge a release, before the parameters move; epsilon from the ledger alone, and its refusals."""

import doctest
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dprs_kernels import NoiseSource
from dprs_kernels.masked_step import StepRecord
from dprs_kernels.optimizer import RSDPOptimizer
from dprs_kernels.privacy import ledger as ledger_module
from dprs_kernels.privacy.accounting import composed_epsilon, epsilon
from dprs_kernels.privacy.ledger import Ledger
from dprs_kernels.schedule import GradualCooling

pytest.importorskip("opacus")
RECORD = StepRecord(
    step=0, key_id="00ff00ff00ff00ff", private=True, noise_multiplier=1.0, max_grad_norm=0.5, expected_batch_size=10.0,
    sensitivity=0.5, drop_rate=0.5, kept=8, keep_digest="d" * 64,
)   # fmt: skip
POISSON: dict[str, Any] = {"sampler": "poisson", "sample_rate": 0.01, "adjacency": "add_remove"}
DELTA = 1e-5


def filled(steps: int, *, ledger: Ledger | None = None, run: dict[str, Any] = POISSON, **changes: Any) -> Ledger:
    ledger = Ledger() if ledger is None else ledger
    first = ledger.steps
    for step in range(first, first + steps):
        ledger.append(replace(RECORD, step=step, **changes), **run)
    return ledger


def sampler_of(name: str = "poisson", sample_rate: float | None = 0.1) -> Any:
    return SimpleNamespace(name=name, sample_rate=sample_rate)


def training(noise: NoiseSource | None = None, **options: Any) -> tuple[torch.nn.Module, RSDPOptimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(3, 2)
    settings: dict[str, Any] = {"max_grad_norm": 1.0, "noise_multiplier": 1.3, "expected_batch_size": 4, **options}
    return model, RSDPOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), noise=noise, **settings)


def grads(samples: int = 4) -> list[torch.Tensor]:
    return [torch.randn(samples, 2, 3), torch.randn(samples, 2)]


def test_epsilon_is_the_accountants() -> None:
    expected = epsilon(noise_multiplier=1.0, sample_rate=0.01, steps=1000, delta=DELTA)
    assert filled(1000).epsilon(DELTA) == expected == pytest.approx(2.101, abs=5e-4)


@pytest.mark.parametrize(("accountant", "expected"), [("rdp", 2.101), ("prv", 1.838), ("pld", 1.828)])
def test_every_accountant(accountant: str, expected: float) -> None:
    if accountant == "pld":
        pytest.importorskip("dp_accounting")
    assert filled(1000).epsilon(DELTA, accountant=accountant) == pytest.approx(expected, abs=5e-4)


def test_the_grids_charge_counts() -> None:
    """sigma C / sensitivity, not sigma."""
    assert filled(50, sensitivity=0.625).epsilon(DELTA) == filled(50, noise_multiplier=0.8).epsilon(DELTA)


def test_changing_settings_are_composed() -> None:
    ledger = filled(40)
    filled(30, ledger=ledger, noise_multiplier=2.0)
    filled(20, ledger=ledger, run={**POISSON, "sample_rate": 0.05})
    filled(10, ledger=ledger, max_grad_norm=0.25, sensitivity=0.5)   # sigma 1/2
    expected = composed_epsilon([(1.0, 0.01, 40), (2.0, 0.01, 30), (1.0, 0.05, 20), (0.5, 0.01, 10)], delta=DELTA)
    assert ledger.epsilon(DELTA) == expected > filled(40).epsilon(DELTA)


def test_file_and_memory_agree(tmp_path: Path) -> None:
    ledger = filled(25, ledger=Ledger(tmp_path / "l"))
    for other in (Ledger.read(tmp_path / "l"), filled(25)):
        assert other.epsilon(DELTA) == ledger.epsilon(DELTA)
        assert list(other.records()) == list(ledger.records())
    assert Ledger.read(tmp_path / "l").head == ledger.head
    ledger.close()
    assert filled(5, ledger=Ledger(tmp_path / "l", head=ledger.head)).steps == 30
    assert Ledger.read(tmp_path / "l").steps_since(ledger.head) == 5


def test_records_come_back_whole() -> None:
    ledger = Ledger()
    odd = replace(RECORD, private=False, noise_multiplier=0.1 + 0.2, max_grad_norm=math.inf, sensitivity=math.inf)
    ledger.append(odd, sampler="mine", sample_rate=None, adjacency=None)
    second_record = replace(RECORD, step=1)
    ledger.append(second_record, **POISSON)
    first, second = ledger.records()
    assert (first.record, first.sampler, first.sample_rate, first.adjacency) == (odd, "mine", None, None)
    assert (second.record, second.sample_rate, second.adjacency) == (second_record, 0.01, "add_remove")


@pytest.mark.parametrize(
    ("changes", "run", "message"),
    [
        ({"private": False}, {}, r"^ledger: 3 of 3 steps were taken with seeded noise, .* no epsilon holds; use Noise"),
        ({"noise_multiplier": 0.0, "private": False}, {}, r"without noise \(noise_multiplier = 0\): no epsilon holds"),
        ({"noise_multiplier": 0.0}, {}, r"without noise"),
        (
            {"max_grad_norm": math.inf, "sensitivity": math.inf}, {},
            r"without a bound \(max_grad_norm = inf\): .*; use a finite max_grad_norm",
        ),
        ({}, {"sampler": "unknown", "sample_rate": None}, r"^sampler: 3 steps drew from 'unknown', which no acc"),
        ({}, {"sampler": "poisson_seeded_for_tests"}, r"drew from 'poisson_seeded_for_tests'"),
        ({}, {"sampler": "shuffled_partition_nominal"}, r"^sampler: 3 steps drew shuffled partitions, .*amplificat"),
        ({}, {"adjacency": None}, r"^adjacency: some steps do not state it, .*state it here: epsilon\(delta, adj"),
    ],
)
def test_refusals(changes: dict[str, Any], run: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        filled(3, run={**POISSON, **run}, **changes).epsilon(DELTA)


def test_one_bad_step_spoils_the_run() -> None:
    ledger = filled(10)
    filled(1, ledger=ledger, private=False)
    with pytest.raises(ValueError, match=r"^ledger: 1 of 11 steps were taken with seeded noise"):
        ledger.epsilon(DELTA)


def test_an_empty_ledger_is_not_epsilon_zero() -> None:
    with pytest.raises(ValueError, match=r"^ledger: holds no steps; an empty history is not epsilon 0"):
        Ledger().epsilon(DELTA)


def test_without_amplification() -> None:
    """q = 1. A shuffled partition is charged for a substitution: one sample less moves another into its place."""
    poisson = filled(20, noise_multiplier=8.0).epsilon(DELTA, amplification=False)
    assert poisson == epsilon(noise_multiplier=8.0, sample_rate=1.0, steps=20, delta=DELTA)
    expected = epsilon(noise_multiplier=4.0, sample_rate=1.0, steps=20, delta=DELTA)
    for change in (
        {"sampler": "shuffled_partition_nominal"}, {"adjacency": "replace_one"},
        {"sampler": "mine", "adjacency": "replace_one"},
        {"sampler": "shuffled_partition_nominal", "adjacency": "replace_one"},
    ):   # fmt: skip
        ledger = filled(20, noise_multiplier=8.0, run={**POISSON, **change})
        assert ledger.epsilon(DELTA, amplification=False) == expected > poisson


@pytest.mark.parametrize("name", ["unknown", "mine"])
def test_without_amplification_an_order_that_may_be_known_has_no_add_remove(name: str) -> None:
    """One sample less may move every other one to another batch: 40 C in one sum where 2 C were charged."""
    ledger = filled(3, run={**POISSON, "sampler": name})
    with pytest.raises(ValueError, match=rf"drew from '{name}', .*adjacency='replace_one' and ask for epsilon"):
        ledger.epsilon(DELTA, amplification=False)


@pytest.mark.parametrize("adjacency", ["add_remove", "replace_one"])
@pytest.mark.parametrize("kind", ["poisson", "shuffled_partition_nominal", "mine"])
def test_seeded_samplers_have_no_epsilon_in_any_way(kind: str, adjacency: str) -> None:
    ledger = filled(3, run={"sampler": f"{kind}_seeded_for_tests", "sample_rate": 0.01, "adjacency": adjacency})
    for options in ({}, {"amplification": False}, {"nominal_as_poisson": True}):
        with pytest.raises(ValueError, match=rf"^sampler: 3 steps drew from '{kind}_seeded_for_tests': who knows the"):
            ledger.epsilon(DELTA, **options)


def test_the_papers_convention_has_to_be_asked_for() -> None:
    ledger = filled(100, run={**POISSON, "sampler": "shuffled_partition_nominal"})
    assert ledger.epsilon(DELTA, nominal_as_poisson=True) == filled(100).epsilon(DELTA)
    with pytest.raises(ValueError, match=r"nominal_as_poisson=True"):
        ledger.epsilon(DELTA)
    with pytest.raises(ValueError, match=r"^sampler: 3 steps drew from 'unknown'"):
        filled(3, run={**POISSON, "sampler": "unknown"}).epsilon(DELTA, nominal_as_poisson=True)


def test_adjacency() -> None:
    unstated = filled(100, run={**POISSON, "adjacency": None})
    assert unstated.epsilon(DELTA, adjacency="add_remove") == filled(100).epsilon(DELTA)
    replaced = filled(100, run={**POISSON, "adjacency": "replace_one"}).epsilon(DELTA)
    assert unstated.epsilon(DELTA, adjacency="replace_one") == replaced > filled(100).epsilon(DELTA)
    with pytest.raises(ValueError, match=r"^adjacency: add_remove and replace_one cannot be composed"):
        filled(100).epsilon(DELTA, adjacency="replace_one")
    mixed = filled(1, ledger=filled(1), run={**POISSON, "adjacency": "replace_one"})
    with pytest.raises(ValueError, match=r"cannot be composed"):
        mixed.epsilon(DELTA)
    with pytest.raises(ValueError, match=r"^adjacency: got 'zero_out'; expected 'add_remove' or 'replace_one'"):
        filled(1).epsilon(DELTA, adjacency="zero_out")


def test_noise_is_not_charged_twice() -> None:
    ledger = filled(3)
    for step in (0, 2):
        with pytest.raises(ValueError, match=rf"^record: step {step} of noise key 00ff.* the same noise would"):
            ledger.append(replace(RECORD, step=step), **POISSON)
    assert ledger.steps == 3
    ledger.append(replace(RECORD, step=7), **POISSON, skipped_steps=4)   # steps that failed after their claim
    ledger.append(replace(RECORD, step=0, key_id="another"), **POISSON)
    assert ledger.epsilon(DELTA) == filled(5).epsilon(DELTA)


def test_steps_without_a_line_are_refused_or_charged(tmp_path: Path) -> None:
    """A key's steps 0, 1, 2, then 5: two releases may be out in the world. Also from the file alone."""
    ledger = filled(3, ledger=Ledger(tmp_path / "l"))
    ledger.append(replace(RECORD, step=5, noise_multiplier=0.9), **{**POISSON, "sample_rate": 0.02})
    expected = composed_epsilon([(1.0, 0.01, 3), (0.9, 0.02, 3)], delta=DELTA)   # as the costliest
    for one in (ledger, Ledger.read(tmp_path / "l")):
        with pytest.raises(ValueError, match=r"^ledger: 2 steps of its noise keys have no line: .*uncharged_steps=2\)"):
            one.epsilon(DELTA)
        with pytest.raises(ValueError, match="2 steps of its noise keys"):
            one.epsilon(DELTA, uncharged_steps=1)
        assert one.epsilon(DELTA, uncharged_steps=2) == expected
    late = Ledger()
    late.append(replace(RECORD, step=4), **POISSON)   # a key that does not begin at 0
    with pytest.raises(ValueError, match=r"^ledger: 4 steps of its noise keys have no line"):
        late.epsilon(DELTA)
    for name in ("uncharged_steps", "unused_draws"):
        for wrong in (-1, 1.0, True):
            with pytest.raises(ValueError, match=rf"^{name}: got {wrong}; expected an integer of at least 0"):
                ledger.epsilon(DELTA, **{name: wrong})


def test_skipped_steps_lie_between_charged_ones() -> None:
    ledger = filled(3)
    with pytest.raises(ValueError, match=r"^skipped_steps: got 3; expected at most 2, the steps between"):
        ledger.append(replace(RECORD, step=5), **POISSON, skipped_steps=3)
    with pytest.raises(ValueError, match=r"^unused_draws: got -1; expected"):
        ledger.append(replace(RECORD, step=3), **POISSON, unused_draws=-1)
    assert ledger.steps == 3


def test_draws_without_a_step_have_to_be_explained(tmp_path: Path) -> None:
    ledger = filled(3, ledger=Ledger(tmp_path / "l"))
    ledger.append(replace(RECORD, step=3), **POISSON, unused_draws=2)
    for one in (ledger, Ledger.read(tmp_path / "l")):
        with pytest.raises(ValueError, match=r"^ledger: 2 batches were drawn and have no step .*unused_draws=2\)"):
            one.epsilon(DELTA)
        assert one.epsilon(DELTA, unused_draws=2) == filled(4).epsilon(DELTA)


def test_seeded_noise_may_be_replayed() -> None:
    """A test resumes with the noise that it had; no epsilon is claimed."""
    ledger = filled(2, private=False)
    ledger.append(replace(RECORD, step=0, private=False), **POISSON)
    with pytest.raises(ValueError, match="seeded noise"):
        ledger.epsilon(DELTA)


def test_a_file_with_repeated_noise_gives_no_epsilon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ledger = filled(2, ledger=Ledger(tmp_path / "l"))
    ledger._history.newest.clear()   # as if written by other code
    ledger.append(replace(RECORD, step=1), **POISSON)
    read = Ledger.read(tmp_path / "l")
    assert len(list(read.records())) == 3
    with pytest.raises(ValueError, match=r"^ledger: step 1 of noise key 00ff\w+ was released twice: .*train anew"):
        read.epsilon(DELTA)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sampler": ""}, r"^sampler: got ''; expected its name"),
        ({"sampler": "x" * 65}, r"^sampler: got 'xx"),
        ({"sampler": None}, r"^sampler: got None"),
        ({"sample_rate": None}, r"^sample_rate: got None for sampler 'poisson'; expected a number in \(0, 1\]"),
        ({"sample_rate": 0.0}, r"^sample_rate: got 0.0"),
        ({"sample_rate": 1.5, "sampler": "mine"}, r"^sample_rate: got 1.5 for sampler 'mine'"),
        ({"sample_rate": math.nan}, r"^sample_rate: got nan"),
        ({"adjacency": "both"}, r"^adjacency: got 'both'; expected"),
    ],
)
def test_append_refuses(change: dict[str, Any], message: str) -> None:
    ledger = Ledger()
    with pytest.raises(ValueError, match=message):
        ledger.append(RECORD, **{**POISSON, **change})
    assert ledger.steps == 0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sensitivity": 0.0}, r"^record: sensitivity is 0.0; expected at least max_grad_norm = 0.5"),
        ({"sensitivity": 0.49}, r"^record: sensitivity is 0.49; expected"),
        ({"sensitivity": -1.0, "noise_multiplier": -1.0}, r"^record: noise_multiplier is -1.0; expected a finite"),
        ({"sensitivity": math.nan}, r"^record: sensitivity is nan"),
        ({"max_grad_norm": 0.0}, r"^record: max_grad_norm is 0.0; expected a number above 0, or inf"),
    ],
)
def test_append_refuses_numbers_that_no_step_has(change: dict[str, Any], message: str) -> None:
    ledger = Ledger()
    with pytest.raises(ValueError, match=message):
        ledger.append(replace(RECORD, **change), **POISSON)
    assert ledger.steps == 0


def test_append_wants_a_record() -> None:
    with pytest.raises(ValueError, match=r"^record: got dict; expected a StepRecord"):
        Ledger().append({"step": 0}, **POISSON)   # type: ignore[arg-type]


def test_attached_optimizer_is_charged_at_every_step() -> None:
    _, optimizer = training(schedule=GradualCooling(final_rate=0.5, epochs=3))
    ledger = Ledger()
    sampler = sampler_of()
    ledger.attach(optimizer, sampler=sampler)
    seen: list[StepRecord] = []
    optimizer.attach_step_hook(lambda _, record: seen.append(record))
    for epoch in range(3):
        optimizer.set_epoch(epoch)
        optimizer.step(grad_samples=grads())
    optimizer.accumulate(grads())
    assert ledger.steps == 3   # a micro-batch is no release
    optimizer.accumulate(grads())
    sampler.sample_rate = 0.2
    optimizer.step()
    optimizer.accumulate_empty()
    optimizer.step()
    charges = list(ledger.records())
    assert [charge.record for charge in charges] == seen
    assert [charge.record.step for charge in charges] == [0, 1, 2, 3, 4]
    assert [charge.record.kept for charge in charges[:3]] == [8, 6, 4]
    assert [charge.sample_rate for charge in charges] == [0.1, 0.1, 0.1, 0.2, 0.2]
    assert {charge.sampler for charge in charges} == {"poisson"}
    assert ledger.epsilon(DELTA) > epsilon(noise_multiplier=1.3, sample_rate=0.1, steps=5, delta=DELTA)


def test_the_charge_is_on_the_disk_before_the_parameters_move(tmp_path: Path) -> None:
    model, optimizer = training()
    before = [param.detach().clone() for param in model.parameters()]
    ledger = Ledger(tmp_path / "l")
    ledger.attach(optimizer, sampler=sampler_of())
    seen = []

    def at_inner_step(*_: Any) -> None:
        moved = [not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        seen.append((Ledger.read(tmp_path / "l").steps, any(moved)))

    optimizer.original_optimizer.register_step_pre_hook(at_inner_step)
    optimizer.step(grad_samples=grads())
    assert seen == [(1, False)]
    assert not torch.equal(before[0], next(model.parameters()))


@pytest.mark.parametrize("fault", ["append", "sampler", "capture"])
def test_what_cannot_be_charged_does_not_move_the_parameters(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    model, optimizer = training()
    ledger, sampler = Ledger(), sampler_of()
    ledger.attach(optimizer, sampler=sampler)
    before = [param.detach().clone() for param in model.parameters()]
    expected: tuple[type[BaseException], str] = (ValueError, "sample_rate: got 2")
    if fault == "append":

        def fail(content: Any) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(ledger._journal, "append", fail)
        expected = OSError, "No space"
    elif fault == "sampler":
        sampler.sample_rate = 2
    else:
        monkeypatch.setattr(ledger_module, "capturing", lambda device: True)
        expected = ValueError, "captured CUDA graph would replay this step uncharged"
    with pytest.raises(expected[0], match=expected[1]):
        optimizer.step(grad_samples=grads())
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert all(param.grad is None for param in model.parameters())
    assert ledger.steps == 0
    monkeypatch.undo()
    sampler.sample_rate = 0.1
    optimizer.step(grad_samples=grads())   # the failed one left a gap, which released nothing
    assert [(charge.record.step, charge.skipped_steps) for charge in ledger.records()] == [(1, 1)]
    assert ledger.epsilon(DELTA) > 0


def test_seeded_noise_and_nameless_samplers_are_recorded_and_refused() -> None:
    _, optimizer = training(NoiseSource.seeded_for_tests(3))
    ledger = Ledger()
    ledger.attach(optimizer, sampler=torch.utils.data.SequentialSampler(range(3)))
    optimizer.step(grad_samples=grads())
    (charge,) = ledger.records()
    assert (charge.record.private, charge.sampler, charge.sample_rate) == (False, "unknown", None)
    with pytest.raises(ValueError, match="seeded noise"):
        ledger.epsilon(DELTA)


def test_attach_refuses(tmp_path: Path) -> None:
    _, optimizer = training()
    filled(1, ledger=Ledger(tmp_path / "l"))
    cases: list[tuple[Callable[[], Any], str]] = [
        (lambda: Ledger().attach(optimizer.original_optimizer, sampler=sampler_of()), r"^optimizer: got SGD; expect"),
        (lambda: Ledger().attach(optimizer, sampler=sampler_of(sample_rate=None)), r"^sample_rate: got None for"),
        (lambda: Ledger().attach(optimizer, sampler=sampler_of(), adjacency="none"), r"^adjacency: got 'none'"),
        (lambda: Ledger.read(tmp_path / "l").attach(optimizer, sampler=sampler_of()), r"opened for reading"),
    ]
    for attach, message in cases:
        with pytest.raises(ValueError, match=message):
            attach()
    shared = sampler_of()
    Ledger().attach(optimizer, sampler=shared)
    _, second = training()
    with pytest.raises(ValueError, match=r"^sampler: serves another optimizer already; two releases of one draw"):
        Ledger().attach(second, sampler=shared)
    with pytest.raises(ValueError, match=r"^optimizer: a ledger is attached already; one release is charged once"):
        Ledger().attach(optimizer, sampler=sampler_of())


def test_opacus_optimizer_is_charged_beside_its_accountant() -> None:
    from opacus import GradSampleModule
    from opacus.accountants import RDPAccountant

    from dprs_kernels.opacus_optimizer import RSDPOpacusOptimizer

    torch.manual_seed(0)
    model = GradSampleModule(torch.nn.Linear(3, 2))
    optimizer = RSDPOpacusOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.1, max_grad_norm=0.7, expected_batch_size=4
    )
    accountant = RDPAccountant()
    optimizer.attach_step_hook(accountant.get_optimizer_hook_fn(sample_rate=0.1))
    ledger = Ledger()
    ledger.attach(optimizer, sampler=sampler_of())
    seen = []
    optimizer.original_optimizer.register_step_pre_hook(lambda *_: seen.append(ledger.steps))
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.randn(4, 3, requires_grad=True)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    charges = [charge.record for charge in ledger.records()]
    assert seen == [1, 2]
    assert charges[-1] == optimizer.last_record
    assert [(record.noise_multiplier, record.max_grad_norm) for record in charges] == [(1.1, 0.7)] * 2
    assert all(record.sensitivity <= 0.7 for record in charges)
    theirs = accountant.get_epsilon(delta=DELTA)
    ledger_epsilon = ledger.epsilon(DELTA)
    weights = [param.detach().clone() for param in model.parameters()]
    ledger.close()
    model(torch.randn(4, 3, requires_grad=True)).sum().backward()
    with pytest.raises(ValueError, match="nothing can be appended, it was closed"):
        optimizer.step()
    assert all(param.grad is None for param in model.parameters())
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert ledger_epsilon == pytest.approx(theirs, rel=1e-6)   # rounding is inside the bound that Opacus knows


def test_a_step_of_opacus_that_could_not_be_charged_is_no_gap() -> None:
    from opacus import GradSampleModule

    from dprs_kernels.opacus_optimizer import RSDPOpacusOptimizer

    model = GradSampleModule(torch.nn.Linear(3, 2))
    optimizer = RSDPOpacusOptimizer(
        torch.optim.SGD(model.parameters(), lr=0.1), noise_multiplier=1.1, max_grad_norm=0.7, expected_batch_size=4
    )
    ledger, sampler = Ledger(), sampler_of()
    ledger.attach(optimizer, sampler=sampler)
    for rate in (2.0, 0.1):
        sampler.sample_rate = rate
        optimizer.zero_grad()
        model(torch.randn(4, 3, requires_grad=True)).sum().backward()
        if rate > 1:
            with pytest.raises(ValueError, match=r"^sample_rate: got 2.0"):
                optimizer.step()
        else:
            optimizer.step()
    assert [(charge.record.step, charge.skipped_steps) for charge in ledger.records()] == [(1, 1)]
    assert ledger.epsilon(DELTA) > 0


def test_repr_tells_where_and_how_much(tmp_path: Path) -> None:
    assert repr(filled(2)).startswith("Ledger('in memory', steps=2, head=")
    assert repr(Ledger(tmp_path / "l")).startswith(f"Ledger('{tmp_path}/l', steps=0")


def test_examples_in_docstrings_run() -> None:
    result = doctest.testmod(ledger_module)
    assert result.failed == 0
    assert result.attempted == 2
