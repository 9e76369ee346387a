"""The compiled GPU kernels: every shipped launch, built for each target and read; and the reading itself.

No GPU takes part. A process either interprets or compiles, so this file runs where TRITON_INTERPRET is not set.
"""

import functools
import importlib.util
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from dprs_kernels import assembly, compiled
from dprs_kernels.backends.shipped import shipped, unusual
from dprs_kernels.compiled import DEVICES, TARGETS, Shipped, build, inspect, read, roofline, table

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET is set: this process interprets", allow_module_level=True)
tl = triton.language


LAUNCHES = shipped()


def each(wanted=lambda launch, target: True):
    """Every launch on every target, or those that a test is about."""
    pairs = [(i, launch, target) for i, launch in enumerate(LAUNCHES) for target in TARGETS if wanted(launch, target)]
    return pytest.mark.parametrize(
        ("launch", "target"), [pytest.param(i, target, id=f"{launch.name}-{target}") for i, launch, target in pairs]
    )


each_launch = each()


@functools.cache
def report_of(launch, target):
    return inspect(LAUNCHES[launch], target)


@each_launch
def test_a_shipped_launch_compiles_and_keeps_everything_in_registers(launch, target):
    report = report_of(launch, target)
    assert report.spills == 0
    if target != "gfx942":
        assert report.stack == 0


@each_launch
def test_a_shipped_launch_leaves_half_the_register_file_to_others(launch, target):
    report = report_of(launch, target)
    lanes = TARGETS[target][2]   # AMD's file is twice as large: 128 registers for 512 threads
    assert report.registers <= 255
    assert report.registers * report.threads <= 128 * 256 * lanes // 32


@each(lambda launch, _: launch.kind == "gradient")
def test_all_loads_of_gradients_are_128_bits_wide(launch, target):
    report = report_of(launch, target)
    assert report.gradient_loads, "no load of gradients was found"
    assert min(report.gradient_loads) >= 128
    assert report.loads[128] >= report.gradient_loads[128]   # the binary has what the PTX asks for


@each_launch
def test_loops_handle_what_the_launch_says(launch, target):
    """The elements of a trip as read from the binary: loop_elements, or a multiple where a compiler unrolled."""
    shipped, report = LAUNCHES[launch], report_of(launch, target)
    for loop in report.loops:
        assert shipped.loop_elements > 0
        assert loop.elements % shipped.loop_elements == 0


@each(lambda launch, _: launch.kind == "noise" or "noised" in launch.name)
def test_noise_has_no_approximate_instruction(launch, target):
    report = report_of(launch, target)
    assert report.approximate == ()
    assert report.flushes == ()


BUDGETS = {   # lane-instructions per value (noise: per coordinate), on the target that the config is for
    "A norms": 6.6,
    "A sums fp32": 4.7,
    "A sums": 5.1,    # 16-bit values: one conversion more each
    "B": 26,
    "release": 250,
}


def has_budget(launch, target):
    """A config for a device on that device's target; the rest on both."""
    device = {"sm_80": "A100", "sm_90": "H100"}.get(target)
    return device is not None and launch.name != "A factors" and (device in launch.name or launch.name[0] != "B")


@each(has_budget)
def test_instructions_stay_within_the_budget(launch, target):
    """At DRAM speed an A100 has 41 for fp32, an H100 45: all are below but the noise, which is made once a step."""
    limit = next(limit for prefix, limit in BUDGETS.items() if LAUNCHES[launch].name.startswith(prefix))
    assert report_of(launch, target).instructions <= limit


@each(lambda launch, _: launch.name.startswith("B"))
def test_the_one_pass_kernel_orders_its_memory(launch, target):
    """The counters and the flag are raised with a release; counters, flag and both polls of it read with an acquire."""
    report = report_of(launch, target)
    noised = "noised" in LAUNCHES[launch].name
    assert report.releases >= 2 + noised
    assert report.acquires >= 3 + noised


