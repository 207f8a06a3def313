"""One publisher's batches, in order and each once: gaps are filled by replay, and what cannot be filled is said so.

A publisher numbers its batches from 0 and keeps the last of them (vLLM: 10,000) for replay; it has no snapshot, and its
messages carry no mark of the process. So, whenever something may have been missed, the replay that is asked for begins
with the batch applied last. Does that come back unchanged, it is the same process; does another, or none, the process
is another, and what its predecessor held is gone. While an answer is awaited, live batches are kept back.

The stream is asked again after some silence: a publisher that drops the last batches of a burst would otherwise leave a
gap that nobody sees until the next one.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import msgspec


class Consumer(Protocol):
    """Whom batches go to."""

    def apply(self, payload: bytes, now_ns: int) -> None:
        """The next batch."""

    def began(self, now_ns: int) -> None:
        """The next batch is the publisher's first: nothing is missing."""

    def lost(self, now_ns: int) -> None:
        """Batches were missed and will not come: what was built from those before may be wrong."""

    def restarted(self, now_ns: int) -> None:
        """Another process publishes: what was built from the old one's batches means nothing."""


class StreamRules(msgspec.Struct, frozen=True, kw_only=True):
    """How long a publisher is waited for.

    Attributes:
        reply_ns: between two messages of a replay.
        num_tries: of a replay that does not answer, or does not help.
        rest_ns: after the last try, in which gaps are not asked for.
        silence_ns: after which the stream is asked whether something was missed.
        max_num_waiting: live batches kept back; with more, they are taken as they are.
    """

    reply_ns: int = 2_000_000_000
    num_tries: int = 3
    rest_ns: int = 30_000_000_000
    silence_ns: int = 10_000_000_000
    max_num_waiting: int = 20_000


@dataclass(slots=True)
class StreamCounts:
    """What happened, of all times."""

    batches: int = 0
    gaps: int = 0
    replayed: int = 0
    unanswered: int = 0
    lost: int = 0
    restarts: int = 0


@dataclass(slots=True)
class _Replay:
    """One that was asked for.

    Attributes:
        deadline_ns: for its next message.
        is_doubtful: whether something may have been missed; else it is asked for certainty only.
        is_sent: the request is with the caller.
        is_answered: a message of it has come.
        is_foreign: it is another process's.
        is_whole: it has all that the publisher keeps.
    """

    deadline_ns: int
    is_doubtful: bool
    is_sent: bool = False
    is_answered: bool = False
    is_foreign: bool = False
    is_whole: bool = False


