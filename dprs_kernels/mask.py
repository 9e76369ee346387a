"""KeepMask: which coordinates take part. Public, data-independent, made before the backward pass.

A drawn mask is a function of (seed, draw, drop_rate, shapes) in integer arithmetic, and of its structure where that
is not "coordinate" (structure.py; a row mask also depends on how parameters form groups, hence on their names, and its
counts on one product in float64): every platform, backend and rank makes the same bits, and sending one takes sending
those numbers. Bits are packed 32 to a word, 1 = kept, each parameter starting a new word (layout.py).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import torch

from dprs_kernels import reference
from dprs_kernels.capture import capturing
from dprs_kernels.layout import WORD, Layout
from dprs_kernels.schedule import checked_rate
from dprs_kernels.structure import STRUCTURES, Groups, RowSet, draw_bits, draw_rows, expanded, groups_of


def mask_key(seed: int, draw: int) -> tuple[int, int, int, int]:
    """Four 64-bit words from (public seed, draw index); hashed, so that neighbouring draws are unrelated."""
    for name, value in (("seed", seed), ("draw", draw)):
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**64:
            raise ValueError(f"{name}: got {value!r}; expected an integer in [0, 2^64)")
    text = b"dprs_kernels keep mask" + seed.to_bytes(8, "little") + draw.to_bytes(8, "little")
    a, b, c, d = np.frombuffer(hashlib.sha256(text).digest(), dtype="<u8").tolist()
    return a, b, c, d


def drop_count(drop_rate: float, size: int) -> int:
    """floor(drop_rate * D), and never all of them."""
    return min(math.floor(checked_rate(drop_rate, "drop_rate") * size), size - 1)


class KeepMask:
    """Make one with draw, full, from_dense or from_scores. Immutable.

    >>> keep = KeepMask.draw([(3, 4), (5,)], drop_rate=0.5, seed=0, draw=7)
    >>> keep.count, keep.size
    (9, 17)
    """

    def __init__(
        self, layout: Layout, bits: torch.Tensor, *, count: int, drop_rate: float, recipe: tuple[int, int] | None = None
    ) -> None:
        self._layout = layout
        self._bits = bits
        self._count = count
        self._drop_rate = drop_rate
        self._recipe = recipe   # (seed, draw) of a drawn mask
        self._structure = "coordinate"
        self._groups: Groups | None = None                # of any other structure
        self._rows: list[RowSet | None] = []              # [P] of the same
        self._version = bits._version
        self._copies: dict[torch.device, torch.Tensor] = {}
        self._digest: str | None = None

    @classmethod
    def draw(
        cls, params_or_shapes: Iterable[Any], *, drop_rate: float, seed: int, draw: int, structure: str = "coordinate"
    ) -> KeepMask:
        """Exactly floor(drop_rate * D) coordinates dropped, uniformly, from a public seed. From parameters on a GPU
        the same bits are drawn there, and nothing but the key crosses the bus (masks of rows are made on the CPU).

        structure="row": whole output rows drop, each with probability drop_rate, as many as structure.py says; give
        (name, parameter) pairs, whose names tell modules apart. structure="mixed": so in groups of many rows only.

        >>> model = torch.nn.Linear(3, 4)
        >>> rows = KeepMask.draw(model.named_parameters(), drop_rate=0.5, seed=0, draw=0, structure="row")
        >>> rows.count, len(rows.kept_rows(0).kept)
        (8, 2)
        """
        if structure not in STRUCTURES:
            raise ValueError(f"structure: got {structure!r}; expected one of {', '.join(map(repr, STRUCTURES))}")
        items = list(params_or_shapes)
        layout = Layout.of(items)
        if structure != "coordinate":
            return cls._by_rows(layout, groups_of(items), structure, drop_rate, seed, draw, _device_of(items))
        dropped = drop_count(drop_rate, layout.size)
        bits = _draw(layout, dropped, mask_key(seed, draw), _device_of(items))
        return cls(layout, bits, count=layout.size - dropped, drop_rate=float(drop_rate), recipe=(seed, draw))

    @classmethod
    def _by_rows(
        cls, layout: Layout, groups: Groups, structure: str, drop_rate: float, seed: int, draw: int,
        device: torch.device | None = None,
    ) -> KeepMask:   # fmt: skip
        kept = draw_rows(layout, groups, checked_rate(drop_rate, "drop_rate"), mask_key(seed, draw), structure)
        bits = expanded(layout, kept)
        count = int(np.unpackbits(bits.numpy().view(np.uint8)).sum(dtype=np.int64))
        mask = cls(layout, bits.to(device), count=count, drop_rate=float(drop_rate), recipe=(seed, draw))
        mask._structure, mask._groups = structure, groups
        sets = {id(part): RowSet(part.nonzero().reshape(-1), len(part)) for part in kept if part.dim() == 1}
        mask._rows = [sets.get(id(part)) for part in kept]   # a group has one
        return mask

    @classmethod
    def full(cls, params_or_shapes: Iterable[Any]) -> KeepMask:
        """Everything kept: plain DP-SGD."""
        return cls.from_dense([torch.ones(shape, dtype=torch.bool) for shape in Layout.of(params_or_shapes).shapes])

    @classmethod
    def from_dense(cls, dense: Sequence[torch.Tensor]) -> KeepMask:
        """From bool tensors, one per parameter, True = kept. They must not depend on the data, unless only
        through what was already released with noise."""
        for i, part in enumerate(dense):
            if not isinstance(part, torch.Tensor) or part.dtype != torch.bool:
                got = part.dtype if isinstance(part, torch.Tensor) else type(part).__name__
                raise ValueError(f"dense: item {i} is {got}; expected a bool tensor, True where kept")
        layout = Layout.of(dense)
        count = sum(int(part.sum()) for part in dense)
        return cls(layout, reference.pack_bits(layout, dense), count=count, drop_rate=1 - count / layout.size)

    @classmethod
    def from_scores(cls, scores: Sequence[torch.Tensor], *, drop_rate: float) -> KeepMask:
        """Keeps the largest scores: drops exactly floor(drop_rate * D) of the smallest, the lower coordinate
        first among equals. Ranked sparsification (Algorithm 4) scores by |released noisy gradients|: released,
        because a mask made from raw gradients is a release of its own."""
        layout = Layout.of(scores)
        flat = torch.cat([part.detach().reshape(-1).to("cpu", torch.float64) for part in scores])
        if bool(flat.isnan().any()):
            raise ValueError("scores: contain NaN; expected comparable numbers")
        keep = torch.ones(layout.size, dtype=torch.bool)
        keep[torch.sort(flat, stable=True).indices[: drop_count(drop_rate, layout.size)]] = False
        parts = [part.view(shape) for part, shape in zip(keep.split(layout.sizes), layout.shapes, strict=True)]
        mask = cls.from_dense(parts)
        mask._drop_rate = float(drop_rate)
        return mask

    @classmethod
    def from_bits(cls, params_or_shapes: Iterable[Any], bits: torch.Tensor) -> KeepMask:
        """From packed bits, as `bits` holds them: a copy, so that nobody can write to them through the original."""
        layout = Layout.of(params_or_shapes)
        if bits.dtype != torch.int32 or bits.shape != (layout.padded // WORD,):
            raise ValueError(f"bits: got {bits.dtype} {list(bits.shape)}; expected int32 [{layout.padded // WORD}]")
        bits = bits.clone()
        words = bits.cpu().numpy()
        for start, size in zip(layout.starts, layout.sizes, strict=True):
            if size % WORD and (int(words[(start + size) // WORD]) & 0xFFFFFFFF) >> size % WORD:
                raise ValueError(f"bits: set beyond the end of the parameter that starts at padded coordinate {start}")
        count = int(np.unpackbits(words.view(np.uint8)).sum(dtype=np.int64))
        return cls(layout, bits, count=count, drop_rate=1 - count / layout.size)

    @property
    def structure(self) -> str:
        """Which coordinates drop together (structure.py): "coordinate" = each by itself (the paper's)."""
        return self._structure

    def kept_rows(self, index: int) -> RowSet | None:
        """The rows of one parameter, where the mask was drawn by rows and it has some."""
        return self._rows[index] if self._rows else None

    @property
    def layout(self) -> Layout:
        return self._layout

    @property
    def count(self) -> int:
        """K, the number kept."""
        return self._count

    @property
    def size(self) -> int:
        """D."""
        return self._layout.size

    @property
    def drop_rate(self) -> float:
        """As asked for; for from_dense and full, the share that is dropped."""
        return self._drop_rate

    @property
    def bits(self) -> torch.Tensor:
        """int32 [padded / 32]: bit b of word w is padded coordinate 32 w + b. Do not write to it."""
        return self._bits

    def bits_on(self, device: torch.device) -> torch.Tensor:
        """bits on that device, copied there once."""
        if self._bits.device == device:
            return self._bits
        if device not in self._copies:
            if capturing(device):
                raise RuntimeError(f"keep: bring the mask to {device} before capturing a CUDA graph: draw it from the "
                                   "parameters there, or take one ordinary step with it")   # fmt: skip
            self._copies[device] = self._bits.to(device)
        return self._copies[device]

    def unchanged(self) -> bool:
        """False if somebody wrote to `bits`, or to kept rows, in place: the mask is then not the one that was drawn."""
        written = any(rows is not None and rows.kept._version for rows in self._rows)
        return self._bits._version == self._version and not written

    def dense(self) -> list[torch.Tensor]:
        """Bool tensors, one per parameter, in its shape."""
        return reference.unpack_bits(self._layout, self._bits)

    def for_param(self, index: int) -> torch.Tensor:
        """The bool tensor of one parameter."""
        words = self._layout.starts[index] // WORD, -(-self._layout.sizes[index] // WORD)
        part = Layout((self._layout.shapes[index],))
        return reference.unpack_bits(part, self._bits[words[0] : words[0] + words[1]])[0]

    def indices(self) -> torch.Tensor:
        """int64 [K]: the kept coordinates, unpadded, ascending."""
        return torch.cat([part.reshape(-1) for part in self.dense()]).nonzero().reshape(-1)

    def digest(self) -> str:
        """16 hex digits over shapes and bits: equal on all ranks, or they do not hold the same mask."""
        if self._digest is None:
            text = repr(("coordinate", self._layout.shapes)).encode()   # of the bits, however they were drawn
            self._digest = hashlib.sha256(text + self._bits.cpu().numpy().astype("<i4").tobytes()).hexdigest()[:16]
        return self._digest

    def __eq__(self, other: object) -> bool:
        return isinstance(other, KeepMask) and self.digest() == other.digest()

    def __hash__(self) -> int:
        return hash(self.digest())

    def __reduce__(self) -> tuple[Any, ...]:
        if self._recipe is None:
            return KeepMask.from_dense, (self.dense(),)
        return _drawn, (self._layout.shapes, self._drop_rate, *self._recipe, self._groups, self._structure)

    def __repr__(self) -> str:
        origin = "" if self._recipe is None else f", seed={self._recipe[0]}, draw={self._recipe[1]}"
        by = {"coordinate": "", "row": " by rows"}.get(self.structure, f", {self.structure}")
        return f"KeepMask({self.count} of {self.size} kept{by}, drop_rate={self.drop_rate:g}{origin})"


def _draw(layout: Layout, dropped: int, key: tuple[int, int, int, int], device: torch.device) -> torch.Tensor:
    from dprs_kernels import backends  # a room above; only a GPU's parameters lead there

    if device.type != "cpu" and not backends.unavailable("triton", device):
        from dprs_kernels.backends import triton_mask

        return triton_mask.draw_mask(layout, dropped, key, device)[0]
    return draw_bits(layout, dropped, key)


def _device_of(items: Sequence[Any]) -> torch.device:
    """Of the first parameter; the CPU for shapes."""
    first = items[0][1] if items and isinstance(items[0], tuple) and len(items[0]) == 2 else items[0] if items else None
    return first.device if isinstance(first, torch.Tensor) else torch.device("cpu")


def _drawn(
    shapes: tuple[tuple[int, ...], ...], drop_rate: float, seed: int, draw: int, groups: Groups | None = None,
    structure: str = "row",
) -> KeepMask:   # fmt: skip
    if groups is not None:
        return KeepMask._by_rows(Layout.of(shapes), groups, structure, drop_rate, seed, draw)
    return KeepMask.draw(shapes, drop_rate=drop_rate, seed=seed, draw=draw)