def unordered(ptx):
    """Releases that follow a write of other threads without a barrier between, and reads that follow an acquire so."""
    found, since = [], "bar"   # since: the last of barrier, write, acquire
    for line in ptx.splitlines():
        if "bar.sync" in line:
            since = "bar"
        elif re.search(r"atom\S*\.(release|acq_rel)", line):
            found += [line.strip()] if since == "write" else []
            since = "acquire" if "acq_rel" in line else since
        elif re.search(r"(atom|ld)\S*\.acquire", line):
            since = "acquire"
        elif re.search(r"st\.global|red\.|atom\S*relaxed", line):
            since = "write"
        elif "ld.global" in line and since == "acquire":
            found.append(line.strip())
    return found


def mutant(tmp_path, old, new):
    """A copy of kernels/one_pass.py with one text for another."""
    from dprs_kernels.kernels import one_pass

    text = Path(one_pass.__file__).read_text()
    assert old in text, "the kernel has changed, and so must this mutant"
    path = tmp_path / "mutant.py"
    path.write_text(text.replace(old, new))
    spec = importlib.util.spec_from_file_location("mutant", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module._one_pass_kernel


ONE_PASS = next(launch for launch in LAUNCHES if launch.name.startswith("B noised"))


def test_barriers_stand_between_what_threads_write_and_what_one_of_them_announces():
    assert unordered(build(ONE_PASS, "sm_80").asm["ptx"]) == []


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        tl.debug_barrier()   # every thread's partials, before thread 0 says so\n", ""),
        ("            tl.debug_barrier()   # every thread's additions, before thread 0 says so\n", ""),
    ],
)
def test_a_kernel_without_one_of_its_barriers_is_noticed(tmp_path, old, new):
    kernel = mutant(tmp_path, old, new)
    ptx = build(replace(ONE_PASS, kernel=kernel), "sm_80").asm["ptx"]
    assert unordered(ptx) or ptx.count("bar.sync") < build(ONE_PASS, "sm_80").asm["ptx"].count("bar.sync")


def test_a_kernel_without_an_acquire_is_noticed(tmp_path):
    old = 'if tl.atomic_add(done_ptr + tile, 1, sem="acq_rel")'
    kernel = mutant(tmp_path, old, old.replace("acq_rel", "release"))
    assert read(ONE_PASS, "sm_80", build(replace(ONE_PASS, kernel=kernel), "sm_80")).acquires < 4


UNUSUAL = unusual()


@pytest.mark.parametrize("target", ["sm_80", *(pytest.param(t, marks=pytest.mark.slow) for t in ("sm_90", "gfx942"))])
@pytest.mark.parametrize("launch", UNUSUAL, ids=lambda launch: launch.name)
def test_unusual_launches_compile_without_spills(launch, target):
    report = inspect(launch, target)
    assert report.spills == 0
    assert report.approximate == () or launch.kind != "noise"


# Small kernels that do what a shipped one must not, or need not.


@triton.jit
def _copy_kernel(out_ptr, in_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(in_ptr + i))


@triton.jit
def _table_kernel(out_ptr, row_ptr, factor_ptr, rows, DTYPE: tl.constexpr, N: tl.constexpr):
    """out = sum over rows of factor * row, with the rows' addresses in a table; factors are floats too."""
    i = tl.arange(0, N)
    acc = tl.zeros([N], dtype=tl.float32)
    for r in range(rows):
        row = tl.multiple_of(tl.load(row_ptr + r).to(tl.pointer_type(DTYPE), bitcast=True), 16)
        acc += tl.load(row + i).to(tl.float32) * tl.load(factor_ptr + r)
    tl.store(out_ptr + i, acc)


@triton.jit
def _root_kernel(out_ptr, in_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.sqrt(tl.load(in_ptr + i)))


@triton.jit
def _exp_kernel(out_ptr, in_ptr, N: tl.constexpr):
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.exp(tl.load(in_ptr + i)))


