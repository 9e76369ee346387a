"""The limit that benchmarks compare with: every way to read it reads everything, and the fastest is taken."""

import sys
from pathlib import Path

import pytest
import torch

from dprs_kernels import native

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
import limit

pytestmark = pytest.mark.skipif(native.library() is None, reason=native.reason())


def words_of(tensors):
    """The exclusive or of all 64-bit words, each tensor's last filled up with zeros."""
    seen = 0
    for tensor in tensors:
        data = bytes(tensor.view(torch.uint8).tolist())
        for at in range(0, len(data), 8):
            seen ^= int.from_bytes(data[at : at + 8], "little")
    return seen


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_any_way_to_read_reads_everything(threads):
    before, random = torch.get_num_threads(), torch.Generator().manual_seed(0)
    buffers = [torch.randint(0, 256, (size,), dtype=torch.uint8, generator=random) for size in (0, 3, 64, 5003, 40_000)]
    torch.set_num_threads(threads)
    try:
        for level in range(len(native.levels())):
            was = native.loaded().dprs_set_level(level)
            try:
                for places in limit.PLACES:
                    assert native.read_once(buffers, places=places) == words_of(buffers), (level, places)
                    for at in (0, 63, 64, 2500, 4999, 5002):   # each byte counts
                        buffers[3][at] ^= 1
                        assert native.read_once(buffers, places=places) == words_of(buffers), (level, places, at)
            finally:
                native.loaded().dprs_set_level(was)
    finally:
        torch.set_num_threads(before)


def test_another_number_of_places_is_refused():
    with pytest.raises(ValueError, match="places: got 3; expected 1, 2, 4 or 8"):
        native.read_once([torch.ones(10)], places=3)


@pytest.mark.parametrize("quickest", limit.PLACES)
def test_the_fastest_way_is_the_limit(quickest, monkeypatch):
    now, asked = [0.0], []

    def read(tensors, *, places):
        asked.append(places)
        now[0] += 1.0 if places == quickest else 2.0
        return places

    monkeypatch.setattr(limit.native, "read_once", read)
    monkeypatch.setattr(limit.time, "perf_counter", lambda: now[0])
    chosen = limit.fastest_read([torch.ones(10)])
    assert sorted(set(asked)) == list(limit.PLACES)
    assert chosen() == quickest
