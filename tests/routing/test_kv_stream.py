import pytest

from moestro.routing.kv_events import BATCH_BYTES, KvStream, StreamCounts, StreamRules

SECOND_NS = 1_000_000_000
RULES = StreamRules(
    reply_ns=2 * SECOND_NS,
    replay_ns=20 * SECOND_NS,
    rest_ns=30 * SECOND_NS,
    silence_ns=10 * SECOND_NS,
    max_waiting_bytes=4 * (BATCH_BYTES + 2),
)


class Received(list):
    """Calls of the consumer, in order; apart from them, the batch before which nothing was missing."""

    def __init__(self) -> None:
        self.began_at: list[int] = []
        self.reasons: list[str] = []

    def began(self, now_ns: int) -> None:
        self.began_at.append(len(self))

    def apply(self, payload: bytes, now_ns: int) -> None:
        self.append(payload.decode())

    def lost(self, now_ns: int) -> None:
        self.append("lost")

    def restarted(self, now_ns: int) -> None:
        self.append("restarted")

    def gave_up(self, why: str) -> None:
        self.reasons.append(why)


class Setting:
    def __init__(self, *, can_replay: bool) -> None:
        self.received, self.counts, self.now_ns = Received(), StreamCounts(), 0
        self.stream = KvStream(self.received, can_replay=can_replay, rules=RULES, counts=self.counts)
        self.stream.connected(0)

    def live(self, *seqs: int, by: str = "a") -> None:
        for seq in seqs:
            self.stream.live(seq, f"{by}{seq}".encode(), self.now_ns)

    def answer(self, *seqs: int, by: str = "a", ends: bool = True) -> int | None:
        """Answer what is requested. Returns from where it was."""
        start = self.stream.request()
        for seq in seqs:
            self.stream.replayed(seq, f"{by}{seq}".encode(), self.now_ns)
        if ends:
            self.stream.replay_ended(self.now_ns)
        return start

    def wait(self, seconds: float) -> None:
        self.now_ns += int(seconds * SECOND_NS)
        self.stream.tick(self.now_ns)

    def taken(self) -> list[str]:
        received, self.received[:] = list(self.received), []
        return received


@pytest.fixture
def asking() -> Setting:
    """A publisher that answers, and has answered the first question: nothing is published yet."""
    setting = Setting(can_replay=True)
    assert setting.answer() == 0
    return setting


@pytest.fixture
def mute() -> Setting:
    """A publisher without a replay endpoint."""
    return Setting(can_replay=False)


def test_batches_in_order_are_passed_on_and_nothing_is_requested(asking):
    asking.live(0, 1, 2)
    assert asking.taken() == ["a0", "a1", "a2"]
    assert asking.stream.request() is None
    assert asking.stream.is_complete


def test_what_was_published_before_the_connection_comes_first():
    setting = Setting(can_replay=True)
    setting.live(2, 3)
    assert setting.answer(0, 1, 2) == 0
    assert setting.taken() == ["a0", "a1", "a2", "a3"]
    assert setting.stream.is_complete


def test_a_history_that_is_not_kept_from_its_beginning_is_not_complete():
    setting = Setting(can_replay=True)
    setting.answer(5, 6)
    setting.live(7)
    assert setting.taken() == ["a5", "a6", "a7"]
    assert not setting.stream.is_complete


def test_a_gap_is_filled_before_what_came_after_it(asking):
    asking.live(0, 1, 4, 5)
    assert asking.taken() == ["a0", "a1"]
    assert asking.answer(1, 2, 3, 4, 5) == 1  # from the one applied last: is it still the same?
    asking.live(6)
    assert asking.taken() == ["a2", "a3", "a4", "a5", "a6"]
    assert asking.stream.is_complete
    assert (asking.counts.gaps, asking.counts.lost) == (1, 0)


def test_a_batch_published_between_answer_and_arrival_is_requested_again(asking):
    asking.live(0, 2)
    asking.answer(0, 1, 2, ends=False)
    asking.live(4)
    asking.stream.replay_ended(0)
    assert asking.answer(2, 3, 4) == 2
    assert asking.taken() == ["a0", "a1", "a2", "a3", "a4"]


def test_a_gap_that_is_not_kept_any_more_is_lost_and_the_rest_is_taken(asking):
    asking.live(0, 9)
    asking.answer(7, 8, 9)
    assert asking.taken() == ["a0", "lost", "a7", "a8", "a9"]
    assert not asking.stream.is_complete


def test_a_gap_that_no_replay_fills_is_requested_three_times(asking):
    asking.live(0, 2)
    for _ in range(3):
        assert asking.answer(0) == 0
    assert asking.stream.request() is None
    assert asking.taken() == ["a0", "lost", "a2"]