@triton.jit
def _greedy_kernel(out_ptr, in_ptr, N: tl.constexpr):
    """All values live until their sum is known: N / 32 registers a thread of one warp."""
    i = tl.arange(0, N)
    x = tl.load(in_ptr + i)
    tl.store(out_ptr + i, x - tl.sum(x, axis=0))


@triton.jit
def _turn_kernel(turn_ptr, out_ptr, N: tl.constexpr):
    ticket = tl.atomic_add(turn_ptr, 1, sem="relaxed")
    while tl.atomic_add(turn_ptr + 1, 0, sem="acquire") < ticket:
        pass
    i = tl.arange(0, N)
    tl.store(out_ptr + i, tl.load(out_ptr + i) + 1)
    tl.debug_barrier()
    tl.atomic_xchg(turn_ptr + 1, ticket + 1, sem="release")


def small(kernel, n=512, *, warps=4, dtype="fp32", kind="other", **more):
    pointers = {"out_ptr": f"*{dtype}", "in_ptr": f"*{dtype}"}
    return Shipped(kernel.__name__, kernel, pointers, {"N": n}, warps, 0, n, 8.0, kind, **more)


def test_loads_are_32_bits_wide_without_the_hint_of_alignment():
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    shipped = small(_copy_kernel, gradient="in_ptr")
    hinted = inspect(shipped, "sm_80")
    assert hinted.gradient_loads == hinted.loads == {128: 1}
    source = ASTSource(_copy_kernel, {"out_ptr": "*fp32", "in_ptr": "*fp32", "N": "constexpr"}, constexprs={"N": 512})
    options = dict(num_warps=4, enable_fp_fusion=False)
    bare = read(shipped, "sm_80", triton.compile(source, target=GPUTarget("cuda", 80, 32), options=options))
    assert bare.gradient_loads == bare.loads == {32: 4}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("name", "e"), [("fp32", 4), ("bf16", 8)])
def test_gradients_are_told_from_factors_and_tables(target, name, e):
    dtype = {"fp32": tl.float32, "bf16": tl.bfloat16}[name]
    n = 128 * e * TARGETS[target][2] // 32   # one vector a thread
    signature = dict(out_ptr="*fp32", row_ptr="*i64", factor_ptr="*fp32", rows="i32")
    shipped = Shipped("table", _table_kernel, signature, dict(DTYPE=dtype, N=n), 4, n, 100 * n, 4.0, "gradient")
    report = inspect(shipped, target)
    assert set(report.gradient_loads) == {128}
    assert report.gradient_bits == 128 // e
    if target != "gfx942":
        assert set(report.loads) == {32, 64, 128}   # factor, address, row (AMD loads the first two once a warp)
    (loop,) = report.loops
    assert loop.elements % n == 0
    assert loop.trips == 100 * n / loop.elements
    bodies = loop.instructions * loop.trips * report.threads / shipped.elements
    assert bodies <= report.slots <= 2 * bodies


@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
def test_approximate_instructions_are_found(target):
    assert inspect(small(_copy_kernel), target).approximate == ()
    assert inspect(small(_exp_kernel), target).approximate
    root = inspect(small(_root_kernel), target)
    assert root.approximate if target == "sm_90" else root.guesses
    assert inspect(small(_root_kernel, dtype="fp64"), target).approximate == ()


def test_spills_are_found():
    report = inspect(small(_greedy_kernel, 16384, warps=1), "sm_80")
    assert report.spills > 0   # 512 values a thread
    assert report.stack > 0


@pytest.mark.parametrize("target", TARGETS)
def test_order_of_memory_is_found(target):
    turn = Shipped("turn", _turn_kernel, dict(turn_ptr="*i32", out_ptr="*i32"), dict(N=512), 4, 0, 512, 8.0, "other")
    report = inspect(turn, target)
    assert (report.releases, report.acquires) == (1, 1)
    assert report.barriers >= 2
    copy = inspect(small(_copy_kernel), target)
    assert (copy.releases, copy.acquires, copy.barriers) == (0, 0, 0)
    assert report.loops == ()   # the wait counts once


