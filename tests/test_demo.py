"""The demo: a short run keeps its budget, takes every step, learns, and keeps public and secret apart."""

import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("opacus")
pytest.importorskip("sklearn")
pytest.importorskip("tqdm")

from dprs_kernels import demo
from dprs_kernels.layout import Layout
from dprs_kernels.plan import make_plan
from dprs_kernels.privacy import accountants
from dprs_kernels.privacy.accounting import epsilon

SHORT: dict[str, Any] = {"epochs": 2, "progress": False}


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Batches this small gain nothing from threads, and on a busy machine their barriers take ten times as long."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def short(one_thread: None) -> demo.DemoResult:
    return demo.run(**SHORT)


def test_short_run_reports_what_it_spent(short: demo.DemoResult) -> None:
    assert short.steps == 2 * demo.STEPS_PER_EPOCH
    assert 2.9 < short.epsilon <= 3.0
    assert 0.0 <= short.accuracy <= 1.0
    without_charge = epsilon(
        noise_multiplier=short.noise_multiplier, sample_rate=demo.SAMPLE_RATE, steps=short.steps, delta=short.delta
    )
    assert without_charge < short.epsilon   # the grid's sensitivity is charged


def test_two_epochs_learn_something(short: demo.DemoResult) -> None:
    """Guessing gets 10 %; twenty runs of 2 epochs gave 67 % or more, mean 77 %, standard deviation 4 %."""
    assert short.accuracy > 0.3


def test_full_run_is_accurate() -> None:
    """Twenty seeds gave 90.3 % to 97.5 %, mean 94.1 %, standard deviation 1.6 %."""
    result = demo.run(progress=False)
    assert result.accuracy > 0.85
    assert 2.9 < result.epsilon <= 3.0
    assert result.steps == 30 * demo.STEPS_PER_EPOCH


def test_summary_says_everything(short: demo.DemoResult) -> None:
    text = short.summary()
    for part in (
        f"{short.accuracy:.1%}", f"epsilon {short.epsilon:.3f} at delta 0.0001", "add/remove", "rdp", "Poisson",
        f"sigma {short.noise_multiplier:.3f}", "10 steps", f"backend {short.backend}", short.key_id, "not covered",
    ):   # fmt: skip
        assert part in text


def test_empty_batches_take_their_steps(monkeypatch: pytest.MonkeyPatch, short: demo.DemoResult) -> None:
    """Noise is added and charged as ever, and it moves the weights: who was sampled must not show."""
    models = []
    make = demo.make_model
    monkeypatch.setattr(demo, "make_model", lambda seed: models.append(make(seed)) or models[-1])
    monkeypatch.setattr(demo, "poisson_indices", lambda size, sample_rate: torch.empty(0, dtype=torch.int64))
    result = demo.run(**SHORT)
    assert (result.steps, result.epsilon, result.noise_multiplier) == (10, short.epsilon, short.noise_multiplier)
    for before, after in zip(make(0).parameters(), models[0].parameters(), strict=True):
        assert bool(after.isfinite().all())
        assert bool((before != after).all())   # drop rates are 0 and 0.9: the first epoch moves every weight


def test_sampler_gets_training_set_and_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def spy(size: int, sample_rate: float) -> torch.Tensor:
        calls.append((size, sample_rate))
        return torch.arange(3)

    monkeypatch.setattr(demo, "poisson_indices", spy)
    demo.run(**SHORT)
    assert calls == [(1797 - demo.TEST_IMAGES, demo.SAMPLE_RATE)] * 10


def test_gradients_per_sample_match_autograd_and_allow_no_samples() -> None:
    model = demo.make_model(0)
    images, labels = torch.rand(3, 64), torch.tensor([1, 5, 9])
    each = demo.per_sample_gradients(model)
    got = each(images, labels)
    for i in range(3):
        model.zero_grad()
        torch.nn.functional.cross_entropy(model(images[i]), labels[i]).backward()
        for name, param in model.named_parameters():
            assert param.grad is not None
            torch.testing.assert_close(got[name][i], param.grad)
    none = each(images[:0], labels[:0])
    assert {name: tuple(g.shape) for name, g in none.items()} == {
        name: (0, *param.shape) for name, param in model.named_parameters()
    }


def test_split_is_fixed_disjoint_and_public() -> None:
    (train, _), (test, labels) = demo.load_digits(0)
    assert (len(train), len(test), len(labels)) == (1797 - 360, 360, 360)
    assert train.shape[1] == 64
    assert 0.0 <= float(train.min()) < float(train.max()) <= 1.0
    assert torch.equal(demo.load_digits(0)[1][0], test)
    assert not torch.equal(demo.load_digits(1)[1][0], test)
    rows = {tuple(image) for image in torch.cat([train, test]).tolist()}
    assert len(rows) == 1797   # no image twice in the data, so none in both halves


@pytest.mark.parametrize(("target", "steps"), [(3.0, 10), (1.0, 40)])
def test_calibration_charges_the_plan_it_leads_to(target: float, steps: int) -> None:
    params = list(demo.make_model(0).named_parameters())
    sigma, ratio = demo.sigma_and_ratio(params, target, steps)
    layout = Layout.of(params)
    plan = make_plan(
        layout, max_grad_norm=demo.MAX_GRAD_NORM, noise_multiplier=sigma, expected_batch_size=demo.EXPECTED_BATCH_SIZE
    )
    true_ratio = plan.sensitivity(layout.size) / demo.MAX_GRAD_NORM
    assert 1.0 < true_ratio <= ratio < 1.01
    spent = epsilon(
        noise_multiplier=sigma, sample_rate=demo.SAMPLE_RATE, steps=steps, delta=demo.DELTA,
        sensitivity_ratio=true_ratio,
    )   # fmt: skip
    assert spent <= target


def test_seed_leaves_the_global_generator_alone_and_keys_are_fresh(short: demo.DemoResult) -> None:
    torch.manual_seed(5)
    before = torch.get_rng_state()
    again = demo.run(**SHORT)
    assert torch.equal(torch.get_rng_state(), before)
    assert again.key_id != short.key_id
    assert all(torch.equal(a, b) for a, b in zip(demo.make_model(3).parameters(), demo.make_model(3).parameters(),
                                                 strict=True))   # fmt: skip


def test_reference_backend() -> None:
    result = demo.run(**SHORT, backend="reference")
    assert (result.backend, result.steps) == ("reference", 10)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epochs": 0}, r"^epochs: got 0; expected"),
        ({"epsilon": -1.0}, r"^target_epsilon: got -1.0; expected"),
        ({"final_rate": 1.0}, r"^final_rate: got 1.0; expected"),
        ({"seed": -1}, r"^seed: got -1; expected an integer"),
        ({"backend": "gpu"}, r"^backend: got 'gpu'; expected one of"),
    ],
)
def test_refuses(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        demo.run(**{**SHORT, **change})


@pytest.mark.parametrize(
    ("module", "name"), [("sklearn.datasets", "scikit-learn"), ("tqdm", "tqdm"), ("opacus.accountants", "opacus")]
)
def test_missing_extra_is_named(module: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    if name == "opacus":   # answers from before would do without it
        monkeypatch.setattr(accountants, "_rdp_curve", accountants._rdp_curve.__wrapped__)
    with pytest.raises(ImportError, match=rf'{name} .*pip install "dprs_kernels\[train\]"'):
        demo.run(**SHORT)
