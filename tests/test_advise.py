"""dprs advise: its numbers against theory.py and the accountant, its words against the numbers, each error."""

import doctest
import re

import pytest

from dprs_kernels import __main__ as cli
from dprs_kernels.layout import Layout
from dprs_kernels.paper import advice as advice_module
from dprs_kernels.paper import budget, theory
from dprs_kernels.paper.advice import SAMPLES, SIGMAS, Advice, advise, measured
from dprs_kernels.paper.channel_statistics import cost
from dprs_kernels.paper.config import PAPER
from dprs_kernels.paper.networks import NETWORKS
from dprs_kernels.paper.table1 import ROWS
from dprs_kernels.privacy.accounting import composed_epsilon

pytest.importorskip("opacus")   # the accountant
GREY = ["--model", "dp-cnn-s", "--dataset-size", "60000", "--batch", "2048", "--epochs", "40", "--epsilon", "3"]


def quick(monkeypatch: pytest.MonkeyPatch, sigma: float = 2.0) -> None:
    """sigma without the search, which takes seconds; longer runs have more."""
    monkeypatch.setattr(budget, "sigma_for", lambda layout, steps, **_: round(sigma * (steps / 1000) ** 0.5, 3))


def made(monkeypatch: pytest.MonkeyPatch, sigma: float, **more: float) -> Advice:
    quick(monkeypatch, sigma)
    options = dict(size=10_000, dataset_size=100_000, batch=1000, epochs=10, epsilon=1.0, delta=1e-6)   # 1000 steps
    return advise(**{**options, **more})   # type: ignore[arg-type]


@pytest.mark.parametrize("name", SIGMAS)
def test_sigmas_of_the_papers_rows(name: str) -> None:
    """The least in thousandths: with the rounding's cost within epsilon, and with a thousandth less above it."""
    row = ROWS[name]
    start, size = row.settings["baseline"][0], SAMPLES[row.dataset]
    layout = Layout.of([(NETWORKS[row.model].size,)])

    channels = PAPER[row.dataset, row.model].get("normalise") == "channels"
    besides = cost(NETWORKS[row.model].input_shape[0]) if channels else []

    def spent(sigma: float) -> float:
        ratio = budget.sensitivity_ratio(layout, sigma=sigma, max_grad_norm=start.clip)
        run = (sigma / ratio, start.batch / size, round(size / start.batch) * start.epochs)
        return composed_epsilon([*besides, run], delta=1e-5)

    assert spent(SIGMAS[name]) <= row.epsilon < spent(SIGMAS[name] - 0.001)


def test_every_row_is_measured() -> None:
    found = {at.row: at for at in measured()}
    assert found.keys() == ROWS.keys()
    assert found["cifar10-dp-cnn-eps3"].ratio == pytest.approx(1.543**2 * 550_570 / 1000**2)
    assert found["cifar10-dp-cnn-eps3"].gain == pytest.approx(1.5)


def test_the_words_about_gains_hold_for_the_papers_rows() -> None:
    """What VERDICTS and advice.py say: gains below 0.09, up to 0.95, and above."""
    found = list(measured())
    gains = {
        "little": [at.gain for at in found if at.ratio < advice_module.LITTLE],
        "possible": [at.gain for at in found if advice_module.LITTLE <= at.ratio < advice_module.MUCH],
        "likely": [at.gain for at in found if at.ratio >= advice_module.MUCH],
    }
    from dprs_kernels.paper.advise_command import VERDICTS

    for verdict, values in gains.items():
        assert f"gained {min(values):+.1f} to {max(values):+.1f} points" in VERDICTS[verdict]
    assert sum(at.ratio < 1 for at in found) == 9   # of twelve, says advice.py


def test_fashion_mnist_at_epsilon_3(capsys: pytest.CaptureFixture[str]) -> None:
    """The real search. Theory gives no reason for a gain there, and the report says so."""
    assert cli.main(["advise", *GREY]) == 0
    printed = capsys.readouterr().out
    words = " ".join(printed.split())
    noise = theory.delta_sigma(max_grad_norm=1.0, noise_multiplier=1.921, size=26_010, batch_size=2048)
    assert "sigma 1.921 for epsilon 3 at delta 1e-05" in words
    assert f"Delta_sigma {noise:.4g} with G = 1 [C^2 sigma^2 d G / (2 B^2), Lemma lem:dpsgd]" in words
    assert f"noise ratio {2 * noise:.4g}, below 1: every rate but 0 raises the bound" in words
    assert "largest r* 0.000 [1 - Delta_C / Delta_sigma" in words
    assert "does RS help a little at best" in words
    assert "theory gives no reason for a gain" in words
    assert "C / (1 - mu) = 1: the same noise with (C, mu) = (1, 0), (0.5, 0.5), (0.1, 0.9)" in words
    assert "no less than 1/N" not in words
    grid = re.findall(r"^ +(\d+) +(\d\.\d{3}) ", printed, re.M)
    assert [int(epochs) for epochs, _ in grid] == [40, 48, 60]
    assert grid[0][1] == "1.921"
    assert re.search(r"Table 1 .*\n +fmnist-dp-cnn-s-eps3 +ratio 0.0229 +gain \+0.8\n", printed)
    assert max(map(len, printed.splitlines())) <= 110


