"""Decides whether and when a rank that ended is restarted. Has no clock: callers pass the time."""

from __future__ import annotations

FIRST_DELAY_S = 1.0
STATELESS_FIRST_DELAY_S = 0.25  # The same for workers without state: a quarter of the time that their start takes.
LAST_DELAY_S = 60.0
STEADY_S = 120.0  # Time of service after which the restart delay begins at its first value again.
STATELESS_STEADY_S = 2.0  # The same for workers without state, whose start takes about as long.
MAX_FAILED_STARTS = 5


class RestartRule:
    """Decides about the restarts of one rank.

    A rank that was ready always restarts. The delay doubles with every end, so that a rank which crashes at once cannot
    keep the machine busy. A rank that ends `MAX_FAILED_STARTS` times in a row before it is ready is not restarted,
    because the next start would end the same way.

    Args:
        keeps_state: whether the rank holds what cannot be sent again. A worker without state restarts at once, because
            requests wait for it: only if it ends soon after it was ready, the next start is delayed.
    """

    def __init__(self, *, keeps_state: bool = True) -> None:
        self._keeps_state = keeps_state
        self._ready_ns: int | None = None
        self._num_ends = 0  # Ends since the rank last served for `STEADY_S`.
        self._num_failed_starts = 0  # Failed starts in a row.

    def ready(self, now_ns: int) -> None:
        """Record that the rank accepts requests."""
        self._ready_ns = now_ns
        self._num_failed_starts = 0

    def ended(self, now_ns: int) -> float | None:
        """Return the delay before the next start, in seconds; None means no restart."""
        if self._ready_ns is None:
            self._num_failed_starts += 1
        elif now_ns - self._ready_ns >= self._steady_s * 1e9:
            self._num_ends = 0
        self._ready_ns = None
        if self._num_failed_starts >= MAX_FAILED_STARTS:
            return None
        self._num_ends += 1
        if self._keeps_state:
            return min(LAST_DELAY_S, FIRST_DELAY_S * 2.0 ** (self._num_ends - 1))
        if self._num_ends == 1:
            return 0.0
        return min(LAST_DELAY_S, STATELESS_FIRST_DELAY_S * 2.0 ** (self._num_ends - 2))

    @property
    def _steady_s(self) -> float:
        return STEADY_S if self._keeps_state else STATELESS_STEADY_S
