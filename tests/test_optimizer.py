"""RSDPOptimizer: the fused step's gradients under any torch optimizer, and nothing used twice."""

import contextlib
import copy
import dataclasses
import itertools
import math
import pickle
import warnings

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, StepLR

from dprs_kernels import ConstantRate, GradualCooling, KeepMask, NoiseSource, PrivateSum, fused_rs_dp_step
from dprs_kernels.grads import FunctionalSource
from dprs_kernels.grads import per_sample as hooks
from dprs_kernels.optimizer import RSDPOptimizer
from tests.oracle import BACKENDS, random_grads
from tests.test_engine import Fails

SHAPES = [(5, 3), (5,)]
INNER = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": lambda params: torch.optim.Adam(params, lr=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=0.01, foreach=True),
}
inner_optimizers = pytest.mark.parametrize("inner", INNER)


def fresh_params():
    generator = torch.Generator().manual_seed(1)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def make(params, inner="sgd", **overrides):
    arguments = dict(
        max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=8.0, noise=NoiseSource.seeded_for_tests(3)
    )
    return RSDPOptimizer(INNER[inner](params), **{**arguments, **overrides})


def per_sample(model, loss_fn, x, y, names=None):
    """p.grad_sample by torch.func, for the parameters that require grad."""
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}

    def loss_of_one(weights, x, y):
        return loss_fn(torch.func.functional_call(model, weights, (x.unsqueeze(0),)), y.unsqueeze(0))

    make_grads = torch.func.vmap(torch.func.grad(loss_of_one), in_dims=(None, 0, 0))
    for name, grad in make_grads({name: p.detach() for name, p in params.items()}, x, y).items():
        params[name].grad_sample = grad


# ---- the same as the parts it is made of


