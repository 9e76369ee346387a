"""assembly: what a compiled kernel says about itself. Text in (SASS, PTX, amdgcn, TTIR), facts out; needs no triton.

The three assembly languages are read into one list of instructions, and one flow graph over it:
    loop        a natural loop: an edge back to an instruction that dominates it, and all that leads there.
                (A branch backwards alone is none: ptxas moves cold blocks behind the end, and they jump back.)
    body        what is reachable from the entry without calls, so neither the padding behind EXIT nor the
                subroutines for rare operands (denormals in fp64 division), which are counted apart
    place       file, line, column of the source: which tl.load a load instruction came from
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

Place = tuple[str, int, int]   # file name, line, column


@dataclass(frozen=True)
class Instruction:
    opcode: str
    targets: tuple[int, ...] = ()   # indices it may jump to
    falls: bool = True              # may go on to the next instruction
    calls: tuple[int, ...] = ()     # indices of subroutines
    uniform: bool = False           # executed once a warp: NVIDIA's U-instructions, AMD's scalar ones
    load: int = 0                   # bits that a lane loads from global memory
    place: Place | None = None

    @property
    def counted(self) -> bool:
        return self.opcode not in ("NOP", "s_nop")


@dataclass(frozen=True)
class SourceLoad:
    """A tl.load of gradients."""

    place: Place
    bits: int      # of an element as it is read: 32 for pairs of bf16
    loop: int      # which loop of the source it is in, 0 if in none


_SASS = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);", re.M)
_SASS_UNIFORM = re.compile(r"U|S2UR|CS2UR|LDCU|VOTEU")


def outer_lines(text: str) -> list[int]:
    """For each instruction in `nvdisasm -gi`, the line of the kernel itself: where a device function was called, not
    the line inside it. 0 where nothing is said."""
    lines, at = [], 0
    for line in text.splitlines():
        if place := re.search(r'//## File "[^"]+", line (\d+)( inlined at)?', line):
            at = at if place[2] else int(place[1])   # the chain of calls ends with the kernel
        elif _SASS.match(line):
            lines.append(at)
    return lines


def parse_sass(text: str) -> list[Instruction]:
    """The instructions of the one kernel in `cuobjdump -sass`."""
    found = _SASS.findall(text)
    at = {int(address, 16): i for i, (address, _, _, _) in enumerate(found)}
    code = []
    for _, guard, opcode, operands in found:
        base = opcode.partition(".")[0]
        numbers = re.findall(r"0x([0-9a-f]+)", operands)
        target = (at[int(numbers[-1], 16)],) if numbers and int(numbers[-1], 16) in at else ()
        jump = base in ("BRA", "BSSY")   # BSSY names where diverged lanes meet again: BSYNC may go there
        always = not guard and re.fullmatch(r"\s*0x[0-9a-f]+\s*", operands) is not None
        code.append(
            Instruction(
                opcode,
                targets=target if jump else (),
                falls=not (always if base == "BRA" else base in ("EXIT", "RET") and not guard),
                calls=target if base == "CALL" else (),
                uniform=_SASS_UNIFORM.match(base) is not None,
                load=_sass_bits(opcode) if base in ("LDG", "LDGSTS") else 0,
            )
        )
    return code


def _sass_bits(opcode: str) -> int:
    """8, 16, 32, 64, 128 or 256: LDG.E.EF.128 is 128 bits; LDG.E.LTC128B is 32, with a prefetch."""
    for part in opcode.split("."):
        if re.fullmatch(r"64|128|256", part):
            return int(part)
        if re.fullmatch(r"[US](8|16)", part):
            return int(part[1:])
    return 32


def local_bytes(code: Iterable[Instruction]) -> int:
    """Bytes of a lane's local memory that SASS stores and loads: spilled registers, or arrays on the stack."""
    return sum(_sass_bits(each.opcode) // 8 for each in code if each.opcode.startswith(("STL", "LDL")))


_FILE = re.compile(r'\s*\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]*)"')
_LOC = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)\s+(\d+)")
_PTX = re.compile(r"\s*(@!?%\w+\s+)?([a-z][\w.:]*)\s*([^;]*);")
_AMD = re.compile(r"\t([a-z]\w+)\s*([^;]*)")
_LABEL = re.compile(r"(\$?\.?L\w+):")
_Reader = Callable[[str], "tuple[Instruction, str] | None"]   # of a line: the instruction and the label it jumps to


def parse_ptx(text: str) -> list[Instruction]:
    """The instructions of the kernel (not of its .func subroutines)."""
    start = text.index(".entry")
    end = text.find("End function", start)
    return _parse_lines(text[start : end if end >= 0 else len(text)], _files(text), _ptx_instruction)


