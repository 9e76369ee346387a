"""RowGrads: per-sample gradients of the rows that a mask keeps; the others were never made.

A source that is told a row mask answers with these (grads/rules.py). The CPU kernels read kept rows where they lie
(csrc/rows.h), with the bits of the whole gradient under the same mask; other backends get what they can read.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from dprs_kernels.structure import RowSet


@dataclass(frozen=True, eq=False)
class RowGrads:
    """In the place of a tensor [n, rows, *rest] wherever grad_samples are taken together with the same mask.

    values: [n, k, *rest], sample i's gradient of the k kept rows, in their order.

    >>> RowGrads(torch.ones(5, 2, 3), RowSet(torch.tensor([1, 3]), 4)).shape
    torch.Size([5, 4, 3])
    """

    values: torch.Tensor
    rows: RowSet

    def __post_init__(self) -> None:
        object.__setattr__(self, "values", self.values.resolve_neg())   # as OuterProducts
        if self.values.dim() < 2 or self.values.shape[1] != len(self.rows.kept):
            raise ValueError(
                f"values: got shape {list(self.values.shape)}; expected [n, {len(self.rows.kept)}, ...], one row for "
                "each that is kept"
            )

    @cached_property
    def shape(self) -> torch.Size:
        return torch.Size((self.values.shape[0], self.rows.count, *self.values.shape[2:]))

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    @property
    def layout(self) -> torch.layout:
        return self.values.layout

    def dim(self) -> int:
        return self.values.dim()

    def version(self) -> int:
        """Changes when torch writes to the values; -1 where it does not count."""
        return -1 if self.values.is_inference() else self.values._version

    def dense(self) -> torch.Tensor:
        """[n, rows, *rest], zeros in the rows that were not made."""
        whole = self.values.new_zeros(self.shape)
        return whole.index_copy_(1, self.rows.kept_on(self.device), self.values)