@inner_optimizers
def test_steps_are_fused_steps_followed_by_the_inner_optimizer(inner):
    schedule = GradualCooling(final_rate=0.8, epochs=3)
    ours, theirs = fresh_params(), fresh_params()
    optimizer = make(ours, inner, schedule=schedule, seed=5)
    plain, noise = INNER[inner](theirs), NoiseSource.seeded_for_tests(3)
    for epoch in range(3):
        optimizer.set_epoch(epoch)
        keep = KeepMask.draw(theirs, drop_rate=schedule(epoch), seed=5, draw=epoch)
        for step in range(2):
            grads = random_grads(SHAPES, 8, seed=10 * epoch + step)
            optimizer.step(grad_samples=grads)
            fused_rs_dp_step(
                theirs, keep=keep, max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=8, noise=noise,
                grad_samples=grads,
            )   # fmt: skip
            plain.step()
        assert optimizer.keep == keep
    for a, b in zip(ours, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("backend", BACKENDS)
def test_micro_batches_give_the_bits_of_one_batch(backend):
    results = []
    for cuts in ([0, 9], [0, 4, 9], [0, 1, 1, 9]):
        params = fresh_params()
        optimizer = make(params, schedule=ConstantRate(0.5, 1), backend=backend)
        grads = random_grads(SHAPES, 9)
        for a, b in itertools.pairwise(cuts[:-1]):
            optimizer.accumulate([g[a:b] for g in grads])
        optimizer.step(grad_samples=[g[cuts[-2] : cuts[-1]] for g in grads])
        results.append([p.detach().clone() for p in params])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_accumulate_then_step_without_further_gradients():
    params, grads = fresh_params(), random_grads(SHAPES, 4)
    optimizer = make(params)
    for p, g in zip(params, grads, strict=True):
        p.grad_sample = g
    optimizer.accumulate()
    assert all(p.grad_sample is None for p in params)
    optimizer.step()
    other = fresh_params()
    make(other).step(grad_samples=random_grads(SHAPES, 4))
    assert all(torch.equal(a, b) for a, b in zip(params, other, strict=True))


@pytest.mark.parametrize("attribute", ["grad_sample", "grad_batch"])
def test_gradients_on_parameters_are_consumed(attribute):
    params = fresh_params()
    optimizer = make(params)
    for p, g in zip(params, random_grads(SHAPES, 4), strict=True):
        setattr(p, attribute, g)
    optimizer.step()
    assert all(getattr(p, attribute) is None for p in params)
    with pytest.raises(ValueError, match=r"no per-sample gradients.*already used by an earlier step"):
        optimizer.step()


def test_an_empty_batch_is_a_step_of_full_noise():
    params, records = fresh_params(), []
    before = [p.detach().clone() for p in params]
    optimizer = make(params)
    optimizer.attach_step_hook(lambda _, record: records.append(record))
    optimizer.accumulate_empty()
    optimizer.step()
    optimizer.step(grad_samples=[torch.zeros(0, *shape) for shape in SHAPES])
    assert [r.step for r in records] == [0, 1]
    assert all((a != b).all() for a, b in zip(params, before, strict=True))


# ---- a torch optimizer


@inner_optimizers
@pytest.mark.parametrize(
    "scheduler",
    [
        lambda o: StepLR(o, step_size=2, gamma=0.5),
        lambda o: OneCycleLR(o, max_lr=0.1, total_steps=6),
        lambda o: LambdaLR(o, lambda epoch: 0.9**epoch),
    ],
    ids=["StepLR", "OneCycleLR", "LambdaLR"],
)
def test_learning_rate_schedulers(inner, scheduler):
    params, plain_params = fresh_params(), fresh_params()
    optimizer, plain = make(params, inner), INNER[inner](plain_params)
    ours, theirs = scheduler(optimizer), scheduler(plain)
    for p in plain_params:
        p.grad = torch.zeros_like(p)
    with warnings.catch_warnings():
        warnings.simplefilter("error")   # "lr_scheduler.step() before optimizer.step()"
        for step in range(5):
            optimizer.step(grad_samples=random_grads(SHAPES, 2, seed=step))
            plain.step()
            ours.step()
            theirs.step()
            assert ours.get_last_lr() == theirs.get_last_lr()
            assert optimizer.param_groups[0]["lr"] == plain.param_groups[0]["lr"]


def test_a_scheduler_that_holds_the_inner_optimizer_works_too():
    params = fresh_params()
    inner = INNER["sgd"](params)
    scheduler = StepLR(inner, step_size=1, gamma=0.1)
    optimizer = RSDPOptimizer(inner, max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step(grad_samples=random_grads(SHAPES, 2))
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)


def test_is_the_inner_optimizer_to_those_who_look():
    params = fresh_params()
    optimizer = make(params, "adam")
    inner = optimizer.original_optimizer
    assert isinstance(optimizer, torch.optim.Optimizer)
    assert optimizer.param_groups is inner.param_groups
    assert optimizer.defaults is inner.defaults
    optimizer.step(grad_samples=random_grads(SHAPES, 2))
    assert optimizer.state is inner.state
    assert set(optimizer.state[params[0]]) == {"step", "exp_avg", "exp_avg_sq"}
    assert "RSDPOptimizer(max_grad_norm=1.0" in repr(optimizer)
    assert "Adam (" in repr(optimizer)


def test_torch_step_hooks_and_closure():
    params, seen = fresh_params(), []
    optimizer = make(params)
    optimizer.register_step_pre_hook(lambda *_: seen.append("pre"))
    optimizer.register_step_post_hook(lambda *_: seen.append("post"))

    def closure():
        assert torch.is_grad_enabled()
        seen.append("closure")
        for p, g in zip(params, random_grads(SHAPES, 2), strict=True):
            p.grad_sample = g
        return 1.5

    with torch.no_grad():
        assert optimizer.step(closure) == 1.5
    assert seen == ["pre", "closure", "post"]
    with pytest.raises(ValueError, match="closure: got list; expected a function, or grad_samples=tensors"):
        optimizer.step(random_grads(SHAPES, 2))


def test_zero_grad_clears_every_kind():
    params = fresh_params()
    optimizer = make(params)
    params[0].grad_sample, params[1].grad_batch = random_grads(SHAPES, 2)
    params[0].grad = torch.ones(SHAPES[0])
    optimizer.zero_grad()
    assert params[0].grad_sample is None
    assert params[1].grad_batch is None
    assert params[0].grad is None


def test_gradient_by_name():
    model = nn.Linear(3, 5)
    inner = torch.optim.SGD(model.named_parameters(), lr=0.1)
    optimizer = RSDPOptimizer(inner, max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=4)
    weight, bias = random_grads(SHAPES, 2)
    optimizer.step(grad_samples={"bias": bias, "weight": weight})
    with pytest.raises(ValueError, match="no entry for 'bias'"):
        optimizer.step(grad_samples={"weight": weight + 1})


# ---- the mask's life


def test_the_mask_is_fixed_inside_a_logical_batch():
    params = fresh_params()
    optimizer = make(params, schedule=GradualCooling(0.5, epochs=4, refresh=2))
    first = optimizer.keep
    assert first.count == first.size
    optimizer.set_epoch(3, tick=1)
    keep = optimizer.keep
    assert keep == KeepMask.draw(params, drop_rate=0.5, seed=0, draw=7)
    optimizer.accumulate(random_grads(SHAPES, 2))
    optimizer.set_epoch(3, tick=1)   # nothing changes
    with pytest.raises(ValueError, match="set_epoch: a logical batch is open, the mask may not change"):
        optimizer.set_epoch(2)
    with pytest.raises(ValueError, match=r"zero_grad: a logical batch is open.*discard"):
        optimizer.zero_grad()
    with pytest.raises(ValueError, match="add_param_group: a logical batch is open"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(2))]})
    with pytest.raises(ValueError, match="load_state_dict: a logical batch is open"):
        optimizer.load_state_dict(optimizer.state_dict())
    optimizer.step()
    for p, kept in zip(params, keep.dense(), strict=True):
        assert not p.grad[~kept].any()
        assert p.grad[kept].all()
    optimizer.set_epoch(2)


