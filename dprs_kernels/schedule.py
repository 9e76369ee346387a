"""Drop rates over training: pure functions of public numbers.

A schedule answers `schedule(epoch, tick)`: the rate at which coordinates drop in that part of training. A mask
lasts 1/refresh of an epoch; `draw_index` numbers the masks, for KeepMask.draw(draw=...).
"""

from __future__ import annotations

from collections.abc import Callable


def checked_rate(rate: float, name: str) -> float:
    """A drop rate in [0, 1), or ValueError naming the argument."""
    if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0.0 <= rate < 1.0:
        raise ValueError(f"{name}: got {rate!r}; expected a number in [0, 1), the share of coordinates to drop")
    return float(rate)


def _checked_count(value: int, name: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: got {value!r}; expected an integer of at least 1")
    return value


class CustomRate:
    """Any function (epoch, tick) -> drop rate. It must not look at the data: rates are public.

    >>> warm = CustomRate(lambda epoch, tick: 0.0 if epoch < 2 else 0.5, epochs=4, refresh=3)
    >>> warm(1), warm(3, tick=2), warm.draw_index(3, tick=2)
    (0.0, 0.5, 11)
    """

    def __init__(self, function: Callable[[int, int], float], epochs: int, refresh: int = 1) -> None:
        if not callable(function):
            raise ValueError(f"function: got {function!r}; expected a callable (epoch, tick) -> drop rate")
        self._function = function
        self.epochs = _checked_count(epochs, "epochs")
        self.refresh = _checked_count(refresh, "refresh")

    def __call__(self, epoch: int, tick: int = 0) -> float:
        self.draw_index(epoch, tick)   # checks both
        return checked_rate(self._function(epoch, tick), f"drop rate of epoch {epoch}, tick {tick}")

    def draw_index(self, epoch: int, tick: int = 0) -> int:
        """The number of the mask in force: epoch * refresh + tick."""
        if not 0 <= epoch < self.epochs:
            raise ValueError(f"epoch: got {epoch}; expected 0 <= epoch < {self.epochs}, the schedule's epochs")
        if not 0 <= tick < self.refresh:
            raise ValueError(f"tick: got {tick}; expected 0 <= tick < {self.refresh}, the schedule's refresh")
        return epoch * self.refresh + tick

    def tick(self, step: int, steps_per_epoch: int) -> int:
        """The tick of step `step` of an epoch. Refreshes fall between steps, never inside a logical batch."""
        if not 0 <= step < steps_per_epoch:
            raise ValueError(f"step: got {step}; expected 0 <= step < steps_per_epoch = {steps_per_epoch}")
        return step * self.refresh // steps_per_epoch


class GradualCooling(CustomRate):
    """r(e) = final_rate * e / (epochs - 1): from 0 in the first epoch to final_rate in the last (Algorithm 1,
    line 2). A single epoch is both; it takes the first's rate, 0. The rate is the epoch's: `refresh` draws
    new masks at that same rate within it.

    >>> schedule = GradualCooling(final_rate=0.9, epochs=4)
    >>> [round(schedule(e), 2) for e in range(4)]
    [0.0, 0.3, 0.6, 0.9]
    """

    def __init__(self, final_rate: float, epochs: int, refresh: int = 1) -> None:
        self.final_rate = checked_rate(final_rate, "final_rate")
        super().__init__(lambda epoch, tick: self.final_rate * (epoch / max(self.epochs - 1, 1)), epochs, refresh)

    def __repr__(self) -> str:
        return f"GradualCooling(final_rate={self.final_rate}, epochs={self.epochs}, refresh={self.refresh})"

    def __reduce__(self) -> tuple[type, tuple[float, int, int]]:
        return GradualCooling, (self.final_rate, self.epochs, self.refresh)


class ConstantRate(CustomRate):
    """The same rate throughout (the paper's ablation without cooling)."""

    def __init__(self, rate: float, epochs: int, refresh: int = 1) -> None:
        self.rate = checked_rate(rate, "rate")
        super().__init__(lambda epoch, tick: self.rate, epochs, refresh)

    def __repr__(self) -> str:
        return f"ConstantRate(rate={self.rate}, epochs={self.epochs}, refresh={self.refresh})"

    def __reduce__(self) -> tuple[type, tuple[float, int, int]]:
        return ConstantRate, (self.rate, self.epochs, self.refresh)
