"""Does a model keep its samples apart? Asked of a few made-up samples before a source runs it on a batch.

    four samples;  the same with another first one;  the same with three others;  the first three alone

An output may change with its own sample only, every layer with trainable parameters must see the batch (which of its
dimensions grows with the number of samples is then known, also where another one has the same size), and the forward
may leave nothing of the samples in buffers. Once per source and per mode (train, eval) of its modules.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_flatten

LARGE, SMALL = 4, 3   # samples; four have halves and quarters, three have neither
Shapes = list[tuple[int, ...] | None]


@dataclass(frozen=True)
class Call:
    """One call of a layer: the batch dimension of each argument and output; None: not a tensor, or shared by all."""

    inputs: tuple[int | None, ...]
    outputs: tuple[int | None, ...]


@dataclass
class Findings:
    """calls: of each layer, in order. outputs: the batch dimension of each tensor that the model returns.
    conclusive: False where no other samples could be made (one sample of one index)."""

    calls: dict[str, list[Call]] = field(default_factory=dict)
    outputs: tuple[int | None, ...] = ()
    conclusive: bool = True


def tensors(value: Any) -> list[torch.Tensor]:
    """The floating-point tensors of a model's output, in tuples, lists and dicts."""
    found = []
    for leaf in tree_flatten(value)[0]:
        if isinstance(leaf, torch.Tensor):
            found += [leaf] if leaf.is_floating_point() else []
        elif leaf is not None and not isinstance(leaf, (bool, int, float, str)):
            raise ValueError(
                f"model: a {type(leaf).__name__} among the outputs; expected tensors, in tuples, lists or dicts, where "
                "samples can be told apart"
            )
    return found


def check_batch_first(model: nn.Module) -> None:
    """For sources that run the model on a whole batch. Of frozen layers too: they pass samples on."""
    for path, module in model.named_modules():
        if isinstance(module, (nn.RNNBase, nn.MultiheadAttention)) and not module.batch_first:
            raise ValueError(
                f"{path or 'model'}: {type(module).__name__} has batch_first=False; per-sample gradients need the "
                "batch as the first dimension: make it with batch_first=True, or use FunctionalSource"
            )


@torch.no_grad()
def check_independent(model: nn.Module, layers: Mapping[str, nn.Module], x: Any) -> Findings:
    """The module's question. Samples are made from x: its values, or others in their range; x itself is not written."""
    parts = [part.detach() for part in (x if isinstance(x, tuple) else (x,))]
    rows = [part[torch.arange(LARGE, device=part.device) % part.shape[0]] for part in parts]
    others = [_others(part, some) for part, some in zip(parts, rows, strict=True)]
    first = [torch.cat([other[:1], some[1:]]) for other, some in zip(others, rows, strict=True)]
    rest = [torch.cat([some[:1], other[1:]]) for other, some in zip(others, rows, strict=True)]
    trial = _Trial(model, layers)
    with trial.prepared():
        base, calls, written = trial.run(rows)
        few, calls_of_few, also = trial.run([some[:SMALL] for some in rows])
        layers_seen = {path: _calls(path, calls[path], calls_of_few[path]) for path in calls if path in calls_of_few}
        dims = tuple(_batch_dim("model", tuple(a.shape), tuple(b.shape)) for a, b in zip(base, few, strict=False))
        if trial.deterministic:   # dropout draws other numbers for another batch size
            _check_buffers(written, also)
            _check_size(model, base, few, dims)
        for replaced, kept in ((first, slice(1, LARGE)), (rest, slice(0, 1))):
            again, _, also = trial.run(replaced)
            _check_buffers(written, also)
            if trial.aligned:
                _check_outputs(model, base, again, dims, kept)
    changed = (any(not torch.equal(a, b) for a, b in zip(rows, made, strict=True)) for made in (first, rest))
    return Findings(layers_seen, dims, all(changed))