def parse_amdgcn(text: str) -> list[Instruction]:
    name = re.search(r"^\s*\.globl\s+(\S+)", text, re.M)
    start = text.index(f"\n{name[1]}:") if name else 0
    end = text.find(".Lfunc_end", start)
    return _parse_lines(text[start : end if end >= 0 else len(text)], _files(text), _amd_instruction)


def _files(text: str) -> dict[str, str]:
    return {number: path.rpartition("/")[2] for number, path in _FILE.findall(text)}


def _parse_lines(text: str, files: dict[str, str], instruction: _Reader) -> list[Instruction]:
    code: list[Instruction] = []
    jumps: list[tuple[int, str]] = []
    labels: dict[str, int] = {}
    place: Place | None = None
    asm = False
    for line in text.splitlines():
        if "begin inline asm" in line:
            asm = True    # LLVM adds 1 to the line number for each line of inline assembly: the first is the true one
        elif "end inline asm" in line:
            asm = False
        elif label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif loc := _LOC.match(line):
            if not asm:
                place = (files.get(loc[1], "?"), int(loc[2]), int(loc[3]))
        elif parsed := instruction(line):
            each, label_name = parsed
            if label_name:
                jumps.append((len(code), label_name))
            code.append(replace(each, place=place) if each.load else each)
    for i, name in jumps:
        code[i] = replace(code[i], targets=(labels[name],) if name in labels else ())
    return code


def _ptx_instruction(line: str) -> tuple[Instruction, str] | None:
    m = _PTX.match(line)
    if not m or line.lstrip().startswith("."):
        return None
    guard, opcode, operands = m.groups()
    parts = opcode.split(".")
    label = operands.split()[-1] if parts[0] == "bra" else ""
    bits = 0
    if parts[0] == "ld" and "global" in parts:
        count = next((int(p[1:]) for p in parts if re.fullmatch(r"v\d", p)), 1)
        bits = count * int(re.sub(r"\D", "", parts[-1]))
    elif parts[:2] == ["cp", "async"] and "global" in opcode and "bulk" not in parts:
        bits = 8 * int(operands.split(",")[2], 0)
    return Instruction(opcode, falls=bool(guard) or parts[0] not in ("bra", "ret", "exit", "trap"), load=bits), label


_AMD_BITS = {"byte": 8, "ubyte": 8, "sbyte": 8, "short": 16, "ushort": 16, "sshort": 16}


def _amd_instruction(line: str) -> tuple[Instruction, str] | None:
    m = _AMD.match(line)
    if not m:
        return None
    opcode, operands = m.groups()
    label = operands.strip() if opcode.startswith(("s_branch", "s_cbranch")) else ""
    bits = 0
    if load := re.match(r"(?:global|buffer|flat)_load_(?:lds_)?(dword|[us]?byte|[us]?short)(?:x(\d))?", opcode):
        bits = _AMD_BITS.get(load[1], 32) * int(load[2] or 1)
    ends = opcode in ("s_branch", "s_endpgm", "s_setpc_b64")
    return Instruction(opcode, falls=not ends, uniform=opcode.startswith("s_"), load=bits), label


def amd_metadata(text: str) -> dict[str, int]:
    """The numbers of the kernel's metadata: vgpr_count, vgpr_spill_count, private_segment_fixed_size, ..."""
    return {name: int(value) for name, value in re.findall(r"^\s+(?:- )?\.(\w+):\s+(\d+)$", text, re.M)}


def reachable(code: Sequence[Instruction], *, without: int = -1, calls: bool = False) -> set[int]:
    """Indices reachable from the first instruction, by no way through `without`."""
    todo, seen = [0] if code and without != 0 else [], set[int]()
    while todo:
        i = todo.pop()
        if i in seen or i == without or i >= len(code):
            continue
        seen.add(i)
        todo.extend(code[i].targets)
        todo.extend(code[i].calls if calls else ())
        if code[i].falls:
            todo.append(i + 1)
    return seen


def loops(code: Sequence[Instruction]) -> list[frozenset[int]]:
    """Bodies of the natural loops, in order of their first instruction."""
    body = reachable(code)
    before: dict[int, set[int]] = {}
    for i in body:
        for j in (*code[i].targets, *((i + 1,) if code[i].falls else ())):
            before.setdefault(j, set()).add(i)
    found = []
    for head in sorted(i for i in body if max(before.get(i, {-1})) >= i or len(before.get(i, ())) > 1):
        back = before[head] - reachable(code, without=head)   # what comes here only from here: head dominates it
        if back:
            members, todo = {head}, list(back)
            while todo:
                i = todo.pop()
                if i not in members:
                    members.add(i)
                    todo.extend(before.get(i, ()))
            found.append(frozenset(members))
    return found


def widths(code: Sequence[Instruction], indices: Iterable[int] | None = None) -> Counter[int]:
    """Bits of a load -> how many load instructions."""
    chosen = code if indices is None else [code[i] for i in indices]
    return Counter(each.load for each in chosen if each.load)


