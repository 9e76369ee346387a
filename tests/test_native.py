"""The compiled library: loading, falling back, instruction sets, and what the compiler made of it."""

import dataclasses
import itertools
import math
import os
import platform
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from dprs_kernels import KeepMask, NoiseSource, PrivateSum, backends, fused_rs_dp_step, native, reference
from dprs_kernels.backends import cpu
from dprs_kernels.layout import Layout
from dprs_kernels.outer import OuterProducts
from dprs_kernels.plan import make_plan
from dprs_kernels.row_grads import RowGrads
from dprs_kernels.structure import STRUCTURES
from tests.oracle import DTYPES, ORDERS, Setting, assert_true, random_grads, run

ROOT = Path(__file__).parents[1]
CSRC = ROOT / "csrc"
FLAGS = ["-std=c++17", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-Wno-psabi", f"-I{CSRC}"]
AVX2 = ["-mavx2", "-mfma", "-mf16c"]
AVX512 = ["-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mf16c"]
needs_native = pytest.mark.skipif(native.library() is None, reason=native.reason())
x86 = platform.machine() in ("x86_64", "AMD64")


@pytest.fixture
def restored_level():
    before = native.loaded().dprs_level()
    yield
    native.loaded().dprs_set_level(before)


def each_level():
    """One instruction set after the other that this build has and this CPU runs, in use; with restored_level."""
    for level in range(3):
        if native.loaded().dprs_set_level(level) >= 0:
            yield level


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sigma", [1.0, 0.001, 0.0])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_instruction_sets_give_the_same_bits(dtype, sigma, structure, restored_level):
    shapes = [(300, 11), (7,), (2050,)]
    keep = KeepMask.draw(shapes, drop_rate=0.5, seed=0, draw=0, structure=structure)
    grads = [
        grad if (rows := keep.kept_rows(p)) is None else RowGrads(grad.index_select(1, rows.kept), rows)
        for p, grad in enumerate(random_grads(shapes, 9, dtype))
    ]
    results = {}
    for level in each_level():
        results[level] = run("cpu", grads, keep, Setting(noise_multiplier=sigma))
    assert 0 in results
    for outs in results.values():
        assert all(torch.equal(a, b) for a, b in zip(outs, results[0], strict=True))


def kinds_of_gradients(dtype):
    """(gradients, mask): contiguous, strided and outer products, all and some of them kept, and rows of some."""
    shapes = [(20, 61), (7,), (30, 90), (2050,)]
    samples = 13   # no whole number of fours
    dense, rows = (KeepMask.draw(shapes, drop_rate=0.5, seed=0, draw=0, structure=s) for s in ("coordinate", "row"))
    first, second, third, last = random_grads(shapes, samples, dtype)
    wide = torch.stack([third, third], -1)[..., 0]
    outer = OuterProducts(*(random_grads([(n,)], samples, dtype)[0] for n in shapes[0]))
    for keep in (dense, None):
        yield [first, second, wide, last], keep
        if dtype.itemsize > 2:
            yield [outer, second, third, last], keep
    pairs = zip((first, second, third, last), map(rows.kept_rows, range(4)), strict=True)
    yield [RowGrads(grad.index_select(1, some.kept), some) for grad, some in pairs], rows


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sigma", [1.0, 0.001, 0.0])
def test_any_order_gives_the_same_bits(dtype, sigma, restored_level):
    """Tiles or samples shared out, packed in slots or read twice, one row at a time or four (csrc/order.h)."""
    before = torch.get_num_threads()
    for grads, keep in kinds_of_gradients(dtype):
        setting, results = Setting(noise_multiplier=sigma), []
        try:
            for threads, order in zip((1, 2, 5, 1, 2, 3, 1, 2, 20, 2, 1, 2, 3, 1, 2, 3, 2, 1), ORDERS, strict=True):
                torch.set_num_threads(threads)
                for _ in each_level():
                    with order():
                        results.append(run("cpu", grads, keep, setting))
        finally:
            torch.set_num_threads(before)
        for outs in results:
            assert all(torch.equal(a, b) for a, b in zip(outs, results[0], strict=True))
        if all(isinstance(grad, torch.Tensor) for grad in grads):
            assert_true("cpu", grads, keep, setting)


def first_rows(grad, samples):
    if isinstance(grad, OuterProducts):
        return OuterProducts(grad.e[:samples], grad.a[:samples])
    if isinstance(grad, RowGrads):
        return RowGrads(grad.values[:samples], grad.rows)
    return grad[:samples]


def run_in_two(grads, keep, setting):
    """As oracle.run, by add and release."""
    params = [torch.nn.Parameter(torch.zeros(grad.shape[1:], dtype=grad.dtype)) for grad in grads]
    total = PrivateSum(params, keep=keep, noise=NoiseSource.seeded_for_tests(0), backend="cpu", **vars(setting))
    total.add(list(grads))
    total.release()
    return [param.grad for param in params]


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("setting", [{}, {"noise_multiplier": 0.0}, {"max_grad_norm": math.inf}], ids=str)
def test_one_call_gives_the_bits_of_two(dtype, setting, restored_level):
    """A step's sums are in scratch, a part of them with each thread, and join in the release: in any order, by any
    number of threads, for any number of samples."""
    before, setting = torch.get_num_threads(), Setting(**setting)
    for all_of_them, keep in kinds_of_gradients(dtype):
        for samples in (13, 1, 0):
            grads = [first_rows(grad, samples) for grad in all_of_them]
            expected = run_in_two(grads, keep, setting)
            assert setting.noise_multiplier == 0 or any((grad != 0).any() for grad in expected)
            try:
                for threads, order in itertools.product((1, 2, 5), ORDERS):
                    torch.set_num_threads(threads)
                    for _ in each_level():
                        with order():
                            found = run("cpu", grads, keep, setting)
                        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
            finally:
                torch.set_num_threads(before)


@needs_native
@pytest.mark.parametrize(("size", "samples"), [(20_000, 70), (1_200_000, 9), (2_400_000, 9), (4_800_000, 3)])
@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_rows_of_any_size_give_the_same_bits(size, samples, rate):
    """Less, and more, than the caches of csrc/order.h."""
    grads, keep = random_grads([(size,)], samples), KeepMask.draw([(size,)], drop_rate=rate, seed=0, draw=0)
    found = run("cpu", grads, keep, Setting())
    for split in cpu.SPLITS:
        with cpu.order(split):
            assert torch.equal(found[0], run("cpu", grads, keep, Setting())[0]), split


@needs_native
@pytest.mark.parametrize("verb", ["add", "release"])
def test_bits_that_somebody_wrote_to_behind_our_back_are_refused(verb):
    """A total has the length that its mask asks for: with another one kernels would write beyond it."""
    words = np.ones(128, dtype=np.int32)
    keep = KeepMask.from_bits([(4096,)], torch.from_numpy(words))
    words[:] = -1   # a copy was taken
    assert keep.count == 128
    total = PrivateSum([torch.zeros(4096)], keep=keep, noise=NoiseSource(), backend="cpu", **vars(Setting()))
    total.add([torch.ones(2, 4096)])
    keep.bits.numpy()[:] = -1   # which torch does not notice
    with pytest.raises(ValueError, match="keep: not the mask that this sum was begun with"):
        getattr(total, verb)(*[[torch.ones(2, 4096)]] * (verb == "add"))


@needs_native
@pytest.mark.parametrize("noise_std", [math.nan, -1.0, 0.0, 2.0**8, math.inf])
def test_noise_that_does_not_fit_its_grid_is_refused(noise_std):
    """Rounded to int32 it would be the same number everywhere, under any key. No argument of a step leads here."""
    plan = make_plan(Layout.of([(40,)]), max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=1)
    wrong, out = dataclasses.replace(plan, noise_std=noise_std), torch.full((40,), 7.0)
    total = torch.zeros(cpu.sums(plan.layout, None), dtype=torch.int64)
    with pytest.raises(ValueError, match=r"noise_std: got .* nothing was released"):
        cpu.release([out], total, None, wrong, bytes(32), 0)
    with pytest.raises(ValueError, match=r"noise_std: got .* nothing was released"):
        cpu.step_([out], None, [torch.zeros(2, 40)], None, wrong, bytes(32), 0)
    assert (out == 7.0).all()
    cpu.step_([out], None, [torch.zeros(2, 40)], None, plan, bytes(32), 0)
    assert not (out == 7.0).any()


@needs_native
@pytest.mark.parametrize("rate", [0.0, 0.5, 0.9])
def test_a_total_has_the_kept_coordinates_only(rate):
    shapes = [(700, 613), (7,), (12_001,)]
    keep = KeepMask.draw(shapes, drop_rate=rate, seed=0, draw=0)
    tiles = sum(-(-size // 1024) for size in keep.layout.sizes)
    assert keep.count <= cpu.sums(keep.layout, keep.bits) <= keep.count + 31 * tiles + 32


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sigma", [1.0, 0.001, 0.0])
def test_dropped_coordinates_may_hold_anything(dtype, sigma, restored_level):
    shapes = [(300, 11), (7,), (2050,)]
    grads, keep = random_grads(shapes, 9, dtype), KeepMask.draw(shapes, drop_rate=0.5, seed=0, draw=0)
    largest = torch.finfo(dtype).max
    worst = torch.tensor([largest, -largest, torch.inf, -torch.inf, torch.nan], dtype=dtype)
    spoilt, clean = [], []
    for grad, kept in zip(grads, keep.dense(), strict=True):
        anything = worst[torch.arange(grad.numel()) % 5].view(grad.shape)
        spoilt.append(torch.where(kept, grad, anything))
        clean.append(torch.where(kept, grad, 0.0))
    plan = Setting(noise_multiplier=sigma).plan(keep.layout)
    for _ in each_level():
        for order in ORDERS:
            totals = torch.zeros(2, cpu.sums(keep.layout, keep.bits), dtype=reference.total_dtype(plan))
            for total, part in zip(totals, (spoilt, clean), strict=True):
                with order():
                    cpu.accumulate_(total, part, keep.bits, plan)
            assert totals[1].any()
            assert torch.equal(totals[0], totals[1])


@needs_native
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rate", [0.0, 0.5])
def test_a_bad_kept_value_removes_its_sample_in_any_order(dtype, rate, restored_level):
    shapes = [(300, 11), (7,), (2050,)]
    grads, keep = random_grads(shapes, 21, dtype), KeepMask.draw(shapes, drop_rate=rate, seed=0, draw=0)
    bad = {0: torch.nan, 6: torch.inf, 20: -torch.inf}
    for sample, value in bad.items():
        for grad, kept in zip(grads, keep.dense(), strict=True):
            grad[(sample, *kept.nonzero()[-1])] = value
    good = [grad[[i for i in range(21) if i not in bad]] for grad in grads]
    expected = run("cpu", good, keep, Setting())
    assert all(out.isfinite().all() for out in expected)
    for _ in each_level():
        for which, order in enumerate(ORDERS):
            with order():
                found = run("cpu", grads, keep, Setting())
            assert all(map(torch.equal, found, expected)), which


@needs_native
def test_fewer_threads_than_asked_for_give_the_same_bits():
    """OpenMP may give less: each thread then has several parts."""
    code = """
import torch
from dprs_kernels import KeepMask
from tests.oracle import ORDERS, Setting, random_grads, run
shapes = [(300, 41), (7,), (5000,)]
grads, keep = random_grads(shapes, 37), KeepMask.draw(shapes, drop_rate=0.6, seed=0, draw=0)
for threads in (1, 5):
    torch.set_num_threads(threads)
    for order in ORDERS:
        with order():
            print([out.numpy().tobytes().hex() for out in run("cpu", grads, keep, Setting())])
"""
    lines = set()
    for limit in ("2", "8"):
        done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True,
                              env={**os.environ, "OMP_THREAD_LIMIT": limit})   # fmt: skip
        assert done.returncode == 0, done.stderr
        lines |= set(done.stdout.splitlines())
    assert len(lines) == 1


ANY, ZEN5, ZEN4 = range(3)   # dprs_make


def chosen(make, *, packed=0, made=0, again=0, whole=None, sums=10**6, samples=256, threads=2, exact=True):
    whole = 2 * packed if whole is None else whole   # of fp32, half of it dropped or more
    found = native.loaded().dprs_choose_order(packed, made, again, whole, sums, samples, threads, exact, make)
    return cpu.SPLITS[found.split], found.group, found.at_once, found.ahead, found.early, found.cache


@needs_native
def test_the_order_goes_by_sizes_and_the_cpu():
    """As csrc/order.h has it; every make, though only one of them is here."""
    small, cnn, huge = dict(packed=54_000, sums=13_500), dict(packed=1_100_000, sums=280_000), dict(packed=30 << 20)
    plain = dict(again=104_000, sums=26_000)   # no mask: nothing is packed
    assert chosen(ANY, **small) == ("samples", 4, 4, 1024, 0, 1)
    assert chosen(ANY, **cnn) == ("tiles", 4, 4, 1024, 0, 1)
    assert chosen(ANY, **huge) == ("twice", 32, 4, 1024, 0, 1)
    assert chosen(ZEN5, **small) == ("samples", 2, 2, 4096, 8192, 1)
    assert chosen(ZEN5, **plain) == ("samples", 2, 2, 4096, 8192, 1)
    assert chosen(ZEN5, **small, exact=False) == ("tiles", 4, 4, 2048, 0, 1)   # float64 sums go by the order of samples
    assert chosen(ZEN5, **small, samples=31) == ("tiles", 4, 4, 2048, 0, 1)   # too few for two threads
    assert chosen(ZEN5, **small, threads=64) == ("tiles", 64, 4, 2048, 0, 1)   # and for 64, where barriers count
    assert chosen(ZEN5, **cnn) == ("samples", 2, 2, 4096, 6144, 1)
    assert chosen(ZEN5, **cnn, threads=8) == ("tiles", 2, 2, 4096, 6144, 1)   # eight threads' sums leave that cache
    assert chosen(ZEN5, **huge, whole=80 << 20, sums=8 << 20) == ("tiles", 4, 2, 3072, 4096, 1)   # little is kept
    assert chosen(ZEN5, **huge, whole=59 << 20, sums=8 << 20) == ("twice", 32, 4, 2048, 0, 1)   # half of it
    assert chosen(ZEN5, **huge, whole=30 << 20) == ("twice", 32, 4, 2048, 0, 1)   # 16 bits, packed in 32
    assert chosen(ZEN5, made=30 << 20) == ("twice", 32, 4, 2048, 0, 1)   # outer products: made again, not stored
    assert chosen(ZEN5, again=30 << 20) == ("twice", 32, 4, 2048, 0, 1)
    assert chosen(ZEN5, again=2_200_000, sums=551_000) == ("tiles", 2, 2, 3072, 4096, 1)
    assert chosen(ZEN4, **small) == ("samples", 2, 2, 4096, 8192, 2)
    assert chosen(ZEN4, **plain) == ("samples", 4, 4, 4096, 8192, 2)
    assert chosen(ZEN4, **small, samples=31) == ("tiles", 4, 4, 2048, 0, 2)
    assert chosen(ZEN4, **cnn) == ("samples", 2, 2, 8192, 10240, 2)
    assert chosen(ZEN4, **huge, sums=8 << 20) == ("tiles", 4, 4, 4096, 8192, 2)
    assert chosen(ZEN4, again=2_200_000, sums=551_000) == ("tiles", 2, 2, 3072, 4096, 2)
    assert chosen(ZEN4, made=30 << 20) == ("twice", 32, 2, 4096, 8192, 2)


@needs_native
@pytest.mark.parametrize(
    "wrong", [dict(split="rows"), dict(group=0), dict(at_once=3), dict(ahead=-1), dict(early=-8192), dict(cache=3)]
)   # fmt: skip
def test_an_order_that_there_is_not_is_refused(wrong):
    """A negative distance would walk ahead for ever."""
    with pytest.raises(ValueError, match="expected one of"), cpu.order(**wrong):
        pass


@needs_native
def test_the_highest_level_is_in_use_and_unusable_ones_are_refused():
    lib = native.loaded()
    assert lib.dprs_level_name(lib.dprs_level()).decode() == native.levels()[-1]
    assert native.levels()[0] == "baseline"
    assert lib.dprs_set_level(7) == -1


@pytest.fixture
def no_library(monkeypatch, tmp_path):
    """As after an installation without a compiler."""
    monkeypatch.setattr(native, "PATH", tmp_path / "_cpu_kernels.so")
    native._load.cache_clear()
    backends._warned.clear()
    yield
    monkeypatch.undo()
    native._load.cache_clear()
    backends._warned.clear()


def test_without_the_library_auto_falls_back_with_one_warning(no_library):
    param = torch.nn.Parameter(torch.zeros(3))
    arguments = dict(noise=NoiseSource.seeded_for_tests(0), grad_samples=[torch.ones(2, 3)], **vars(Setting()))
    with pytest.warns(UserWarning, match="the cpu backend cannot run .* using the reference") as caught:
        fused_rs_dp_step([param], **arguments)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fused_rs_dp_step([param], **arguments)
    assert len(caught) == 1
    assert caught[0].filename == __file__
    assert param.grad.any()
    assert KeepMask.draw([(40,)], drop_rate=0.5, seed=0, draw=0).count == 20


def test_without_the_library_cpu_raises_and_says_how_to_build(no_library):
    message = r"'cpu' cannot run on cpu, where .* is not built.*pip install.*Available here: ref"
    with pytest.raises(ValueError, match=message):
        fused_rs_dp_step([torch.zeros(3)], noise=NoiseSource(), grad_samples=[torch.ones(2, 3)], backend="cpu",
                         **vars(Setting()))   # fmt: skip


def test_a_broken_or_old_library_is_named(no_library, monkeypatch):
    native.PATH.write_bytes(b"not a library")
    assert "does not load" in native.reason()
    if shutil.which("g++"):
        (native.PATH.parent / "old.cpp").write_text('extern "C" long dprs_abi(void) { return -1; }')
        command = ["g++", "-shared", "-fPIC", "old.cpp", "-o", native.PATH.name]
        subprocess.run(command, cwd=native.PATH.parent, check=True)
        native._load.cache_clear()
        assert "has interface -1, expected" in native.reason()


def test_installation_succeeds_without_a_compiler(tmp_path):
    pytest.importorskip("setuptools", minversion="77")
    checkout = tmp_path / "checkout"
    shutil.copytree(ROOT, checkout, ignore=shutil.ignore_patterns(".*", "build", "*.so", "*.egg-info", "__pycache__"))
    environment = {**os.environ, "CC": "no-such-compiler", "CXX": "no-such-compiler"}
    built = subprocess.run(
        [sys.executable, "setup.py", "build"], cwd=checkout, env=environment, capture_output=True, text=True
    )
    assert built.returncode == 0, built.stderr
    assert "no-such-compiler" in built.stdout + built.stderr
    assert list(checkout.glob("build/lib*/dprs_kernels/step.py"))
    assert not list(checkout.rglob("*.so"))


def test_import_is_light():
    """No optional dependency, and no compiler, at import."""
    code = (
        "import sys, torch; before = set(sys.modules); import dprs_kernels;"
        "print([m for m in ('triton', 'opacus', 'backpack', 'sklearn', 'tqdm', 'torch._dynamo')"
        " if m in set(sys.modules) - before])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"


def compiler(name):
    return pytest.mark.skipif(shutil.which(name) is None, reason=f"{name} is not installed")


@compiler("g++")
@pytest.mark.skipif(not x86, reason="x86 instruction sets")
@pytest.mark.parametrize(("file", "flags"), [("isa_avx512.cpp", AVX512), ("isa_avx2.cpp", AVX2)])
def test_no_shared_function_is_compiled_for_a_newer_cpu(file, flags, tmp_path):
    """A weak symbol outside the instruction set's namespace could replace the baseline's copy when linked, and
    stop an older CPU with an illegal instruction. -O1: more is left out of line than at -O3."""
    subprocess.run(["g++", *FLAGS, *flags, "-O1", "-w", "-c", str(CSRC / file), "-o", "x.o"], cwd=tmp_path, check=True)
    symbols = subprocess.run(["nm", "-C", "x.o"], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    own = file.removeprefix("isa_").removesuffix(".cpp")
    weak = [line for line in symbols.splitlines() if re.search(r" [WVu] ", line) and f"dprs::{own}::" not in line]
    weak = [line for line in weak if "DW.ref.__gxx_personality" not in line]   # a pointer, not code
    assert f"dprs::{own}::" in symbols
    assert weak == []
    # Statics of templates are one for a process, whatever library they are in: a second build would run the first's.
    assert [line for line in symbols.splitlines() if " u " in line] == []


def checksums(tmp_path, cxx, runner=(), link=()):
    sources = [CSRC / "dispatch.cpp", CSRC / "isa_baseline.cpp"]
    sources += [CSRC / "isa_avx2.cpp", CSRC / "isa_avx512.cpp"] if cxx == "g++" and x86 else []
    extra = {"isa_avx2.cpp": AVX2, "isa_avx512.cpp": AVX512}
    objects = []
    for source in [*sources, ROOT / "tests" / "checksum.cpp"]:
        objects.append(str(tmp_path / f"{cxx}-{source.stem}.o"))
        flags = [*FLAGS, *extra.get(source.name, []), "-O2", "-w", "-fopenmp"]
        subprocess.run([cxx, *flags, "-c", str(source), "-o", objects[-1]], check=True)
    program = tmp_path / f"{cxx}-checksum"
    subprocess.run([cxx, *objects, "-fopenmp", *link, "-o", str(program)], check=True)
    return subprocess.run([*runner, str(program)], capture_output=True, text=True, check=True).stdout


@pytest.mark.slow
@compiler("g++")
@compiler("aarch64-linux-gnu-g++")
@compiler("qemu-aarch64-static")
def test_neon_gives_the_same_bits(tmp_path):
    """The NEON build, run under emulation, against every instruction set of this machine."""
    here = checksums(tmp_path, "g++")
    there = checksums(tmp_path, "aarch64-linux-gnu-g++", ["qemu-aarch64-static"], ["-static"])
    runs = [part.split("\n", 1) for part in (here + there).split("level ")[1:]]
    assert len(runs) >= 2
    assert "0000000000000000" not in here + there   # what checksum.cpp prints if one call is not what two are
    assert len({body for _, body in runs}) == 1, [name for name, _ in runs]
