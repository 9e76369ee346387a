"""Who races: ours, the limit, and the peers, each as one whole step from per-sample gradients to p.grad.

Every builder takes (work, rate) and returns run(sigma) -> released gradients. Reads and writes below count passes
over the [N, D] buffer (R, W), without credit for caches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from harness import BOUND, RATES, SEED, Workload
from limit import fastest_read
from names import LIMIT, OURS
from racing import Contender

from dprs_kernels import NoiseSource, fused_rs_dp_step

Run = Callable[[float], Sequence[torch.Tensor]]
PAPER = "paper's lines"
OPACUS, OPACUS_COPY, OPACUS_INPLACE = "Opacus, no mask", "Opacus, mask", "Opacus, mask in place"
COMPILED = "torch.compile"
PEERS = (PAPER, OPACUS_COPY, OPACUS_INPLACE, OPACUS, COMPILED)


def limit(work: Workload) -> Contender:
    """1R with all threads and nothing else: no step that looks at every gradient can be faster from memory."""

    def reduced() -> list[torch.Tensor]:   # torch's own reduction, which reads at the memory's speed
        return [grad.sum() for grad in work.grads]

    read: Callable[[], object] = fastest_read(work.grads) if work.device.type == "cpu" else reduced
    return Contender(LIMIT, lambda sigma: read(), peer=False)


def ours(work: Workload, rate: float, backend: str = "auto") -> Run:
    """fused_rs_dp_step as users call it: Python checks, the pass over G, ChaCha20 noise, p.grad in place."""
    params, keep = work.params(), work.keeps[rate]
    noise = NoiseSource.seeded_for_tests(SEED)   # step 0 is the one that is checked; speed is that of any key

    def run(sigma: float) -> Sequence[torch.Tensor]:
        fused_rs_dp_step(
            params, keep=keep, max_grad_norm=BOUND, noise_multiplier=sigma, expected_batch_size=work.shape.samples,
            noise=noise, grad_samples=work.grads, backend=backend,
        )   # fmt: skip
        return [p.grad for p in params if p.grad is not None]

    return run


def paper(work: Workload, rate: float) -> Run:
    """Algorithm 1 in the style of the paper's published script, written anew from the paper: each sample's
    gradient is concatenated over parameters, dropped coordinates are zeroed by an indexed write per sample, then
    norm, scaling in place, sum, noise zeroed at the same indices. 4R 2W, r N D scattered writes, N launches, and
    two copies of G at peak (the list and the concatenation). Indices come in the order of the random permutation
    they are drawn by (sorted, the step would take about 0.75 of the time)."""
    samples, sizes = work.shape.samples, [math.prod(part) for part in work.shape.shapes]
    dropped = (~work.flat_keep(rate)).nonzero().reshape(-1)   # int64 [r D], made once per epoch: not timed
    dropped = dropped[torch.randperm(dropped.numel())].to(work.device)

    def run(sigma: float) -> Sequence[torch.Tensor]:
        flat = torch.cat([grad.reshape(samples, -1) for grad in work.grads], 1)   # 1R 1W
        if dropped.numel():
            for row in flat:
                row[dropped] = 0
        norms = flat.norm(dim=1)                                                 # 1R
        flat *= (BOUND / norms).clamp(max=1).unsqueeze(1)                        # 1R 1W
        total = flat.sum(0)                                                      # 1R
        noise = torch.normal(0.0, sigma * BOUND, total.shape, dtype=total.dtype, device=work.device)
        noise[dropped] = 0
        out = (total + noise) / samples
        parts = zip(out.split(sizes), work.shape.shapes, strict=True)
        return [part.view(shape) for part, shape in parts]

    return run


def opacus(work: Workload, rate: float, mask: str = "") -> Run:
    """Opacus's own DPOptimizer: clip_and_accumulate, add_noise, scale_grad. 2R; with bf16 gradients also a copy in
    fp32, the parameters' dtype. Opacus has no masks; a user would multiply, p.grad_sample * keep (mask="copy", 1R 1W
    and a second buffer of [N, D]) or with mul_ (mask="in place", 1R 1W), and mask the noise afterwards."""
    from opacus.optimizers import DPOptimizer

    params: list[Any] = work.params()   # Opacus gives them attributes
    samples = work.shape.samples
    optimizer = DPOptimizer(
        torch.optim.SGD(params, lr=1.0), noise_multiplier=0.0, max_grad_norm=BOUND, expected_batch_size=samples
    )
    keep = [part.to(work.device, work.dtype) for part in work.dense[rate]]
    # In place spoils G for the others, so it has its own. Masking twice is masking once: it can be reused.
    grads = [grad.clone() for grad in work.grads] if mask == "in place" else work.grads

    def run(sigma: float) -> Sequence[torch.Tensor]:
        optimizer.noise_multiplier = sigma
        for p, grad, part in zip(params, grads, keep, strict=True):
            if mask == "copy":
                p.grad_sample = grad * part
            elif mask == "in place":
                p.grad_sample = grad.view(grad.shape).mul_(part)
            else:
                p.grad_sample = grad.view(grad.shape)   # a new tensor object: Opacus marks used ones
            p.summed_grad = p.grad = None               # what zero_grad does
        optimizer.clip_and_accumulate()
        optimizer.add_noise()
        optimizer.scale_grad()
        for p, part in zip(params, keep, strict=True):
            p.grad_sample = p.summed_grad = None
            if mask:
                p.grad.mul_(part)
        return [p.grad for p in params]

    return run


def compiled(work: Workload, rate: float) -> Run:
    """torch.compile of the operation in plain torch, fp32 inside, static shapes: mask, norm, clip, sum, randn.
    The fastest of six spellings: a float mask multiplied into the norm, a matmul for the sum, masked afterwards
    (bool masks and torch.where, as the reference has it to keep a dropped NaN out, took 2 to 4 times as long).
    sigma goes in as a tensor, so that a new value is no new graph."""
    samples, keep = work.shape.samples, [part.float().to(work.device) for part in work.dense[rate]]

    def step(grads: list[torch.Tensor], keep: list[torch.Tensor], sigma: torch.Tensor) -> list[torch.Tensor]:
        pairs = [(grad.float(), part) for grad, part in zip(grads, keep, strict=True)]
        squares = torch.stack([(grad * part).reshape(samples, -1).square().sum(1) for grad, part in pairs]).sum(0)
        factors = (BOUND / squares.sqrt()).clamp(max=1)
        outs = []
        for grad, part in pairs:
            total = (factors @ grad.reshape(samples, -1)).view(part.shape)
            outs.append((total + torch.randn_like(part) * (sigma * BOUND)) * part / samples)
        return outs

    torch._dynamo.reset()   # one graph at a time; the recompile limit counts per function, not per shape
    fast = torch.compile(step, dynamic=False, fullgraph=True)
    return lambda sigma: fast(work.grads, keep, torch.tensor(sigma, device=work.device))


def build(name: str, work: Workload, rate: float) -> Contender:
    """ImportError where an optional library is missing."""
    if name == OURS:
        return Contender(name, ours(work, rate), seeded=True, peer=False)
    if name == PAPER:
        return Contender(name, paper(work, rate))
    if name == COMPILED:
        return Contender(name, compiled(work, rate))
    mask = {OPACUS: "", OPACUS_COPY: "copy", OPACUS_INPLACE: "in place"}[name]
    return Contender(name, opacus(work, rate, mask), masked=bool(mask))


def peers_for(shape: str, dtype: torch.dtype, rate: float, full: bool) -> list[str]:
    """Which peers race in a case. At r = 0 nobody would multiply by a mask of ones. The default run has the paper's
    lines on DP-CNN/S only (on DP-CNN 1.2 s a step), and on 11M coordinates nobody but Opacus without a mask."""
    names = [OPACUS] if rate == RATES[0] else [OPACUS_COPY, OPACUS_INPLACE, OPACUS]
    if full:
        return [PAPER, *names, COMPILED]
    if shape.startswith("one tensor"):
        return [OPACUS]
    names = [PAPER, *names] if shape == "DP-CNN/S" else names
    return [*names, COMPILED] if rate == 0.5 and dtype == torch.float32 else names
