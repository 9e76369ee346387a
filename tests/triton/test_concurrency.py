"""Design B with real concurrency: one process per program, all tensors in shared memory. The interpreter runs programs
one after another, where no race can show; its loads, stores and atomics are real ones, so in processes of their own
races do show. What x86 orders by itself (a missing fence) stays invisible: tests/test_compiled.py reads the fences.

Schedules are random (sleeps before memory operations, order of the starts) or adversarial (a program is held before
an operation until another has done the one that would be a mistake). Every schedule must give the same bits as the
sequential run; mutants that pass the sequential run must not.
"""

import importlib.util
import mmap
import os
import random
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import count
from pathlib import Path

import numpy as np
import pytest
import torch

from dprs_kernels.backends import triton as backend
from dprs_kernels.backends import tuning
from dprs_kernels.backends.tuning import Config
from dprs_kernels.layout import Layout
from tests.oracle import Setting, key_of, random_grads
from tests.triton.common import drawn
from tests.triton.recorder import ATOMIC, LOAD, STORE, hooked

pytestmark = pytest.mark.usefixtures("needs_interpreter")

TIMEOUT = 60.0   # seconds for all programs of a schedule, of which it takes one or two
RESULTS = ("total", "norm", "factor", "p.grad")


class Launch:
    """One captured launch of design B with noise and release, on shared memory."""

    def __init__(self, shapes, samples, config, drop_rate=None):
        from dprs_kernels.kernels import one_pass

        plan = Setting().plan(Layout.of(shapes))
        grads = [grad.share_memory_() for grad in random_grads(shapes, samples, scale=0.1)]
        self.outs = [torch.empty(shape).share_memory_() for shape in shapes]   # addresses are in tables: shared first
        self.alive = (grads, bits := None if drop_rate is None else drawn(shapes, drop_rate).bits)
        total = torch.zeros(plan.layout.padded, dtype=torch.int64)
        calls, kernel = [], one_pass._one_pass_kernel

        class Capture:
            def __getitem__(self, grid):
                return lambda *args, **kwargs: calls.append((grid, args, kwargs))

        try:
            one_pass._one_pass_kernel = Capture()
            with tuning.override(config):
                backend.step_(self.outs, total, grads, bits, plan, key_of(0), 0)
        finally:
            one_pass._one_pass_kernel = kernel
        ((grid, args, options),) = calls
        self.kernel, self.programs = kernel, grid[0]
        self.slots = slots(-(-samples // config.group), config.lag)
        self.options = {name: value for name, value in options.items() if name in kernel.arg_names}
        self.tensors = {}   # by the kernel's names, without _ptr
        self.args = dict(zip(kernel.arg_names, args, strict=False))
        for name, arg in self.args.items():
            if isinstance(arg, torch.Tensor):
                self.tensors[name.removesuffix("_ptr")] = arg.share_memory_()   # with all views of its storage

    def reset(self):
        """Whatever a program may read too early is poison."""
        for name in ("total", "sync"):
            self.tensors[name].zero_()
        for name in ("norm", "partial"):
            self.tensors[name].fill_(float("nan"))
        self.tensors["factor"].fill_(3.0)   # a NaN would convert to any integer; 3 to a wrong one
        for out in self.outs:
            out.fill_(float("nan"))

    def results(self):
        """The bits of everything that comes out. Partials are inputs of norms."""
        found = {name: self.tensors[name] for name in RESULTS[:-1]}
        found["p.grad"] = torch.cat([out.flatten() for out in self.outs])
        return {name: value.clone().view(torch.int64 if value.dtype.itemsize == 8 else torch.int32)
                for name, value in found.items()}   # fmt: skip

    @contextmanager
    def program(self, kernel):
        """A function that runs program i of the kernel in this process, as interpreter.GridExecutor does."""
        from triton.runtime import interpreter

        fn = kernel.rewrite()
        executor = interpreter.GridExecutor(fn, kernel.arg_names, (self.programs,))
        scope = interpreter._patch_lang(fn)
        args = {name: value if name in executor.constexprs else interpreter._implicit_cvt(value)
                for name, value in {**self.args, **self.options}.items()}   # fmt: skip
        interpreter.interpreter_builder.set_grid_dim(self.programs, 1, 1)

        def run(i):
            interpreter.interpreter_builder.set_grid_idx(i, 0, 0)
            fn(**args)

        try:
            yield run
        finally:
            scope.restore()

    def where(self, handle, active):
        """Which tensor an operation touches, and the smallest index in it."""
        addresses = np.asarray(handle.data)[active]
        if addresses.size:
            first = int(addresses.min())
            for name, tensor in self.tensors.items():
                begin = tensor.data_ptr()
                if begin <= first < begin + tensor.numel() * tensor.element_size():
                    return name, (first - begin) // tensor.element_size()
            for out in self.outs:
                if out.data_ptr() <= first < out.data_ptr() + out.numel() * out.element_size():
                    return "p.grad", (first - out.data_ptr()) // out.element_size()
        return "G", 0


def slots(groups, lag):
    """(phase, group) of each slot, written from the first lines of kernels/one_pass.py."""
    lag = min(lag, groups)
    steady = [pair for k in range(groups - lag) for pair in ((1, k + lag), (2, k))]
    return [*((1, k) for k in range(lag)), *steady, *((2, k) for k in range(groups - lag, groups))]


@dataclass(frozen=True)
class Operation:
    """What a program does to memory; the work that its ticket gave it (phase 0: no ticket yet); and how many had
    counted themselves at its group's or tile's counter before it did (-1: it has not yet)."""

    kind: str
    tensor: str
    index: int
    phase: int
    group: int
    tile: int
    earlier: int


@dataclass(frozen=True)
class Hold:
    """Programs wait before an operation that matches `held` until one that matches `until` is done, or `seconds`."""

    held: Callable[[Operation], bool]
    until: Callable[[Operation], bool]
    seconds: float = 0.3


class Schedule:
    """Start order, how many run at a time, and what happens around each memory operation."""

    def __init__(self, seed=None, holds=(), order=None, at_a_time=None):
        self.seed, self.holds, self.order, self.at_a_time = seed, holds, order, at_a_time

    def starts(self, programs):
        order = list(range(programs)) if self.order is None else self.order(programs)
        if self.seed is not None:
            random.Random(self.seed).shuffle(order)
        return order

    def hooks(self, launch, i, happened):
        """before and after of recorder.hooked in the process of program i. happened: one shared byte a hold."""
        chance = random.Random(f"{self.seed} {i}")
        # Some programs are slow throughout, and one in three falls asleep once, long enough to be overtaken by most.
        slowness = 0.0 if self.seed is None else chance.choice((0.0, 0.001, 0.004))
        asleep = -1 if self.seed is None or chance.random() > 1 / 3 else chance.randrange(14)   # of some 14 operations
        work, operations = [(0, 0, 0, -1)], count()

        def before(kind, handle, active):
            if next(operations) == asleep:
                time.sleep(0.4)
            elif slowness and chance.random() < 0.5:
                time.sleep(chance.random() * slowness)
            if kind == ATOMIC:
                time.sleep(0.0002)   # whoever waits in a loop leaves the processor to the others
            if self.holds:
                operation = Operation(kind, *launch.where(handle, active), *work[0])
                for h, hold in enumerate(self.holds):
                    end = time.monotonic() + hold.seconds
                    while hold.held(operation) and not happened[h] and time.monotonic() < end:
                        time.sleep(0.001)

        def after(kind, handle, active, result):
            if self.holds:
                tensor, index = launch.where(handle, active)
                if (kind, tensor, index) == (ATOMIC, "sync", 0):
                    slot, tile = divmod(int(result.data.item()), launch.options["TILES"])
                    work[0] = (*launch.slots[slot], tile, -1)
                elif (kind, tensor) == (ATOMIC, "sync"):
                    phase, group, tile, _ = work[0]
                    if index == (1 + group if phase == 1 else 1 + len(launch.slots) + tile):   # 2 slots a group
                        work[0] = (phase, group, tile, int(result.data.item()))
                operation = Operation(kind, tensor, index, *work[0])
                for h, hold in enumerate(self.holds):
                    if hold.until(operation):
                        happened[h] = 1

        return before, after


class Stuck(AssertionError):
    pass


def run_sequentially(launch, kernel):
    launch.reset()
    with launch.program(kernel) as run:
        for i in range(launch.programs):
            run(i)
    return launch.results()


def run_concurrently(launch, kernel, schedule, timeout=TIMEOUT):
    """A process per program. A process that fails, or has not ended in time, fails the test; none is left behind."""
    launch.reset()
    happened = mmap.mmap(-1, mmap.PAGESIZE)   # shared, zero
    waiting, running, failed = schedule.starts(launch.programs)[::-1], {}, []
    end = time.monotonic() + timeout
    try:
        with launch.program(kernel) as run:
            while waiting or running:
                while waiting and len(running) < (schedule.at_a_time or launch.programs):
                    i = waiting.pop()
                    pid = os.fork()
                    if pid == 0:
                        _child(run, launch, schedule, i, happened)
                    running[pid] = i
                for pid in list(running):
                    ended, status = os.waitpid(pid, os.WNOHANG)
                    if ended:
                        i = running.pop(pid)
                        if status:
                            failed.append((i, status))
                if time.monotonic() > end:
                    raise Stuck(f"programs {sorted(running.values())} still run, {len(waiting)} wait to be started")
                time.sleep(0.001)
    finally:
        for pid in running:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        happened.close()
    assert not failed, failed
    return launch.results()


def _child(run, launch, schedule, i, happened):
    """Never returns: a forked pytest must not go on testing."""
    status = 1
    try:
        with hooked(*schedule.hooks(launch, i, happened)):
            run(i)
        status = 0
    except BaseException:
        os.write(2, f"program {i}\n{traceback.format_exc()}".encode())
    finally:
        os._exit(status)


def differing(got, expected):
    return [name for name in expected if not torch.equal(got[name], expected[name])]


LAG_1 = Config("B", columns=512, warps=4, group=2, lag=1)
SETUPS = {   # 5 samples in 3 groups, the last with one; 18, 18 and 12 programs
    "two parameters": dict(shapes=[(1024,), (8, 52)], samples=5, config=LAG_1),
    "mask": dict(shapes=[(1024,), (8, 52)], samples=5, config=LAG_1, drop_rate=0.5),
    "lag 2": dict(shapes=[(1000,)], samples=5, config=Config("B", columns=512, warps=4, group=2, lag=2)),
}   # fmt: skip


@lru_cache(maxsize=4)
def launched(name):
    launch = Launch(**SETUPS[name])
    return launch, run_sequentially(launch, launch.kernel)


def test_slots_cover_every_group_in_the_kernels_order():
    from triton.runtime import interpreter

    from dprs_kernels.kernels.one_pass import slot_work

    for groups, lag in ((1, 1), (1, 3), (2, 3), (3, 1), (7, 3)):
        expected = slots(groups, lag)
        assert sorted(expected) == [(phase, k) for phase in (1, 2) for k in range(groups)]
        assert all(expected.index((1, k)) < expected.index((2, k)) for k in range(groups))
        scope = interpreter._patch_lang(slot_work.fn)
        try:
            number = interpreter._implicit_cvt
            got = [slot_work(number(s), number(groups), number(min(lag, groups))) for s in range(2 * groups)]
            assert [(int(phase) + 1, int(k)) for phase, k in got] == expected
        finally:
            scope.restore()


def test_the_sequential_run_is_the_launchers():
    """What is compared below is what a step gives: the captured launch, run program by program, and step_ itself."""
    launch, expected = launched("mask")
    setup = SETUPS["mask"]
    outs = [torch.empty(shape) for shape in setup["shapes"]]
    plan = Setting().plan(Layout.of(setup["shapes"]))
    grads, bits = launch.alive
    total = torch.zeros(plan.layout.padded, dtype=torch.int64)
    with tuning.override(setup["config"]):
        norms = backend.step_(outs, total, grads, bits, plan, key_of(0), 0)
    assert torch.equal(torch.cat([out.flatten() for out in outs]).view(torch.int32), expected["p.grad"])
    assert torch.equal(total, expected["total"])
    assert torch.equal(norms.flatten().view(torch.int64), expected["norm"].flatten())


@pytest.mark.parametrize("seed", range(24))
def test_random_schedules_give_the_same_bits(seed):
    launch, expected = launched(list(SETUPS)[seed % len(SETUPS)])
    assert differing(run_concurrently(launch, launch.kernel, Schedule(seed)), expected) == []


@pytest.mark.parametrize("at_a_time", [1, 2, 3])
def test_no_program_needs_another_that_has_not_started(at_a_time):
    """Highest program id first, few at a time: tickets, not ids, decide the work, so all waits are for programs that
    run, or have run."""
    launch, expected = launched("lag 2")
    schedule = Schedule(order=backwards, at_a_time=at_a_time)
    assert differing(run_concurrently(launch, launch.kernel, schedule), expected) == []


def backwards(programs):
    return list(range(programs))[::-1]


# Each gives a mistake the time to happen, with certainty. The clean kernel does not make it: the hold runs out, or
# there is nothing to hold, and the bits are the same.
FACTORS = Hold(        # the sums of group 0 read its factors before any tile has written its norms
    held=lambda o: (o.kind, o.tensor, o.phase, o.group) == (STORE, "partial", 1, 0),
    until=lambda o: (o.kind, o.tensor, o.phase, o.group) == (LOAD, "factor", 2, 0),
)
MORE_FACTORS = replace(FACTORS, held=lambda o: FACTORS.held(o) and o.tile > 0)   # .. after the first has
PARTIALS = Hold(       # the last tile to be counted adds up norms before the first has written its own
    held=lambda o: FACTORS.held(o) and o.earlier == 0,
    until=lambda o: (o.kind, o.tensor, o.group) == (STORE, "norm", 0),
)
RELEASED = Hold(       # a tile is released before group 0 has added to it
    held=lambda o: (o.kind, o.tensor, o.phase, o.group) == (ATOMIC, "total", 2, 0),
    until=lambda o: (o.kind, o.tensor) == (STORE, "p.grad"),
)
COUNTED = replace(     # .. before the first group to be counted has
    RELEASED, held=lambda o: (o.kind, o.tensor, o.phase, o.earlier) == (ATOMIC, "total", 2, 0)
)
READ = Hold(           # group 0 reads the sums of tile 0 first
    held=lambda o: (o.kind, o.tensor, o.tile) == (LOAD, "total", 0) and o.group > 0,
    until=lambda o: (o.kind, o.tensor, o.tile, o.group) == (LOAD, "total", 0, 0),
)
OVERWRITTEN = Hold(    # .. and writes them after group 1
    held=lambda o: (o.kind, o.tensor, o.tile, o.group) == (STORE, "total", 0, 0),
    until=lambda o: (o.kind, o.tensor, o.tile, o.group) == (STORE, "total", 0, 1),
)
HOLDS = {"factors": FACTORS, "more factors": MORE_FACTORS, "released": RELEASED}


@pytest.mark.parametrize("name", HOLDS)
def test_adversarial_schedules_give_the_same_bits(name):
    launch, expected = launched("two parameters")
    assert differing(run_concurrently(launch, launch.kernel, Schedule(holds=(HOLDS[name],))), expected) == []


TICKET = 'ticket = tl.atomic_add(sync_ptr, 1, sem="relaxed")'
ARRIVED = 'tl.atomic_add(arrived_ptr + group, 1, sem="acq_rel") == TILES - 1'
DONE = 'tl.atomic_add(done_ptr + tile, 1, sem="acq_rel") == groups - 1'
READY = 'tl.atomic_xchg(ready_ptr + group, 1, sem="release")\n'
WAIT = """        while ready == 0:
            ready = tl.atomic_add(ready_ptr + group, 0, sem="acquire")
"""
ADD = "        add_units(total_ptr, word, keep, units, E, SMALL)\n"
ROWS = "        for r in range(0, GROUP, ROWS):\n"
MUTANTS = {   # edits of the kernel's text, the holds that show the mistake, and what comes out wrong at least
    "sums do not wait for factors": ([(WAIT, "")], [FACTORS], "total"),
    "the last group releases without looking": ([(DONE, "group == groups - 1")], [RELEASED], "p.grad"),
    "the first tile says that factors are ready": ([("    " + READY, READY)], [MORE_FACTORS], "total"),
    "arrival before the partial norms": (
        [(ROWS, f"        last = {ARRIVED}\n{ROWS}"), (f"if {ARRIVED}", "if last")], [PARTIALS], "norm",
    ),
    "arrival before the sums": (
        [(f"if {DONE}", "if last"), (ADD, f"        last = {DONE}\n{ADD}")], [COUNTED], "p.grad",
    ),
    "sums are loaded and stored": ([(ADD, ADD.replace("SMALL", "2"))], [READ, OVERWRITTEN], "total"),   # 2: FLOAT
}   # fmt: skip


def mutant(edits, tmp_path):
    """The kernel's module with its text edited, from a file: the interpreter reads the source."""
    from dprs_kernels.kernels import one_pass

    text = Path(one_pass.__file__).read_text()
    for old, new in edits:
        assert text.count(old) == 1, f"the kernel has changed, and so must this mutant: {old!r}"
        text = text.replace(old, new)
    path = tmp_path / "one_pass_mutant.py"
    path.write_text(text)
    spec = importlib.util.spec_from_file_location(path.stem, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module._one_pass_kernel


@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_pass_in_sequence_and_fail_concurrently(name, tmp_path):
    edits, holds, wrong = MUTANTS[name]
    kernel = mutant(edits, tmp_path)
    launch, expected = launched("two parameters")
    assert differing(run_sequentially(launch, kernel), expected) == []
    schedule = Schedule(holds=[replace(hold, seconds=TIMEOUT / 2) for hold in holds])   # however slow the machine
    assert wrong in differing(run_concurrently(launch, kernel, schedule), expected)


def test_program_ids_instead_of_tickets_deadlock(tmp_path):
    """So the test of few programs at a time can fail: the highest id sums the last group, and waits for ever."""
    kernel = mutant([(TICKET, 'ticket = tl.program_id(0) + 0 * tl.atomic_add(sync_ptr, 1, sem="relaxed")')], tmp_path)
    launch, expected = launched("lag 2")
    assert differing(run_sequentially(launch, kernel), expected) == []
    with pytest.raises(Stuck):
        run_concurrently(launch, kernel, Schedule(order=backwards, at_a_time=2), timeout=2.0)
