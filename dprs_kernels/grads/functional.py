"""Per-sample gradients by torch.func: vmap over samples of the gradient of a batch of one. Any module, any loss.

    g_i = d loss_fn(model(x_i), y_i) / d params

The model sees batches of one inside vmap, so nothing can mix samples and tied weights, attention, recurrent layers
and functional uses of parameters all work. What vmap refuses: control flow on values (.item()), in-place writes of
sample data into buffers.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from dprs_kernels.grads.source import (
    LossFn,
    check_batch,
    check_model,
    check_params,
    check_scalar,
    completed,
    reduction_of,
    trainable,
)

# Their C++ loops add sample data in place to a hidden state that is the same for all samples, which vmap refuses.
_RECURRENT = {
    torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu,
    torch.lstm_cell, torch.gru_cell, torch.rnn_tanh_cell, torch.rnn_relu_cell,
}   # fmt: skip


class FunctionalSource:
    """torch.func as a source.

    loss_reduction: of losses without a .reduction ("mean" or "sum"); of one sample they are the same, so it is only
        checked against loss_fn.
    chunk_size: samples per vmap, to bound activations (their memory grows with it, at equal results); None: all.
    randomness: of dropout in the model: "different" for each sample, "same", or "error" to refuse it.

    Buffers are copies: what a forward writes to them is dropped.

    >>> model = torch.nn.Linear(3, 1)
    >>> source = FunctionalSource(model)
    >>> grads = source.grads(torch.nn.MSELoss(), torch.randn(4, 3), torch.randn(4, 1))
    >>> {name: list(g.shape) for name, g in grads.items()}
    {'weight': [4, 1, 3], 'bias': [4, 1]}
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        loss_reduction: str | None = None,
        chunk_size: int | None = None,
        randomness: str = "different",
    ) -> None:
        if chunk_size is not None and (not isinstance(chunk_size, int) or chunk_size < 1):
            raise ValueError(f"chunk_size: got {chunk_size!r}; expected a positive integer, or None for all at once")
        if randomness not in ("different", "same", "error"):
            raise ValueError(f"randomness: got {randomness!r}; expected 'different', 'same' or 'error'")
        reduction_of(None, loss_reduction)
        check_model(model)
        self.model = model
        self.params = trainable(model)
        self.chunk_size = chunk_size
        self.randomness = randomness
        self._given = loss_reduction

    def grads(self, loss_fn: LossFn, x: Any, y: Any) -> dict[str, torch.Tensor]:
        n = check_batch(x, y)
        reduction_of(loss_fn, self._given)
        check_model(self.model)
        check_params(self.model, self.params)
        if n == 0:
            return completed(self.params, {}, 0)
        values = {name: param.detach() for name, param in self.params}
        inputs = tuple(part.detach() for part in (x if isinstance(x, tuple) else (x,)))
        targets = y if isinstance(y, tuple) else (y,)

        def loss_of_one(values: Any, inputs: Any, targets: Any) -> torch.Tensor:
            batch = tuple(part.unsqueeze(0) for part in inputs)
            ones = tuple(part.unsqueeze(0) for part in targets)
            buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
            outputs = functional_call(self.model, (values, buffers), batch)
            loss = loss_fn(outputs, ones if isinstance(y, tuple) else ones[0])
            check_scalar(loss)
            return loss

        per_sample = vmap(grad(loss_of_one), in_dims=(None, 0, 0), randomness=self.randomness)
        chunk = self.chunk_size or n
        with batchable(self.model, self.params[0][1].device):
            if chunk >= n:
                return dict(per_sample(values, inputs, targets))
            # Rows are copied into place: vmap's own chunk_size would hold all chunks and their concatenation.
            out = {name: param.detach().new_empty(n, *param.shape) for name, param in self.params}
            for start in range(0, n, chunk):
                rows = slice(start, start + chunk)
                part = per_sample(values, tuple(t[rows] for t in inputs), tuple(t[rows] for t in targets))
                for name, rows_of in part.items():
                    out[name][rows] = rows_of
            return out


@contextmanager
def batchable(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Implementations that vmap can batch, where torch's first choice is one that it refuses or would loop over."""
    with ExitStack() as stack:
        if any(isinstance(module, (nn.RNNBase, nn.RNNCellBase)) for module in model.modules()):
            stack.enter_context(_Recurrent())
        if device.type == "cpu":   # 1.4x on a small encoder layer; GPU attention has a rule
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield


class _Recurrent(TorchFunctionMode):
    """Gives every sample its own hidden state (see _RECURRENT), and takes torch's own loops: the oneDNN and cuDNN
    ones have no batching rule."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _RECURRENT:
            return func(*args, **kwargs)
        x, hidden, *rest = args
        zero = torch.zeros_like(x).sum()   # a number per sample
        hidden = hidden + zero if isinstance(hidden, torch.Tensor) else [h + zero for h in hidden]
        held = torch.backends.mkldnn.enabled
        torch.backends.mkldnn.enabled = False   # type: ignore[assignment]
        try:
            with torch.backends.cudnn.flags(enabled=False):
                return func(x, hidden, *rest, **kwargs)
        finally:
            torch.backends.mkldnn.enabled = held
