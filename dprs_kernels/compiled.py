"""compiled: the Triton kernels, built ahead of time for GPUs that need not be here, and read back.

    inspect(shipped, "sm_90").registers                 from the binary
    print(table(shipped_launches(), "sm_90"))           compiled and modelled, not timed on a GPU

Instructions per element are an estimate from the binary:
    total        = instructions outside main loops, once (both arms of every branch, however rarely taken)
                 + instructions of a main loop * its trips
    main loop    for a launch that loads gradients: a loop that holds such loads and no smaller one that does; as
                 many as the source has (where a compiler split one into an unrolled one and a rest, the rest counts
                 once). Otherwise, if loop_elements > 0, the loop with the most instructions.
    trips        = elements / elements of one trip: what the gradient loads of the body bring in, so that a compiler's
                 unrolling is seen; without such loads, loop_elements
A loop around a main loop counts outer_trips times, any other (a spin on a flag) once: that is not in the binary.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from inspect import getsourcelines
from typing import Any

from dprs_kernels import assembly

Body = frozenset[int]   # indices of a loop's instructions
TARGETS = {   # name -> Triton's backend, architecture, lanes of a warp
    "sm_80": ("cuda", 80, 32),
    "sm_90": ("cuda", 90, 32),
    "sm_100": ("cuda", 100, 32),
    "gfx942": ("hip", "gfx942", 64),
}


@dataclass(frozen=True)
class Device:
    """What a bound assumes of a GPU."""

    target: str        # whose code runs on it
    bandwidth: float   # bytes per second, DRAM, the data sheet's figure
    processors: int    # SMs
    clock: float       # Hz, boost
    schedulers: int = 4   # per SM, one warp instruction per clock each


DEVICES = {
    "A100-80": Device("sm_80", 2.04e12, 108, 1.41e9),
    "H100 SXM": Device("sm_90", 3.35e12, 132, 1.755e9),
}


@dataclass(frozen=True)
class Shipped:
    """A kernel as it is launched."""

    name: str                   # "norms fp32"
    kernel: Any                 # what @triton.jit returned
    signature: dict[str, str]   # the arguments that are no constexpr: "*fp64", "i32", ...
    constants: dict[str, Any]   # the constexpr ones; DTYPE, if there, is the gradients' type
    warps: int
    loop_elements: int          # elements of G of one trip of a program's main loop; 0 without a loop
    elements: int               # elements that a whole program handles
    bytes_per_element: float    # DRAM bytes, for the bound
    kind: str                   # "gradient": all loads of G must be 128 bits wide; "noise"; "other"
    max_registers: int = 0      # asked of NVIDIA's compiler; 0: whatever it takes
    gradient: str = ""          # the argument that points to G; "": its addresses come out of a table
    outer_trips: float = 1.0    # of a loop around the main loop, if there is one
    rare: tuple[str, ...] = ()  # calls in the kernel whose instructions do not count: one program of many makes them
    twice: str = ""             # the line up to which instructions count twice: programs of either phase run them

    def __post_init__(self) -> None:
        if self.kind not in ("gradient", "noise", "other"):
            raise ValueError(f"{self.name}: kind is {self.kind!r}, expected 'gradient', 'noise' or 'other'")
        if self.elements < 1 or self.loop_elements < 0:
            raise ValueError(f"{self.name}: elements must be positive and loop_elements at least 0")


@dataclass(frozen=True)
class Loop:
    instructions: int   # of one trip, uniform ones included
    elements: int       # of one trip
    trips: float


@dataclass(frozen=True)
class Report:
    shipped: Shipped
    target: str
    threads: int
    registers: int                         # per thread; on gfx942 VGPRs
    spills: int                            # bytes stored to and loaded from local memory; on gfx942 VGPRs spilled
    stack: int                             # bytes per thread
    shared: int                            # bytes per program
    loads: Mapping[int, int]               # bits of a global load -> instructions
    gradient_loads: Mapping[int, int]      # the same of gradients alone (on NVIDIA as in the PTX)
    gradient_bits: int                     # of one element of G, 0 if no load of gradients was found
    instructions: float                    # lane-instructions per element, without the uniform ones
    uniform: float                         # instructions executed once a warp, in the same unit: they take a slot too
    loops: tuple[Loop, ...]                # the main ones
    subroutines: int                       # instructions reached by calls only, for rare operands; not counted above
    releases: int
    acquires: int
    barriers: int
    approximate: tuple[str, ...]           # see assembly.approximations
    guesses: tuple[str, ...]
    flushes: tuple[str, ...]

    @property
    def slots(self) -> float:
        """Issue slots per element, times the lanes of a warp."""
        return self.instructions + self.uniform


@dataclass(frozen=True)
class Bound:
    """Milliseconds per 1e9 elements; `ms`, the larger, is the bound."""

    dram: float
    issue: float

    @property
    def ms(self) -> float:
        return max(self.dram, self.issue)


def build(shipped: Shipped, target: str) -> Any:
    """Triton's compiled kernel: .asm holds ttir, ptx and cubin, or amdgcn and hsaco. Once a process."""
    if target not in TARGETS:
        raise ValueError(f"target {target!r} is not known; available: {', '.join(TARGETS)}")
    if triton().knobs.runtime.interpret:
        raise ValueError("TRITON_INTERPRET is set: a process either interprets or compiles; unset it to compile")
    given = {**shipped.signature, **shipped.constants}
    if wrong := sorted(set(given) ^ set(shipped.kernel.arg_names)):
        raise ValueError(f"{shipped.name}: arguments missing from the kernel or from signature and constants: {wrong}")
    return _build(
        shipped.kernel, tuple(shipped.signature.items()), tuple(shipped.constants.items()), shipped.warps, target,
        shipped.max_registers,
    )   # fmt: skip


