"""Every load, store and atomic that interpreted kernels ask for, in program order, and which tensor it fell into."""

from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

LOAD, STORE, ATOMIC = "load", "store", "atomic"
OPERATIONS = {   # methods of the interpreter's builder: kind, position of the pointers, of the lanes' mask
    "create_masked_load": (LOAD, 0, 1), "create_masked_store": (STORE, 0, 2),
    "create_atomic_rmw": (ATOMIC, 1, 3), "create_atomic_cas": (ATOMIC, 0, None),
}   # fmt: skip


@contextmanager
def hooked(before=None, after=None):
    """Calls before(kind, handle of the pointers, active) and after(.. , result) around each memory operation. An
    unmasked load is a masked one in the interpreter, and so is an atomic one."""
    from triton.runtime.interpreter import interpreter_builder as builder

    def wrap(name, kind, pointers, mask):
        method = getattr(builder, name)

        def call(*args):
            handle = args[pointers]
            active = np.broadcast_to(True if mask is None else args[mask].data, handle.data.shape)
            if before:
                before(kind, handle, active)
            result = method(*args)
            if after:
                after(kind, handle, active, result)
            return result

        setattr(builder, name, call)

    for name, (kind, pointers, mask) in OPERATIONS.items():
        wrap(name, kind, pointers, mask)
    try:
        yield
    finally:
        for name in OPERATIONS:
            delattr(builder, name)   # the class's method shows again


@dataclass(frozen=True)
class Range:
    """Bytes begin .. end - 1 of a tensor; held: its element type in Triton's words, None where kernels may choose."""

    name: str
    begin: int
    end: int
    held: str | None = None


@dataclass(frozen=True)
class Access:
    """One operation of one program. addresses: of its active lanes, `size` bytes each. owner: of each lane, an index
    into Log.names, -1 if no tensor holds it wholly."""

    kind: str
    kernel: str
    program: tuple[int, ...]
    addresses: np.ndarray
    size: int
    owner: np.ndarray


@dataclass
class Log:
    known: list[Range]                                           # gradients, outputs, scratch: for all launches
    accesses: list[Access] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    def requested(self, *kinds):
        """Bytes by name of the tensor; all kinds if none is given."""
        total = Counter()
        for access in self.accesses:
            if not kinds or access.kind in kinds:
                for owner, lanes in zip(*np.unique(access.owner, return_counts=True), strict=True):
                    total["outside" if owner < 0 else self.names[owner]] += int(lanes) * access.size
        return total

    def outside(self):
        """A line for each access with lanes outside every tensor of its launch."""
        return [
            f"{access.kernel} {access.program}: {access.kind} of {access.size} bytes by {bad.size} lanes at {bad[0]:#x}"
            for access in self.accesses
            if (bad := access.addresses[access.owner < 0]).size
        ]

    def of(self, *names):
        """(name, addresses, access) of the accesses to these tensors, in program order."""
        for access in self.accesses:
            for name in names:
                if name in self.names and (mine := access.owner == self.names.index(name)).any():
                    yield name, access.addresses[mine], access


def rows(name, tensors):
    """A range for each sample of each gradient: [N, ...] with the samples anywhere, each contiguous."""
    found = []
    for tensor in tensors:
        size = tensor[0].numel() * tensor.element_size() if tensor.shape[0] else 0
        begins = {tensor.data_ptr() + i * tensor.stride(0) * tensor.element_size() for i in range(tensor.shape[0])}
        found += [Range(name, begin, begin + size) for begin in begins if size]
    return found


def whole(name, tensors):
    return [Range(name, t.data_ptr(), t.data_ptr() + t.numel() * t.element_size()) for t in tensors if t.numel()]


def _arguments(names, args, kwargs):
    """Ranges of a launch's tensor arguments, by the kernel's names. Pointers that it promises not to follow hold a
    placeholder and are left out: following one is an access outside."""
    bound = {**dict(zip(names, args, strict=False)), **kwargs}
    unused = set() if bound.get("HAS_KEEP", True) else {"bits_ptr"}
    if not bound.get("RELEASE", True):
        unused |= {"out_ptr", "release_ptr", "key_ptr", "step_ptr"}
    if not bound.get("HAS_NOISE", True):
        unused |= {"key_ptr", "step_ptr"}
    return [
        Range(name.removesuffix("_ptr"), arg.data_ptr(), arg.data_ptr() + arg.numel() * arg.element_size(),
              str(_element_type(arg)))
        for name, arg in bound.items()
        if hasattr(arg, "data_ptr") and arg.numel() and name not in unused
    ]   # fmt: skip


def _element_type(tensor):
    import triton.language as tl

    return getattr(tl, str(tensor.dtype).removeprefix("torch."))


@contextmanager
def recorded(known):
    """The Log of all launches inside. known: ranges that kernels reach through addresses in tables. Arguments are
    known by themselves, for their launch only; the staging kernel's scratch also for the launches after it."""
    from triton.runtime import interpreter

    log, current = Log(list(known)), {}
    launch = interpreter.GridExecutor.__call__

    def call(self, *args, **kwargs):
        mine = _arguments(self.arg_names, args, kwargs)
        ranges = sorted([*mine, *log.known], key=lambda r: r.begin)
        assert all(a.end <= b.begin for a, b in pairwise(ranges)), "a byte must have one owner"
        log.names += sorted({r.name for r in ranges} - set(log.names))
        current.update(
            kernel=self.fn.__name__, begins=np.array([r.begin for r in ranges]), ends=np.array([r.end for r in ranges]),
            names=np.array([log.names.index(r.name) for r in ranges]), held=[r.held for r in ranges],
        )   # fmt: skip
        launch(self, *args, **kwargs)
        log.known += [Range(r.name, r.begin, r.end) for r in mine if r.name == "scratch"]

    def record(kind, handle, active):
        addresses = np.asarray(handle.data)[active].astype(np.int64)
        size, held = handle.get_element_ty().primitive_bitwidth // 8, str(handle.get_element_ty())
        at = np.searchsorted(current["begins"], addresses, side="right") - 1
        fits = np.array([expected in (None, held) for expected in current["held"]])
        inside = (at >= 0) & (addresses + size <= current["ends"][at]) & fits[at]
        owner = np.where(inside, current["names"][at], -1)
        program = interpreter.interpreter_builder.grid_idx
        log.accesses.append(Access(kind, current["kernel"], program, addresses, size, owner))

    interpreter.GridExecutor.__call__ = call
    try:
        with hooked(before=record):
            yield log
    finally:
        interpreter.GridExecutor.__call__ = launch