@pytest.mark.parametrize("name", ["max_grad_norm", "noise_multiplier", "expected_batch_size"])
def test_numbers_change_between_steps_only(name):
    optimizer = make(fresh_params())
    setattr(optimizer, name, 2.0)
    optimizer.accumulate(random_grads(SHAPES, 2))
    setattr(optimizer, name, 3.0)
    with pytest.raises(ValueError, match=f"{name}: a logical batch is open, began with 2.0, now 3.0"):
        optimizer.step()
    assert optimizer.noise.step == 0
    setattr(optimizer, name, 2.0)
    optimizer.step()


def test_discard_gives_up_what_was_added():
    params, other = fresh_params(), fresh_params()
    optimizer = make(params)
    optimizer.accumulate(random_grads(SHAPES, 4, seed=1))
    optimizer.discard()
    optimizer.zero_grad()
    optimizer.step(grad_samples=random_grads(SHAPES, 4, seed=2))
    make(other).step(grad_samples=random_grads(SHAPES, 4, seed=2))
    assert all(torch.equal(a, b) for a, b in zip(params, other, strict=True))


def test_parameters_may_be_added_and_frozen_between_steps():
    params = fresh_params()
    optimizer = make(params, schedule=ConstantRate(0.5, epochs=2))
    optimizer.step(grad_samples=random_grads(SHAPES, 2))
    extra = nn.Parameter(torch.zeros(40))
    optimizer.add_param_group({"params": [extra]})
    assert optimizer.keep.size == 60
    assert optimizer.param_groups[1]["lr"] == 0.1
    optimizer.accumulate(random_grads([*SHAPES, (40,)], 2))
    params[0].requires_grad_(False)
    with pytest.raises(ValueError, match="params: a logical batch is open, other parameters are trainable now"):
        optimizer.step()
    params[0].requires_grad_(True)
    optimizer.step()
    assert extra.detach().any()


# ---- nothing is used twice


def test_the_same_gradients_are_refused():
    optimizer = make(fresh_params())
    grads = random_grads(SHAPES, 4)
    optimizer.step(grad_samples=grads)
    for call in (lambda: optimizer.step(grad_samples=grads), lambda: optimizer.accumulate(grads)):
        with pytest.raises(ValueError, match=r"param_groups\[0\]\['params'\]\[0\]: these .* used by an earlier"):
            call()
    with pytest.raises(ValueError, match="already used"):
        optimizer.step(grad_samples=[[g + 0.0] * 2 for g in grads])
    for grad in grads:
        grad.normal_()   # one buffer, filled again: fine
    optimizer.step(grad_samples=grads)
    assert optimizer.noise.step == 2


