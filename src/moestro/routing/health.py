"""Health of engines: what counts against one, when its circuit opens and is probed again, and how many retries pass.

Callers pass in the time. Evidence are failures of requests that differ in client and in body. An engine is silent by
its bytes and its health checks. The budget limits retries to a share of the traffic, of all clients and of each.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from moestro.core.clients import MAX_CLIENTS, ClientTable


class Origin(NamedTuple):
    """Where a request comes from, as far as its failure is judged.

    Attributes:
        client: Name of the client, as rate limits count it. A client cannot choose it at will.
        body: Digest of the body.
    """

    client: Hashable
    body: Hashable


class Evidence:
    """Failures of one engine since its last success.

    A failure that follows a request from engine to engine is the request's own. A failure is the engine's if requests
    of different clients with different bodies have it too, and none succeeds meanwhile. So the failures of one client,
    or of one body, count as one witness, however many they are. The memory is bounded by `max_witnesses`.

    Args:
        max_witnesses: Largest number of witnesses that a caller needs.
    """

    def __init__(self, max_witnesses: int) -> None:
        self._max_witnesses = max_witnesses
        self._clients: set[Hashable] = set()
        self._bodies: set[Hashable] = set()
        self._since_ns: int | None = None  # First failure since the last success.
        self._num_failures = 0

    def failed(self, origin: Origin, now_ns: int) -> None:
        """Record the failure of a request."""
        if self._since_ns is None:
            self._since_ns = now_ns
        self._num_failures += 1
        is_new = origin.client not in self._clients and origin.body not in self._bodies
        if is_new and len(self._clients) < self._max_witnesses:
            self._clients.add(origin.client)
            self._bodies.add(origin.body)

    def clear(self) -> None:
        """Forget all failures, because the engine has answered a request since."""
        if self._since_ns is not None:
            self._since_ns, self._num_failures = None, 0
            self._clients.clear()
            self._bodies.clear()

    @property
    def num_witnesses(self) -> int:
        """Failures that differ pairwise in client and in body, at most `max_witnesses`."""
        return len(self._clients)

    @property
    def num_failures(self) -> int:
        """Failures since the last success, of whatever origin."""
        return self._num_failures

    def age_ns(self, now_ns: int) -> int:
        """Nanoseconds since the first failure that no success has followed; 0 without any failure."""
        return 0 if self._since_ns is None else now_ns - self._since_ns


_NEVER_NS = 1 << 62
_MAX_DOUBLINGS = 30  # Keeps the shifted number small; `max_open_ns` is reached long before.


class BreakerState(StrEnum):
    """States of a breaker, by the requests that it admits."""

    CLOSED = "closed"  # all requests
    OPEN = "open"  # no request
    PROBING = "probing"  # requests again, but few where other engines can take them; the first success closes it


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerRules:
    """When a breaker opens, and for how long.

    Attributes:
        num_witnesses: failed requests, pairwise of different clients and with different bodies, that open the breaker
            if none succeeds between them. At least 2, so that no client opens it alone.
        num_in_probe: the same while the breaker is probing: fewer, because the failure is known.
        silence_ns: time without a success that must have passed since the first of these failures, ns. So the requests
            of other clients have time to succeed, whatever the number and speed of those that fail.
        open_ns: duration of the first opening, ns. Each further opening lasts twice as long, up to `max_open_ns`.
    """

    num_witnesses: int = 3
    num_in_probe: int = 2
    silence_ns: int = 1_000_000_000
    open_ns: int = 1_000_000_000
    max_open_ns: int = 60_000_000_000


class BackOff:
    """Durations that double from one failure to the next, until none has happened for the longest of them.

    Args:
        first_ns, longest_ns: bounds of the durations, ns.
    """

    def __init__(self, first_ns: int, longest_ns: int) -> None:
        self._first_ns = first_ns
        self._longest_ns = longest_ns
        self._num_failures = 0
        self._ended_ns: int | None = None  # None means that no failure has ended.

    def next_ns(self, now_ns: int) -> int:
        """Return the duration after a failure at `now_ns`."""
        if self._ended_ns is not None and now_ns - self._ended_ns >= self._longest_ns:
            self._num_failures = 0
        self._num_failures += 1
        return min(self._longest_ns, self._first_ns << min(self._num_failures - 1, _MAX_DOUBLINGS))

    def end(self, now_ns: int) -> None:
        """Record that the failure is over."""
        self._ended_ns = now_ns


class Breaker:
    """The circuit breaker of one engine.

    An engine that cannot be reached is out at once, until a health check passes: no request causes a refused
    connection. Every other failure (a 5xx, a cut answer, a time limit) may be the request's own, so it counts only as
    `Evidence`, and health checks, which pass meanwhile, do not end such an opening. A 4xx is the request's own.
    """

    def __init__(self, rules: BreakerRules) -> None:
        self._rules = rules
        self._evidence = Evidence(rules.num_witnesses)
        self._open_until_ns: int | None = None  # None means closed; `_NEVER_NS` waits for a passed health check.
        self._back_off = BackOff(rules.open_ns, rules.max_open_ns)

    def state(self, now_ns: int) -> BreakerState:
        """Return the breaker's state at `now_ns`."""
        if self._open_until_ns is None:
            return BreakerState.CLOSED
        return BreakerState.OPEN if now_ns < self._open_until_ns else BreakerState.PROBING

    def opens_in_ns(self, now_ns: int) -> int:
        """Nanoseconds until the breaker admits requests, as far as known; 0 if it admits requests now."""
        if self._open_until_ns is None:
            return 0
        return self._rules.open_ns if self._open_until_ns == _NEVER_NS else max(0, self._open_until_ns - now_ns)

    @property
    def is_clear(self) -> bool:
        """Whether it is closed, and no failure has come since the last success."""
        return self._open_until_ns is None and not self._evidence.num_failures

    def is_in_doubt(self, now_ns: int) -> bool:
        """Return whether other engines are better: it is probing, or requests fail and none has succeeded for long."""
        if self._open_until_ns is not None:
            return True
        is_failing = self._evidence.num_failures >= self._rules.num_witnesses
        return is_failing and self._evidence.age_ns(now_ns) >= self._rules.silence_ns

    def succeeded(self, sent_ns: int, now_ns: int) -> None:
        """Record that the engine has answered a request of `sent_ns` with a success."""
        if self._open_until_ns is None:
            self._evidence.clear()
        elif self._is_probe(sent_ns, now_ns):
            self._evidence.clear()
            self._open_until_ns = None
            self._back_off.end(now_ns)

    def streamed(self) -> None:
        """Record output of an answer that began earlier. It speaks for a closed breaker, but does not close one."""
        if self._open_until_ns is None:
            self._evidence.clear()

    def failed(self, origin: Origin, sent_ns: int, now_ns: int) -> None:
        """Record the failure of a request of `sent_ns`, which may be the request's own."""
        is_probe = self._is_probe(sent_ns, now_ns)
        if self._open_until_ns is not None and not is_probe:
            return  # A request from before the opening says nothing new.
        rules, evidence = self._rules, self._evidence
        evidence.failed(origin, now_ns)
        num_needed, silence_ns = (rules.num_in_probe, 0) if is_probe else (rules.num_witnesses, rules.silence_ns)
        if evidence.num_witnesses >= num_needed and evidence.age_ns(now_ns) >= silence_ns:
            self._open(now_ns)

    def unreachable(self, now_ns: int) -> None:
        """Record that no connection to the engine can be made: the breaker is open until a health check passes."""
        self._evidence.clear()  # What answered before is gone.
        self._open_until_ns = _NEVER_NS

    def check_passed(self, now_ns: int) -> None:
        """Record a passed health check, after which an engine that could not be reached gets requests."""
        if self._open_until_ns == _NEVER_NS:
            self._open_until_ns = now_ns

    def _is_probe(self, sent_ns: int, now_ns: int) -> bool:
        """Return whether a request was sent while the breaker was probing."""
        return self._open_until_ns is not None and self._open_until_ns <= sent_ns <= now_ns

    def _open(self, now_ns: int) -> None:
        self._evidence.clear()
        self._open_until_ns = now_ns + self._back_off.next_ns(now_ns)