# The readers, on hand-written text.

SASS = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;          /* 0x00000a00ff017b82 */
                                                                   /* 0x000fe20000000800 */
        /*0010*/                   ULDC.64 UR4, c[0x0][0x208] ;    /* 0x0 */
        /*0020*/              @P0  BRA 0xa0 ;                      /* 0x0 */
        /*0030*/                   LDG.E.LTC128B R2, [R4.64] ;     /* 0x0 */
        /*0040*/              @!P1 LDG.E.EF.128 R8, desc[UR4][R6.64] ; /* 0x0 */
        /*0050*/                   FADD R3, R3, R8 ;               /* 0x0 */
        /*0060*/                   BRA.U UP0, 0x40 ;               /* 0x0 */
        /*0070*/                   CALL.REL.NOINC 0xc0 ;           /* 0x0 */
        /*0080*/                   NOP ;                           /* 0x0 */
        /*0090*/                   EXIT ;                          /* 0x0 */
        /*00a0*/                   LDG.E.U16 R3, [R4.64] ;         /* 0x0 */
        /*00b0*/                   BRA 0x70 ;                      /* 0x0 */
        /*00c0*/                   STL.64 [R1], R2 ;               /* 0x0 */
        /*00d0*/                   RET.REL.NODEC R4 0x0 ;          /* 0x0 */
        /*00e0*/                   BRA 0xe0;                       /* 0x0 */
        /*00f0*/                   NOP;                            /* 0x0 */
"""


def test_sass_widths_loops_and_reach():
    code = assembly.parse_sass(SASS)
    assert len(code) == 16
    body = assembly.reachable(code)
    assert body == set(range(12))                                            # neither subroutine nor padding
    assert assembly.reachable(code, calls=True) - body == {12, 13}
    assert assembly.loops(code) == [frozenset({4, 5, 6})]                    # 0xb0 jumps back, but is no loop
    assert assembly.widths(code, body) == {32: 1, 128: 1, 16: 1}
    assert [code[i].opcode for i in body if code[i].uniform] == ["ULDC.64"]
    assert assembly.local_bytes(code) == 8


PTX = """
.visible .entry _k(
	.param .u64 _k_param_0
)
{
	.file	1 "/src" "norms.py"
	ld.param.b64 	%rd1, [_k_param_0];
	.loc	1 20 5                          // norms.py:20:5
	@%p1 bra 	$L__BB0_2;
$L__BB0_1:
	.loc	1 30 9                          // norms.py:30:9
	// begin inline asm
	mov.u32 %r1, 0x0;
	.loc	1 31 9                          // norms.py:31:9
	@%p2 ld.global.L1::evict_first.L2::cache_hint.v4.b32 { %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ], %rd2;
	// end inline asm
	.loc	1 40 9
	ld.global.b64 { %rd11 }, [ %rd12 + 0 ];
	cp.async.cg.shared.global [ %r5 + 0 ], [ %rd3 + 0 ], 0x10, %r6;
	ld.shared.b32 	%r3, [global_smem];
	@%p3 bra 	$L__BB0_1;
$L__BB0_2:
	fence.acq_rel.gpu;
	@%p1 atom.global.gpu.release.exch.b32 %r19, [ %rd4 + 0 ], %r20;
	@%p1 ld.global.gpu.acquire.b32 %r9, [ %rd4 + 0 ];
	bar.sync 	0;
	rcp.approx.ftz.f64 	%rd5, %rd6;
	rcp.approx.ftz.f32 	%f5, %f6;
	div.full.f32 	%f5, %f6, %f7;
	div.rn.f32 	%f5, %f6, %f7;
	sqrt.rn.f64 	%fd5, %fd6;
	ex2.approx.f32 	%f5, %f6;
	add.ftz.f32 	%f1, %f2, %f3;
	ret;
}
                                        // -- End function
