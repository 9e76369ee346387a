"""Masks and Linear norms, compiled for every target and read; tests/triton runs them."""

import re
import subprocess
import tempfile
from pathlib import Path

import pytest

triton = pytest.importorskip("triton")
if triton.knobs.runtime.interpret:
    pytest.skip("TRITON_INTERPRET is set: this process interprets", allow_module_level=True)

from dprs_kernels.backends import triton_linear, triton_mask  # noqa: E402
from dprs_kernels.kernels import linear, mask  # noqa: E402

TARGETS = [80, 90, 100, "gfx942"]
POINTERS = {"partial_ptr": "*fp64", "out_ptr": "*fp64", "exponent_ptr": "*i32", "bits_ptr": "*i32"}
TILE = triton_linear.TILE


def compiled(fn, signature, constants, target, **options):
    """A kernel built ahead of time as a launch with 16-byte aligned pointers would build it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    full = {name: signature.get(name, "constexpr") for name in fn.arg_names}
    aligned = [i for i, kind in enumerate(full.values()) if kind.startswith("*")]
    source = ASTSource(fn, full, constexprs=constants, attrs={(i,): [["tt.divisibility", 16]] for i in aligned})
    gpu = GPUTarget("cuda", target, 32) if isinstance(target, int) else GPUTarget("hip", target, 64)
    return triton.compile(source, target=gpu, options=dict(enable_fp_fusion=False, **options))


def resources(kernel, target):
    """(registers a thread, bytes a thread keeps in memory: spills and stack)"""
    if not isinstance(target, int):
        fields = dict(re.findall(r"\.(\w+):\s+(\d+)", kernel.asm["amdgcn"]))
        assert fields["vgpr_spill_count"] == fields["sgpr_spill_count"] == "0"
        return int(fields["vgpr_count"]), int(fields["private_segment_fixed_size"])
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    if not tool.exists():
        pytest.skip("this Triton comes without cuobjdump")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        text = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
    registers, stack, local = re.search(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", text).groups()
    return int(registers), int(stack) + int(local)


@pytest.mark.parametrize("target", TARGETS)
def test_masks_compile_without_spills(target):
    draw = dict(count_ptr="*i64", draw_ptr="*i64", step="i32")
    for fn, signature, constants in [
        (mask._mask_count_kernel, draw, dict(BLOCK=triton_mask.BLOCK)),
        (mask._mask_narrow_kernel, draw, {}),
        (mask._mask_pack_kernel, dict(bits_ptr="*i32", draw_ptr="*i64", tile_ptr="*i64"),
         dict(WORDS=triton_mask.WORDS)),
    ]:   # fmt: skip
        kernel = compiled(fn, signature, constants, target, num_warps=4)
        registers, spilled = resources(kernel, target)
        assert spilled == 0
        assert registers <= 128


def test_arithmetic_of_masks_is_unsigned_and_wide():
    """What interpreter and compiler may read differently: constants from 2^63 on, shifts, comparison."""
    signature = dict(bits_ptr="*i32", draw_ptr="*i64", tile_ptr="*i64")
    text = compiled(mask._mask_pack_kernel, signature, dict(WORDS=64), 80).asm["ttir"]
    for constant in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB):
        assert re.search(rf"arith\.constant dense<{constant - 2**64}> : tensor<64x32xi64>", text)
    assert len(re.findall(r"arith\.shrui .*xi64>", text)) == 4
    assert "arith.shrsi" not in text
    assert re.search(r"arith\.cmpi ugt, .*xi64>", text)


def launches(dtype, has_keep, contiguous):
    """(kernel, constants, options) as triton_linear.py launches them."""
    unit = ("a_stride_c", "e_stride_o", "stride_c") if contiguous else ()
    wide = dict(num_warps=triton_linear.WARPS)
    for fn, constants, options in [
        (linear._linear_scale_kernel, dict(BLOCK_T=1, BLOCK_C=1024), dict(num_warps=4)),
        (linear._linear_scale_kernel, dict(BLOCK_T=16, BLOCK_C=64), dict(num_warps=4)),
        (linear._linear_squares_kernel, dict(BLOCK_N=TILE, BLOCK_O=TILE, SPLIT=triton_linear.SPLIT),
         dict(num_stages=triton_linear.STAGES, **wide)),
        (linear._linear_positions_kernel, dict(BLOCK_O=TILE, BLOCK_C=TILE, BLOCK_T=triton_linear.DEPTH), wide),
        (linear._linear_finish_kernel, dict(OPERANDS=1, BLOCK_N=128), dict(num_warps=4)),
        (linear._linear_finish_kernel, dict(OPERANDS=2, BLOCK_N=128), dict(num_warps=4)),
    ]:   # fmt: skip
        constants.update({name: 1 for name in unit if name in fn.arg_names})
        if "HAS_KEEP" in fn.arg_names:
            constants.update(HAS_KEEP=has_keep, **({} if has_keep else {"bits_ptr": None}))
        values = dict.fromkeys(("a_ptr", "e_ptr", "x_ptr"), f"*{dtype}")
        names = [name for name in fn.arg_names if name not in constants]
        yield fn, {name: {**POINTERS, **values}.get(name, "i32") for name in names}, constants, options


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("dtype", "has_keep", "contiguous"),
    [("fp32", True, True), ("bf16", True, True), ("fp16", True, True), ("fp32", False, False)],
)
def test_linear_norms_compile_without_spills(target, dtype, has_keep, contiguous):
    for fn, signature, constants, options in launches(dtype, has_keep, contiguous):
        registers, spilled = resources(compiled(fn, signature, constants, target, **options), target)
        assert spilled == 0, fn
        assert registers <= 128, fn


def test_linear_norms_keep_subnormals_and_float64_constants():
    """Flushing would undo the scaling's exactness; an fp32 literal would make the slack 0."""
    texts = {}
    for fn, signature, constants, options in launches("fp32", True, True):
        kernel = compiled(fn, signature, constants, 80, **options)
        assert ".ftz" not in kernel.asm["ptx"], fn
        assert "mma.sync" not in kernel.asm["ptx"], fn   # tf32 has 11 bits
        texts[fn] = kernel.asm["ttir"]
    assert f"{2.0**-252 * TILE**2:.16E} : f64" in texts[linear._linear_positions_kernel]
