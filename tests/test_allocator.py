"""keep_freed_memory: what it changes in a process of its own, and where it leaves things alone; large pages."""

import mmap
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dprs_kernels import NoiseSource, PrivateSum, allocator, step

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's malloc")
real = allocator.keep_freed_memory   # conftest.py puts another in its place

# Five times 16 blocks of 8 MB, written and freed: 32768 pages a time where they come from the system, 4 KB each (huge
# pages would be few).
FAULTS = """
import ctypes, resource, sys, torch
from dprs_kernels.allocator import keep_freed_memory, kept
PR_SET_THP_DISABLE = 41
ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
done = len(sys.argv) > 1 and keep_freed_memory(int(sys.argv[1]))
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def touch():
    blocks = [torch.ones(2**21) for _ in range(16)]
touch(); touch()
before = faults()
for _ in range(5):
    touch()
print(done, kept(), faults() - before)
"""


def run(*arguments, **variables):
    env = {name: value for name, value in os.environ.items() if name not in allocator.VARIABLES}
    env.pop("GLIBC_TUNABLES", None)
    text = subprocess.run([sys.executable, "-c", FAULTS, *arguments], env=env | variables, check=True,
                          capture_output=True, text=True).stdout   # fmt: skip
    done, kept, faults = text.split()
    return done == "True", int(kept), int(faults)


def test_blocks_that_are_freed_serve_again():
    done, kept, with_it = run(str(2**28))
    assert done
    assert kept == 2**28
    assert with_it < 10_000
    # Left alone, glibc may or may not give blocks of this size back, by what was freed before them. Told to, it does:
    assert run(MALLOC_MMAP_THRESHOLD_="131072")[2] > 100_000   # the test can tell


def test_a_limit_beyond_what_mallopt_takes_is_the_most():
    assert run(str(2**40))[:2] == (True, 2**31 - 1)


@pytest.mark.parametrize("variable", [*allocator.VARIABLES, "GLIBC_TUNABLES"])
def test_the_environment_has_the_last_word(monkeypatch, variable):
    monkeypatch.setenv(variable, "glibc.malloc.trim_threshold=131072" if variable == "GLIBC_TUNABLES" else "131072")
    assert not real()
    assert allocator.kept() == 0


@pytest.mark.parametrize("library", allocator.OTHERS)
def test_another_malloc_is_left_alone(monkeypatch, tmp_path, library):
    maps = tmp_path / "maps"
    maps.write_text(f"7f0000000000-7f0000001000 r-xp 00000000 08:01 42 /usr/lib/lib{library}.so.2\n")
    monkeypatch.setattr(allocator, "Path", lambda name: maps)
    assert not real()
    assert allocator.kept() == 0


def test_other_systems_are_left_alone(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    assert not real()


def test_a_negative_limit_is_refused():
    with pytest.raises(ValueError, match="limit: got -1; expected a number of bytes"):
        real(-1)


THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
needs_large_pages = pytest.mark.skipif(not THP.exists() or not Path("/proc/self/smaps").exists(),
                                       reason="the system has no large pages, or does not say who asked for them")
ASKED = "hg"   # of VmFlags: MADV_HUGEPAGE


def flags_of(address):
    """VmFlags of the mapping that the address lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= address < int(match[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return line.split()[1:]
    raise AssertionError(f"no mapping holds {address:x}")


@needs_large_pages
@pytest.mark.parametrize(("count", "asked"), [(2**22, False), (2**23 + 2**20, True)])   # 16 and 36 MB of fp32
def test_what_malloc_never_keeps_is_to_come_in_large_pages(count, asked):
    tensor = torch.empty(count)
    start, size = tensor.data_ptr(), tensor.nbytes
    inside = start + mmap.PAGESIZE, start + size // 2, start + size - mmap.PAGESIZE - 1
    assert all(ASKED not in flags_of(at) for at in inside)
    assert allocator.in_large_pages(tensor) is tensor
    assert all((ASKED in flags_of(at)) == asked for at in inside)
    assert tensor.zero_().sum() == 0


@needs_large_pages
def test_sums_and_released_gradients_do(monkeypatch):
    seen = []
    monkeypatch.setattr(step, "in_large_pages", lambda tensor: seen.append(tensor) or allocator.in_large_pages(tensor))
    param = torch.nn.Parameter(torch.ones(3000, 3136))   # 9.4M coordinates: a sum of 75 MB, a p.grad of 38 MB
    total = PrivateSum([param], max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=1, noise=NoiseSource(),
                       backend="cpu")   # fmt: skip
    total.add([torch.ones(1, *param.shape)])
    total.release()
    of_grad, of_sum = sorted(tensor.nbytes for tensor in seen)
    assert of_grad == param.nbytes
    assert 0 <= of_sum - 2 * param.nbytes <= 8 * 64   # each tile of it a multiple of 32, and a register beyond
    assert any(tensor is param.grad for tensor in seen)
    assert all(ASKED in flags_of(tensor.data_ptr() + tensor.nbytes // 2) for tensor in seen)


@pytest.mark.parametrize("count", [0, 2**23 + 2**20])
def test_where_there_is_no_such_advice_nothing_is_done(monkeypatch, count):
    monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    monkeypatch.setattr(allocator, "_libc", lambda: pytest.fail("asked all the same"))
    tensor = torch.empty(count)
    assert allocator.in_large_pages(tensor) is tensor
