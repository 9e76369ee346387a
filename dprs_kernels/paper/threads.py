"""How many threads a run takes: torch's number, or one; whichever is quicker for this network, here and now.

Two hyperthreads that the system counts as two cores, or a machine that is shared, make the second thread wait for the
first: an epoch of DP-CNN/S took 3 times as long with two as with one, on such a machine. No setting tells, so a few
steps of a copy of the network, on test images and with noise of its own, are timed with both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from dprs_kernels.grads import per_sample
from dprs_kernels.grads.engine import micro_batch_size
from dprs_kernels.grads.source import LossFn
from dprs_kernels.paper.recipes import Recipe

ROUNDS = 3   # and one to warm up


@contextmanager
def threads_of(threads: int | None) -> Iterator[None]:
    """torch's number of threads within; None leaves it.

    >>> before = torch.get_num_threads()
    >>> with threads_of(1):
    ...     torch.get_num_threads()
    1
    >>> torch.get_num_threads() == before
    True
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def quicker(
    model: nn.Module, recipe: Recipe, loss: LossFn, x: torch.Tensor, y: torch.Tensor, *,
    clock: Callable[[], float] = time.perf_counter,
) -> int:   # fmt: skip
    """1, or torch's number. model: a copy; it is trained on x [n, ...] and y [n], one micro-batch of them."""
    most = torch.get_num_threads()
    if most == 1:
        return 1
    source, optimizer = per_sample(model), recipe.optimizer_for(model.parameters())
    n = micro_batch_size(source.params)
    times: dict[int, list[float]] = {1: [], most: []}
    for _ in range(ROUNDS + 1):
        for threads, found in times.items():
            with threads_of(threads):
                start = clock()
                optimizer.backward(source, loss, x[:n], y[:n])
                optimizer.step()
                found.append(clock() - start)
    return min(times, key=lambda threads: statistics.median(times[threads][1:]))
