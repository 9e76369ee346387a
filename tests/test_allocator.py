"""keep_freed_memory: what it changes in a process of its own, and where it leaves things alone; large pages."""

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from dprs_kernels import allocator

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


# Two steps of 9.4M coordinates; the second one's page faults. Its sum takes 75 MB, its p.grad 38 MB.
STEPS = """
import ctypes, resource, sys, torch
from dprs_kernels import NoiseSource, fused_rs_dp_step
PR_SET_THP_DISABLE = 41
if len(sys.argv) > 1:
    ctypes.CDLL(None).prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
param, noise = torch.nn.Parameter(torch.ones(3000, 3137)), NoiseSource()
grads = torch.ones(1, *param.shape)
for _ in range(2):
    param.grad = None
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    fused_rs_dp_step([param], max_grad_norm=1.0, noise_multiplier=1.0, expected_batch_size=1, noise=noise,
                     grad_samples=[grads])
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@pytest.mark.skipif(not THP.exists() or "[never]" in THP.read_text(), reason="the system has no large pages")
def test_what_malloc_never_keeps_comes_in_large_pages():
    def faults(*arguments):
        done = subprocess.run([sys.executable, "-c", STEPS, *arguments], check=True, capture_output=True, text=True)
        return int(done.stdout)

    assert faults() < 5_000
    assert faults("in small pages") > 25_000   # the test can tell


@pytest.mark.parametrize("count", [0, 1, 2**23, 2**23 + 1])   # up to 32 MB of fp32, and beyond
def test_the_tensor_is_the_same(count):
    tensor = torch.empty(count)
    address = tensor.data_ptr()
    assert allocator.in_large_pages(tensor) is tensor
    assert tensor.data_ptr() == address
    assert tensor.zero_().sum() == 0