"""


def test_ptx_widths_places_and_order():
    code = assembly.parse_ptx(PTX)
    loads = [(each.load, each.place) for each in code if each.load]
    assert loads[0] == (128, ("norms.py", 30, 9))   # of the line before the assembly, not of the line in it
    assert [bits for bits, _ in loads] == [128, 64, 128, 32]
    (loop,) = assembly.loops(code)
    assert assembly.widths(code, loop) == {128: 2, 64: 1}
    assert assembly.ordering(PTX) == (2, 2, 1)


def test_ptx_approximations():
    approximate, guesses, flushes = assembly.approximations(PTX)
    assert approximate == ("div.full.f32", "ex2.approx.f32", "rcp.approx.ftz.f32")
    assert guesses == ("rcp.approx.ftz.f64",)
    assert flushes == ("add.ftz.f32",)


# The loop is entered in its middle and ends by falling through to its head, as LLVM likes it.
AMDGCN = """
	.globl	_k                              ; -- Begin function _k
_k:                                     ; @_k
	.file	1 "/src" "norms.py"
	s_load_dwordx2 s[2:3], s[0:1], 0x0
	s_branch .LBB0_2
.LBB0_1:                                ;   in Loop: Header=BB0_2 Depth=1
	v_add_f32_e32 v1, v1, v2
	s_nop 0
	s_cbranch_scc0 .LBB0_3
.LBB0_2:                                ; =>This Inner Loop Header: Depth=1
	.loc	1 30 9                          ; norms.py:30:9
	global_load_dwordx4 v[2:5], v[2:3], off
	global_load_dwordx4 v[6:9], v[6:7], off
	.loc	1 40 9                          ; norms.py:40:9
	buffer_load_dword v9, v7, s[4:7], 0 offen
	buffer_load_ushort v9, v7, s[4:7], 0 offen
	s_branch .LBB0_1
.LBB0_3:
	buffer_wbl2 sc1
	buffer_inv sc1
	v_log_f32_e32 v1, v2
	v_rcp_f64_e32 v[6:7], v[4:5]
	s_barrier
	s_endpgm
	v_nop
.Lfunc_end0:
	.amdgpu_metadata
  - .agpr_count:     0
    .private_segment_fixed_size: 24
    .sgpr_count:     42
    .vgpr_count:     39
    .vgpr_spill_count: 7
	.end_amdgpu_metadata
