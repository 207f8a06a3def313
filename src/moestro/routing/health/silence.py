"""Whether an engine still answers, judged by its bytes and its health checks. Callers pass in the time."""

from __future__ import annotations

from dataclasses import dataclass

# A first byte that takes this many times as long as usual counts against the engine. By Markov's inequality at most a
# quarter of first bytes do, whatever their distribution, so this alone suspects no engine.
LATE_FACTOR = 4
_GAIN = 1 / 8  # weight of the newest first byte in the usual one, as of a round trip in RFC 6298
_NEVER_NS = -(1 << 62)


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
        self._arrived_ns = self.checked_ns = _NEVER_NS
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
