"""Health of an engine: one verdict from checks, responses, silence and the operator. Callers pass in the time."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum

from moestro.core.client_table import MAX_CLIENTS, ClientTable
from moestro.routing.health.breaker import BackOff, Breaker, BreakerRules, BreakerState
from moestro.routing.health.silence import Silence, SilenceRules

# Refusals that make an engine busy for all, with no success between them, beside those of the most refused client.
_NUM_REFUSALS = 3
_MAX_WITNESSES = 64  # clients whose refusals are counted


class Pauses:
    """Pauses of one engine by client.

    A refusal may concern its client alone: a rate limit of a key, a quota, an oversized request. The engine itself is
    busy if different clients are refused several times and none is served for `silence_ns`. One client's flood of
    refused requests thus takes no engine out that refuses others now and then.
    """

    def __init__(self, silence_ns: int, max_clients: int = MAX_CLIENTS) -> None:
        self._silence_ns = silence_ns
        self._until_ns = ClientTable(int, max_clients)  # A forgotten client is refused once more.
        self._last_ns = 0  # End of the longest pause.
        self._witnesses: dict[Hashable, tuple[int, int]] = {}  # refusals since the last success, and the latest pause
        self._since_ns = 0  # Time of the first of these refusals.

    def __len__(self) -> int:
        return len(self._until_ns)

    def refused(self, client: Hashable, until_ns: int) -> None:
        """Record that the engine refused a request of `client`, which leaves it alone until `until_ns`."""
        self._until_ns[client] = max(self._until_ns[client], until_ns)
        self._last_ns = max(self._last_ns, until_ns)

    def overloaded(self, client: Hashable, for_ns: int, now_ns: int) -> int:
        """Record that a refusal of `client` named the engine's own load and a pause of `for_ns`.

        Returns:
            Pause of the engine for all clients, ns; 0 unless it is busy for all. It is the shortest of all clients: a
            long one may be the answer to the requests of one client alone.
        """
        if not self._witnesses:
            self._since_ns = now_ns
        if client in self._witnesses or len(self._witnesses) < _MAX_WITNESSES:
            num_before, _ = self._witnesses.get(client, (0, 0))
            self._witnesses[client] = num_before + 1, for_ns
        counts, pauses = zip(*self._witnesses.values(), strict=True)
        is_busy = sum(counts) - max(counts) >= _NUM_REFUSALS and now_ns - self._since_ns >= self._silence_ns
        return min(pauses) if is_busy else 0

    def succeeded(self) -> None:
        """Record that the engine has answered a request, so it is not busy for all clients."""
        self._witnesses.clear()

    def concern(self, client: Hashable, now_ns: int) -> bool:
        """Return whether `client` should leave the engine alone now."""
        return (self._until_ns.get(client) or 0) > now_ns

    def last(self, now_ns: int) -> bool:
        """Return whether any client should leave the engine alone now; forgets all pauses once none does."""
        if now_ns < self._last_ns:
            return True
        self._until_ns.clear()
        return False


_RECENT_NS = 500_000_000  # age up to which output excuses a failed check
# Time until a loop is looked for again. A loop through another router shows only when that router chooses it.
_FIRST_LOOP_NS, _LONGEST_LOOP_NS = 1_000_000_000, 60_000_000_000


class Condition(StrEnum):
    """Why an engine does or does not get requests. The first condition that holds applies, in this order."""

    DRAINING = "draining"  # the operator drains the engine
    LOOP = "loop"  # the engine leads back to this router
    UNCHECKED = "unchecked"  # no health check has passed yet
    DOWN = "down"  # health checks fail or are not answered
    OPEN = "open"  # the breaker is open
    ABSENT = "absent"  # no list of engines has the engine any more
    BUSY = "busy"  # the engine refused a request and requests a pause
    PROBING = "probing"  # the breaker admits requests until one succeeds or fails
    STALLED = "stalled"  # the engine's queue grows without any output
    SUSPECTED = "suspected"  # the engine may have stopped answering
    UP = "up"


# Conditions after which an engine needs no slow start.
_KEEPS_CACHE = frozenset({Condition.ABSENT, Condition.BUSY, Condition.SUSPECTED})


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthRules:
    """Thresholds for judging an engine.

    Attributes:
        num_failed_checks: consecutive failed checks that take an engine out of rotation.
        stall_ns: time without progress, while the queue grows, after which an engine counts as stalled.
        slow_start_ns: time over which a returning engine's share of requests grows to the full share.
        default_busy_ns: pause for a busy engine that names no duration.
        max_busy_ns: longest pause that an engine may ask for.
    """

    num_failed_checks: int = 2
    stall_ns: int = 30_000_000_000
    slow_start_ns: int = 30_000_000_000
    default_busy_ns: int = 500_000_000
    max_busy_ns: int = 60_000_000_000
    breaker: BreakerRules = field(default_factory=BreakerRules)
    silence: SilenceRules = field(default_factory=SilenceRules)


class Health:
    """The health of one engine.

    Args:
        silence: signs of life of the engine's server, which the ranks of one address share.

    Attributes:
        breaker: circuit breaker fed by the engine's responses.
        pauses: clients that the engine has refused.
        silence: signs of life of the engine.
        is_draining: whether the operator drains the engine. Callers may set it at any time.
        is_absent: whether no list of engines has the engine. Callers may set it at any time.
    """

    def __init__(self, rules: HealthRules, now_ns: int, silence: Silence | None = None) -> None:
        self._rules = rules
        self.breaker = Breaker(rules.breaker)
        self.pauses = Pauses(rules.breaker.silence_ns)
        self.silence = silence or Silence(rules.silence)
        self.is_draining = self.is_absent = False
        self._loop_until_ns: int | None = None  # time of the next look for a loop; None means no loop
        self._loop_back_off = BackOff(_FIRST_LOOP_NS, _LONGEST_LOOP_NS)
        self._num_failed_checks: int | None = None  # consecutive; None means never checked
        self._busy_until_ns = now_ns
        self._output_ns: int | None = None  # time of the last output
        self._progress_ns = now_ns  # time of the last output, or of the last moment without requests
        self._num_at_progress = 0
        self._counter: float | None = None  # computed tokens, as last reported
        self._counter_ns = now_ns
        self._was_up = False
        self._returned_ns: int | None = None

    def checked(self, now_ns: int, *, passed: bool) -> None:
        """Record the result of a health check that has ended; a missing answer is a failure.

        A check that fails while output arrives is ignored: the engine is only too busy to answer checks.
        """
        if passed:
            self._num_failed_checks = 0
            self.breaker.check_passed(now_ns)
        elif self._num_failed_checks is not None and not self.has_just_answered(now_ns):
            self._num_failed_checks += 1

    def has_just_answered(self, now_ns: int) -> bool:
        """Return whether output of the engine arrived a moment ago, which excuses a failed check."""
        return self._output_ns is not None and now_ns - self._output_ns < _RECENT_NS

    def looped(self, now_ns: int) -> None:
        """Record that a request for the engine has come back to its router."""
        self._loop_until_ns = now_ns + self._loop_back_off.next_ns(now_ns)

    def loop_ended(self, now_ns: int) -> None:
        """Record that a request passed through the engine does not come back."""
        self._loop_until_ns = None
        self._loop_back_off.end(now_ns)

    def is_loop_check_due(self, now_ns: int) -> bool:
        """Return whether to check if the engine still leads back to its router."""
        return self._loop_until_ns is not None and now_ns >= self._loop_until_ns

    def succeeded(self, sent_ns: int, now_ns: int) -> None:
        """Record that the engine has answered a request of `sent_ns` with a success."""
        self.breaker.succeeded(sent_ns, now_ns)
        self.pauses.succeeded()

    def streamed(self) -> None:
        """Record output of an answer that began earlier: the engine serves requests, whichever fail."""
        self.breaker.streamed()
        self.pauses.succeeded()

    def refused(self, client: Hashable, for_ns: int | None, now_ns: int, *, is_overloaded: bool) -> None:
        """Record that the engine refused a request of `client`.

        Args:
            for_ns: pause that the engine asks for, ns; None means no duration given.
            is_overloaded: whether the refusal names the engine's load, and not a limit of the client.
        """
        wanted = self._rules.default_busy_ns if for_ns is None else min(for_ns, self._rules.max_busy_ns)
        self.pauses.refused(client, now_ns + wanted)
        if is_overloaded:
            self._busy_until_ns = max(self._busy_until_ns, now_ns + self.pauses.overloaded(client, wanted, now_ns))

    def progressed(self, num_in_flight: int, now_ns: int) -> None:
        """Record output of the engine, which has `num_in_flight` requests of this router."""
        self._output_ns = self._progress_ns = now_ns
        self._num_at_progress = num_in_flight

    def counted(self, num_tokens: float, num_in_flight: int, now_ns: int) -> None:
        """Record the engine's reported count of tokens computed since its start."""
        if num_tokens != self._counter:
            self.progressed(num_in_flight, now_ns)
        self._counter, self._counter_ns = num_tokens, now_ns

    def paused(self, pause_ns: int, now_ns: int) -> None:
        """Discount `pause_ns` during which the router itself stood still and could not observe the engine."""
        self._progress_ns = min(self._progress_ns + pause_ns, now_ns)
        self._counter_ns = min(self._counter_ns + pause_ns, now_ns)

    def condition(self, num_in_flight: int, num_streaming: int, now_ns: int, longest_wait_ns: int = 0) -> Condition:
        """Return the verdict on an engine.

        Args:
            num_in_flight: requests that the router has on the engine.
            num_streaming: those of them that stream output.
            longest_wait_ns: time for which one of them has waited for its first byte.
        """
        found = self._condition(num_in_flight, num_streaming, now_ns)
        if found is Condition.UP and self.silence.is_suspected(longest_wait_ns):
            found = Condition.SUSPECTED
        if found is Condition.UP:
            if not self._was_up and self._returned_ns is None:
                self._returned_ns = now_ns - self._rules.slow_start_ns  # the first start gets the full share at once
            elif not self._was_up:
                self._returned_ns = now_ns
            self._was_up = True
        elif found not in _KEEPS_CACHE:
            self._was_up = False
        return found

    def share(self, now_ns: int) -> float:
        """Fraction of its full share of requests that an engine should get; grows from 0 to 1 after a return.

        An engine in doubt gets one request at a time, if others can take the rest: it may be failing, or one client's
        requests may.
        """
        if self.breaker.is_in_doubt(now_ns):
            return 0.0
        if self._returned_ns is None or not self._rules.slow_start_ns:
            return 1.0
        return min(1.0, (now_ns - self._returned_ns) / self._rules.slow_start_ns)

    def wait_ns(self, now_ns: int) -> int | None:
        """Nanoseconds until the engine may take requests again by itself; None means no known time."""
        if self.is_draining or self.is_absent or self._loop_until_ns is not None:
            return None
        if self._num_failed_checks is None or self.is_down:
            return None
        return max(self.breaker.opens_in_ns(now_ns), self._busy_until_ns - now_ns, 0)

    @property
    def is_down(self) -> bool:
        """Whether health checks fail, or are not answered."""
        return (self._num_failed_checks or 0) >= self._rules.num_failed_checks or self.silence.is_hung

    def _condition(self, num_in_flight: int, num_streaming: int, now_ns: int) -> Condition:
        if self.is_draining and not self.is_absent:
            return Condition.DRAINING
        if self._loop_until_ns is not None:
            return Condition.LOOP
        if self._num_failed_checks is None:
            return Condition.UNCHECKED
        if self.is_down:
            return Condition.DOWN
        return self._condition_by_answers(num_in_flight, num_streaming, now_ns)

    def _condition_by_answers(self, num_in_flight: int, num_streaming: int, now_ns: int) -> Condition:
        state = self.breaker.state(now_ns)
        if state is BreakerState.OPEN:
            return Condition.OPEN
        if self.is_absent:
            return Condition.ABSENT
        if now_ns < self._busy_until_ns:
            return Condition.BUSY
        if state is BreakerState.PROBING:
            return Condition.PROBING
        return Condition.STALLED if self._is_stalled(num_in_flight, num_streaming, now_ns) else Condition.UP

    def _is_stalled(self, num_in_flight: int, num_streaming: int, now_ns: int) -> bool:
        """Return whether the engine is stalled. Silence counts only while streams or counters should produce output."""
        if num_in_flight == 0:
            self._progress_ns, self._num_at_progress = now_ns, 0
            return False
        stall_ns = self._rules.stall_ns
        is_audible = num_streaming > 0 or (self._counter is not None and now_ns - self._counter_ns < stall_ns)
        return is_audible and num_in_flight > self._num_at_progress and now_ns - self._progress_ns >= stall_ns