"""

TTIR = """
#loc3 = loc("/src/norms.py":30:9)
#loc4 = loc("/src/norms.py":40:9)
#loc9 = loc("/src/norms.py":7:1)
  tt.func public @_k(%row_ptr: !tt.ptr<i64> {tt.divisibility = 16 : i32} loc("row_ptr"(#loc)), %x_ptr: !tt.ptr<f32>) {
    %0 = tt.load %row_ptr : !tt.ptr<i64> loc(#loc9)
    %base = tt.int_to_ptr %0 : i64 -> !tt.ptr<i32> loc(#loc9)
    %p = tt.splat %base : !tt.ptr<i32> -> tensor<8x!tt.ptr<i32>> loc(#loc9)
    %q:2 = scf.for %c = %a to %b step %c1 iter_args(%acc = %zero, %at = %p) -> (tensor<8xf32>, tensor<8x!tt.ptr<i32>>)  : i32 {
      %x = tt.load %at, %m, %z : tensor<8x!tt.ptr<i32>> loc(#loc12)
      %at_1 = tt.addptr %at, %o : tensor<8x!tt.ptr<i32>>, tensor<8xi32> loc(#loc9)
      scf.yield %acc, %at_1 : tensor<8xf32>, tensor<8x!tt.ptr<i32>> loc(#loc9)
    } loc(#loc9)
    %y = tt.load %q#1 : tensor<8x!tt.ptr<i32>> loc(#loc4)
    %f = tt.load %x_ptr : !tt.ptr<f32> loc(#loc9)
    tt.return loc(#loc9)
  } loc(#loc)
#loc11 = loc("x"(#loc3))
#loc12 = loc(callsite(#loc11 at #loc9))
"""   # noqa: E501


def test_gradients_are_followed_back_to_the_table():
    assert assembly.gradient_loads(TTIR) == [
        assembly.SourceLoad(("norms.py", 30, 9), 32, 1),
        assembly.SourceLoad(("norms.py", 40, 9), 32, 0),
    ]
    assert assembly.gradient_loads(TTIR, "x_ptr") == [assembly.SourceLoad(("norms.py", 7, 1), 32, 0)]


def test_counts_from_loops_and_trips():
    """2 loads of 8 bf16 by 256 threads: 4096 elements a trip, twice what the source says (unrolled)."""
    dtype = SimpleNamespace(primitive_bitwidth=16)
    shipped = Shipped("hand", None, {}, {"DTYPE": dtype}, 4, 2048, 40960, 2.0, "gradient")
    ttir = TTIR.replace("%y = tt.load %q#1", "%y = tt.load %x_ptr")
    built = SimpleNamespace(asm={"amdgcn": AMDGCN, "ttir": ttir}, metadata=SimpleNamespace(shared=64))
    report = read(shipped, "gfx942", built)
    assert (report.registers, report.spills, report.stack, report.shared) == (39, 7, 24, 64)
    assert report.loads == {128: 2, 32: 1, 16: 1}
    assert report.gradient_loads == {128: 2}
    assert report.loops == (compiled.Loop(instructions=7, elements=4096, trips=10.0),)
    assert report.instructions == pytest.approx((5 * 10 + 4) * 256 / 40960)   # vector ones: in the loop, behind it
    assert report.uniform == pytest.approx((2 * 10 + 4) * 256 / 40960)        # s_nop is none
    assert (report.releases, report.acquires, report.barriers) == (1, 1, 1)
    assert (report.approximate, report.guesses) == (("v_log_f32_e32",), ("v_rcp_f64_e32",))


# Bounds and the table.


def test_a_bound_is_the_larger_of_memory_and_issue():
    report = inspect(small(_copy_kernel), "sm_80")
    bound = roofline(report, "A100-80")
    assert bound.dram == pytest.approx(1e3 * 8e9 / 2.04e12)
    assert bound.issue == pytest.approx(1e3 * report.slots * 1e9 / (108 * 4 * 32 * 1.41e9))
    assert bound.ms == max(bound.dram, bound.issue)


def test_the_table_says_what_it_is():
    text = table([small(_copy_kernel)], "sm_80")
    assert "compiled and modelled, not timed on a GPU" in text
    assert all(f"{d.bandwidth / 1e12:g} TB/s, {d.processors} SMs" in text for d in DEVICES.values())
    rows = [line for line in text.splitlines() if line.startswith("|")]
    assert len(rows) == 3
    assert len({len(row) for row in rows}) == 1
    assert "_copy_kernel" in rows[2]
    assert "128 x 1" in rows[2]


# What a caller can do wrong.


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="'sm_75' is not known; available: sm_80, sm_90, sm_100, gfx942"):
        inspect(small(_copy_kernel), "sm_75")
    with pytest.raises(ValueError, match="'V100' is not known; available: A100-80, H100 SXM"):
        roofline(inspect(small(_copy_kernel), "sm_80"), "V100")
    with pytest.raises(ValueError, match="kind is 'gradients', expected"):
        small(_copy_kernel, kind="gradients")
    misnamed = Shipped("copy", _copy_kernel, dict(out_ptr="*i8", x_ptr="*i8"), dict(N=64), 1, 0, 64, 2.0, "other")
    with pytest.raises(ValueError, match=r"copy: arguments missing .*\['in_ptr', 'x_ptr'\]"):
        inspect(misnamed, "sm_80")


def test_an_interpreting_process_does_not_compile(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(ValueError, match="TRITON_INTERPRET is set: a process either interprets or compiles"):
        inspect(small(_copy_kernel), "sm_80")


def test_missing_triton_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ImportError, match=r"dprs_kernels\[triton\]"):
        inspect(small(_copy_kernel), "sm_80")
