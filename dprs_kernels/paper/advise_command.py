"""`dprs advise`: what theory and the paper's own rows say about a model, a batch and a budget, before any training.

    advise --model dp-cnn-s --dataset-size 60000 --batch 2048 --epochs 40 --epsilon 3

Equations are cited as in theory.py: by their number and label in the paper's source.
"""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING, Any

from dprs_kernels.paper.config import DELTA, MODELS, PAPER

if TYPE_CHECKING:
    from dprs_kernels.paper.advice import Advice

WIDTH = 110   # of the printed lines
VERDICTS = {
    "likely": "likely: the noise term is as large as what sparsification enlarges; the paper's rows of this kind "
              "gained +1.1 to +3.1 points",
    "possible": "possible: the bound has nothing to say for it, its best rate is 0; and yet the paper's rows of this "
                "kind gained +0.8 to +1.5 points",
    "little": "a little at best: the noise term is small, the bound's best rate is 0, theory gives no reason for a "
              "gain; the paper's rows of this kind gained +0.3 to +0.9 points, some within a few standard errors",
}   # fmt: skip


def add_parser(commands: Any) -> None:
    """The sub-command, for dprs_kernels.__main__."""
    parser = commands.add_parser(
        "advise", help="whether random sparsification is likely to help, and a small grid to try",
        description="Sigma, the noise term, the largest rate that the paper's bound allows, and a small grid to try.",
    )   # fmt: skip
    add = parser.add_argument
    network = parser.add_mutually_exclusive_group(required=True)
    network.add_argument("--model", metavar="NAME", help=", ".join(MODELS))
    network.add_argument("--size", type=int, metavar="D", help="trainable parameters, of any other model")
    add("--dataset-size", type=int, required=True, metavar="N", help="training samples")
    add("--batch", type=int, required=True, metavar="B", help="expected batch size")
    add("--epochs", type=int, required=True, metavar="E")
    add("--epsilon", type=float, required=True, metavar="EPS", help="the budget")
    add("--delta", type=float, default=DELTA, metavar="D", help="default: 1e-5")
    add("--clip", type=float, default=1.0, metavar="C", help="max_grad_norm (default: 1)")
    add("--momentum", type=float, default=0.0, metavar="M", help="of SGD (default: 0)")
    add("--smoothness", type=float, default=1.0, metavar="G", help="of the loss; not known, so a unit (default: 1)")
    add("--accountant", choices=("rdp", "prv", "pld"), default="rdp", help="default: rdp, as the published numbers")
    parser.set_defaults(command=run)


def run(*, model: str | None, size: int | None, **options: Any) -> None:
    from dprs_kernels.paper.advice import advise
    from dprs_kernels.paper.networks import NETWORKS

    if model is not None:
        if model not in NETWORKS:
            listed = ", ".join(NETWORKS)
            raise ValueError(f"model: got {model!r}; expected one of {listed}; for any other give --size D")
        size = NETWORKS[model].size
    assert size is not None   # argparse asks for one of them
    besides = []
    if any(name == model and paper.get("normalise") == "channels" for (_, name), paper in PAPER.items()):
        from dprs_kernels.paper.channel_statistics import cost

        assert model is not None
        besides = cost(NETWORKS[model].input_shape[0])
    print(report(advise(size=size, besides=besides, **options), model=model or "model", **options))
    if besides:
        print("sigma pays for channel statistics, too; with --normalise group it would be smaller.")


def report(
    advice: Advice, *, model: str, dataset_size: int, batch: int, epochs: int, epsilon: float, delta: float,
    accountant: str, smoothness: float, **_: object,
) -> str:   # fmt: skip
    """A line or paragraph for each figure, its source in brackets; then the nearest rows, and the grid."""
    plan = advice.plans[0]
    small = plan.ratio < 1
    meaning = "below 1: every rate but 0 raises the bound" if small else "at least 1: a rate can lower the bound"
    pairs = ", ".join(f"({c:.3g}, {mu:g})" for c, mu in advice.pairs)
    figures = {
        "run": f"{model}, d = {advice.size:,}; N = {dataset_size:,}, q = B/N = {advice.sample_rate:.4g}, "
               f"{advice.steps} steps of B = {batch} in {epochs} epochs",
        "sigma": f"{plan.sigma:.3f} for epsilon {epsilon:g} at delta {delta:g} [{accountant} accountant, Poisson "
                 "batches, add/remove, rounding included]",
        "Delta_sigma": f"{plan.delta_sigma:.4g} with G = {smoothness:g} [C^2 sigma^2 d G / (2 B^2), Lemma lem:dpsgd]",
        "noise ratio": f"{plan.ratio:.4g}, {meaning} [sigma^2 d / B^2: Lemma lem:dpsgd over equation 14 (eq:dprs); the "
                       "quotient is ours]",
        "largest r*": f"{plan.largest_rate:.3f} [1 - Delta_C / Delta_sigma with nothing left to gain, b = 0, kappa = "
                      "sqrt(1 - r), Appendix app:gradual_cooling]",
        "does RS help": f"{VERDICTS[advice.verdict]} [tab:acc]",
        "not known": "G, the loss left to gain and the bias b, so Delta_C and with it r* itself; the paper found its "
                     "rates, 0.5 to 0.9, by search [Appendix app:gradual_cooling]",
        "scaling rule": f"C / (1 - mu) = {advice.noise_scale:.4g}: the same noise with (C, mu) = {pairs} [Appendix "
                        "app:scaling_rule]",
    }   # fmt: skip
    if advice.momentum:
        figures["Delta_sigma"] += (
            f"; that is with C / (1 - mu) for C, since the Lemma has no momentum [Appendix app:scaling_rule]; with C = "
            f"{advice.clip:g} itself {advice.unscaled_delta_sigma:.4g}"
        )
    if delta * dataset_size >= 1:
        figures["sigma"] += f"; this delta is no less than 1/N = {1 / dataset_size:.2g}: it promises next to nothing"
    indent = " " * 15
    lines = [
        textwrap.fill(f"{name:<14} {text}", WIDTH, subsequent_indent=indent, break_on_hyphens=False)
        for name, text in figures.items()
    ]   # fmt: skip
    lines += ["", "nearest rows of the paper's Table 1 (tab:acc), by noise ratio"]
    lines += [f"  {found.row:<22} ratio {found.ratio:<8.3g} gain {found.gain:+.1f}" for found in advice.nearest]
    rates = ", ".join(f"{rate:g}" for rate in advice.rates)
    lines += ["", f"a grid to try: each length with final rate 0 (the baseline) and {rates}, the first of them first"]
    lines += ["  epochs   sigma   Delta_sigma   largest r*"]
    lines += [f"  {at.epochs:>6}  {at.sigma:>6.3f}  {at.delta_sigma:>12.4g}  {at.largest_rate:>11.3f}"
              for at in advice.plans]   # fmt: skip
    lines += ["Several runs cost more privacy than the epsilon of one."]
    return "\n".join(lines)
