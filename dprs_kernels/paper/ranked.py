"""RankedOptimizer: the masks of Algorithm 4, from what earlier steps released.

    z_e   = sum over the steps of period e of   g~ + (1 - keep) o N(0, (sigma C)^2) / B            (line 20)
    keep  = all in the first period; later all but the floor(rate * D) coordinates of smallest |z_(e-1)|

g~ is the released gradient. A dropped coordinate's z is noise alone, as large as the noise that kept ones have: without
it dropped coordinates would rank last for ever. A period is an epoch, or 1/refresh of one. Masks are made from released
values and noise only, so they cost no privacy (post-processing). The paper's line 18 moves w by g_t, which has neither
bound nor noise; the released g~ is meant, and used here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer

from dprs_kernels.layout import Layout
from dprs_kernels.mask import KeepMask
from dprs_kernels.masked_step import STATE_KEY, StepRecord
from dprs_kernels.noise import NoiseSource
from dprs_kernels.optimizer import RSDPOptimizer
from dprs_kernels.step import PrivateSum, fused_rs_dp_step


class RankedOptimizer(RSDPOptimizer):
    """RSDPOptimizer whose set_epoch ranks in the place of drawing. The arguments are the same; schedule is required.

    ranking_noise: of the dropped coordinates' statistic; None makes one with a fresh key. It never reaches a parameter.

    >>> from dprs_kernels import ConstantRate
    >>> model = torch.nn.Linear(3, 1, bias=False)
    >>> optimizer = RankedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), schedule=ConstantRate(0.5, epochs=2),
    ...                             max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=4)
    >>> optimizer.step(grad_samples=[torch.randn(4, 1, 3)])
    >>> optimizer.keep.count, optimizer.set_epoch(1), optimizer.keep.count
    (3, None, 2)
    """

    def __init__(self, optimizer: Optimizer, *, ranking_noise: NoiseSource | None = None, **settings: Any) -> None:
        if settings.get("schedule") is None:
            raise ValueError("schedule: got None; ranked sparsification needs the rates, e.g. GradualCooling(0.9, 40)")
        if settings.get("structure", "coordinate") != "coordinate":
            raise ValueError(f"structure: got {settings['structure']!r}; ranked sparsification ranks each coordinate")
        self.ranking_noise = NoiseSource() if ranking_noise is None else ranking_noise
        self._scores: list[torch.Tensor] | None = None    # z of the last period, float64
        self._running: list[torch.Tensor] | None = None   # z of this one, so far
        self._ranked: tuple[Any, KeepMask] | None = None
        self._rest: tuple[KeepMask, KeepMask] | None = None   # a mask, and its complement
        self._undo: tuple[tuple[str, int], list[torch.Tensor] | None] | None = None   # (key, step), z before it
        super().__init__(optimizer, **settings)
        if self.ranking_noise.key_id == self.noise.key_id:
            raise ValueError("ranking_noise: has the key of noise; two uses of one key repeat its noise; give another")
        self.attach_step_hook(_save)

    def set_epoch(self, epoch: int, tick: int = 0) -> None:
        """As RSDPOptimizer; leaving a period in which steps were taken, its statistic ranks the next."""
        before = self._at
        super().set_epoch(epoch, tick)
        if self._at != before and self._running is not None:
            self._scores, self._running = self._running, None

    @property
    def keep(self) -> KeepMask:
        """The mask in force, ranked once for a period."""
        params = self._trainable()
        if self._scores is None:
            place: Any = Layout.of(params)
        elif Layout.of(params) == Layout.of(self._scores):
            place = self._at
        else:
            raise ValueError(
                "params: other parameters are trainable than those that were ranked; freeze before the first step, or "
                "make a new optimizer"
            )
        if self._ranked is None or self._ranked[0] != place:
            if self._scores is None:
                mask = KeepMask.full(params)
            else:
                assert self.schedule is not None
                rate = self.schedule(*self._at)
                mask = KeepMask.from_scores([z.abs() for z in self._scores], drop_rate=rate)
            self._ranked = place, mask
        return self._ranked[1]

    def state_dict(self) -> dict[str, Any]:
        """As RSDPOptimizer, with both statistics: sums of released values."""
        state = super().state_dict()
        ranking = {"scores": self._scores, "running": self._running, "noise": self.ranking_noise.state_dict()}
        return {**state, STATE_KEY: {**state[STATE_KEY], "ranking": ranking}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        ours = state_dict.get(STATE_KEY)
        if ours is not None and "ranking" not in ours:
            raise ValueError("state: holds no ranking; it was saved by another optimizer than RankedOptimizer")
        super().load_state_dict(state_dict)
        if ours is not None:
            ranking = ours["ranking"]
            self.ranking_noise.load_state_dict(ranking["noise"])
            self._scores, self._running = _copied(ranking["scores"]), _copied(ranking["running"])
            self._ranked = self._rest = None

    def _give_up(self, total: PrivateSum) -> None:
        """What a failing hook (a ledger that cannot write) gives up is not ranked by, either."""
        super()._give_up(total)
        if self._undo is not None and self._undo[0] == total.claimed:
            self._running = self._undo[1]

    def _complement(self, keep: KeepMask) -> KeepMask:
        if self._rest is None or self._rest[0] is not keep:
            self._rest = keep, KeepMask.from_dense([~part for part in keep.dense()])
        return self._rest[1]


def _save(optimizer: RSDPOptimizer, record: StepRecord) -> None:
    """Line 20: a step hook, so after the release and before it moves a parameter."""
    assert isinstance(optimizer, RankedOptimizer)
    params, keep = [param for _, param in optimizer._trainable()], optimizer.keep
    released = [param.grad.to(torch.float64, copy=True) for param in params if param.grad is not None]
    assert len(released) == len(params)
    if keep.count < keep.size:
        # The core's own noise, on the complement: the step of a batch without samples.
        others = [torch.nn.Parameter(torch.empty_like(param)) for param in params]
        fused_rs_dp_step(
            others, keep=optimizer._complement(keep), max_grad_norm=record.max_grad_norm,
            noise_multiplier=record.noise_multiplier, expected_batch_size=record.expected_batch_size,
            noise=optimizer.ranking_noise, grad_samples=[param.new_empty(0, *param.shape) for param in params],
            backend=optimizer.backend,
        )   # fmt: skip
        for z, other in zip(released, others, strict=True):
            assert other.grad is not None
            z += other.grad
    before = optimizer._running
    optimizer._undo = (record.key_id, record.step), before
    optimizer._running = released if before is None else [a + b for a, b in zip(before, released, strict=True)]


def _copied(parts: list[torch.Tensor] | None) -> list[torch.Tensor] | None:
    return None if parts is None else [part.clone() for part in parts]