def test_no_gradients_no_step():
    params = fresh_params()
    optimizer = make(params)
    with pytest.raises(ValueError, match="no backward pass has filled"):
        optimizer.step()
    params[0].grad_sample = torch.zeros(2, 5, 3)
    with pytest.raises(ValueError, match="the parameter took no part in the loss"):
        optimizer.step()
    assert optimizer.noise.step == 0
    assert params[0].grad is None


@pytest.mark.parametrize("micro_batches", [0, 1])
def test_a_failure_after_the_claim_leaves_nothing_behind(micro_batches, monkeypatch):
    """The claimed step is gone, the gradients too, and p.grad holds nothing half-written."""
    params, records = fresh_params(), []
    optimizer = make(params)
    optimizer.attach_step_hook(lambda _, record: records.append(record))
    before = [p.detach().clone() for p in params]
    for p, g in zip(params, random_grads(SHAPES, 4), strict=True):
        p.grad, p.grad_sample = torch.zeros_like(p), g
    if micro_batches:
        optimizer.accumulate(random_grads(SHAPES, 4, seed=1))

    def failing_close(self):
        self.__dict__["_released"] = True
        self.noise.claim()
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(PrivateSum, "_close", failing_close)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step()
    assert optimizer.noise.step == 1
    assert not records
    assert all(p.grad is None and p.grad_sample is None for p in params)
    with pytest.raises(ValueError, match="already used by an earlier step"):
        optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    optimizer.step(grad_samples=random_grads(SHAPES, 4, seed=2))
    assert [record.step for record in records] == [1]


def test_a_release_is_recorded_even_if_the_inner_optimizer_or_a_hook_fails():
    params, records = fresh_params(), []
    optimizer = make(params)

    def failing(*_):
        raise RuntimeError("broken")

    optimizer.attach_step_hook(failing)
    optimizer.attach_step_hook(lambda _, record: records.append(record))
    with pytest.raises(RuntimeError, match="broken"):
        optimizer.step(grad_samples=random_grads(SHAPES, 2))
    optimizer.original_optimizer.step = failing
    with pytest.raises(RuntimeError, match="broken"):
        optimizer.step(grad_samples=random_grads(SHAPES, 2))
    assert [record.step for record in records] == [0, 1]


def test_without_its_record_a_release_is_not_used():
    params = fresh_params()
    start, optimizer = [p.detach().clone() for p in params], make(params)

    def full_disk(*_):
        raise OSError("no space left")

    optimizer.attach_step_hook(full_disk)
    with pytest.raises(OSError, match="no space"):
        optimizer.step(grad_samples=random_grads(SHAPES, 2))
    assert all(torch.equal(a, b) for a, b in zip(params, start, strict=True))
    assert all(p.grad is None for p in params)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("make_source", [hooks, FunctionalSource])
def test_backward_through_a_source_in_micro_batches(make_source, reduction):
    torch.manual_seed(0)
    x, y, loss_fn = torch.randn(11, 3), torch.randn(11, 2), nn.MSELoss(reduction=reduction)
    results = []
    for split in (None, 4, 1):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2))
        source = make_source(model)
        # Another order than the model's, and names that only torch knows.
        optimizer = make([*model[2].parameters(), *model[0].parameters()])
        for _ in range(2):
            optimizer.backward(source, loss_fn, x, y, max_physical_batch_size=split)
            optimizer.step()
            optimizer.zero_grad()
        optimizer.backward(source, loss_fn, x[:0], y[:0])
        optimizer.step()
        assert optimizer.noise.step == 3
        results.append([p.detach().clone() for p in model.parameters()])
    for other in results[1:]:
        assert all(torch.allclose(a, b, rtol=1e-5, atol=1e-6) for a, b in zip(results[0], other, strict=True))


def test_backward_misuse_changes_nothing():
    model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2))
    x, y = torch.randn(4, 3), torch.randn(4, 2)
    optimizer = make(model.parameters())
    with pytest.raises(ValueError, match="loss_reduction: got 'mean'; backward makes each sample's own gradient"):
        make(model.parameters(), loss_reduction="mean").backward(hooks(model), nn.MSELoss(), x, y)
    with pytest.raises(ValueError, match="source: has no gradients for param_groups"):
        optimizer.backward(hooks(nn.Linear(3, 2)), nn.MSELoss(), x, y)
    with pytest.raises(ValueError, match=r"0\.bias: not among the optimizer's parameters"):
        make([*model[1].parameters()]).backward(hooks(model), nn.MSELoss(), x, y)
    with pytest.raises(ValueError, match="no per-sample gradients"):
        optimizer.step()