class KvStream:
    """Puts batches in order.

    The caller hands in what comes from the two sockets, asks `request` after each call whether a replay is wanted, and
    calls `tick` at `deadline_ns`. It tells of a new connection before the first batch that came by it. A request
    replaces the one before it, whose messages are not to be handed in any more.

    Args:
        consumer: gets the batches.
        can_replay: whether there is somebody to ask.
        rules: see there.
        counts: are kept.

    Attributes:
        is_complete: nothing is missing of what the publisher has sent since its first batch.
    """

    def __init__(self, consumer: Consumer, *, can_replay: bool, rules: StreamRules, counts: StreamCounts) -> None:
        self.is_complete = False
        self._consumer = consumer
        self._can_replay = can_replay
        self._rules = rules
        self._counts = counts
        self._is_connected = False
        self._next: int | None = None  # the number that comes next; None: whichever comes
        self._last_payload = b""  # of the batch applied last
        self._last_live = -1
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._replay: _Replay | None = None
        self._num_tries = 0  # of replays, since a batch came in its turn
        self._rest_until_ns: int | None = None
        self._silent_at_ns: int | None = None
        self._is_rebuild_due = False  # batches were lost; perhaps the publisher still keeps them

    # --- what comes in

    def connected(self, now_ns: int) -> None:
        """There is a new connection: what was sent since the last one's end has not come."""
        self._is_connected = True
        self._last_live = -1
        self._begin(now_ns)
        if not self._can_replay and self._next is not None:
            self._lose(now_ns)

    def disconnected(self, now_ns: int) -> None:
        """The connection has ended. After some silence it is not known any more what the cache holds."""
        self._is_connected = False
        self._replay = None
        self._waiting.clear()
        self._silent_at_ns = now_ns + self._rules.silence_ns

    def live(self, seq: int, payload: bytes, now_ns: int) -> None:
        """A batch was published."""
        if seq <= self._last_live:
            self._restart(now_ns)
        self._last_live = seq
        if self._replay is None:
            self._take(seq, payload, now_ns)
        else:
            self._waiting.append((seq, payload))
            if len(self._waiting) > self._rules.max_num_waiting:
                self._give_up(now_ns)

    def replayed(self, seq: int, payload: bytes, now_ns: int) -> None:
        """A batch came again, as it was asked for."""
        replay = self._replay
        if replay is None or replay.is_foreign:
            return
        replay.deadline_ns = now_ns + self._rules.reply_ns
        if self._next and seq < self._next - 1:
            return  # more than was asked for
        is_first, replay.is_answered = not replay.is_answered, True
        if is_first and self._next:  # it should be the one applied last
            if seq == self._next - 1:
                replay.is_foreign = payload != self._last_payload
                return
            self._lose(now_ns)  # so old a batch is not kept any more
        if self._next is not None and seq > self._next:
            self._lose(now_ns)
        if self._next is None or seq == self._next:
            replay.is_whole |= self._next is None
            self._counts.replayed += 1
            self._apply(seq, payload, now_ns)

    def replay_ended(self, now_ns: int) -> None:
        """All that was asked for has come."""
        replay = self._replay
        if replay is None:
            return
        self._replay = self._rest_until_ns = None
        if replay.is_foreign or (self._next and not replay.is_answered):
            self._restart(now_ns)
            return
        if self._next is None:
            self._next, self.is_complete, replay.is_whole = 0, True, True  # nothing was published yet
            self._consumer.began(now_ns)
        self._is_rebuild_due &= not replay.is_whole
        self._release(now_ns)

    def tick(self, now_ns: int) -> None:
        """Time has passed."""
        if self.deadline_ns is None or now_ns < self.deadline_ns:
            return
        if self._replay is not None:
            self._counts.unanswered += 1
            self._not_answered(now_ns, self._replay)
        elif self._is_connected and self._is_rebuild_due:
            self._rebuild(now_ns)
        elif self._is_connected:
            self._ask(now_ns, is_doubtful=False)
        else:
            self._silent_at_ns = None
            if self._next is not None:
                self._lose(now_ns)

    # --- what goes out

    def request(self) -> int | None:
        """The number from which a replay is to be asked for now, said once; None: none is."""
        if self._replay is None or self._replay.is_sent:
            return None
        self._replay.is_sent = True
        return self._next - 1 if self._next else 0

    @property
    def deadline_ns(self) -> int | None:
        """When to call `tick`."""
        return self._silent_at_ns if self._replay is None else self._replay.deadline_ns

    @property
    def is_certain(self) -> bool:
        """Whether nothing speaks for another process, or for batches that have not come."""
        return self._is_connected and self._replay is None

    # --- inside

    def _begin(self, now_ns: int) -> None:
        """Find out where the publisher is."""
        self._waiting.clear()
        self._replay = self._rest_until_ns = self._silent_at_ns = None
        self._num_tries = 0
        if self._can_replay:
            self._ask(now_ns, is_doubtful=True)

    def _take(self, seq: int, payload: bytes, now_ns: int) -> None:
        """A live batch while no replay is awaited."""
        if self._is_rebuild_due and self._may_ask(now_ns):
            self._waiting.appendleft((seq, payload))
            self._rebuild(now_ns)
        elif self._next is None or seq == self._next:
            self._num_tries = 0
            self._apply(seq, payload, now_ns)
        elif seq > self._next:
            self._counts.gaps += 1
            if self._may_ask(now_ns):
                self._waiting.appendleft((seq, payload))
                self._ask(now_ns, is_doubtful=True)
            else:
                self._lose(now_ns)
                self._apply(seq, payload, now_ns)

    def _apply(self, seq: int, payload: bytes, now_ns: int) -> None:
        if self._next is None:
            self.is_complete = seq == 0
            if self.is_complete:
                self._consumer.began(now_ns)
        self._next, self._last_payload = seq + 1, payload
        self._counts.batches += 1
        self._listen(now_ns)
        self._consumer.apply(payload, now_ns)

    def _listen(self, now_ns: int) -> None:
        self._silent_at_ns = now_ns + self._rules.silence_ns if self._can_replay else None

    def _release(self, now_ns: int) -> None:
        """Let those go that were kept back, until there is a gap that is to be asked for."""
        self._listen(now_ns)
        while self._waiting and self._replay is None:
            self._take(*self._waiting.popleft(), now_ns)

    def _may_ask(self, now_ns: int) -> bool:
        is_resting = self._rest_until_ns is not None and now_ns < self._rest_until_ns
        return self._can_replay and not is_resting and self._num_tries < self._rules.num_tries

    def _ask(self, now_ns: int, *, is_doubtful: bool) -> None:
        self._num_tries += is_doubtful
        self._replay = _Replay(now_ns + self._rules.reply_ns, is_doubtful)

    def _rebuild(self, now_ns: int) -> None:
        """Begin with the first batch that the publisher keeps."""
        if self._next is not None:
            self._next, self.is_complete = None, False
            self._consumer.lost(now_ns)
        self._ask(now_ns, is_doubtful=True)

    def _not_answered(self, now_ns: int, replay: _Replay) -> None:
        if not replay.is_doubtful:
            self._replay = None
            self._release(now_ns)
        elif self._num_tries < self._rules.num_tries:
            self._ask(now_ns, is_doubtful=True)
        else:
            self._give_up(now_ns)

    def _give_up(self, now_ns: int) -> None:
        """Go on with what there is."""
        self._replay = None
        self._rest_until_ns = now_ns + self._rules.rest_ns
        self._is_rebuild_due = True
        if self._next is not None:
            self._lose(now_ns)
        self._release(now_ns)

    def _lose(self, now_ns: int) -> None:
        self._next, self.is_complete = None, False
        self._is_rebuild_due = self._can_replay
        self._counts.lost += 1
        self._consumer.lost(now_ns)

    def _restart(self, now_ns: int) -> None:
        """Another process publishes: find its first batch."""
        self._next, self.is_complete, self._is_rebuild_due = None, False, False
        self._counts.restarts += 1
        self._consumer.restarted(now_ns)
        self._begin(now_ns)