@cache
def _build(
    kernel: Any, signature: tuple[tuple[str, str], ...], constants: tuple[tuple[str, Any], ...], warps: int,
    target: str, registers: int,
) -> Any:   # fmt: skip
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    types = {name: dict(signature).get(name, "constexpr") for name in kernel.arg_names}
    # Tensors are allocated at multiples of 16 bytes at least; without the hint all loads are 32 bits wide.
    hints = {(i,): [["tt.divisibility", 16]] for i, t in enumerate(types.values()) if t.startswith("*")}
    source = ASTSource(kernel, types, constexprs=dict(constants), attrs=hints)
    options: dict[str, Any] = dict(num_warps=warps, enable_fp_fusion=False)   # a product is rounded before it is added
    if registers and target.startswith("sm"):
        options["maxnreg"] = registers
    return triton().compile(source, target=GPUTarget(*TARGETS[target]), options=options)


def triton() -> Any:
    try:
        import triton
    except ImportError as error:
        raise ImportError(f'the GPU kernels need triton ({error}): pip install "dprs_kernels[triton]"') from error
    return triton


def inspect(shipped: Shipped, target: str) -> Report:
    """Registers, memory, load widths, instructions, fences and approximations of one launch on one target."""
    return read(shipped, target, build(shipped, target))