def _others(part: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[4, ...]: another sample in every place. Numbers in the range of those given; indices of another sample, or in
    their range, so that a table has them."""
    generator = torch.Generator().manual_seed(0)   # the caller's random numbers stay theirs
    if rows.numel() == 0:
        return rows
    if part.is_floating_point():
        low, high = (float(v) for v in part.aminmax())
        if not high - low < float("inf"):
            low, high = 0.0, 1.0
        spread = (high - low) or 1.0
        return (low + spread * torch.rand(rows.shape, generator=generator, dtype=torch.float64)).to(rows)
    made, pool = rows.clone(), part[:64]
    for i, row in enumerate(rows):
        differs = (pool != row).reshape(len(pool), -1).any(1)
        if bool(differs.any()):
            made[i] = pool[differs][0]
        elif part.dtype == torch.bool:
            made[i] = ~row
        elif not part.is_complex():
            low, high = (int(v) for v in part.aminmax())
            made[i] = torch.randint(low, high + 1, row.shape, generator=generator).to(row)
    return made


class _Trial:
    """Runs the model on a few samples, always from the same random numbers and buffers."""

    def __init__(self, model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
        self.model, self.layers = model, layers
        self.deterministic = True   # no random numbers were drawn
        self.aligned = True         # the last run drew as many as the first one
        self._drawn: torch.Tensor | None = None
        self._log: dict[str, list[tuple[Shapes, Shapes]]] = {}
        # (module, name, the buffer, its values)
        self._buffers = [
            (f"{path}.{name}" if path else name, module, name, buffer, buffer.clone())
            for path, module in model.named_modules()
            for name, buffer in module._buffers.items()
            if buffer is not None
        ]

    @contextmanager
    def prepared(self) -> Iterator[None]:
        """Records the shapes that layers see. A compiled model runs as it was written: it would compile again."""
        with ExitStack() as stack:
            compiled = any(module._compiled_call_impl is not None for module in self.model.modules())
            if compiled and hasattr(torch.compiler, "set_stance"):   # torch 2.6
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            for module in self.model.modules():
                if isinstance(module, nn.RReLU) and module.training:   # draws for negative values only: never aligned
                    module.training = False
                    stack.callback(setattr, module, "training", True)
            for path, module in self.layers.items():
                handle = module.register_forward_hook(self._recorder(path), with_kwargs=True, prepend=True)
                stack.callback(handle.remove)
            yield

    def _recorder(self, path: str) -> Any:
        def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            shapes = [tuple(v.shape) if isinstance(v, torch.Tensor) else None for v in (*args, *kwargs.values())]
            leaves = tree_flatten(output)[0]
            made = [tuple(t.shape) for t in leaves if isinstance(t, torch.Tensor) and t.is_floating_point()]
            self._log.setdefault(path, []).append((shapes, list(made)))

        untraced: Any = torch.compiler.disable
        return untraced(record)

    def run(self, batch: list[torch.Tensor]) -> tuple[list[torch.Tensor], dict[str, Any], dict[str, torch.Tensor]]:
        """(outputs, calls of layers, buffers that were written)."""
        self._log = {}
        devices = sorted({part.device.index for part in batch if part.device.type == "cuda"})
        written = {}
        try:
            with torch.random.fork_rng(devices=devices):
                state = torch.get_rng_state()
                model = getattr(self.model, "_orig_mod", self.model)
                outputs = tensors(model(*(part.clone() for part in batch)))   # a forward may write to its input
                drawn = torch.get_rng_state()
            self.deterministic &= not devices and torch.equal(state, drawn)
            self._drawn = drawn if self._drawn is None else self._drawn
            self.aligned = torch.equal(drawn, self._drawn)
        finally:
            for label, module, name, buffer, values in self._buffers:
                now = module._buffers[name]
                if now is not buffer or not torch.equal(now, values):
                    written[label] = torch.empty(0) if now is None else now.clone()
                    module._buffers[name] = buffer.copy_(values)
        return outputs, self._log, written


def _check_buffers(written: Mapping[str, torch.Tensor], again: Mapping[str, torch.Tensor]) -> None:
    for name in sorted({*written, *again}):
        if name not in written or name not in again or not torch.equal(written[name], again[name]):
            raise ValueError(
                f"{name}: a buffer that the forward writes from the samples, without noise; switch that off (.eval() "
                "on its module), and fill it from public data"
            )


def _check_outputs(
    model: nn.Module, base: list[torch.Tensor], again: list[torch.Tensor], dims: tuple[int | None, ...], kept: slice
) -> None:
    """Those of the `kept` samples stay, whatever the others are."""
    for before, after, dim in zip(base, again, dims, strict=False):
        if before.shape != after.shape or _differ(_narrow(before, dim, kept), _narrow(after, dim, kept), 1 / 64):
            raise ValueError(
                f"model: {type(model).__name__} mixes samples: the output of one changes with the values of another, "
                "so they have no gradients of their own; look for statistics over the batch dimension, or a batch "
                "dimension that is not the first"
            )


def _check_size(
    model: nn.Module, base: list[torch.Tensor], few: list[torch.Tensor], dims: tuple[int | None, ...]
) -> None:
    for before, after, dim in zip(base, few, dims, strict=False):
        same, alone = (_narrow(value, dim, slice(0, SMALL)) for value in (before, after))
        if same.shape == alone.shape and _differ(same, alone, 1):
            raise ValueError(
                f"model: {type(model).__name__} mixes samples: the output of one changes with the number of others; "
                "look for a division by the size of the batch"
            )


def _narrow(value: torch.Tensor, dim: int | None, kept: slice) -> torch.Tensor:
    return value if dim is None else value.movedim(dim, 0)[kept]


def _differ(a: torch.Tensor, b: torch.Tensor, factor: float) -> bool:
    """Beyond rounding. NaN in both is the same, NaN in one is not."""
    if a.numel() == 0:
        return False
    finite = a.nan_to_num(0.0, 0.0, 0.0)
    near = (a - b).abs() <= factor * tolerance(a) * finite.abs().max()
    return bool((~near & (a != b) & ~(a.isnan() & b.isnan())).any())


def _calls(path: str, large: list[tuple[Shapes, Shapes]], small: list[tuple[Shapes, Shapes]]) -> list[Call]:
    calls = []
    for (inputs, outputs), (fewer_in, fewer_out) in zip(large, small, strict=False):
        dims = tuple(_batch_dim(path, a, b) for a, b in zip(inputs, fewer_in, strict=True))
        if all(dim is None for dim in dims):
            raise ValueError(
                f"{path}: no input of this layer has the batch dimension, so that its gradients cannot be told apart; "
                "expand its input to one row per sample (positions: torch.arange(T).expand(n, T)), or use "
                "FunctionalSource"
            )
        calls.append(Call(dims, tuple(_batch_dim(path, a, b) for a, b in zip(outputs, fewer_out, strict=True))))
    return calls


def _batch_dim(path: str, large: tuple[int, ...] | None, small: tuple[int, ...] | None) -> int | None:
    """The dimension that has 4 for four samples and 3 for three; None where the shape stays."""
    if large == small or large is None or small is None:
        return None
    moved = [d for d, (a, b) in enumerate(zip(large, small, strict=False)) if a != b]
    if len(large) != len(small) or len(moved) != 1 or (large[moved[0]], small[moved[0]]) != (LARGE, SMALL):
        raise ValueError(
            f"{path}: a tensor of shape {list(large)} for {LARGE} samples, {list(small)} for {SMALL}; expected "
            "one dimension for the samples alone, the first: no layer may merge it with another"
        )
    return moved[0]


def tolerance(values: torch.Tensor) -> float:
    """Of the sum of magnitudes: rounding stays far below, a missing term far above."""
    low = torch.is_autocast_enabled(values.device.type) or values.dtype in (torch.bfloat16, torch.float16)
    return 2.0**-5 if low else 1e-3