def test_without_anybody_to_ask_a_gap_is_lost(mute):
    mute.live(0, 2)
    assert mute.taken() == ["a0", "lost", "a2"]
    assert mute.stream.request() is None
    assert mute.stream.deadline_ns is None


def test_numbers_that_begin_again_are_another_process(asking, mute):
    for setting in (asking, mute):
        setting.live(0, 1)
        setting.live(0, by="b")
    assert mute.taken() == ["a0", "a1", "restarted", "b0"]
    assert asking.answer(0, by="b") == 0
    assert asking.taken() == ["a0", "a1", "restarted", "b0"]
    assert asking.stream.is_complete


def test_a_new_connection_to_the_same_process_misses_nothing(asking):
    asking.live(0, 1)
    asking.stream.disconnected(0)
    asking.stream.connected(0)
    assert asking.answer(1, 2) == 1
    asking.live(3)
    assert asking.taken() == ["a0", "a1", "a2", "a3"]


def test_that_nothing_is_missing_is_reported_before_the_first_batch(asking, mute):
    assert asking.received.began_at == [0]
    mute.live(3, 4)
    assert mute.received.began_at == []
    mute.live(0)
    assert mute.taken() == ["a3", "a4", "restarted", "a0"]
    assert mute.received.began_at == [3]


@pytest.mark.parametrize("num_published", [1, 2, 5])
def test_another_process_is_recognized_by_the_batch_applied_last(asking, num_published):
    """Be it that the new one has not come so far yet, or further: never is its history taken for the old one's."""
    asking.live(0, 1)
    asking.stream.disconnected(0)
    asking.stream.connected(0)
    seqs = range(num_published)
    assert asking.answer(*seqs[1:], by="b") == 1
    assert asking.answer(*seqs, by="b") == 0
    assert asking.taken() == ["a0", "a1", "restarted", *(f"b{seq}" for seq in seqs)]
    assert asking.stream.is_complete


def test_without_anybody_to_ask_a_new_connection_is_a_new_beginning(mute):
    mute.live(0, 1)
    mute.stream.disconnected(0)
    mute.stream.connected(0)
    mute.live(2)
    assert mute.taken() == ["a0", "a1", "lost", "a2"]
    assert not mute.stream.is_complete


def test_unanswered_replay_is_retried_then_suspended(asking):
    asking.live(0, 2)
    for _ in range(3):
        assert asking.stream.request() == 0
        asking.wait(2)
    assert asking.taken() == ["a0", "lost", "a2"]
    asking.live(3, 5)
    assert asking.taken() == ["a3", "lost", "a5"]
    assert asking.stream.request() is None
    assert asking.counts.unanswered == 3


def test_what_was_lost_is_built_anew_once_the_replay_answers_again(asking):
    asking.live(0, 2)
    for _ in range(3):
        asking.stream.request()
        asking.wait(2)
    asking.live(3)
    asking.taken()
    asking.wait(31)
    assert asking.answer(0, 1, 2, 3) == 0
    assert asking.taken() == ["lost", "a0", "a1", "a2", "a3"]
    assert asking.stream.is_complete


def test_after_a_silence_missed_batches_are_requested(asking):
    asking.live(0)
    asking.wait(9.9)
    assert asking.stream.request() is None
    asking.wait(0.2)
    assert asking.answer(0, 1) == 0
    assert asking.taken() == ["a0", "a1"]
    asking.wait(10)
    assert asking.stream.request() == 1
    asking.wait(2)  # no answer: nothing speaks for a loss
    assert asking.taken() == []
    assert asking.stream.is_complete


def test_a_connection_that_does_not_come_back_is_not_believed_for_ever(asking):
    asking.live(0)
    asking.stream.disconnected(0)
    asking.wait(10)
    assert asking.taken() == ["a0", "lost"]
    asking.stream.connected(asking.now_ns)
    assert asking.answer(0, 1) == 0
    assert asking.taken() == ["a0", "a1"]


def test_no_more_is_kept_back_than_allowed(asking):
    asking.live(0, 2, 3, 4, 5)
    assert asking.taken() == ["a0"]
    asking.live(6)
    assert asking.taken() == ["lost", "a2", "a3", "a4", "a5", "a6"]


def test_a_publisher_that_answers_more_than_requested_is_understood(asking):
    asking.live(0, 1, 2, 4)
    assert asking.answer(0, 1, 2, 3, 4) == 2
    assert asking.taken() == ["a0", "a1", "a2", "a3", "a4"]