# A first byte that takes this many times as long as usual counts against the engine. By Markov's inequality at most a
# quarter of first bytes do, whatever their distribution, so this alone suspects no engine.
LATE_FACTOR = 4
_GAIN = 1 / 8  # weight of the newest first byte in the usual one, as of a round trip in RFC 6298
_NEVER_ARRIVED_NS = -(1 << 62)


@dataclass(frozen=True, slots=True, kw_only=True)
class SilenceRules:
    """When a silent engine is checked, suspected and given up.

    Attributes:
        check_ns: interval between the health checks of an engine that sends bytes.
        hang_ns: longest time from an engine's last byte to the verdict that it hangs.
        num_suspecting: missed checks in a row that make an engine suspected; one less where a first byte is late too.
        num_fatal: missed checks in a row after which an engine counts as hung.
    """

    check_ns: int = 5_000_000_000
    hang_ns: int = 4_000_000_000
    num_suspecting: int = 2
    num_fatal: int = 3

    @property
    def quiet_ns(self) -> int:
        """Time without a byte after which an engine is checked.

        By default 1.25 s, so that an idle engine whose `/metrics` is read every second needs no more checks.
        """
        return self.hang_ns * 5 // 16

    @property
    def limit_ns(self) -> int:
        """Time after which an unanswered check is missed, and the next one is sent."""
        return (self.hang_ns - self.quiet_ns) // self.num_fatal


