"""Virtual time: what happens when, in one total order. Nobody here reads a clock or sleeps."""

from __future__ import annotations

from enum import IntEnum
from heapq import heappop, heappush


class Kind(IntEnum):
    """What happens; of things at the same nanosecond, the smaller first.

    Whoever arrives exactly when a step ends is seen by the next one, as in a rank's loop, which reads its inbox first.
    """

    FIRST_ARRIVAL = 0  # of a request whose time was known from the beginning
    ARRIVAL = 1  # of one that follows another
    STEP = 2


class World:
    """A queue of events and the time of the one taken last.

    The key is (time, kind, number), and all of it is compared: which of two events comes first is never left to chance.
    An event that lost its meaning is left where it is; whoever takes it sees so from its own state.

    Attributes:
        now_ns: integer nanoseconds, never goes back.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self._events: list[tuple[int, Kind, int]] = []

    def at(self, time_ns: int, kind: Kind, number: int) -> None:
        """Let `number` of `kind` happen at `time_ns`, which is not in the past."""
        assert time_ns >= self.now_ns, f"an event at {time_ns}, and it is {self.now_ns}"
        heappush(self._events, (time_ns, kind, number))

    def next(self) -> tuple[Kind, int] | None:
        """Go on to the next event and say what it is; None: there is none."""
        if not self._events:
            return None
        self.now_ns, kind, number = heappop(self._events)
        return kind, number
