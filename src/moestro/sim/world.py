"""The event queue of virtual time, in one total order. The simulator reads no clock and never sleeps."""

from __future__ import annotations

from heapq import heappop, heappush

from moestro.core.clock import FOREVER_NS

# Kinds of events: a request whose time is known from the start, one that follows another, the end of a step, and a look
# at figures for requests that wait in front of the router. At the same nanosecond the smaller kind comes first: a
# request that arrives exactly when a step ends enters the next step, as in a worker, which reads its inbox first.
FIRST_ARRIVAL, ARRIVAL, STEP, LOOK = range(4)


class World:
    """A queue of events, and the current time.

    Events are ordered by (time, kind, number), so their order is never left to chance. An event that has become
    obsolete stays in the queue; its receiver detects it from its own state.

    Attributes:
        now_ns: current time, integer nanoseconds; never decreases.
    """

    def __init__(self) -> None:
        self.now_ns = 0
        self._events: list[tuple[int, int, int]] = []

    def at(self, time_ns: int, kind: int, number: int) -> None:
        """Schedule event `number` of `kind` at `time_ns`, which is not in the past."""
        assert time_ns >= self.now_ns, f"an event at {time_ns}, and it is {self.now_ns}"
        heappush(self._events, (time_ns, kind, number))

    @property
    def next_ns(self) -> int:
        """Time of the next event, or FOREVER_NS."""
        return self._events[0][0] if self._events else FOREVER_NS

    def next(self) -> tuple[int, int] | None:
        """Advance to the next event and return it; None means that the queue is empty."""
        if not self._events:
            return None
        self.now_ns, kind, number = heappop(self._events)
        return kind, number
