"""The API server's clock, as a rank on another machine reads it.

A request's arrival, which the rank compares with its own time, is on that clock, and so are the times that it reports.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from moestro.errors import EngineDiedError
from moestro.wire.messages import ClockReading, ReadClock
from moestro.worker.channel import Channel

_NUM_QUESTIONS = 8  # of which the one with the fastest answer counts: the others waited in some queue
_ANSWER_S = 10.0


def server_clock(channel: Channel) -> Callable[[], int]:
    """Measure how far the API server's clock is from this machine's, and return a function that reads it, in ns.

    The error is at most half of the fastest round trip. Later drift is not corrected.

    Raises:
        EngineDiedError: the API server does not answer.
    """
    _, offset_ns = min(_ask(channel) for _ in range(_NUM_QUESTIONS))
    return lambda: time.monotonic_ns() + offset_ns


def _ask(channel: Channel) -> tuple[int, int]:
    """Return the duration of one round trip, and the offset that it suggests."""
    asked_ns = time.monotonic_ns()
    channel.send(ReadClock(asked_ns))
    # Nothing else is sent to a rank that is not ready, except for the end of its process.
    for message in channel.receive(_ANSWER_S):
        answered_ns = time.monotonic_ns()
        if isinstance(message, ClockReading) and message.asked_ns == asked_ns:
            return answered_ns - asked_ns, message.server_ns - (asked_ns + answered_ns) // 2
    raise EngineDiedError(f"the API server did not tell its time within {_ANSWER_S:g} s")
