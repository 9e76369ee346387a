"""Progress: one live line on a terminal, one line an epoch elsewhere. All of it on stderr; results go to stdout."""

from __future__ import annotations

import shutil
import sys
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

from dprs_kernels.paper.run_folder import Metrics

WINDOW = 20      # steps that the shown rate is a mean of
REFRESH = 0.1    # seconds between two drawings


class Progress:
    """live: draw over one line; None: where the stream is a terminal. clock: for tests."""

    def __init__(
        self, *, live: bool | None = None, stream: TextIO | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.stream = sys.stderr if stream is None else stream
        self.live = self.stream.isatty() if live is None else live
        self._clock, self._drawn_at, self._width = clock, -REFRESH, 0
        self._times: deque[float] = deque(maxlen=WINDOW + 1)
        self._epochs = self._steps = 0
        self._last: Metrics | None = None

    def start(self, *, epochs: int, steps: int, last: Metrics | None = None) -> None:
        """steps: of the whole run. last: where a resumed run stood."""
        self._epochs, self._steps, self._last = epochs, steps, last
        self._times.clear()
        self._times.append(self._clock())

    def step(self, *, epoch: int, done: int, drop_rate: float) -> None:
        """After step `done` (from 1) in `epoch` (from 1)."""
        now = self._clock()
        self._times.append(now)
        if self.live and now - self._drawn_at >= REFRESH:
            self._drawn_at = now
            rate = (len(self._times) - 1) / max(now - self._times[0], 1e-9)
            parts = [f"epoch {epoch}/{self._epochs}", f"step {done}/{self._steps}", f"{rate:.3g} steps/s",
                     f"drop {drop_rate:.2f}"]   # fmt: skip
            if self._last is not None:
                parts += [f"test {self._last.test_accuracy:.1%}", shown_epsilon(self._last)]
            self._draw(_fitting([*parts, f"{duration((self._steps - done) / rate)} left"]))

    def epoch(self, row: Metrics) -> None:
        """A line that stays: one an epoch."""
        self._last = row
        parts = [f"epoch {row.epoch}/{self._epochs}", f"drop {row.drop_rate:.2f}", f"test {row.test_accuracy:.1%}"]
        parts += [shown_epsilon(row), f"{row.seconds:.1f} s", f"{row.steps_per_second:.3g} steps/s"]
        self.note("  ".join(parts))
        self._times.clear()   # the evaluation is no step
        self._times.append(self._clock())

    def note(self, text: str) -> None:
        self.clear()
        print(text, file=self.stream, flush=True)

    def clear(self) -> None:
        if self._width:
            self._draw("")

    def _draw(self, text: str) -> None:
        print(f"\r{text.ljust(self._width)}" + ("" if text else "\r"), end="", file=self.stream, flush=True)
        self._width = len(text)


class Silent(Progress):
    """Says nothing at all."""

    def __init__(self) -> None:
        super().__init__(live=False)

    def note(self, text: str) -> None:
        pass


def _fitting(parts: list[str]) -> str:
    """In one line of the terminal: one that wraps cannot be drawn over. Spaces go first, then the second part."""
    width = shutil.get_terminal_size().columns - 1
    for text in ("  ".join(parts), " ".join(parts)):
        if len(text) <= width:
            return text
    return " ".join(parts[:1] + parts[2:])[:width]


def shown_epsilon(row: Metrics) -> str:
    if row.epsilon is None:
        return "no privacy claim"
    return f"{'nominal ' if row.claim == 'nominal' else ''}epsilon {row.epsilon:.2f}"


def duration(seconds: float) -> str:
    """
    >>> duration(59.7), duration(754), duration(7384)
    ('1:00', '12:34', '2:03:04')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
