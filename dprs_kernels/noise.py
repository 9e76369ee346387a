"""NoiseSource: the secret key, the step counter, and the grid that noise is rounded to.

Noise is a pure function of (key, step, padded coordinate); see reference.words and reference.normals. This file
holds what must not go wrong around that function (PRIVACY.md R1-R4): where keys come from, that no
(key, step) is used twice, and that keys leave by no door.
"""

from __future__ import annotations

import copyreg
import hashlib
import math
import os
import threading
import weakref
from typing import Any, NamedTuple

import torch

from dprs_kernels.capture import capturing

MAX_STEPS = 2**64
GRAPH_CLAIMS = 256   # captured steps of one source; each has 2^48 replays
_sources: weakref.WeakValueDictionary[int, NoiseSource] = weakref.WeakValueDictionary()
_next_handle = 0
_captured: list[tuple[torch.Tensor, torch.Tensor]] = []


class Stream(NamedTuple):
    """One step's right to noise: handed out once, by NoiseSource.claim. In a captured CUDA graph the key is a
    device tensor, int64 [5], that holds another step at each replay."""

    key: bytes | torch.Tensor
    step: int

    def __repr__(self) -> str:
        return f"Stream(key=<secret>, step={self.step})"


class NoiseSource:
    """ChaCha20 noise under a fresh 256-bit key from the operating system.

    The key is never printed, pickled, copied or saved: a copy, an unpickled source or a forked child has a
    fresh key of its own, because two holders of one key would repeat each other's noise. `key_id` is a public
    fingerprint for logs.

    >>> NoiseSource().step
    0
    """

    def __init__(self) -> None:
        self._start(os.urandom(32), seed=None)   # raises where the system has no entropy: no fallback

    @classmethod
    def seeded_for_tests(cls, seed: int) -> NoiseSource:
        """The same noise every time, for tests and debugging. Carries no privacy claim: anyone who knows or
        guesses the seed can subtract the noise."""
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**64:
            raise ValueError(f"seed: got {seed!r}; expected an integer in [0, 2^64)")
        source = cls.__new__(cls)
        source._start(hashlib.sha256(b"dprs_kernels seeded noise" + seed.to_bytes(8, "little")).digest(), seed)
        return source

    def _start(self, key: bytes, seed: int | None) -> None:
        global _next_handle
        self._key = key
        self._key_id = hashlib.sha256(b"dprs_kernels key id" + key).hexdigest()[:16]
        self._seed = seed
        self._step = 0
        self._pid = os.getpid()
        self._lock = threading.Lock()
        # What captured graphs draw from: a key of its own, and counters on the device.
        self._graph_states: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = {}
        self._graph_claims = 0
        self._retired_states: list[tuple[torch.Tensor, torch.Tensor]] = []
        # A compiled graph cannot hold this object; it holds the handle, and the ticket it appears to write,
        # so that no two calls are merged and none is removed (ops.py).
        self._handle, _next_handle = _next_handle, _next_handle + 1
        self._ticket = torch.zeros((), dtype=torch.int64)
        _sources[self._handle] = self

    @property
    def step(self) -> int:
        """The step that the next claim gets."""
        return self._step

    @property
    def key_id(self) -> str:
        """Public fingerprint of the key: 16 hex digits."""
        return self._key_id

    @property
    def private(self) -> bool:
        """False for a seeded source: nothing released with it carries a privacy claim."""
        return self._seed is None

    def claim(self, device: torch.device | None = None) -> Stream:
        """The next (key, step). The counter advances first, so an error afterwards wastes a step and never
        repeats one. device: where the noise will be made; matters only to CUDA graphs."""
        if os.getpid() != self._pid:
            if not self.private:
                raise RuntimeError(
                    "this seeded NoiseSource was forked: parent and child would draw the same noise; make a "
                    "NoiseSource.seeded_for_tests with another seed in the child"
                )
            self._start(os.urandom(32), seed=None)
        if device is not None and device.type == "cuda":
            if capturing(device):
                return self._claim_captured(device)
            self._graph_state(device)
        with self._lock:   # two threads must not read the same step
            step = self._step
            if step >= MAX_STEPS:
                raise OverflowError("NoiseSource: all 2^64 steps of this key are used; make a new NoiseSource")
            self._step = step + 1
            return Stream(self._key, step)

    def captured_steps(self) -> int:
        """Steps that replays of captured CUDA graphs have claimed; waits for the device. `step` does not count
        them, so accounting must."""
        return sum(int(counters.sum()) for _, counters in [*self._graph_states.values(), *self._retired_states])

    def _graph_state(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """(key, int64 [4]; counters, int64 [GRAPH_CLAIMS]). Made by the first eager step on a device, since a capture
        cannot bring a key there."""
        if device not in self._graph_states:
            key = os.urandom(32) if self._seed is None else hashlib.sha256(b"graph" + self._key).digest()
            words = torch.frombuffer(bytearray(key), dtype=torch.int64)
            counters = torch.zeros(GRAPH_CLAIMS, dtype=torch.int64, device=device)
            self._graph_states[device] = words.to(device, copy=True), counters
            words.zero_()
        return self._graph_states[device]

    def _claim_captured(self, device: torch.device) -> Stream:
        """Under capture Python runs once and the graph many times: the counter lives on the device, and the graph
        itself takes a step and advances it, before the kernel that makes the words. The key is one that eager
        steps never use; each captured claim has a counter and a range of 2^48 steps of its own, so that graphs that
        run at the same time never meet."""
        if device not in self._graph_states:
            raise RuntimeError(
                f"noise: take one ordinary step on {device} before capturing a CUDA graph; it puts a key there"
            )
        key, counters = self._graph_states[device]
        with self._lock:
            slot, self._graph_claims = self._graph_claims, self._graph_claims + 1
        if slot >= GRAPH_CLAIMS:
            raise RuntimeError(f"noise: {GRAPH_CLAIMS} steps of this NoiseSource are captured already; make a new one")
        _captured.append((key, counters))   # a graph outlives this object: its memory must not be given away
        step = counters[slot : slot + 1] + (slot << 48)
        counters[slot] += 1
        return Stream(torch.cat([key, step]), -1)

    def state_dict(self) -> dict[str, Any]:
        """Public position: never the key, never the seed."""
        return {"version": 1, "key_id": self.key_id, "step": self._step, "private": self.private}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Secure: a fresh key at the saved step, since the words up to it may already be out in the world.
        Seeded: the saved step of the same seed, so a test can replay a run bit for bit."""
        if self.private != state["private"] or (not self.private and state["key_id"] != self.key_id):
            raise ValueError(
                f"state: saved from a {'secure' if state['private'] else 'seeded'} source with key_id "
                f"{state['key_id']}; this one is {'secure' if self.private else 'seeded'} with {self.key_id}"
            )
        step = state["step"]
        if isinstance(step, bool) or not isinstance(step, int) or not 0 <= step <= MAX_STEPS:
            raise ValueError(f"state: step is {step!r}; expected an integer in [0, 2^64]")
        if self.private:
            retired = [*self._retired_states, *self._graph_states.values()]   # graphs made before go on drawing
            self._start(os.urandom(32), seed=None)
            self._retired_states = retired
        self._step = step

    def __reduce__(self) -> tuple[Any, ...]:
        if self._seed is None:
            return NoiseSource, ()
        return _seeded_at, (self._seed, self._step)

    def __copy__(self) -> NoiseSource:
        return self.__deepcopy__({})

    def __deepcopy__(self, memo: dict[int, Any]) -> NoiseSource:
        function, arguments = self.__reduce__()
        return function(*arguments)

    def __repr__(self) -> str:
        kind = "secure" if self.private else "seeded for tests, no privacy claim"
        return f"NoiseSource({kind}, key_id={self.key_id}, step={self._step})"


def _seeded_at(seed: int, step: int) -> NoiseSource:
    source = NoiseSource.seeded_for_tests(seed)
    source._step = step
    return source


def _refuse(stream: Stream) -> Any:
    raise TypeError("a Stream holds a noise key and cannot be pickled or copied")


copyreg.pickle(Stream, _refuse)


def source_of(handle: int) -> NoiseSource:
    """The live source with this handle (compiled graphs only)."""
    source = _sources.get(handle)
    if source is None:
        raise ValueError(f"noise: the NoiseSource with handle {handle} no longer exists; compile again")
    return source


def grid_of(noise_std: float) -> float:
    """g = 2^floor(log2(noise_std 2^-20)), 0 for noise_std = 0 (R4)."""
    return math.ldexp(1.0, math.frexp(noise_std)[1] - 21) if noise_std > 0 else 0.0
