"""OuterProducts: per-sample gradients that are kept as their two factors.

A Linear with one position per sample has G_i = e_i a_i^T: n (out + in) numbers say what n out in would store. The CPU
kernels make a tile of it in cache at each touch (csrc/rows.h), with the bits of the stored product; other backends
get the stored product.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from dprs_kernels.row_grads import RowGrads


@dataclass(frozen=True, eq=False)
class OuterProducts:
    """G_i = e_i a_i^T, in the place of a tensor [n, out, in] wherever grad_samples are taken.

    e: [n, out], the gradient of the loss by the layer's output; a: [n, in], the layer's input; of one dtype.

    >>> OuterProducts(torch.ones(5, 3), torch.ones(5, 4)).shape
    torch.Size([5, 3, 4])
    """

    e: torch.Tensor
    a: torch.Tensor

    def __post_init__(self) -> None:
        for name in ("e", "a"):   # kernels read what is in memory: no sign that torch has only noted
            object.__setattr__(self, name, getattr(self, name).resolve_neg())
        for name, factor in (("e", self.e), ("a", self.a)):
            if factor.dim() != 2:
                raise ValueError(f"{name}: got shape {list(factor.shape)}; expected two dimensions, one row per sample")
        if (self.e.shape[0], self.e.dtype, self.e.device) != (self.a.shape[0], self.a.dtype, self.a.device):
            raise ValueError(
                f"a: {self.a.shape[0]} samples, {self.a.dtype} on {self.a.device}; e has {self.e.shape[0]}, "
                f"{self.e.dtype} on {self.e.device}"
            )

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.e.shape, self.a.shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        return self.e.dtype

    @property
    def device(self) -> torch.device:
        return self.e.device

    @property
    def layout(self) -> torch.layout:
        return self.e.layout

    def dim(self) -> int:
        return 3

    def version(self) -> int:
        """Changes when a factor is written to; -1 where torch does not count."""
        if self.e.is_inference() or self.a.is_inference():
            return -1
        return self.e._version + self.a._version

    def dense(self) -> torch.Tensor:
        """[n, out, in]. Factors of 16 bits are widened first: their product has more."""
        e, a = (f.float() if f.dtype in (torch.bfloat16, torch.float16) else f for f in (self.e, self.a))
        return e.unsqueeze(2) * a.unsqueeze(1)


Grad = torch.Tensor | OuterProducts | RowGrads   # [n, *shape]
