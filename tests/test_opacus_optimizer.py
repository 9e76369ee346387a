"""RSDPOpacusOptimizer: Opacus's own numbers without noise and mask; its accountant, loader, memory manager as ever."""

import copy
import dataclasses
import importlib
import itertools
import sys
import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, TensorDataset

pytest.importorskip("opacus")
from opacus import PrivacyEngine
from opacus.grad_sample import GradSampleModule
from opacus.optimizers import AdaClipDPOptimizer, DPOptimizer, DPPerLayerOptimizer
from opacus.schedulers import ExponentialNoise
from opacus.utils.batch_memory_manager import BatchMemoryManager

from dprs_kernels import ConstantRate, GradualCooling, KeepMask, NoiseSource
from dprs_kernels.opacus_optimizer import RSDPOpacusOptimizer

pytestmark = [
    pytest.mark.filterwarnings("ignore:Secure RNG turned off"),
    pytest.mark.filterwarnings("ignore:Full backward hook is firing"),
    pytest.mark.filterwarnings("ignore:noise. seeded for tests"),
]
# Opacus clips by C/(n + 1e-6) with n > 0.4, we by C (1 - 2^-20)/n: 3.5e-6 of at most 12 C a step, times lr, over some
# steps under momentum. A step itself is about 4e-3.
CLOSE = dict(rtol=1e-5, atol=3e-6)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv1d(1, 3, 3), nn.Flatten(), nn.Tanh(), nn.Linear(18, 2))


def data(samples=48):
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(
        torch.randn(samples, 1, 8, generator=generator), torch.randint(2, (samples,), generator=generator)
    )


def private(convert=None, *, noise_multiplier=0.0, poisson=False, reduction="mean", batch=12, mode="hooks", **more):
    """What make_private returns, converted where asked."""
    engine, model = PrivacyEngine(accountant="rdp"), net()
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9),
        data_loader=DataLoader(data(), batch_size=batch), noise_multiplier=noise_multiplier,
        max_grad_norm=more.pop("max_grad_norm", 0.4), poisson_sampling=poisson, loss_reduction=reduction,
        grad_sample_mode=mode, **more,
    )   # fmt: skip
    if convert is not None:
        assert RSDPOpacusOptimizer.from_opacus(optimizer, **convert) is optimizer
    return engine, model, optimizer, loader


def backward(model, optimizer, batch):
    x, y = batch
    nn.functional.cross_entropy(model(x), y, reduction=optimizer.loss_reduction).backward()


def train(model, optimizer, batches):
    for batch in batches:
        optimizer.zero_grad()
        backward(model, optimizer, batch)
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def assert_close(ours, theirs):
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, **CLOSE)


# ---- Opacus's numbers


@pytest.mark.parametrize("mode", ["hooks", "functorch", "ew"])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_without_noise_and_mask_it_is_opacus(reduction, mode):
    results = []
    for convert in (None, {}):
        _, model, optimizer, loader = private(convert, reduction=reduction, mode=mode)
        results.append(train(model, optimizer, loader))
    assert_close(*results)


def test_per_layer_clipping_is_opacus():
    results = []
    for convert in (None, {}):
        bounds = [0.3, 0.1, 0.2, 0.05]
        _, model, optimizer, loader = private(convert, clipping="per_layer", max_grad_norm=bounds)
        results.append(train(model, optimizer, loader))
    assert_close(*results)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_virtual_steps_are_opacus(reduction):
    results = []
    for convert in (None, {}):
        engine, model, optimizer, loader = private(convert, reduction=reduction)
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=5, optimizer=optimizer) as small:
            results.append(train(model, optimizer, small))
        assert [entry[2] for entry in engine.accountant.history] == [4]   # 4 logical batches, 12 physical
    assert_close(*results)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_accumulated_backward_passes_are_opacus(reduction):
    """grad_sample is a list of two; the accountant and the divisor see two iterations."""
    results = []
    for convert in (None, {}):
        engine, model, optimizer, loader = private(convert, reduction=reduction)
        first, second, *_ = loader
        backward(model, optimizer, first)
        backward(model, optimizer, second)
        assert optimizer.accumulated_iterations == 2
        optimizer.step()
        results.append([p.grad.clone() for p in model.parameters()])
        assert engine.accountant.history == [(0.0, 0.5, 1)]   # sample rate 1/4, twice
    assert_close(*results)


