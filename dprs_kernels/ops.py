"""The fused step as a torch operator, for loops under torch.compile. Eager calls never come here: they would pay
the dispatcher for every tensor.

The operator is opaque to the compiler: it gets tensors and plain numbers, and a handle for the NoiseSource. It
declares that it writes `ticket`, a tensor that belongs to the source; without that, a compiler may merge two
calls with equal arguments into one (the same noise twice) or drop a call whose result it thinks unused.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from dprs_kernels.layout import Layout
from dprs_kernels.mask import KeepMask
from dprs_kernels.noise import NoiseSource, source_of


@torch.library.custom_op("dprs_kernels::fused_rs_dp_step", mutates_args={"outs", "ticket"})
def _step_op(
    outs: Sequence[torch.Tensor],
    grad_samples: Sequence[torch.Tensor],
    keep_bits: torch.Tensor | None,
    keep_count: int,
    ticket: torch.Tensor,
    handle: int,
    max_grad_norm: Sequence[float],
    noise_multiplier: float,
    expected_batch_size: float,
    loss_reduction: str,
    clipping: str,
    backend: str,
) -> None:
    from dprs_kernels.step import PrivateSum  # step imports this module, too

    keep = None
    if keep_bits is not None:   # bits that a KeepMask held: nothing to check, and no way back from the device
        keep = KeepMask(Layout.of(outs), keep_bits, count=keep_count, drop_rate=0.0)
    total = PrivateSum(
        outs, keep=keep, max_grad_norm=max_grad_norm[0] if len(max_grad_norm) == 1 else list(max_grad_norm),
        noise_multiplier=noise_multiplier, expected_batch_size=expected_batch_size, noise=source_of(handle),
        loss_reduction=loss_reduction, clipping=clipping, backend=backend,
    )   # fmt: skip
    total.add(list(grad_samples))
    total.release_into(outs)
    ticket += 1


@_step_op.register_fake
def _(*arguments: Any) -> None:
    """Nothing to infer: the outputs are arguments."""


def traced_step(
    params: Iterable[Any],
    keep: KeepMask | None,
    max_grad_norm: float | Sequence[float],
    noise_multiplier: float,
    expected_batch_size: float,
    noise: NoiseSource,
    grad_samples: Any,
    loss_reduction: str,
    clipping: str,
    backend: str,
) -> None:
    """What fused_rs_dp_step does while torch.compile traces it. The operator checks its arguments when it runs."""
    pairs = [item if isinstance(item, tuple) else ("", item) for item in params]
    tensors = [tensor for _, tensor in pairs]
    if grad_samples is None:
        grads = [param.grad_sample if hasattr(param, "grad_sample") else param.grad_batch for param in tensors]
    elif isinstance(grad_samples, dict):
        grads = [grad_samples[name] for name, _ in pairs]
    else:
        grads = list(grad_samples)
    bounds: list[Any] = list(max_grad_norm) if isinstance(max_grad_norm, (list, tuple)) else [max_grad_norm]
    outs = [torch.empty(param.shape, dtype=param.dtype, device=param.device) for param in tensors]
    torch.ops.dprs_kernels.fused_rs_dp_step(
        outs, grads, None if keep is None else keep.bits, 0 if keep is None else keep.count, noise._ticket,
        noise._handle,
        [float(c) for c in bounds], float(noise_multiplier), float(expected_batch_size),
        loss_reduction, clipping, backend,
    )   # fmt: skip
    for param, out in zip(tensors, outs, strict=True):
        param.grad = out
        if grad_samples is None:   # consumed, as in an eager step
            setattr(param, "grad_sample" if hasattr(param, "grad_sample") else "grad_batch", None)