def gradient_loads(ttir: str, argument: str = "") -> list[SourceLoad]:
    """The loads through `argument`; without a name, those through addresses that come out of a table.

    The pointer of each tt.load is followed back to the kernel argument or the tt.int_to_ptr it was made from.
    """
    places = dict(re.findall(r"^(#loc\d*) = (.*)$", ttir, re.M))
    made: dict[str, str] = {}   # value -> the value its pointer came from, or an int_to_ptr's own "table"
    nest: list[int] = []        # of each open brace: number of its loop, 0 if it is none
    count, found = 0, []
    for line in ttir.splitlines():
        text = line.strip()
        if text.startswith("}"):
            nest.pop()
        if text.endswith("{"):
            is_loop = "scf.for" in text or "scf.while" in text or text.startswith("} do")
            count += is_loop
            nest.append(count if is_loop else 0)
        carried = re.findall(r"(%\w+) = (%[\w#]+)", text[text.find("iter_args(") :]) if "iter_args(" in text else []
        made.update(carried)
        m = re.match(r'(%\w+)(?::\d+)? = "?([\w.]+)"?\(?\s*(%[\w#]+)?', text)
        if not m:
            continue
        result, op, operand = m.groups()
        if op == "scf.for":
            made.update({result if len(carried) == 1 else f"{result}#{i}": init for i, (_, init) in enumerate(carried)})
        elif op == "tt.int_to_ptr":
            made[result] = "table"
        elif operand and (op in ("tt.addptr", "tt.splat") or "tt.ptr<" in text) and op != "tt.load":
            made[result] = operand
        elif op == "tt.load" and operand and (bits := re.search(r"!tt\.ptr<[a-z]+(\d+)>", text)):
            root = operand
            while root in made:
                root = made[root]
            where = re.search(r"loc\((#loc\d*|\".*)\)$", text)
            if root == (f"%{argument}" if argument else "table") and where:
                found.append(SourceLoad(_place(where[1], places), int(bits[1]), max(nest, default=0)))
    return found


def _place(text: str, places: dict[str, str]) -> Place:
    """The innermost place: of callsite(a at b) it is a."""
    while not (m := re.search(r'"([^"]*)":(\d+):(\d+)', text)):
        name = re.search(r"#loc\d*", text)
        if not name or name[0] not in places:
            return ("?", 0, 0)
        text = places[name[0]]
    return (m[1].rpartition("/")[2], int(m[2]), int(m[3]))


def ordering(text: str) -> tuple[int, int, int]:
    """Releases, acquires and barriers, from PTX or amdgcn (where cache write-backs and invalidations are those)."""
    if ".entry" not in text:
        release, acquire, barriers = (
            len(re.findall(rf"^\s+{op}\b", text, re.M)) for op in ("buffer_wbl2", "buffer_inv", "s_barrier")
        )
        return release, acquire, barriers
    opcodes = [m[2] for m in map(_PTX.match, text.splitlines()) if m]
    both = sum(".acq_rel" in o or o.startswith(("fence.sc", "membar.gl", "membar.sys")) for o in opcodes)
    release, acquire = (sum(f".{word}" in o and "acq_rel" not in o for o in opcodes) for word in ("release", "acquire"))
    barriers = sum(o.startswith(("bar.sync", "barrier.sync", "barrier.cta.sync")) for o in opcodes)
    return release + both, acquire + both, barriers


def approximations(text: str) -> tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...]]:
    """Opcodes, sorted: those of approximate results, first guesses that Newton steps refine, those that flush to zero.

    A guess is rcp or rsqrt in fp64, which exists only as such (libdevice's fp64 log begins with one); on AMD every
    v_rcp, v_rsq and v_sqrt, since exact division and root begin with one too. A flush is .ftz on anything else.
    """
    approximate, guesses, flushes = set[str](), set[str](), set[str]()
    if ".entry" not in text:
        for opcode in re.findall(r"^\t(v_(?:exp|log|sin|cos|rcp|rsq|sqrt)_\w+)", text, re.M):
            (approximate if re.match(r"v_(exp|log|sin|cos)", opcode) else guesses).add(opcode)
        return tuple(sorted(approximate)), tuple(sorted(guesses)), ()
    for m in filter(None, map(_PTX.match, text.splitlines())):
        parts = m[2].split(".")
        if parts[0] in ("rcp", "rsqrt") and "approx" in parts and parts[-1] == "f64":
            guesses.add(m[2])
        elif "approx" in parts or parts[0] in ("ex2", "lg2", "sin", "cos", "tanh") or parts[:2] == ["div", "full"]:
            approximate.add(m[2])
        elif "ftz" in parts:
            flushes.add(m[2])
    return tuple(sorted(approximate)), tuple(sorted(guesses)), tuple(sorted(flushes))
