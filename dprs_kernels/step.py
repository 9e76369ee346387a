"""fused_rs_dp_step and PrivateSum: the whole operation on one page.

    n_i = || keep o g_i ||            f_i = min(1, C'/n_i), 0 if n_i is not finite       C' = C (1 - 2^-20)
    S   = sum_i f_i keep o g_i
    p.grad = keep o ( snap(S) + snap(sigma C z) ) / expected_batch_size                  z ~ N(0, I)

Misuse raises here, before anything is written. reference.py is the specification of each verb.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.compiler import is_compiling

from dprs_kernels import backends, inputs, reference
from dprs_kernels.allocator import in_large_pages
from dprs_kernels.capture import capturing
from dprs_kernels.layout import Layout
from dprs_kernels.mask import KeepMask
from dprs_kernels.noise import NoiseSource, Stream
from dprs_kernels.outer import OuterProducts
from dprs_kernels.plan import StepPlan, StepRecord, make_plan
from dprs_kernels.row_grads import RowGrads

HALVES = (torch.float16, torch.bfloat16)
NOT_TENSORS = (OuterProducts, RowGrads)


@dataclass
class NonPrivateDiagnostics:
    """What a step saw of the data: raw norms. Looking at it, or letting it steer anything, is a release that
    no epsilon covers. For debugging on data that is not private.

    norms: [N, segments] float64, in the order the samples came; inf where a sample was left out.
    clipped: the share of norms above their bound.
    """

    norms: torch.Tensor = field(default_factory=lambda: torch.empty(0, 0, dtype=torch.float64))
    clipped: float = 0.0

    def _update(self, norms: torch.Tensor, plan: StepPlan) -> None:
        self.norms = norms if self.norms.numel() == 0 else torch.cat([self.norms, norms])
        if self.norms.numel():
            bounds = torch.tensor(plan.bounds, dtype=torch.float64, device=norms.device)
            self.clipped = float((self.norms > bounds).double().mean())


class PrivateSum:
    """A private sum over a logical batch that comes in micro-batches: `add` each, then `release` once.

    keep, max_grad_norm, noise_multiplier and the parameters are fixed for its life; the result does not depend on
    how the batch was split (bit for bit, where there is noise and a bound; on Triton, where all micro-batches are laid
    out alike). Memory: 8 bytes a coordinate (on the CPU of kept ones only, and those of a few samples while adding).

    >>> model = torch.nn.Linear(3, 1)
    >>> total = PrivateSum(model.parameters(), max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=4,
    ...                    noise=NoiseSource())
    >>> for _ in range(2):
    ...     total.add([torch.randn(2, 1, 3), torch.randn(2, 1)])
    >>> total.release()
    >>> model.weight.grad.shape
    torch.Size([1, 3])
    """

    _frozen = False

    def __init__(
        self,
        params: Iterable[Any],
        *,
        keep: KeepMask | None = None,
        max_grad_norm: float | Sequence[float],
        noise_multiplier: float,
        expected_batch_size: float,
        noise: NoiseSource,
        loss_reduction: str = "sum",
        clipping: str = "flat",
        backend: str = "auto",
        grad_scaler: Any = None,
        non_private_diagnostics: NonPrivateDiagnostics | None = None,
    ) -> None:
        self.names, self.params = inputs.named_params(params)
        if keep is not None and not isinstance(keep, KeepMask):
            raise ValueError(f"keep: got {type(keep).__name__}; expected a KeepMask, or None to keep everything")
        shapes = tuple([param.shape for param in self.params])
        layout = keep.layout if keep is not None and keep.layout.shapes == shapes else Layout.of(shapes)
        if keep is not None and keep.layout is not layout:
            raise ValueError(
                f"keep: made for parameters of other shapes ({keep.size} coordinates in {len(keep.layout.shapes)} "
                f"tensors; params have {layout.size} in {len(layout.shapes)}); draw it from the same list"
            )
        if not isinstance(noise, NoiseSource):
            raise ValueError(f"noise: got {type(noise).__name__}; expected a NoiseSource")
        if grad_scaler is not None and grad_scaler.is_enabled():
            raise ValueError(
                "grad_scaler: dynamic loss scaling is refused: the scale reacts to the data and is not accounted for, "
                "and scaled gradients are all clipped; train in bf16, or unscale the per-sample gradients first"
            )
        self.plan = make_plan(
            layout, max_grad_norm=max_grad_norm, noise_multiplier=noise_multiplier,
            expected_batch_size=expected_batch_size, loss_reduction=loss_reduction, clipping=clipping,
        )   # fmt: skip
        self.keep = keep
        self.noise = noise
        self._diagnostics = non_private_diagnostics
        self._backend = backends.resolve(backend, self.params[0].device, self.names[0])
        self._used = inputs.UsedOnce()
        self._total: torch.Tensor | None = None
        self._captured = False
        self._released = False
        self._claimed: tuple[str, int, bool] | None = None   # key id, step, private: of the noise that it took
        self._written = False
        self._frozen = True

    def add(self, grad_samples: Any = None) -> None:
        """Adds one micro-batch [N, *shape] per parameter; N = 0 is an ordinary micro-batch."""
        self._check_open("add")
        self._add(*self._micro_batches(grad_samples))

    @torch.no_grad()
    def _add(self, batches: Sequence[inputs.MicroBatch], sources: Sequence[str]) -> None:
        for batch in batches:
            self._used.add(self.names, batch)
        for batch in batches:
            norms = self._backend.accumulate_(self._sum(), self._taken(batch), self._bits(), self.plan)
            if self._diagnostics is not None:
                self._diagnostics._update(norms, self.plan)
        inputs.consume(self.params, sources)

    def release(self) -> None:
        """Adds the noise, once, and writes p.grad: in place where there is one that fits, else a new tensor."""
        outs, new = _gradients_of(self.params)
        self.release_into(outs)
        for param, out in new:
            param.grad = out

    @torch.no_grad()
    def release_into(self, outs: Sequence[torch.Tensor]) -> None:
        """As release, into contiguous tensors of the parameters' shapes."""
        self._check_open("release")
        stream = self._close()
        self._backend.release(outs, self._sum(), self._bits(), self.plan, stream.key, stream.step)
        self.__dict__.update(_total=None, _written=True)

    def step(self, grad_samples: Any = None) -> None:
        """add and release, for a logical batch that is one micro-batch: a single pass where the backend has one, and
        nobody asks for norms."""
        self._check_open("step")
        fused = None if self._diagnostics is not None else getattr(self._backend, "step_", None)
        batches, sources = self._micro_batches(grad_samples)
        if fused is None or len(batches) != 1 or self._total is not None:
            self._add(batches, sources)
            self.release()
            return
        outs, new = _gradients_of(self.params)
        taken = self._taken(batches[0])
        total = self._sum() if getattr(self._backend, "NEEDS_TOTAL", True) else None
        stream = self._close()
        fused(outs, total, taken, self._bits(), self.plan, stream.key, stream.step)
        inputs.consume(self.params, sources)
        self.__dict__.update(_total=None, _written=True)
        for param, out in new:
            param.grad = out

    def record(self) -> StepRecord:
        """The release, for Ledger.append in a loop of your own, before p.grad is used. None before release, and
        none after one that failed."""
        if not self._written or self._claimed is None:
            raise ValueError("record: nothing was released; call release() first, and append the record after it")
        (key_id, step, private), plan = self._claimed, self.plan
        keep = KeepMask.full(self.params) if self.keep is None else self.keep
        return StepRecord(
            step=step, key_id=key_id, private=private and plan.noise_std > 0 and math.isfinite(plan.max_grad_norm),
            noise_multiplier=plan.noise_multiplier, max_grad_norm=plan.max_grad_norm,
            expected_batch_size=plan.expected_batch_size, sensitivity=plan.sensitivity(keep.count),
            drop_rate=keep.drop_rate, kept=keep.count, keep_digest=keep.digest(),
        )   # fmt: skip

    @property
    def claimed(self) -> tuple[str, int] | None:
        """(key_id, step) of the noise that it took, once it did: by a release, also by one that failed."""
        return None if self._claimed is None else self._claimed[:2]

    def _micro_batches(self, grad_samples: Any) -> tuple[list[inputs.MicroBatch], list[str]]:
        batches, sources = inputs.micro_batches(self.names, self.params, grad_samples)
        for batch in batches:
            if self.plan.loss_reduction == "mean":
                self._refuse_halves(batch)
            self._check_rows(batch)
        return batches, sources

    def _refuse_halves(self, batch: inputs.MicroBatch) -> None:
        """g_i/n is rounded differently for n and n - 1: at n = 3000 one sample moved a bf16 sum by 15.6 C."""
        for name, grad in zip(self.names, batch, strict=True):
            if grad.dtype in HALVES:
                raise ValueError(
                    f"loss_reduction: got 'mean' with gradients of {grad.dtype} for {name}: rounded after the division "
                    "by n, every sample's gradient moves when n changes by one, and no bound holds; make the gradients "
                    "of the sum of losses, with loss_reduction='sum'"
                )

    def _check_rows(self, batch: inputs.MicroBatch) -> None:
        """Gradients of some rows go with the mask that keeps just these: nothing else says what the others are."""
        if {torch.Tensor}.issuperset(map(type, batch)):
            return
        for p, grad in enumerate(batch):
            if isinstance(grad, RowGrads):
                rows = None if self.keep is None else self.keep.kept_rows(p)
                if rows is None or (rows is not grad.rows and not torch.equal(rows.kept, grad.rows.kept)):
                    raise ValueError(
                        f"{self.names[p]}: gradients of {len(grad.rows.kept)} of {grad.rows.count} rows, made for "
                        "another mask than keep; make them with the mask that the step has"
                    )

    def _taken(self, batch: inputs.MicroBatch) -> inputs.MicroBatch:
        """As the backend takes it: what it does not make or place itself is stored, and so are signs that torch has
        only noted (`.imag` of a conjugate), since kernels read what is in memory."""
        if all(type(grad) is torch.Tensor and not grad.is_neg() for grad in batch):
            return batch
        taken: tuple[type, ...] = getattr(self._backend, "TAKES", ())
        stored = tuple(kind for kind in NOT_TENSORS if kind not in taken)
        with torch.no_grad():
            dense = [grad.dense() if isinstance(grad, stored) else grad for grad in batch]
            return [grad.resolve_neg() if isinstance(grad, torch.Tensor) else grad for grad in dense]

    def _close(self) -> Stream:
        """No second release, whatever happens next: the sum closes before noise is made."""
        self.__dict__["_released"] = True
        stream = self.noise.claim(self.params[0].device)
        # After the claim: a forked child re-keys in it.
        self.__dict__["_claimed"] = self.noise.key_id, stream.step, self.noise.private
        return stream

    def _sum(self) -> torch.Tensor:
        if self._total is None:
            self.__dict__["_captured"] = capturing(self.params[0].device)
            sums = getattr(self._backend, "sums", None)
            size = self.plan.layout.padded if sums is None else sums(self.plan.layout, self._bits())
            total = torch.empty(size, dtype=reference.total_dtype(self.plan), device=self.params[0].device)
            self.__dict__["_total"] = in_large_pages(total).zero_()
        assert self._total is not None
        return self._total

    def _bits(self) -> torch.Tensor | None:
        """The keep bits, or None where all are kept (the same result, with less work)."""
        if self.keep is None or self.keep.count == self.keep.size:
            return None
        return self.keep.bits_on(self.params[0].device)

    def _check_open(self, verb: str) -> None:
        if self._released:
            raise ValueError(f"{verb}: this PrivateSum was released; noise is added once, make a new one per step")
        if self._total is not None and self._captured != capturing(self._total.device):
            raise ValueError(
                f"{verb}: part of this PrivateSum was captured in a CUDA graph and part was not; a replay would "
                "release what is left of the other part: capture the whole step, or none of it"
            )
        if self.keep is not None and not self.keep.unchanged():
            raise ValueError(f"{verb}: keep.bits was written to; the mask is fixed for the life of a PrivateSum")

    def __reduce__(self) -> Any:
        raise ValueError("PrivateSum: cannot be copied or pickled: the same samples would be released twice")

    def __setattr__(self, name: str, value: Any) -> None:
        if self._frozen:
            raise ValueError(f"{name}: fixed for the life of a PrivateSum; make a new one")
        super().__setattr__(name, value)