def read(shipped: Shipped, target: str, built: Any) -> Report:
    """The report of a kernel that was compiled by other means."""
    asm = built.asm
    if "cubin" in asm:
        text = asm["ptx"]
        sass, used = _dump(asm["cubin"])
        code, located = assembly.parse_sass(sass), assembly.parse_ptx(text)
        registers, stack, spills = used["REG"], used["STACK"], assembly.local_bytes(code)
    else:
        text = asm["amdgcn"]
        code = located = assembly.parse_amdgcn(text)
        used = assembly.amd_metadata(text)
        registers, spills, stack = used["vgpr_count"], used["vgpr_spill_count"], used["private_segment_fixed_size"]
    sources = assembly.gradient_loads(asm["ttir"], shipped.gradient)
    dtype = shipped.constants.get("DTYPE")   # bf16 may be read as pairs in int32
    bits = 0 if not sources else sources[0].bits if dtype is None else dtype.primitive_bitwidth
    places = {each.place for each in sources}
    of_gradients = {i for i in assembly.reachable(located) if located[i].load and located[i].place in places}
    threads = shipped.warps * TARGETS[target][2]

    body = assembly.reachable(code)
    loops = assembly.loops(code)
    main: list[tuple[Body, int]] = []
    if bits:
        main = _gradient_loops(code, loops, located, of_gradients, threads, bits)
        main = main[: len({each.loop for each in sources if each.loop})]
    elif loops and shipped.loop_elements:
        main = [(max(loops, key=len), shipped.loop_elements)]
    around = [loop for loop in loops if any(inner < loop for inner, _ in main)]
    trips = {i: shipped.outer_trips for loop in around for i in loop}
    trips.update({i: shipped.elements / elements for loop, elements in main for i in loop})
    weights = _weights(shipped, asm["cubin"]) if "cubin" in asm and (shipped.rare or shipped.twice) else {}
    total = {False: 0.0, True: 0.0}   # by uniform
    for i in body:
        total[code[i].uniform] += code[i].counted * trips.get(i, 1.0) * weights.get(i, 1.0)
    releases, acquires, barriers = assembly.ordering(text)
    approximate, guesses, flushes = assembly.approximations(text)
    return Report(
        shipped=shipped, target=target, threads=threads, registers=registers, spills=spills, stack=stack,
        shared=built.metadata.shared,
        loads=assembly.widths(code, body), gradient_loads=assembly.widths(located, of_gradients), gradient_bits=bits,
        instructions=total[False] * threads / shipped.elements, uniform=total[True] * threads / shipped.elements,
        loops=tuple(Loop(sum(code[i].counted for i in loop), n, shipped.elements / n) for loop, n in main),
        subroutines=len(assembly.reachable(code, calls=True) - body),
        releases=releases, acquires=acquires, barriers=barriers,
        approximate=approximate, guesses=guesses, flushes=flushes,
    )   # fmt: skip


def _gradient_loops(
    code: Sequence[assembly.Instruction], loops: Sequence[Body],
    located: Sequence[assembly.Instruction], of_gradients: set[int], threads: int, bits: int,
) -> list[tuple[Body, int]]:   # fmt: skip
    """The innermost loops of `code` that load gradients, with the elements of one trip, largest first.

    SASS does not say where a load came from, PTX (`located`) does. So each loop of SASS is matched to one of the PTX by
    its loads of the gradients' width: in order, or by their number if ptxas split loops. It holds as many gradient
    loads, times the factor by which ptxas unrolled it (9 loads against 10 are one trip: two equal ones were merged).
    """
    width = max(assembly.widths(located, of_gradients), default=0)
    written = [   # loads of this width, those of gradients among them
        (assembly.widths(located, loop)[width], assembly.widths(located, of_gradients & loop)[width])
        for loop in _innermost(located, assembly.loops(located), width)
    ]
    found = _innermost(code, loops, width)
    sizes = {}
    for i, loop in enumerate(found):
        n = assembly.widths(code, loop)[width]
        candidates = written if len(written) != len(found) else written[i : i + 1]
        every, theirs = min(candidates, key=lambda w: abs(n / w[0] - max(1, round(n / w[0]))), default=(1, 0))
        if theirs:
            sizes[loop] = max(1, round(n / every)) * theirs * threads * width // bits
    return sorted(sizes.items(), key=lambda item: -item[1])


def _innermost(code: Sequence[assembly.Instruction], loops: Sequence[Body], width: int) -> list[Body]:
    """Loops with loads of this width, and without a smaller loop that has them."""
    having = [loop for loop in loops if width and assembly.widths(code, loop)[width]]
    return [loop for loop in having if not any(inner < loop for inner in having)]


def _weights(shipped: Shipped, cubin: bytes) -> dict[int, float]:
    """How often each instruction counts, by its index, from the line of the kernel that it came from."""
    lines, first = getsourcelines(shipped.kernel.fn)
    split = next((i for i, line in enumerate(lines) if shipped.twice and shipped.twice in line), 0)
    weight = [2.0 if 0 < i < split else 1.0 for i in range(len(lines))]
    inside = False   # a rare call and what follows it up to its closing parenthesis
    for i, line in enumerate(lines):
        inside = inside or any(call in line for call in shipped.rare)
        if inside:
            weight[i] = 0.0
            inside = not line.split("#")[0].rstrip().endswith(")")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton().knobs.nvidia.nvdisasm.path, "-gi", "-c", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    places = enumerate(assembly.outer_lines(text))
    return {i: weight[line - first] for i, line in places if 0 <= line - first < len(lines)}


