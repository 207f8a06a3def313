"""Law: an engine is suspected and down by its silence alone, within the stated time, and up again once it answers."""

from __future__ import annotations

from hypothesis import example, given
from hypothesis import strategies as st

from moestro.routing.health import LATE_FACTOR, Condition, Health, HealthRules, SilenceRules

MS = 1_000_000
RULES = HealthRules(silence=SilenceRules(check_ns=5_000 * MS, hang_ns=4_000 * MS))
QUIET_NS, LIMIT_NS, SOON_NS = RULES.silence.quiet_ns, RULES.silence.limit_ns, 500 * MS


class Watched:
    """An engine that is checked as the router does it, without a socket. Each verdict is compared with its silence."""

    def __init__(self, usual_ns: int | None, longest_wait_ns: int) -> None:
        self.health = Health(RULES, 0)
        self.health.checked(0, passed=True)
        self.health.silence.arrived(0)
        if usual_ns is not None:
            self.health.silence.began(usual_ns)
        self.longest_wait_ns = longest_wait_ns
        self.is_late = usual_ns is not None and longest_wait_ns > LATE_FACTOR * usual_ns
        self.now_ns = self.byte_ns = 0
        self.sent: list[int] = []  # checks that can still be missed
        self.check_ns = 0  # time of the next check

    def byte(self, at_ns: int) -> None:
        """Let time pass until the engine sends a byte."""
        while (event_ns := min([self.check_ns, *(sent + LIMIT_NS for sent in self.sent)])) <= at_ns:
            self.now_ns = event_ns
            self.judge()
            if self.sent and self.sent[0] + LIMIT_NS == event_ns:
                self.health.silence.missed(self.sent.pop(0))
            else:
                self.check()
            self.judge()
        self.now_ns = at_ns
        self.judge()
        self.byte_ns = at_ns
        self.health.silence.arrived(at_ns)
        self.check_ns = min(self.check_ns, self.health.silence.next_check_ns) if self.is_well else self.check_ns
        assert self.condition is Condition.UP

    def check(self) -> None:
        """Send a health check. If it is due only because of a silence that has ended, it is put off."""
        silence = self.health.silence
        if not self.is_well or silence.next_check_ns <= self.now_ns:
            silence.checked(self.now_ns)
            self.sent.append(self.now_ns)
        self.check_ns = silence.next_check_ns if self.is_well else self.now_ns + SOON_NS

    @property
    def condition(self) -> Condition:
        return self.health.condition(1, 0, self.now_ns, self.longest_wait_ns)

    @property
    def is_well(self) -> bool:
        return self.condition in (Condition.UP, Condition.SUSPECTED)

    def judge(self) -> None:
        silence_ns = self.now_ns - self.byte_ns
        if silence_ns < LIMIT_NS or (silence_ns < 2 * LIMIT_NS and not self.is_late):
            assert self.condition is Condition.UP
        if silence_ns < 3 * LIMIT_NS:
            assert self.condition is not Condition.DOWN
        if silence_ns > QUIET_NS + 2 * LIMIT_NS:
            assert self.condition in (Condition.SUSPECTED, Condition.DOWN)
        if silence_ns > RULES.silence.hang_ns:
            assert self.condition is Condition.DOWN


@example([3_999, 4_001, 1], 100, 10**6)
@given(
    st.lists(st.integers(1, 1_999) | st.integers(1, 12_000), min_size=1, max_size=12),
    st.none() | st.integers(1, 5_000),
    st.integers(0, 10**6),
)
def test_silence_alone_takes_an_engine_out(gaps_ms, usual_ms, wait_ms):
    watched = Watched(None if usual_ms is None else usual_ms * MS, wait_ms * MS)
    at_ns = 0
    for gap_ms in gaps_ms:
        at_ns += gap_ms * MS
        watched.byte(at_ns)


@given(st.lists(st.integers(1, 900), min_size=20, max_size=40))
def test_an_engine_that_sends_bytes_keeps_its_share(gaps_ms):
    """It is never suspected, so it needs no slow start either."""
    watched, at_ns = Watched(1 * MS, 10**6 * MS), 0
    for gap_ms in gaps_ms:
        at_ns += gap_ms * MS
        watched.byte(at_ns)
    assert watched.health.share(at_ns) == 1.0