def test_where_the_number_of_passes_changes_the_last_counts_as_in_opacus():
    results = []
    for convert in (None, {}):
        _, model, optimizer, loader = private(convert)
        first, second, third, _ = loader
        optimizer.signal_skip_step(True)
        train(model, optimizer, [first])
        optimizer.zero_grad()
        backward(model, optimizer, second)
        backward(model, optimizer, third)
        optimizer.step()
        results.append([p.grad.clone() for p in model.parameters()])
    assert_close(*results)


def test_poisson_batches_and_empty_ones():
    """Batch 1 of 48: every third batch is empty, and counts."""
    results, histories = [], []
    for convert in (None, {}):
        engine, model, optimizer, loader = private(convert, poisson=True, batch=1)
        torch.manual_seed(5)
        batches = list(loader)
        assert any(len(x) == 0 for x, _ in batches)
        results.append(train(model, optimizer, batches))
        histories.append(engine.accountant.history)
    assert_close(*results)
    assert histories[0] == histories[1] == [(0.0, 1 / 48, 48)]


def test_an_empty_batch_is_full_noise():
    _, model, optimizer, _ = private({}, noise_multiplier=1.0)
    train(model, optimizer, [(torch.zeros(0, 1, 8), torch.zeros(0, dtype=torch.long))])
    grads = torch.cat([p.grad.flatten() for p in model.parameters()])
    assert (grads != 0).all()
    assert 0.2 < float(grads.std() * 12 / 0.4) < 2   # 50 coordinates, sigma C = 0.4, over 12


def test_the_accountant_is_opacus():
    """One entry of history per logical step, and Opacus's epsilon."""
    epsilons = []
    for convert in (None, dict(schedule=GradualCooling(0.9, epochs=2), steps_per_epoch=4)):
        engine, model, optimizer, loader = private(convert, noise_multiplier=1.1, poisson=True)
        for epoch in range(2):
            with BatchMemoryManager(data_loader=loader, max_physical_batch_size=8, optimizer=optimizer) as small:
                train(model, optimizer, small)
            assert engine.accountant.history == [(1.1, 0.25, 4 * (epoch + 1))]
        epsilons.append(engine.get_epsilon(1e-5))
    assert epsilons[0] == epsilons[1] > 0


# ---- the mask


def test_dropped_coordinates_are_exactly_zero_and_kept_ones_have_noise():
    convert = dict(schedule=ConstantRate(0.7, epochs=1), seed=3)
    _, model, optimizer, loader = private(convert, noise_multiplier=1.0)
    keep = KeepMask.draw(optimizer.params, drop_rate=0.7, seed=3, draw=0)
    for batch in loader:
        train(model, optimizer, [batch])
        for p, kept in zip(optimizer.params, keep.dense(), strict=True):
            assert not p.grad[~kept].any()
            assert p.grad[kept].all()


def test_masking_comes_before_clipping():
    """Against the equation: kept coordinates of each sample's gradient, clipped, summed, divided."""
    _, model, optimizer, loader = private(dict(schedule=ConstantRate(0.5, epochs=1)))
    backward(model, optimizer, next(iter(loader)))
    dense = optimizer.keep.dense()
    rows = [torch.where(k, p.grad_sample.double(), 0) for p, k in zip(optimizer.params, dense, strict=True)]
    factors = (0.4 / torch.cat([row.flatten(1) for row in rows], 1).norm(dim=1)).clamp(max=1)
    assert (factors < 1).any()
    optimizer.step()
    expected = [torch.einsum("n,n...->...", factors, row).float() / 12 for row in rows]
    assert_close([p.grad for p in optimizer.params], expected)


def test_epochs_are_counted_from_logical_steps():
    schedule = GradualCooling(0.8, epochs=3, refresh=2)
    _, model, optimizer, loader = private(dict(schedule=schedule, steps_per_epoch=4), noise_multiplier=1.0)
    records = []
    optimizer.attach_step_hook(lambda o: records.append(o.last_record))
    for _ in range(3):
        with BatchMemoryManager(data_loader=loader, max_physical_batch_size=5, optimizer=optimizer) as small:
            train(model, optimizer, small)
    expected = [
        KeepMask.draw(optimizer.params, drop_rate=schedule(epoch), seed=0, draw=2 * epoch + tick).digest()
        for epoch, tick, _ in itertools.product(range(3), range(2), range(2))
    ]
    assert [record.keep_digest for record in records] == expected
    with pytest.raises(ValueError, match="set_epoch: with steps_per_epoch= epochs are counted"):
        optimizer.set_epoch(1)
    with pytest.raises(ValueError, match="epoch: got 3"):
        train(model, optimizer, loader)