@cache
def _dump(cubin: bytes) -> tuple[str, dict[str, int]]:
    """SASS and resource usage (REG, STACK, ...) of a cubin with one kernel. 0.5 s"""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton().knobs.nvidia.cuobjdump.path, "-sass", "-res-usage", file.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return text, {name: int(value) for name, value in re.findall(r"\b(REG|STACK):(\d+)", text)}


def roofline(report: Report, device: str) -> Bound:
    """DRAM time and issue time on `device`, whose own code the report should be of.

    Bounds, not predictions: latency, waiting, launches and units slower than one instruction a clock (fp64,
    conversions, shared memory) are left out. The issue time takes every arm of every branch: where a rare arm is long
    (noise, added by the last group only), it is too high, and a variant without that arm gives the bound.
    """
    if device not in DEVICES:
        raise ValueError(f"device {device!r} is not known; available: {', '.join(DEVICES)}")
    d = DEVICES[device]
    lanes = TARGETS[report.target][2]
    return Bound(
        dram=1e12 * report.shipped.bytes_per_element / d.bandwidth,
        issue=1e12 * report.slots / (lanes * d.processors * d.schedulers * d.clock),
    )


def table(launches: Iterable[Shipped], target: str) -> str:
    """Markdown: what the binaries for `target` need, and the bounds of each launch on A100 and H100."""
    rows = [("kernel", "config", "registers", "spills", "stack", "shared", "loads (bits x count)",
             "instr/element (uniform)", "bytes/element", *(f"bound {name}" for name in DEVICES))]   # fmt: skip
    for shipped in launches:
        report = inspect(shipped, target)
        loads = ", ".join(f"{bits} x {count}" for bits, count in sorted(report.loads.items(), reverse=True))
        numbers = [str(n) for n in (report.registers, report.spills, report.stack, report.shared)]
        bounds = [roofline(inspect(shipped, device.target), name) for name, device in DEVICES.items()]
        limits = [f"{bound.ms:.3f} {'DRAM' if bound.dram >= bound.issue else 'issue'}" for bound in bounds]
        rows.append(
            (shipped.name, _config(shipped), *numbers, loads or "none", f"{report.slots:.2f} ({report.uniform:.2f})",
             f"{shipped.bytes_per_element:.2f}", *limits)
        )   # fmt: skip
    width = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    lines = ["| " + " | ".join(cell.ljust(w) for cell, w in zip(row, width, strict=True)) + " |" for row in rows]
    lines.insert(1, "|" + "|".join("-" * (w + 2) for w in width) + "|")
    return "\n".join([*_header(target), "", *lines])


def _header(target: str) -> list[str]:
    devices = "; ".join(
        f"{name}: {d.bandwidth / 1e12:g} TB/s, {d.processors} SMs x {d.schedulers} schedulers at "
        f"{d.clock / 1e9:g} GHz, its own code ({d.target})"
        for name, d in DEVICES.items()
    )
    spills = "VGPRs" if target.startswith("gfx") else "bytes of local memory traffic"
    return [
        f"{target}: compiled and modelled, not timed on a GPU.",
        f"From the binary: registers, spills ({spills}) and stack (bytes) a thread, shared (bytes), global loads.",
        "Modelled: lane-instructions per element, from loop bodies and trip counts, both arms of every branch taken, "
        "but for those that one program of many takes (B: a group's factors, a tile's noise). B: both phases.",
        "Bounds: ms per 1e9 elements, the larger of DRAM time and issue time, at full bandwidth and one instruction a "
        f"clock and scheduler. {devices}.",
    ]


def _config(shipped: Shipped) -> str:
    words = []
    for name, value in shipped.constants.items():
        if isinstance(value, bool):
            words += [name] if value else []
        else:
            words.append(str(value) if name == "DTYPE" else f"{name}={value}")
    return " ".join([*words, f"{shipped.warps} warps"])
