"""Is a training step right? Checked before it is timed, against one sample at a time in float64.

    truth = sum_i min(1, C/n_i) keep g_i / B        n_i = ||keep g_i||, C the median of them: half is clipped

Contenders without a mask are held against the sum without keep, with a C of its own.
"""

from __future__ import annotations

import copy
import math

import torch
from harness import flatten
from names import OURS
from racing import SIGMA
from torch import nn
from training_contenders import MASKED, ROWS, Settings, build, default_micro, mask_for
from training_models import Model

from dprs_kernels import KeepMask

TOLERANCE = 1e-5   # of the truth's largest value, beyond what plain fp32 autograd is off; 4e-6 seen (torch's fp32 norm)
SEAM = 3           # samples in the second micro-batch
MOST = 32          # samples in the first; one at a time in float64, 480 of DP-CNN/S took 6 s


class Truth:
    """Per-sample gradients of a batch that is cut into a whole micro-batch and a small one, in float64.

    fp32 and float64 may see different maxima in pooling, or signs in ReLU, where two values nearly tie. That is no
    fault of a contender, so it is allowed what fp32 autograd, one sample at a time, is off by.
    """

    def __init__(self, case: Model) -> None:
        self.case = case
        self.micro = min(default_micro(case.build()), MOST)
        self.x, self.y = case.data(self.micro + SEAM)
        self.grads = self._one_at_a_time(torch.float64)     # [n, D]
        self.honest = self._one_at_a_time(torch.float32)
        self._take(mask_for(OURS, case.build()))

    def under(self, keep: KeepMask) -> Truth:
        """The same samples under another mask."""
        other = copy.copy(self)
        other._take(keep)
        return other

    def _take(self, keep: KeepMask) -> None:
        self.keep = torch.cat([part.reshape(-1) for part in keep.dense()])   # [D] bool
        self.bounds = {
            masked: float(self._masked(self.grads, masked).norm(dim=1).median()) for masked in (False, True)
        }
        self.slack = {
            masked: float((self.sum(masked, self.honest) - self.sum(masked)).abs().max()) for masked in (False, True)
        }

    def _one_at_a_time(self, dtype: torch.dtype) -> torch.Tensor:
        """In float64, whatever it was computed in."""
        model = self.case.build().to(dtype)
        params, x = list(model.parameters()), self.x.to(dtype) if self.x.is_floating_point() else self.x
        grads = torch.empty(len(x), self.case.size, dtype=torch.float64)
        for row, sample, target in zip(grads, x.split(1), self.y.split(1), strict=True):
            loss = nn.functional.cross_entropy(model(sample), target)
            row.copy_(flatten(torch.autograd.grad(loss, params)))
        return grads

    def _masked(self, grads: torch.Tensor, masked: bool) -> torch.Tensor:
        return torch.where(self.keep, grads, 0.0) if masked else grads

    def sum(self, masked: bool, grads: torch.Tensor | None = None) -> torch.Tensor:
        """Clipped, over B: the number of samples in the whole batch. [D]"""
        rows = self._masked(self.grads if grads is None else grads, masked)
        return (self.bounds[masked] / rows.norm(dim=1)).clamp(max=1) @ rows / len(self.x)

    def wrong(self, name: str) -> str:
        """Why the contender is wrong, or ""; whatever it raises if it cannot run the model."""
        masked, batch = name in MASKED or name in ROWS, len(self.x)
        truth = self.sum(masked)
        step = build(name, self.case.build(), Settings(self.micro, batch, self.bounds[masked], 0.0))
        out = flatten(step(self.x, self.y))
        worst = float((out - truth).abs().max())
        allowed = self.slack[masked] + TOLERANCE * float(truth.abs().max())
        if not worst <= allowed:   # NaN is not <=
            return f"off by {worst:.3e}, allowed {allowed:.3e}"
        return self._wrong_noise(name, masked)

    def _wrong_noise(self, name: str, masked: bool) -> str:
        """Moments of the noise on one sample; zero where dropped. Six standard errors."""
        batch = len(self.x)
        step = build(name, self.case.build(), Settings(self.micro, batch, self.bounds[masked], SIGMA))
        out = flatten(step(self.x[:1], self.y[:1]))
        if masked and bool((out[~self.keep] != 0).any()):
            return "a dropped coordinate is not 0"
        first = self.sum(masked, self.grads[:1])
        noise = (out - first) * batch / (SIGMA * self.bounds[masked])
        noise = noise[self.keep] if masked else noise
        if not abs(float(noise.mean())) <= 6 / math.sqrt(noise.numel()):
            return f"noise has mean {float(noise.mean()):.2e} standard deviations"
        if not abs(float(noise.square().mean()) - 1) <= 6 * math.sqrt(2 / noise.numel()):
            return f"noise has variance {float(noise.square().mean()):.5f}, expected 1"
        return ""
