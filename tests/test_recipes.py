"""Algorithms 1-4 against loops written from the paper's pseudo-code, in float64, with the same batches, masks and
normals; and what a recipe refuses."""

import math
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional

from dprs_kernels import ConstantRate, KeepMask, per_sample, reference
from dprs_kernels.layout import Layout
from dprs_kernels.paper.ranked import RankedOptimizer
from dprs_kernels.paper.recipes import RANKING_SEED, Recipe
from dprs_kernels.privacy.ledger import Ledger
from dprs_kernels.privacy.sampling import PoissonBatchSampler, ShuffledPartitionNominal
from tests.oracle import key_of

SIZE, BATCH, EPOCHS, SEED = 24, 8, 3, 5
LOSS = partial(functional.cross_entropy, reduction="sum")
BASE = dict(epochs=EPOCHS, final_rate=0.6, lr=0.5, max_grad_norm=0.7, noise_multiplier=0.8, expected_batch_size=BATCH)
# Of weights that move by 0.1 and more: 9 steps of lr/B times the grid (7e-7), C' (1e-6 of a gradient), and what the
# network makes of that. A wrong mask, sum or noise is off by 1e-2.
TOLERANCE = 2e-5


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)   # quicker beside other work, on models this small
    yield
    torch.set_num_threads(before)


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(SIZE, 5, generator=generator, dtype=torch.float64) * 2,
        torch.randint(0, 3, (SIZE,), generator=generator),
    )


def flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([param.detach().reshape(-1) for param in model.parameters()])


