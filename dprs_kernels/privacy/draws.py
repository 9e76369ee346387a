"""One draw, one step: each release has to come from a batch of its own, drawn by the sampler that the ledger charges.

An accountant's step is: draw a batch at q, release its sum once. A release that holds k draws, or k releases of one
draw, cost more than the same number of steps; how much more depends on who was drawn. So a ledger that is attached
with a sampler of privacy.sampling compares, at every release, the batches drawn with the releases charged:

    refused    a batch was drawn while the logical batch was open (gradient accumulation over several draws)
               nothing was drawn since the release before (two steps, or two optimizers, on one batch)
               more releases in a pass than batches drawn in it
    noted      draws of a pass that no release used; epsilon() asks whether they were thrown away

Loader workers draw ahead: of what was drawn before a pass's first release, all but one batch counts as drawn ahead,
and once a pass has no more to draw, its last batches come out without a draw. There the rules see less: what was drawn
ahead and never came out is noted when the next pass begins.
"""

from __future__ import annotations

from collections.abc import Callable

from dprs_kernels.privacy.sampling import Draws

REMEDY = "one draw, one step: a larger batch is a larger sample_rate, in micro-batches where memory asks for it"


class DrawCount:
    """draws: the sampler's, now. Releases are counted from here on.

    >>> now = Draws(total=1, run=0, in_run=1, exhausted=False)
    >>> count = DrawCount(lambda: now)
    >>> count.release(opened=1)
    0
    >>> count.release(opened=1)
    Traceback (most recent call last):
    ...
    ValueError: step: no batch was drawn since the last step, ...
    """

    def __init__(self, draws: Callable[[], Draws]) -> None:
        self._draws = draws
        now = draws()
        self._seen = Draws(now.total - now.in_run, now.run, 0, exhausted=False)   # at the last release, or at first
        self._released = 0        # in the pass of _seen
        self._unused = 0          # noted in it

    def total(self) -> int:
        return self._draws().total

    def release(self, *, opened: int) -> int:
        """One release of a logical batch that got its first samples when `opened` batches were drawn. How many
        earlier draws are in no release, as far as can be told; ValueError where this release is not one draw's."""
        now, last = self._draws(), self._seen
        if now.total != opened:
            raise ValueError(
                f"step: {now.total - opened} batches were drawn while this logical batch was open: it may hold several "
                f"draws, and is charged as one; {REMEDY}"
            )
        unused = 0
        if now.run == last.run:
            drawn = now.total - last.total
            if (drawn == 0 and not now.exhausted) or self._released + self._unused >= now.in_run:
                raise ValueError(
                    "step: no batch was drawn since the last step, or fewer than steps were taken: the same samples "
                    f"would be released again, under one step's epsilon; {REMEDY}"
                )
            if self._released:   # before the first, batches may have been drawn ahead
                unused = max(drawn - 1, 0)
        else:
            if now.in_run == 0:
                raise ValueError(f"step: no batch was drawn in this pass; {REMEDY}")
            if last.exhausted and self._released:
                unused = max(last.in_run - self._released - self._unused, 0)
            self._seen, self._released, self._unused = now, 1, 0
            return unused
        self._seen, self._released, self._unused = now, self._released + 1, self._unused + unused
        return unused