def _gradients_of(params: Sequence[torch.Tensor]) -> tuple[list[torch.Tensor], list[tuple[torch.Tensor, torch.Tensor]]]:
    """What a release writes to: p.grad where there is one that fits, else a new tensor; and the new ones with their
    parameters."""
    outs: list[torch.Tensor] = []
    new: list[tuple[torch.Tensor, torch.Tensor]] = []
    for param in params:
        out = param.grad
        if out is None or out.dtype != param.dtype or not out.is_contiguous() or out.requires_grad or out.is_neg():
            out = in_large_pages(torch.empty(param.shape, dtype=param.dtype, device=param.device))
            new.append((param, out))
        outs.append(out)
    return outs, new


def fused_rs_dp_step(
    params: Iterable[Any],
    *,
    keep: KeepMask | None = None,
    max_grad_norm: float | Sequence[float],
    noise_multiplier: float,
    expected_batch_size: float,
    noise: NoiseSource,
    grad_samples: Any = None,
    loss_reduction: str = "sum",
    clipping: str = "flat",
    backend: str = "auto",
    grad_scaler: Any = None,
    non_private_diagnostics: NonPrivateDiagnostics | None = None,
) -> None:
    """Mask, clip, sum and noise per-sample gradients in one pass, and write p.grad: private once written.

    params: parameters, or (name, parameter) pairs; all on one device. Floats of any width.
    keep: a KeepMask for the same parameters; None keeps everything (plain DP-SGD).
    max_grad_norm: C, the bound of a sample's norm over all kept coordinates. With clipping="per_layer" it is
        split as C/sqrt(P), or given as a list, one per parameter.
    noise_multiplier: sigma; the noise added to the sum has standard deviation sigma C.
    expected_batch_size: the divisor, a public number fixed in advance (about sample_rate times the size of the
        data set); never the number of samples drawn, nor anything computed from the private data.
    grad_samples: [N, *shape] per parameter, a list or a name -> tensor dict. Without it p.grad_sample or
        p.grad_batch is taken and consumed (set to None).
    loss_reduction: "mean" if each gradient was divided by the N of its micro-batch (BackPACK and plain autograd
        under a mean loss); "sum" otherwise, also for Opacus, which undoes the mean itself. "mean" is refused for
        16-bit gradients, and costs a little in fp32 (privacy/SECURITY.md): prefer a sum of losses.
    clipping: "flat", "per_layer", or "automatic" (scale by C/(n + 0.01)).
    backend: "auto", "reference", "cpu" or "triton".
    grad_scaler: a torch GradScaler in use, so that it can be refused.
    non_private_diagnostics: filled with raw norms; see its warning.

    N = 0 gives pure noise. A sample with a NaN or Inf among kept coordinates contributes exactly 0. Dropped
    coordinates get exactly 0, without noise.

    >>> model = torch.nn.Linear(3, 1)
    >>> noise = NoiseSource()
    >>> keep = KeepMask.draw(model.parameters(), drop_rate=0.5, seed=0, draw=0)
    >>> fused_rs_dp_step(model.parameters(), keep=keep, max_grad_norm=1.0, noise_multiplier=1.0,
    ...                  expected_batch_size=8, noise=noise,
    ...                  grad_samples=[torch.randn(8, 1, 3), torch.randn(8, 1)])
    >>> int((model.weight.grad == 0).sum() + (model.bias.grad == 0).sum())
    2
    """
    if is_compiling():
        from dprs_kernels import ops

        ops.traced_step(
            params, keep, max_grad_norm, noise_multiplier, expected_batch_size, noise, grad_samples,
            loss_reduction, clipping, backend,
        )   # fmt: skip
        return
    total = PrivateSum(
        params, keep=keep, max_grad_norm=max_grad_norm, noise_multiplier=noise_multiplier,
        expected_batch_size=expected_batch_size, noise=noise, loss_reduction=loss_reduction, clipping=clipping,
        backend=backend, grad_scaler=grad_scaler, non_private_diagnostics=non_private_diagnostics,
    )   # fmt: skip
    total.step(grad_samples)