def test_the_mask_and_the_numbers_are_fixed_inside_a_logical_batch():
    _, model, optimizer, loader = private(dict(schedule=GradualCooling(0.8, epochs=3)), noise_multiplier=1.0)
    optimizer.signal_skip_step(True)
    first, second, *_ = loader
    train(model, optimizer, [first])
    with pytest.raises(ValueError, match="set_epoch: a logical batch is open"):
        optimizer.set_epoch(1)
    optimizer.zero_grad()
    optimizer.noise_multiplier = 0.5
    with pytest.raises(ValueError, match="noise_multiplier: a logical batch is open"):
        train(model, optimizer, [second])
    optimizer.noise_multiplier = 1.0
    train(model, optimizer, [second])
    optimizer.set_epoch(1)


# ---- noise and sensitivity


def test_noise_is_secure_by_default_and_steps_once():
    _, model, optimizer, loader = private({}, noise_multiplier=1.0)
    assert optimizer.noise.private
    train(model, optimizer, loader)
    assert optimizer.noise.step == 4
    assert optimizer.last_record.private


@pytest.mark.parametrize("bound", [0.4, 1.0, [0.5, 0.5, 0.5, 0.5]])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 64.0])
def test_sensitivity_with_rounding_is_within_what_the_accountant_knows(sigma, bound):
    clipping = "per_layer" if isinstance(bound, list) else "flat"
    _, model, optimizer, loader = private({}, noise_multiplier=sigma, max_grad_norm=bound, clipping=clipping)
    train(model, optimizer, [next(iter(loader))])
    record = optimizer.last_record
    assert record.max_grad_norm == optimizer.max_grad_norm
    assert 0.99 * record.max_grad_norm < record.sensitivity <= record.max_grad_norm
    settings = optimizer._to_core(optimizer._opacus_settings())
    inner = settings["max_grad_norm"]
    total = torch.tensor(inner, dtype=torch.float64).norm().item()
    assert settings["noise_multiplier"] * total >= sigma * record.max_grad_norm * (1 - 1e-7)
    assert record.noise_multiplier == sigma


def test_noise_and_bound_follow_opacus_schedulers():
    _, model, optimizer, loader = private({}, noise_multiplier=1.0)
    scheduler, records = ExponentialNoise(optimizer, gamma=0.5), []
    optimizer.attach_step_hook(lambda o: records.append(o.last_record.noise_multiplier))
    for batch in itertools.islice(loader, 3):
        train(model, optimizer, [batch])
        scheduler.step()
    assert records == [1.0, 0.5, 0.25]


# ---- DPOptimizer's behaviour


def test_no_gradient_is_used_twice():
    _, model, optimizer, loader = private({})
    batch = next(iter(loader))
    backward(model, optimizer, batch)
    optimizer.step()
    with pytest.raises(ValueError, match="Gradients haven't been cleared"):
        optimizer.step()
    with pytest.raises(ValueError, match="add_noise: nothing was accumulated"):
        optimizer.add_noise()
    held = [p.grad_sample for p in optimizer.params]
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="Per sample gradient is not initialized"):
        optimizer.step()
    for p, grad in zip(optimizer.params, held, strict=True):
        del grad._processed
        p.grad_sample = grad
    with pytest.raises(ValueError, match="already used by an earlier step"):
        optimizer.step()


