"""Who makes normals in bench_noise.py, on one core: ours, and what torch and numpy have.

torch has no Philox on the CPU in eager mode (its generator there is mt19937); what torch.compile generates for randn
is Philox-4x32-10, so that is raced under its name. numpy has Philox too. The cipher alone is the floor of ours: 16
words for 8 normals.
"""

from __future__ import annotations

import ctypes
import functools
import math
from typing import Any

import numpy as np
import torch
from limit import fastest_read
from names import OURS
from racing import Contender

from dprs_kernels import native, reference
from dprs_kernels.backends import cpu
from dprs_kernels.layout import Layout
from dprs_kernels.plan import StepPlan, make_plan

READ, SILENT = "read the floats once (limit)", f"{OURS}, release without noise"
CIPHER = f"{OURS}, ChaCha20 alone"
RANDN, RANDN_64, PHILOX = "torch.randn", "torch.randn, float64", "torch.compile, Philox"
LIBM, NUMPY, NUMPY_PHILOX = "numpy, float64 libm", "numpy, PCG64 ziggurat", "numpy, Philox ziggurat"
KEY = bytes(range(32))   # speed is that of any key


class Normals:
    """`count` of them; each contender writes where it wrote before, so that no page is fresh while the clock runs
    (torch.compile and libm return new memory: that is how they are used)."""

    def __init__(self, count: int) -> None:
        assert count % 8 == 0   # a block of ChaCha20 makes 8
        self.count = count
        self.out32, self.out64 = torch.zeros(count), torch.zeros(count, dtype=torch.float64)
        self.words = reference.words(KEY, 0, 0, count // 8)

    def contenders(self) -> list[Contender]:
        out32, out64, array = self.out32, self.out64, self.out64.numpy()
        pcg, philox = np.random.Generator(np.random.PCG64(0)), np.random.Generator(np.random.Philox(0))
        # When first called: importing the compiler takes seconds.
        compiled: Any = functools.cache(lambda: torch.compile(torch.randn_like, dynamic=False))
        read = fastest_read([out32])
        return [
            Contender(READ, lambda sigma: read(), peer=False),
            self._release(OURS, 1.0),
            self._release(SILENT, 0.0),
            self._cipher(),
            Contender(RANDN, lambda sigma: out32.normal_()),
            Contender(RANDN_64, lambda sigma: out64.normal_()),
            Contender(PHILOX, lambda sigma: compiled()(out32)),
            Contender(LIBM, lambda sigma: reference.normals(self.words)),
            Contender(NUMPY, lambda sigma: pcg.standard_normal(out=array)),
            Contender(NUMPY_PHILOX, lambda sigma: philox.standard_normal(out=array)),
        ]

    def plan(self, sigma: float) -> StepPlan:
        layout = Layout.of([(self.count,)])
        return make_plan(layout, max_grad_norm=1.0, noise_multiplier=sigma, expected_batch_size=1)

    def _release(self, name: str, sigma: float) -> Contender:
        """As a step does it, on the sum of an empty batch: words, transform, rounding to the grid, adding, p.grad."""
        plan = self.plan(sigma)
        total = torch.zeros(cpu.sums(plan.layout, None), dtype=reference.total_dtype(plan))

        def run(_: float) -> torch.Tensor:
            cpu.release([self.out32], total, None, plan, KEY, 0)
            return self.out32

        return Contender(name, run, peer=False)

    def _cipher(self) -> Contender:
        """The words, without the transform."""
        made = np.empty((self.count // 8, 16), np.uint32)
        place = made.ctypes.data_as(ctypes.c_void_p)

        def run(_: float) -> torch.Tensor:
            native.loaded().dprs_words(KEY, 0, 0, self.count // 8, place)
            return torch.from_numpy(made)

        return Contender(CIPHER, run, peer=False)

    def wrong(self, contender: Contender) -> str:
        """Why, or "". Ours against the specification, the others by moments within six standard errors."""
        if contender.name == CIPHER:
            same = np.array_equal(contender.run(1.0).numpy(), self.words)
            return "" if same else "other words than the specification's"
        z = torch.as_tensor(contender.run(1.0)).double()
        if contender.name == SILENT:
            return "" if not z.any() else "noise where none was asked for"
        if contender.name == OURS:
            # Rounded to the grid (2^-21 of sigma C at most), then to fp32: 2^-22 for |z| < 8.
            worst, allowed = float((z - torch.from_numpy(reference.normals(self.words))).abs().max()), 2.0**-20
            return "" if worst <= allowed else f"off by {worst:.3e}, allowed {allowed:.3e}"
        if abs(float(z.mean())) > 6 / math.sqrt(self.count):
            return f"mean {float(z.mean()):.2e}"
        if abs(float(z.square().mean()) - 1) > 6 * math.sqrt(2 / self.count):
            return f"variance {float(z.square().mean()):.5f}"
        return ""
