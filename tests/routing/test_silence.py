"""Signs of life of an engine: bytes and health checks; time is a number here."""

from __future__ import annotations

from moestro.routing.health import LATE_FACTOR, Silence, SilenceRules

S = 1_000_000_000
RULES = SilenceRules(check_ns=5 * S, hang_ns=4 * S)


def missing(*seconds: float) -> Silence:
    """An engine that last sent a byte at 0 s and misses the checks of these seconds."""
    silence = Silence(RULES)
    silence.arrived(0)
    for second in seconds:
        silence.checked(int(second * S))
        silence.missed(int(second * S))
    return silence


def test_missed_checks_make_an_engine_suspected_and_then_hung():
    assert [missing(*range(1, n + 1)).is_suspected(0) for n in range(5)] == [False, False, True, True, True]
    assert [missing(*range(1, n + 1)).is_hung for n in range(5)] == [False, False, False, True, True]


def test_any_byte_since_a_check_was_sent_excuses_it():
    silence = missing(1, 2, 3)
    silence.checked(4 * S)
    silence.arrived(int(4.5 * S))
    assert not silence.is_hung
    silence.missed(4 * S)
    assert silence.num_missed == 0


def test_the_same_byte_counts_once():
    silence = missing(1, 2, 3)
    silence.arrived(0)
    assert silence.is_hung


def test_one_missed_check_suspects_an_engine_whose_first_byte_is_late():
    for num_missed, is_suspected in ((0, False), (1, True)):
        silence = missing(*range(1, num_missed + 1))
        silence.began(S // 10)
        assert not silence.is_suspected(LATE_FACTOR * S // 10)
        assert silence.is_suspected(LATE_FACTOR * S // 10 + 1) is is_suspected


def test_without_an_earlier_first_byte_none_is_late():
    assert not missing(1).is_suspected(1000 * S)


def test_the_usual_first_byte_follows_the_load():
    silence = missing(1)
    for _ in range(50):
        silence.began(S)
    assert silence.is_suspected(5 * S)
    for _ in range(50):
        silence.began(10 * S)
    assert not silence.is_suspected(5 * S)


def test_an_engine_that_sends_bytes_is_checked_at_the_interval_alone():
    silence = missing(1)
    for tenth in range(11, 60):
        silence.arrived(tenth * S // 10)
        assert silence.next_check_ns == min(6 * S, tenth * S // 10 + RULES.quiet_ns)


def test_a_silent_engine_is_checked_at_once_and_again():
    silence = missing()
    silence.checked(0)
    assert silence.next_check_ns == RULES.quiet_ns
    silence.checked(RULES.quiet_ns)
    assert silence.next_check_ns == RULES.quiet_ns + RULES.limit_ns