def test_a_failed_backward_is_given_up_whole():
    """Run again, it counts every sample once."""
    layer = nn.Linear(4, 1, bias=False)
    model = Fails(layer)
    x, y = torch.zeros(6, 4), torch.full((6, 1), -1e3)
    x[0, 0] = 1e3
    optimizer = make(layer.parameters(), noise_multiplier=1e-6, expected_batch_size=1)
    source, given = hooks(model), (nn.MSELoss(reduction="sum"), x, y)
    for error in (RuntimeError, KeyboardInterrupt):
        model.failing = error, 2   # in the second micro-batch
        with pytest.raises(error):
            optimizer.backward(source, *given, max_physical_batch_size=3)
        with pytest.raises(ValueError, match="no per-sample gradients"):
            optimizer.step()
    optimizer.zero_grad()   # nothing is open
    optimizer.backward(source, *given, max_physical_batch_size=3)
    optimizer.step()
    assert float(layer.weight.grad.norm()) == pytest.approx(1.0, abs=1e-3)


def test_a_gradient_frozen_after_backward_never_reaches_the_inner_optimizer():
    params = fresh_params()
    optimizer = make(params)
    params[0].grad = torch.ones(SHAPES[0])   # raw, from backward
    params[0].requires_grad_(False)
    before = params[0].detach().clone()
    optimizer.step(grad_samples=random_grads(SHAPES[1:], 2))
    assert torch.equal(params[0], before)


# ---- records and checkpoints


def test_records():
    params, records = fresh_params(), []
    start = params[0].detach().clone()
    optimizer = make(params, schedule=ConstantRate(0.5, 1), noise=None, max_grad_norm=2.0)
    optimizer.attach_step_hook(lambda who, record: records.append((who, record, params[0].detach().clone())))
    optimizer.step(grad_samples=random_grads(SHAPES, 2))
    (who, record, weights), keep = records[0], optimizer.keep
    assert who is optimizer
    assert torch.equal(weights, start)   # the hook runs before the inner step: recorded, then used
    assert not torch.equal(weights, params[0])
    assert 2.0 < record.sensitivity < 2.0001
    assert dataclasses.asdict(record) == dict(
        step=0, key_id=optimizer.noise.key_id, private=True, noise_multiplier=1.0, max_grad_norm=2.0,
        expected_batch_size=8.0, sensitivity=record.sensitivity, drop_rate=0.5, kept=10, keep_digest=keep.digest(),
    )   # fmt: skip
    with pytest.raises(dataclasses.FrozenInstanceError):
        record.step = 7


def test_the_record_is_of_the_noise_that_was_used():
    """Another source, put in its place while a batch is open, is not the one that the release has."""
    params, records = fresh_params(), []
    optimizer = make(params, noise=NoiseSource.seeded_for_tests(1))
    optimizer.attach_step_hook(lambda _, record: records.append(record))
    optimizer.accumulate(random_grads(SHAPES, 4))
    used, optimizer.noise = optimizer.noise, NoiseSource()
    optimizer.noise.claim()
    optimizer.step()
    assert (records[0].private, records[0].key_id, records[0].step) == (False, used.key_id, 0)


@pytest.mark.parametrize("where", ["record", "keep_digest"])
def test_an_interrupt_before_the_record_leaves_no_gradient(where, monkeypatch):
    """Ctrl-C after the noise and before any hook: nothing is charged, so nothing may be used."""
    params = fresh_params()
    optimizer = make(params)

    def interrupt(*_):
        raise KeyboardInterrupt

    target = PrivateSum if where == "record" else KeepMask
    with monkeypatch.context() as patch:
        patch.setattr(target, "record" if where == "record" else "digest", interrupt)
        with pytest.raises(KeyboardInterrupt):
            optimizer.step(grad_samples=random_grads(SHAPES, 4))
    assert all(param.grad is None for param in params)
    optimizer.step(grad_samples=random_grads(SHAPES, 4))
    assert optimizer.noise.step == 2