class Silence:
    """How long an engine has been silent.

    Every byte on any connection is a sign of life: of an answer, of a health check, of `/metrics`. So an engine that is
    overloaded is not suspected as long as it sends anything, and one that is too busy for health checks neither.

    Attributes:
        checked_ns: time at which the last health check was sent.
        num_missed: health checks in a row that were not answered in time, without any byte since the first one.
    """

    def __init__(self, rules: SilenceRules) -> None:
        self._rules = rules
        self.num_missed = 0
        self._arrived_ns = self.checked_ns = _NEVER_ARRIVED_NS
        self._usual_ns: float | None = None  # usual time to a first byte; None means that there was none

    def arrived(self, byte_ns: int) -> None:
        """Record the time of the last byte that the engine sent. Repeated calls have no effect."""
        if byte_ns > self._arrived_ns:
            self._arrived_ns = byte_ns
            self.num_missed = 0

    def checked(self, now_ns: int) -> None:
        """Record that a health check is sent."""
        self.checked_ns = now_ns

    def missed(self, sent_ns: int) -> None:
        """Record that the check sent at `sent_ns` has no answer in time. Any byte since then excuses the engine."""
        if self._arrived_ns < sent_ns:
            self.num_missed += 1

    def began(self, wait_ns: int) -> None:
        """Record that an answer began `wait_ns` after its request was sent."""
        usual_ns = wait_ns if self._usual_ns is None else self._usual_ns
        self._usual_ns = usual_ns + _GAIN * (wait_ns - usual_ns)

    @property
    def next_check_ns(self) -> int:
        """Time at which the next health check is due."""
        rules = self._rules
        quiet_ns = max(self._arrived_ns + rules.quiet_ns, self.checked_ns + rules.limit_ns)
        return min(self.checked_ns + rules.check_ns, quiet_ns)

    @property
    def is_awaited(self) -> bool:
        """Whether no byte has arrived since the last health check was sent."""
        return self._arrived_ns < self.checked_ns

    @property
    def is_hung(self) -> bool:
        """Whether the engine has stopped answering."""
        return self.num_missed >= self._rules.num_fatal

    def is_suspected(self, longest_wait_ns: int) -> bool:
        """Return whether the engine may have stopped answering.

        Args:
            longest_wait_ns: time for which a request has waited for its first byte.
        """
        is_late = self._usual_ns is not None and longest_wait_ns > LATE_FACTOR * self._usual_ns
        return self.num_missed >= self._rules.num_suspecting - is_late


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

    def rests(self, now_ns: int) -> bool:
        """Note that an engine that is up has no requests, and return whether time alone changes nothing about it."""
        self._progress_ns, self._num_at_progress = now_ns, 0
        return self.breaker.is_clear and not self.is_draining and not self.is_absent

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


_MAX_CLIENTS = 1024  # Clients whose used retries are counted; of more, the one that used least is forgotten.


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRules:
    """Size of the retry budget.

    Attributes:
        share: retries earned per request.
        per_s: retries earned per second independent of traffic, so that low traffic can be retried too.
        burst: largest number of saved retries.
    """

    share: float = 0.2
    per_s: float = 3.0
    burst: float = 100.0


class RetryBudget:
    """Keeps retries from multiplying an overload, and clients from using up the retries of the others.

    A retry after a response (the engine is busy, or failed the request) needs a grant. A request whose engine is gone
    is always sent again: the engine leaves rotation at once, which bounds the number of such requests. Such a retry is
    charged to the budget and leaves less for others.

    A client may have used at most as many retries as are left: one client uses half of them, two a third each. What
    clients have used is forgotten as the budget gains: an equal part of its rate for each of them, and the share of
    each client's own requests.
    """

    def __init__(self, rules: RetryRules, now_ns: int) -> None:
        self._rules = rules
        self._num_left, self._then_ns = rules.burst, now_ns
        self._used: dict[Hashable, float] = {}  # Above 0, by client.

    def request(self, client: Hashable) -> None:
        """Earn the share of one new request of `client`."""
        self._num_left = min(self._rules.burst, self._num_left + self._rules.share)
        if client in self._used:
            self._forget(client, self._rules.share)

    def grant(self, client: Hashable, now_ns: int) -> bool:
        """Return whether `client` is granted a retry, and deduct a granted retry from the budget."""
        self._refill(now_ns)
        used = self._used.get(client, 0.0) + 1
        if used > self._num_left:
            return False
        self._num_left -= 1
        self._used[client] = used
        if len(self._used) > _MAX_CLIENTS:
            del self._used[min(self._used, key=self._used.__getitem__)]
        return True

    def charge(self, client: Hashable, now_ns: int) -> None:
        """Deduct a retry of `client` that needed no grant, but never more than it could have been granted."""
        self.grant(client, now_ns)

    def _refill(self, now_ns: int) -> None:
        gained = (now_ns - self._then_ns) * 1e-9 * self._rules.per_s
        self._num_left, self._then_ns = min(self._rules.burst, self._num_left + gained), now_ns
        if self._used and gained:
            part = gained / len(self._used)
            for client in list(self._used):
                self._forget(client, part)

    def _forget(self, client: Hashable, num: float) -> None:
        self._used[client] -= num
        if self._used[client] <= 0:
            del self._used[client]
