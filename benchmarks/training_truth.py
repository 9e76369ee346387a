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
SPARE = 8          # more than that nearly tie is an error; 1 of 19 of DP-CNN's did with AVX-512, none with AVX2
MOST = 32          # samples in the first; one at a time in float64, 480 of DP-CNN/S took 6 s


class Truth:
    """Per-sample gradients of a batch that is cut into a whole micro-batch and a small one, in float64.

    fp32 and float64 may see different maxima in pooling, or signs in ReLU, where two values nearly tie, and fp32 alone
    may with the size of the batch, since convolutions then take other ways. That is no fault of a contender: samples
    whose gradients plain autograd gets otherwise in fp32 are left out, and a contender is allowed what fp32 autograd,
    one sample at a time, is off by on the others.
    """

    def __init__(self, case: Model) -> None:
        self.case = case
        self.micro = min(default_micro(case.build()), MOST)
        self.x, self.y = case.data(self.micro + SEAM + SPARE)
        self.grads, self.honest = self._one_at_a_time(torch.float64), self._one_at_a_time(torch.float32)   # [n, D]
        self._leave_out_ties(self.micro + SEAM)
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

    def _leave_out_ties(self, wanted: int) -> None:
        """Keeps the first samples that fp32 autograd gets right, alone and in a batch."""
        model = self.case.build()
        params, off = list(model.parameters()), (self.honest - self.grads).abs().amax(1)
        for first in range(0, len(self.x), self.micro):
            some = slice(first, first + self.micro)
            losses = nn.functional.cross_entropy(model(self.x[some]), self.y[some], reduction="none")
            together, truth = torch.autograd.grad(losses.sum(), params, retain_graph=True), self.grads[some].sum(0)
            if (flatten(together) - truth).abs().max() <= TOLERANCE * truth.abs().max():
                continue   # one pass told of all
            for i, loss in enumerate(losses, start=first):
                batched = flatten(torch.autograd.grad(loss, params, retain_graph=True))
                off[i] = max(off[i], (batched - self.grads[i]).abs().max())
        right = (off <= TOLERANCE * self.grads.abs().amax(1)).nonzero().reshape(-1)[:wanted]
        assert len(right) == wanted, f"{self.case.name}: {len(off) - len(right)} of {len(off)} samples have near ties"
        self.x, self.y, self.grads, self.honest = (part[right] for part in (self.x, self.y, self.grads, self.honest))

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