@pytest.mark.parametrize(
    "overrides", [{}, dict(noise=None, noise_multiplier=0.0), dict(noise=None, max_grad_norm=math.inf)]
)
def test_ablations_and_seeded_noise_are_not_private(overrides):
    records = []
    optimizer = make(fresh_params(), **overrides)
    optimizer.attach_step_hook(lambda _, record: records.append(record))
    optimizer.step(grad_samples=random_grads(SHAPES, 2))
    assert not records[0].private


@inner_optimizers
def test_a_run_continues_from_a_checkpoint(inner, tmp_path):
    schedule = GradualCooling(0.8, epochs=4)
    straight, broken = fresh_params(), fresh_params()
    whole, first = make(straight, inner, schedule=schedule), make(broken, inner, schedule=schedule)
    for optimizer in (whole, first):
        optimizer.set_epoch(2)
        optimizer.step(grad_samples=random_grads(SHAPES, 4, seed=1))
    torch.save(first.state_dict(), tmp_path / "state.pt")
    second = make(broken, inner, schedule=schedule)
    second.load_state_dict(torch.load(tmp_path / "state.pt", weights_only=True))
    for optimizer in (whole, second):
        optimizer.step(grad_samples=random_grads(SHAPES, 4, seed=2))
    assert second.keep == whole.keep
    assert all(torch.equal(a, b) for a, b in zip(straight, broken, strict=True))


def test_a_checkpoint_holds_no_key_and_loading_makes_a_fresh_one():
    params = fresh_params()
    optimizer = make(params, noise=NoiseSource())
    optimizer.step(grad_samples=random_grads(SHAPES, 2))
    state, key, key_id = optimizer.state_dict(), optimizer.noise._key, optimizer.noise.key_id
    assert key not in pickle.dumps(state)
    assert key.hex() not in repr(state) + repr(optimizer)
    optimizer.load_state_dict(state)
    assert optimizer.noise.key_id != key_id
    assert optimizer.noise.step == 1
    for copier in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(ValueError, match=r"cannot be pickled or copied.*use state_dict\(\)"):
            copier(optimizer)


def test_checkpoints_from_elsewhere():
    params = fresh_params()
    optimizer = make(params, seed=1)
    with pytest.raises(ValueError, match="seed: saved with 0, got 1"):
        optimizer.load_state_dict(make(fresh_params()).state_dict())
    plain = INNER["sgd"](fresh_params())
    plain.param_groups[0]["lr"] = 0.7
    optimizer.load_state_dict(plain.state_dict())
    assert optimizer.param_groups[0]["lr"] == 0.7
    plain.load_state_dict(optimizer.state_dict())   # and back


# ---- mixed precision, adapters, unused branches


def test_bf16_autocast_with_fp32_parameters():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.ReLU(), nn.Linear(4, 2))
    twin = copy.deepcopy(model)
    x, y = torch.randn(8, 6), torch.randint(2, (8,))
    optimizer = make(list(model.parameters()), noise_multiplier=0.0)
    reference = make(list(twin.parameters()), noise_multiplier=0.0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        per_sample(model, nn.functional.cross_entropy, x, y)
    for p in model.parameters():
        p.grad_sample = p.grad_sample.bfloat16()   # as hooks under autocast leave them
    per_sample(twin, nn.functional.cross_entropy, x, y)
    optimizer.step()
    reference.step()
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert p.grad.dtype == torch.float32
        assert torch.allclose(p.grad, q.grad, atol=0.03 * float(q.grad.norm()))   # bf16 has 8 bits


@pytest.mark.parametrize("unscaled", [False, True])
def test_dynamic_loss_scaling_is_refused(unscaled):
    params = fresh_params()
    optimizer = make(params)
    before = [p.detach().clone() for p in params]
    for p, g in zip(params, random_grads(SHAPES, 2), strict=True):
        p.grad, p.grad_sample = torch.ones_like(p), g
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    if unscaled:
        scaler.unscale_(optimizer)
    with pytest.raises(ValueError, match="dynamic loss scaling is refused: the scale reacts to the data"):
        scaler.step(optimizer)
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    assert optimizer.noise.step == 0
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)   # a scaler that is off is no scaler
    assert optimizer.noise.step == 1


