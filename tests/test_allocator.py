"""keep_freed_memory: what it changes in a process of its own, and where it leaves things alone."""

import os
import subprocess
import sys

import pytest

from dprs_kernels import allocator

# Five times 16 blocks of 8 MB, written and freed: 32768 pages a time where they come from the system.
FAULTS = """
import resource, sys, torch
from dprs_kernels.allocator import keep_freed_memory, kept
done = len(sys.argv) > 1 and keep_freed_memory(2**28)
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
    done, kept, with_it = run("keep")
    if not done:
        pytest.skip("not glibc")
    assert kept == 2**28
    assert with_it < 10_000
    # Left alone, glibc may or may not give blocks of this size back, by what was freed before them. Told to, it does:
    assert run(MALLOC_MMAP_THRESHOLD_="131072")[2] > 100_000   # the test can tell


@pytest.mark.parametrize("variable", [*allocator.VARIABLES, "GLIBC_TUNABLES"])
def test_the_environment_has_the_last_word(monkeypatch, variable):
    monkeypatch.setenv(variable, "glibc.malloc.trim_threshold=131072" if variable == "GLIBC_TUNABLES" else "131072")
    before = allocator.kept()
    assert not allocator.keep_freed_memory()
    assert allocator.kept() == before


def test_a_negative_limit_is_refused():
    with pytest.raises(ValueError, match="limit: got -1; expected a number of bytes"):
        allocator.keep_freed_memory(-1)