def test_numbers_are_those_of_theory(monkeypatch: pytest.MonkeyPatch) -> None:
    advice = made(monkeypatch, 15.0, clip=0.2, momentum=0.75, smoothness=3.0)
    assert (advice.sample_rate, advice.steps) == (0.01, 1000)
    assert advice.noise_scale == theory.noise_scale(max_grad_norm=0.2, momentum=0.75) == pytest.approx(0.8)
    assert [plan.epochs for plan in advice.plans] == [10, 12, 15]
    for plan in advice.plans:
        assert plan.sigma == round(15.0 * (plan.epochs / 10) ** 0.5, 3)
        common = dict(noise_multiplier=plan.sigma, size=10_000, batch_size=1000)
        assert plan.ratio == theory.noise_over_clipping(**common)   # type: ignore[arg-type]
        assert plan.largest_rate == theory.largest_best_rate(**common)   # type: ignore[arg-type]
        expected = theory.delta_sigma(max_grad_norm=advice.noise_scale, smoothness=3.0, **common)   # type: ignore[arg-type]
        assert plan.delta_sigma == expected
    at_clip = theory.delta_sigma(
        max_grad_norm=0.2, noise_multiplier=15.0, size=10_000, batch_size=1000, smoothness=3.0
    )   # fmt: skip
    assert advice.unscaled_delta_sigma == pytest.approx(at_clip)
    for clip, momentum in advice.pairs:
        assert theory.noise_scale(max_grad_norm=clip, momentum=momentum) == pytest.approx(0.8)


@pytest.mark.parametrize(
    ("sigma", "verdict", "first"), [(2.0, "little", 0.5), (5.0, "possible", 0.7), (10.0, "likely", 0.9)]
)
def test_verdicts(sigma: float, verdict: str, first: float, monkeypatch: pytest.MonkeyPatch) -> None:
    advice = made(monkeypatch, sigma)   # ratios 0.04, 0.25, 1
    assert (advice.verdict, advice.rates[0]) == (verdict, first)
    distances = [abs(at.ratio / advice.plans[0].ratio - 1) for at in advice.nearest]
    assert len(distances) == 3
    assert min(distances) < 0.5


def test_any_model_with_momentum_and_a_large_delta(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch, 10.0)
    words = ["advise", "--size", "40000", "--dataset-size", "100000", "--batch", "1000", "--epochs", "10",
             "--epsilon", "1", "--delta", "1e-4", "--clip", "0.1", "--momentum", "0.9"]   # fmt: skip
    assert cli.main(words) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "run model, d = 40,000; N = 100,000, q = B/N = 0.01, 1000 steps of B = 1000 in 10 epochs" in printed
    assert "Delta_sigma 2 with G = 1" in printed   # 100 * 40,000 / (2 * 10^6)
    assert "with C / (1 - mu) for C, since the Lemma has no momentum" in printed
    assert "with C = 0.1 itself 0.02" in printed
    assert "noise ratio 4, at least 1: a rate can lower the bound" in printed
    assert "largest r* 0.750" in printed
    assert "does RS help likely" in printed
    assert "this delta is no less than 1/N = 1e-05" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "hal"], "model: got 'hal'; expected one of dp-cnn, .*; for any other give --size D"),
        (["--epochs", "0"], "epochs: got 0; expected an integer of at least 1"),
        (["--dataset-size", "0"], "dataset_size: got 0; expected an integer of at least 1"),
        (["--batch", "60001"], "batch: got 60001; expected at most 60000, the size of the data"),
        (["--clip", "0"], "max_grad_norm: got 0.0; expected a finite number above 0"),
        (["--momentum", "1"], r"momentum: got 1.0; expected a number in \[0, 1\)"),
        (["--epsilon", "-1"], "target_epsilon: got -1.0"),
        (["--delta", "2"], "target_delta: got 2.0"),
        (["--smoothness", "0"], "smoothness: got 0.0; expected a finite number above 0"),
    ],
)
def test_advise_refuses(words: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["advise", *GREY, *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.search(f"dprs_kernels: {message}", err)


def test_a_model_or_a_size(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (GREY[2:], [*GREY, "--size", "3"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(["advise", *words])
        assert stop.value.code == 2
    assert "--size: not allowed with argument --model" in capsys.readouterr().err


def test_examples_in_docstrings() -> None:
    result = doctest.testmod(advice_module)
    assert result.attempted > 1
    assert result.failed == 0