def test_a_failed_release_is_not_repeated(monkeypatch):
    engine, model, optimizer, loader = private({}, noise_multiplier=1.0)
    backward(model, optimizer, next(iter(loader)))
    with monkeypatch.context() as patch:
        patch.setattr("dprs_kernels.step.PrivateSum.release_into", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            optimizer.step()
    assert all(p.grad is None for p in optimizer.params)
    assert not engine.accountant.history
    with pytest.raises(ValueError, match="Gradients haven't been cleared"):
        optimizer.step()
    train(model, optimizer, loader)


def test_an_interrupt_before_the_record_leaves_no_gradient(monkeypatch):
    engine, model, optimizer, loader = private({}, noise_multiplier=1.0)
    backward(model, optimizer, next(iter(loader)))

    def interrupt(_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("dprs_kernels.step.PrivateSum.record", interrupt)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert all(p.grad is None for p in optimizer.params)
    assert not engine.accountant.history
    optimizer.zero_grad()
    train(model, optimizer, loader)


def test_zero_grad_and_skipped_steps():
    _, model, optimizer, loader = private({})
    hooks, weights = [], [p.detach().clone() for p in model.parameters()]
    optimizer.attach_step_hook(hooks.append)
    first, second, *_ = loader
    optimizer.signal_skip_step(True)
    backward(model, optimizer, first)
    optimizer.step()
    optimizer.zero_grad()
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert not hooks
    assert all(p.grad_sample is None for p in optimizer.params)
    backward(model, optimizer, second)
    optimizer.step()
    assert hooks == [optimizer]
    assert not any(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    optimizer.zero_grad(set_to_none=True)
    assert all(p.grad is None and p.grad_sample is None for p in optimizer.params)


def test_what_already_holds_the_optimizer_goes_on_working():
    _, model, optimizer, loader = private()
    scheduler = StepLR(optimizer, step_size=1, gamma=0.1)   # has patched optimizer.step
    RSDPOpacusOptimizer.from_opacus(optimizer, schedule=ConstantRate(0.5, epochs=1))
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*lr_scheduler")
        train(model, optimizer, [next(iter(loader))])
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.001)
    assert sum(int((p.grad == 0).sum()) for p in optimizer.params) == 25
    assert isinstance(optimizer, DPOptimizer)
    assert "SGD" in repr(optimizer)


def test_closure_and_plain_construction():
    model = GradSampleModule(net())
    inner = torch.optim.SGD(model.parameters(), lr=0.5)
    optimizer = RSDPOpacusOptimizer(inner, noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=4)
    optimizer.step(lambda: backward(model, optimizer, data(4).tensors))
    assert optimizer.noise.step == 1


def test_a_checkpoint_of_the_engine_continues(tmp_path):
    convert = dict(schedule=GradualCooling(0.8, epochs=2), steps_per_epoch=4)
    weights = []
    for interrupted in (False, True):
        seeded = dict(noise=NoiseSource.seeded_for_tests(1), **convert)
        engine, model, optimizer, loader = private(seeded, noise_multiplier=1.0)
        train(model, optimizer, [*loader, next(iter(loader))])
        if interrupted:
            engine.save_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
            seeded = dict(noise=NoiseSource.seeded_for_tests(1), **convert)
            engine, model, optimizer, loader = private(seeded, noise_multiplier=1.0)
            engine.load_checkpoint(path=tmp_path / "run.pt", module=model, optimizer=optimizer)
        weights.append(train(model, optimizer, [next(iter(loader))]))
        assert engine.accountant.history == [(1.0, 0.25, 6)]
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    private(convert)[2].load_state_dict(private()[2].state_dict())   # from before the conversion


def test_loss_scaling_is_refused():
    _, model, optimizer, loader = private({})
    backward(model, optimizer, next(iter(loader)))
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(ValueError, match="dynamic loss scaling is refused"):
        scaler.step(optimizer)


# ---- misuse


def test_what_cannot_be_converted():
    sgd = torch.optim.SGD(net().parameters(), lr=0.1)
    numbers = dict(noise_multiplier=1.0, max_grad_norm=1.0, expected_batch_size=1)
    adaptive = dict(
        target_unclipped_quantile=0.5, clipbound_learning_rate=0.2, max_clipbound=1e8, min_clipbound=1e-8,
        unclipped_num_std=5.0,
    )   # fmt: skip
    done = RSDPOpacusOptimizer.from_opacus(DPOptimizer(copy.deepcopy(sgd), **numbers))
    for wrong in (sgd, AdaClipDPOptimizer(sgd, **numbers, **adaptive), done):
        with pytest.raises(ValueError, match=rf"optimizer: got {type(wrong).__name__}; expected the DPOptimizer"):
            RSDPOpacusOptimizer.from_opacus(wrong)
    generator = DPOptimizer(sgd, generator=torch.Generator(), **numbers)
    with pytest.raises(ValueError, match=r"noise_generator: got a torch.Generator, which our noise does not use"):
        RSDPOpacusOptimizer.from_opacus(generator)
    assert type(generator) is DPOptimizer   # as it was
    for convert, message in ((dict(steps_per_epoch=0), "steps_per_epoch: got 0"), (dict(schedule=0.5), "schedule: ")):
        with pytest.raises(ValueError, match=message):
            RSDPOpacusOptimizer.from_opacus(DPOptimizer(sgd, **numbers), **convert)
    with pytest.raises(ValueError, match="max_grad_norm: got -1"):
        RSDPOpacusOptimizer.from_opacus(DPOptimizer(sgd, **{**numbers, "max_grad_norm": -1.0}))
    _, model, optimizer, loader = private()
    train(model, optimizer, [next(iter(loader))])
    with pytest.raises(ValueError, match="optimizer: inside a logical batch"):
        RSDPOpacusOptimizer.from_opacus(optimizer)
    optimizer.zero_grad()
    assert isinstance(RSDPOpacusOptimizer.from_opacus(optimizer), RSDPOpacusOptimizer)


@pytest.mark.filterwarnings("default:noise. seeded for tests")
def test_seeded_noise_warns():
    with pytest.warns(UserWarning, match="epsilon does not hold"):
        _, model, optimizer, loader = private(dict(noise=NoiseSource.seeded_for_tests(0)), noise_multiplier=1.0)
    train(model, optimizer, [next(iter(loader))])
    assert not dataclasses.asdict(optimizer.last_record)["private"]


def test_without_opacus_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "opacus.optimizers", None)
    monkeypatch.delitem(sys.modules, "dprs_kernels.opacus_optimizer")
    with pytest.raises(ImportError, match=r'pip install "dprs_kernels\[opacus\]"'):
        importlib.import_module("dprs_kernels.opacus_optimizer")


def test_a_loop_that_was_left_can_be_discarded():
    _, model, optimizer, loader = private({})
    with BatchMemoryManager(data_loader=loader, max_physical_batch_size=5, optimizer=optimizer) as small:
        train(model, optimizer, [next(iter(small))])
    assert optimizer._total is not None
    optimizer.discard()
    _, other, reference, _ = private({})
    assert_close(train(model, optimizer, loader), train(other, reference, loader))


def test_per_layer_optimizers_keep_their_kind():
    _, _, optimizer, _ = private({}, clipping="per_layer", max_grad_norm=[1.0] * 4)
    assert isinstance(optimizer, RSDPOpacusOptimizer)
    assert not isinstance(optimizer, DPPerLayerOptimizer)
    assert optimizer._opacus_settings()["clipping"] == "per_layer"


def test_after_make_private_with_epsilon_the_target_holds():
    """sigma is Opacus's, found for the steps that are then taken."""
    engine, model = PrivacyEngine(accountant="rdp"), net()
    model, optimizer, loader = engine.make_private_with_epsilon(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        data_loader=DataLoader(data(), batch_size=12),
        target_epsilon=4.0, target_delta=1e-3, epochs=3, max_grad_norm=0.4,
    )   # fmt: skip
    RSDPOpacusOptimizer.from_opacus(optimizer, schedule=GradualCooling(0.9, 3), steps_per_epoch=len(loader))
    for _ in range(3):
        train(model, optimizer, loader)
    assert optimizer.last_record.drop_rate == pytest.approx(0.9, abs=0.02)
    assert 3.0 < engine.get_epsilon(1e-3) <= 4.0


def test_a_model_that_was_wrapped_before():
    """make_private on a GradSampleModule of the user's own."""
    engine, model = PrivacyEngine(accountant="rdp"), GradSampleModule(net())
    model, optimizer, loader = engine.make_private(
        module=model, optimizer=torch.optim.SGD(model.parameters(), lr=0.01),
        data_loader=DataLoader(data(), batch_size=12),
        noise_multiplier=1.0, max_grad_norm=0.4,
    )   # fmt: skip
    RSDPOpacusOptimizer.from_opacus(optimizer, schedule=ConstantRate(0.5, 1))
    train(model, optimizer, loader)
    assert optimizer.noise.step == len(loader)
    assert optimizer.last_record.private