def gradient(w: torch.Tensor, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Of one sample's loss, D values, in plain arithmetic."""
    w = w.clone().requires_grad_()
    hidden = torch.tanh(w[:20].view(4, 5) @ x + w[20:24])
    scores = w[24:36].view(3, 4) @ hidden + w[36:39]
    (torch.logsumexp(scores, 0) - scores[y]).backward()
    return w.grad


def normals(seed: int, step: int, layout: Layout) -> torch.Tensor:
    """z of a step, D values."""
    z = torch.from_numpy(reference.normals(reference.words(key_of(seed), step, 0, layout.padded // 8)))
    return torch.cat([part.reshape(-1) for part in layout.split(z)])


def naive(recipe: Recipe, epochs: list[list[list[int]]]) -> torch.Tensor:
    """The pseudo-code, line by line. epochs: the batches of each."""
    (x, y), model = data(), network()
    layout, w = Layout.of(model.parameters()), flat(model)
    d, c, sigma, big_b = len(w), recipe.max_grad_norm, recipe.noise_multiplier, recipe.expected_batch_size
    v, second, step, ranking_step = torch.zeros(d).double(), torch.zeros(d).double(), 0, 0
    z_before = z = None
    for e, batches in enumerate(epochs):
        rate = recipe.final_rate * (1 if recipe.cooling == "constant" else e / (EPOCHS - 1))
        period = None
        for t, batch in enumerate(batches):
            if t * recipe.refresh // len(batches) != period:
                period = t * recipe.refresh // len(batches)
                if recipe.algorithm == 4:
                    z_before, z = z, torch.zeros(d).double()
                    m = torch.ones(d).double()
                    if z_before is not None:
                        m[torch.argsort(z_before.abs())[: math.floor(d * rate)]] = 0
                else:
                    drawn = KeepMask.draw(
                        model.named_parameters(), drop_rate=rate, seed=recipe.seed, draw=e * recipe.refresh + period,
                        structure=recipe.structure,
                    )   # fmt: skip
                    m = torch.cat([part.reshape(-1) for part in drawn.dense()]).double()
                    assert recipe.structure == "row" or int(m.sum()) == d - math.floor(d * rate)
            total = torch.zeros(d).double()
            for i in batch:
                g = m * gradient(w, x[i], y[i])
                total += g if recipe.algorithm == 2 else g * min(1, c / float(g.norm()))
            if recipe.algorithm == 2:
                total += m * sigma * normals(SEED, step, layout)
            elif recipe.algorithm != 3:
                total += m * sigma * c * normals(SEED, step, layout)
            g = total / big_b
            step += 1
            if recipe.algorithm == 4:
                z += g
                if m.min() == 0:
                    z += (1 - m) * sigma * c * normals(SEED + RANKING_SEED, ranking_step, layout) / big_b
                    ranking_step += 1
            if recipe.optimizer == "adam":
                v, second = 0.9 * v + 0.1 * g, 0.999 * second + 0.001 * g**2
                w = w - recipe.lr * (v / (1 - 0.9**step)) / ((second / (1 - 0.999**step)).sqrt() + 1e-8)
            else:
                v = recipe.momentum * v + g
                w = w - recipe.lr * v
    return w


def ours(recipe: Recipe) -> tuple[torch.Tensor, list[list[list[int]]], list[float]]:
    """The library's loop: weights, the batches it drew, the drop rate of each step."""
    (x, y), model = data(), network()
    source, schedule = per_sample(model), recipe.schedule()
    optimizer = recipe.optimizer_for(model.named_parameters(), seed_for_tests=SEED)
    sampler = recipe.sampler_for(SIZE, seed_for_tests=SEED)
    drawn, rates = [], []
    for epoch in range(EPOCHS):
        drawn.append(list(sampler))
        for t, batch in enumerate(drawn[-1]):
            optimizer.set_epoch(epoch, schedule.tick(t, sampler.steps))
            optimizer.backward(source, LOSS, x[batch], y[batch])
            optimizer.step()
            rates.append(optimizer.keep.drop_rate)
    return flat(model), drawn, rates


VARIANTS = {
    "plain": {},
    "momentum": dict(momentum=0.9, lr=0.2),
    "adam": dict(optimizer="adam", lr=0.05),
    "refresh": dict(refresh=3),
    "constant": dict(cooling="constant"),
    "partition": dict(sampler="shuffled-nominal"),
}


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("algorithm", [1, 2, 3, 4])
def test_algorithm_is_the_papers_loop(algorithm: int, variant: str) -> None:
    check_loop(Recipe(algorithm=algorithm, seed=2, **{**BASE, **VARIANTS[variant]}))


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("algorithm", [1, 2, 3])
def test_with_row_masks_it_is_the_same_loop(algorithm: int, variant: str) -> None:
    check_loop(Recipe(algorithm=algorithm, seed=2, structure="row", **{**BASE, **VARIANTS[variant]}))


def check_loop(recipe: Recipe) -> None:
    weights, batches, _ = ours(recipe)
    assert sum(map(len, batches)) == EPOCHS * SIZE // BATCH
    truth = naive(recipe, batches)
    assert (truth - flat(network())).abs().max() > 0.1   # it trained
    torch.testing.assert_close(weights, truth, rtol=0, atol=TOLERANCE)


def test_the_tolerance_tells_algorithms_apart() -> None:
    """Another algorithm, refresh or rate is seen: the comparison above can fail."""
    recipe = Recipe(algorithm=1, seed=2, **BASE)
    weights, batches, _ = ours(recipe)
    others = (dict(algorithm=2), dict(algorithm=3), dict(algorithm=4), dict(refresh=3), dict(final_rate=0.5),
              dict(structure="row"))   # fmt: skip
    for other in others:
        changed = naive(Recipe(**{**BASE, "algorithm": 1, "seed": 2, **other}), batches)
        assert (weights - changed).abs().max() > 100 * TOLERANCE


def test_ranking_keeps_the_largest_released_values() -> None:
    recipe = Recipe(algorithm=4, seed=2, **{**BASE, "cooling": "constant"})
    model = network()
    optimizer = recipe.optimizer_for(model.named_parameters(), seed_for_tests=SEED)
    released = []
    for _ in range(2):
        assert optimizer.keep.count == optimizer.keep.size   # the first epoch keeps all, at any rate
        optimizer.step(grad_samples=[torch.randn(4, *p.shape, dtype=p.dtype) for p in model.parameters()])
        released.append(torch.cat([p.grad.reshape(-1) for p in model.parameters()]))
    optimizer.set_epoch(1)
    magnitude, keep = sum(released).abs(), torch.cat([part.reshape(-1) for part in optimizer.keep.dense()])
    assert int((~keep).sum()) == math.floor(0.6 * 39)
    assert magnitude[~keep].max() < magnitude[keep].min()


def test_dropped_coordinates_come_back() -> None:
    """With noise in the statistic of dropped coordinates; without it their z is 0, and they stay dropped for ever."""
    recipe = Recipe(algorithm=4, seed=2, **{**BASE, "cooling": "constant"})
    model = network()
    optimizer = recipe.optimizer_for(model.named_parameters(), seed_for_tests=SEED)
    kept = []
    for epoch in range(EPOCHS):
        optimizer.set_epoch(epoch)
        optimizer.step(grad_samples=[torch.randn(4, *p.shape, dtype=p.dtype) for p in model.parameters()])
        kept.append(torch.cat([part.reshape(-1) for part in optimizer.keep.dense()]))
    assert bool((kept[2] & ~kept[1]).any())


def test_a_release_that_was_not_charged_is_not_ranked_by() -> None:
    """A hook that fails after ours (a ledger on a full disk) gives the release up: z is as before it."""
    param = torch.nn.Parameter(torch.zeros(8))
    optimizer = RankedOptimizer(
        torch.optim.SGD([param], lr=1.0), schedule=ConstantRate(0.5, epochs=2), max_grad_norm=1.0,
        noise_multiplier=1.0, expected_batch_size=4,
    )   # fmt: skip
    optimizer.step(grad_samples=[torch.randn(4, 8)])
    before = [part.clone() for part in optimizer._running]

    def full(optimizer: object, record: object) -> None:
        raise OSError("No space left on device")

    optimizer.attach_step_hook(full)
    with pytest.raises(OSError, match="No space left"):
        optimizer.step(grad_samples=[torch.randn(4, 8)])
    assert all(torch.equal(a, b) for a, b in zip(optimizer._running, before, strict=True))


def test_ranked_state_resumes_bit_for_bit() -> None:
    recipe = Recipe(algorithm=4, seed=2, **{**BASE, "cooling": "constant", "refresh": 2, "momentum": 0.5})
    generator = torch.Generator().manual_seed(4)
    grads = [
        [torch.randn(4, *p.shape, generator=generator, dtype=p.dtype) for p in network().parameters()] for _ in range(6)
    ]

    def run(model: nn.Module, optimizer: RankedOptimizer, steps: range) -> None:
        for i in steps:
            optimizer.set_epoch(i // 2, i % 2)
            optimizer.step(grad_samples=[grad.clone() for grad in grads[i]])

    whole = network()
    run(whole, recipe.optimizer_for(whole.parameters(), seed_for_tests=SEED), range(6))
    first = network()
    before = recipe.optimizer_for(first.parameters(), seed_for_tests=SEED)
    run(first, before, range(3))
    second = network()
    after = recipe.optimizer_for(second.parameters(), seed_for_tests=SEED)
    second.load_state_dict(first.state_dict())
    after.load_state_dict(before.state_dict())
    run(second, after, range(3, 6))
    assert torch.equal(flat(second), flat(whole))


def test_ranked_refuses_row_masks() -> None:
    with pytest.raises(ValueError, match="structure: got 'row'; ranked sparsification ranks each coordinate"):
        RankedOptimizer(torch.optim.SGD(network().parameters(), lr=0.1), structure="row", max_grad_norm=1.0,
                        noise_multiplier=1.0, expected_batch_size=4, schedule=ConstantRate(0.5, epochs=2))   # fmt: skip


def test_ranked_refuses() -> None:
    model, settings = network(), dict(max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=4)
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match=r"schedule: got None; ranked sparsification needs the rates"):
        RankedOptimizer(inner, **settings)
    schedule = Recipe(algorithm=4, **BASE).schedule()
    optimizer = RankedOptimizer(inner, schedule=schedule, **settings)
    with pytest.raises(ValueError, match=r"ranking_noise: has the key of noise"):
        RankedOptimizer(inner, schedule=schedule, noise=optimizer.noise, ranking_noise=optimizer.noise, **settings)
    random = Recipe(algorithm=1, **BASE).optimizer_for(model.parameters())
    with pytest.raises(ValueError, match=r"state: holds no ranking"):
        optimizer.load_state_dict(random.state_dict())
    optimizer.step(grad_samples=[torch.zeros(1, *p.shape, dtype=p.dtype) for p in model.parameters()])
    optimizer.set_epoch(1)
    model[0].weight.requires_grad_(False)
    with pytest.raises(ValueError, match=r"params: other parameters are trainable than those that were ranked"):
        _ = optimizer.keep


@pytest.mark.parametrize("algorithm", [1, 2, 3, 4])
def test_only_1_and_4_have_an_epsilon(algorithm: int) -> None:
    pytest.importorskip("opacus")
    recipe, model, ledger = Recipe(algorithm=algorithm, **BASE), network(), Ledger()
    optimizer = recipe.optimizer_for(model.parameters())
    sampler = recipe.sampler_for(SIZE)
    ledger.attach(optimizer, sampler=sampler)
    next(iter(sampler))   # one draw, one step
    optimizer.step(grad_samples=[torch.zeros(1, *p.shape, dtype=p.dtype) for p in model.parameters()])
    assert recipe.private == (algorithm in (1, 4))
    if recipe.private:
        assert 0 < ledger.epsilon(1e-5) < math.inf
    else:
        with pytest.raises(ValueError, match="without noise" if algorithm == 3 else "without a bound"):
            ledger.epsilon(1e-5)


def test_samplers() -> None:
    poisson = Recipe(algorithm=1, **{**BASE, "expected_batch_size": 2048}).sampler_for(60000)
    assert isinstance(poisson, PoissonBatchSampler)
    assert (poisson.steps, poisson.sample_rate, poisson.private) == (29, 2048 / 60000, True)   # 29.3 batches
    parts = Recipe(algorithm=1, sampler="shuffled-nominal", **BASE).sampler_for(SIZE, seed_for_tests=1)
    assert isinstance(parts, ShuffledPartitionNominal)
    assert not parts.private
    assert sorted(i for batch in parts for i in batch) == list(range(SIZE))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(algorithm=5), r"algorithm: got 5; expected one of 1 \(DP-SGD"),
        (dict(cooling="sudden"), "cooling: got 'sudden'; expected 'gradual' or 'constant'"),
        (dict(optimizer="lbfgs"), "optimizer: got 'lbfgs'; expected 'sgd' or 'adam'"),
        (dict(sampler="uniform"), "sampler: got 'uniform'; expected 'poisson' or 'shuffled-nominal'"),
        (dict(structure="tile"), "structure: got 'tile'; expected 'coordinate' or 'row' or 'mixed'"),
        (dict(structure="row", algorithm=4), "structure: got 'row' with algorithm 4, which ranks each coordinate"),
        (dict(lr=0.0), "lr: got 0.0; expected a positive number"),
        (dict(lr=math.nan), "lr: got nan; expected a positive number"),
        (dict(momentum=1.0), r"momentum: got 1.0; expected a number in \[0, 1\)"),
        (dict(momentum=0.9, optimizer="adam"), "momentum: got 0.9 with Adam, which has its own"),
        (dict(expected_batch_size=0), "expected_batch_size: got 0; expected an integer of at least 1"),
        (dict(expected_batch_size=2.5), "expected_batch_size: got 2.5; expected an integer"),
        (dict(final_rate=1.0), r"final_rate: got 1.0; expected a number in \[0, 1\)"),
        (dict(epochs=0), "epochs: got 0; expected an integer of at least 1"),
    ],
)
def test_recipe_refuses(change: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Recipe(**{"algorithm": 1, **BASE, **change})


def test_batches_larger_than_the_data_are_refused() -> None:
    with pytest.raises(ValueError, match="expected_batch_size: got 8; expected at most 7, the size of the data"):
        Recipe(algorithm=1, **BASE).sampler_for(7)
