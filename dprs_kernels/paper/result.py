"""Result: how a training run ended, and what a person is told."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from dprs_kernels.paper.config import TrainConfig
from dprs_kernels.paper.plain import PlainRatio
from dprs_kernels.paper.recipes import ALGORITHMS
from dprs_kernels.paper.run_folder import RunFolder


@dataclass(frozen=True)
class Result:
    """How a run ended, in public numbers."""

    config: TrainConfig
    folder: Path | None
    ended: str                   # "finished", "interrupted", "budget": no further step was affordable
    accuracy: float | None       # on the test set; None: interrupted in the first epoch
    epsilon: float | None        # spent, as the claim says; None: no claim
    unamplified: float | None    # a bound for any sampler, where the claim is nominal
    claim: str
    sigma: float
    sample_rate: float
    steps: int
    charged: int
    planned: int
    plain: PlainRatio | None

    def summary(self) -> str:
        config = self.config
        accuracy = "not measured yet" if self.accuracy is None else f"{self.accuracy:.2%}"
        lines = {
            "test accuracy": f"{accuracy} ({config.dataset}, {config.model})",
            "privacy": self._privacy(),
            "algorithm": f"{config.algorithm}, {ALGORITHMS[config.algorithm]}; {config.cooling} rate, at last "
                         f"{config.final_rate:.0%} dropped",
            "steps": f"{self.steps} of {self.planned}, {self.charged} charged",
        }   # fmt: skip
        if config.normalise == "channels":
            lines["features"] = "normalised by channel statistics, estimated privately: two releases, in epsilon"
        if self.claim != "none":
            lines["not covered"] = "choosing these settings, further runs, test images, the number of images, times"
        if self.plain is not None:
            lines["speed"] = self.plain.summary()
        if self.folder is not None:
            lines["run"] = str(self.folder)
            if RunFolder(self.folder, config).plot.exists():
                lines["plot"] = str(RunFolder(self.folder, config).plot)
        return "\n".join(f"{name:<14} {value}" for name, value in lines.items())

    def _privacy(self) -> str:
        config = self.config
        if self.claim == "none":
            why = "seeded noise" if config.insecure_seeded_noise else f"Algorithm {config.algorithm} is an ablation"
            return f"NO PRIVACY CLAIM: {why if config.sigma != 0 else 'no noise'}"
        if self.epsilon is None:
            return "no step taken yet"
        weak = ""
        if config.delta * config.batch >= self.sample_rate:   # N = B/q
            weak = "; a delta of 1/N or more promises next to nothing"
        how = f"{config.accountant}, q = {self.sample_rate:.4g}, sigma {self.sigma:.3f}, adjacency add/remove"
        if self.claim == "nominal":
            return (
                f"NOMINAL epsilon {self.epsilon:.3f} at delta {config.delta:g}: shuffled batches counted as Poisson "
                f"samples, no proof; without amplification {self.unamplified:.3f} ({how}){weak}"
            )
        return f"epsilon {self.epsilon:.3f} at delta {config.delta:g} ({how}, Poisson batches with secret bits){weak}"