class LoRA(nn.Module):
    """A frozen Linear and a low-rank path beside it."""

    def __init__(self, base, rank):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / 4)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


def test_adapters_on_a_frozen_model():
    torch.manual_seed(0)
    model = nn.Sequential(LoRA(nn.Linear(8, 16), 2), nn.Tanh(), LoRA(nn.Linear(16, 3), 2))
    frozen = {name: p.detach().clone() for name, p in model.named_parameters() if not p.requires_grad}
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)   # all of them: the frozen ones are left alone
    schedule = ConstantRate(0.5, epochs=1)
    optimizer = RSDPOptimizer(inner, max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=4, schedule=schedule)
    adapters = [p for p in model.parameters() if p.requires_grad]
    assert optimizer.keep.size == sum(p.numel() for p in adapters) == 2 * (8 + 16 + 16 + 3)
    for _ in range(2):
        per_sample(model, nn.functional.cross_entropy, torch.randn(4, 8), torch.randint(3, (4,)))
        optimizer.step()
        for p, kept in zip(adapters, optimizer.keep.dense(), strict=True):
            assert not p.grad[~kept].any()
            assert p.grad[kept].all()
        optimizer.zero_grad()
    named = dict(model.named_parameters())
    assert all(torch.equal(named[name], before) for name, before in frozen.items())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("as_list", [False, True])
def test_unused_parameters_get_noise_like_all_others(backend, as_list):
    """As with gradients of 0, bit for bit."""
    results = []
    for explicit in (False, True):
        params = fresh_params()
        optimizer = make(params, schedule=ConstantRate(0.5, 1), unused_params="zero", backend=backend)
        used, _ = random_grads(SHAPES, 6)
        params[0].grad_sample = [used[:2], used[2:]] if as_list else used
        if explicit:
            params[1].grad_sample = [torch.zeros(2, 5), torch.zeros(4, 5)] if as_list else torch.zeros(6, 5)
        optimizer.step()
        results.append([p.grad for p in params])
        assert torch.equal(params[1].grad != 0, optimizer.keep.dense()[1])
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    with pytest.raises(ValueError, match="already used by an earlier step"):
        optimizer.step()   # none has gradients: not an unused branch


# ---- misuse


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (dict(max_grad_norm=0.0), "max_grad_norm: got 0.0"),
        (dict(noise_multiplier=-1.0), "noise_multiplier: got -1.0"),
        (dict(expected_batch_size=0), "expected_batch_size: got 0"),
        (dict(schedule=lambda epoch: 0.5), "schedule: got function; expected GradualCooling"),
        (dict(seed=-1), "seed: got -1"),
        (dict(noise="secure"), "noise: got str; expected a NoiseSource"),
        (dict(clipping="ghost"), "clipping: got 'ghost'"),
        (dict(loss_reduction="none"), "loss_reduction: got 'none'"),
        (dict(unused_params="skip"), "unused_params: got 'skip'; expected 'error' or 'zero'"),
    ],
)
def test_wrong_arguments_raise_at_construction(overrides, message):
    with pytest.raises(ValueError, match=message):
        make(fresh_params(), **overrides)


def test_wrong_optimizers_raise():
    params = fresh_params()
    numbers = dict(max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=1)
    for wrong in (params, torch.optim.LBFGS(params), make(params)):
        with pytest.raises(ValueError, match=r"optimizer: got .*; expected a plain torch optimizer"):
            RSDPOptimizer(wrong, **numbers)
    for p in params:
        p.requires_grad_(False)
    with pytest.raises(ValueError, match="is nothing trainable"):
        RSDPOptimizer(INNER["sgd"](params), **numbers)


def test_wrong_epochs_raise():
    optimizer = make(fresh_params(), schedule=GradualCooling(0.5, epochs=3))
    for wrong, message in (((3,), "epoch: got 3"), ((0, 1), "tick: got 1"), ((-1,), "epoch: got -1"), ((1.0,), "1.0")):
        with pytest.raises(ValueError, match=message):
            optimizer.set_epoch(*wrong)
    with contextlib.suppress(ValueError):
        optimizer.step(grad_samples=[torch.zeros(2, 5, 3)])   # refused: one tensor for two parameters
    optimizer.set_epoch(2)   # and nothing was left open
