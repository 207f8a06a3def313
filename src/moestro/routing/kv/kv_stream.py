"""KV stream: delivers one publisher's batches in order and once each, fills gaps by replay, and reports losses.

A publisher numbers its batches from 0 and keeps the latest (vLLM: 10,000) for replay. Publishers send no snapshot, and
their messages do not identify the process. So when batches may have been missed, the requested replay begins with the
batch applied last. If that batch returns unchanged, the publisher did not restart. If another batch returns, or none,
the publisher restarted, and the old process's cache is gone. Live batches are held back while a replay is awaited.

After some silence the stream requests a replay too. Otherwise a publisher that drops the last batches of a burst would
leave a gap that remains unnoticed until the next burst.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

import msgspec


class Consumer(Protocol):
    """Receives a stream's batches."""

    def apply(self, payload: bytes, now_ns: int) -> None:
        """Process the next batch."""

    def began(self, now_ns: int) -> None:
        """Expect the publisher's first batch next: no batch is missing."""

    def lost(self, now_ns: int) -> None:
        """Discard what earlier batches built up: batches were missed for good, so it may be wrong."""

    def restarted(self, now_ns: int) -> None:
        """Discard what the batches of the old process built up: another process publishes now."""

    def gave_up(self, why: str) -> None:
        """Report that batches are not awaited any longer, which `lost` follows if any were delivered before."""


BATCH_BYTES = 128  # memory of a waiting batch without its payload


class StreamRules(msgspec.Struct, frozen=True, kw_only=True):
    """Time limits and bounds of a stream.

    Attributes:
        reply_ns: longest time between two messages of a replay.
        replay_ns: longest time of a whole replay. A publisher that keeps 10,000 batches sends them in a few seconds.
        num_tries: attempts at a replay that is unanswered or fills no gap.
        rest_ns: time after the last attempt during which gaps cause no further replay.
        silence_ns: time without batches after which a replay checks for missed ones.
        max_waiting_bytes: limit of the live batches held back; beyond it the stream stops awaiting the replay. A busy
            engine publishes about 0.2 MB a second, so the limit is a minute and a half of it.
    """

    reply_ns: int = 2_000_000_000
    replay_ns: int = 60_000_000_000
    num_tries: int = 3
    rest_ns: int = 30_000_000_000
    silence_ns: int = 10_000_000_000
    max_waiting_bytes: int = 16 << 20


@dataclass(slots=True)
class StreamCounts:
    """Cumulative counts of a stream."""

    batches: int = 0
    gaps: int = 0
    replayed: int = 0
    unanswered: int = 0
    lost: int = 0
    restarts: int = 0


@dataclass(slots=True)
class _Replay:
    """A requested replay.

    Attributes:
        end_ns: time by which it must have ended.
        deadline_ns: time by which its next message must arrive, at most `end_ns`.
        is_doubtful: whether batches may have been missed; False means a check after silence.
        is_sent: whether the caller has taken the request.
        is_answered: whether a message of the replay has arrived.
        is_foreign: whether its batches come from another process.
        is_whole: whether it contains all batches that the publisher keeps.
    """

    end_ns: int
    deadline_ns: int
    is_doubtful: bool
    is_sent: bool = False
    is_answered: bool = False
    is_foreign: bool = False
    is_whole: bool = False


class KvStream:
    """Puts one publisher's batches in order.

    The caller passes in what arrives on the two sockets, checks `request` after each call, and calls `tick` at
    `deadline_ns`. The caller reports a new connection before its first batch. A new request replaces the previous one,
    whose messages must not be passed in any more.

    Args:
        consumer: receiver of the batches.
        can_replay: whether the publisher has a replay endpoint.
        rules: time limits and bounds.
        counts: counts to update.

    Attributes:
        is_complete: whether all batches of the publisher, from its first on, were delivered.
        num_waiting_bytes: memory of the live batches held back.
    """

    def __init__(self, consumer: Consumer, *, can_replay: bool, rules: StreamRules, counts: StreamCounts) -> None:
        self.is_complete = False
        self.num_waiting_bytes = 0
        self._consumer = consumer
        self._can_replay = can_replay
        self._rules = rules
        self._counts = counts
        self._is_connected = False
        self._next: int | None = None  # number of the next batch; None accepts any
        self._last_payload = b""  # payload of the batch applied last
        self._last_live = -1
        self._waiting: deque[tuple[int, bytes]] = deque()
        self._replay: _Replay | None = None
        self._num_tries = 0  # replays requested since a batch arrived in order
        self._rest_until_ns: int | None = None
        self._silent_at_ns: int | None = None
        self._is_rebuild_due = False  # batches were lost, but the publisher may still keep them

    # --- input

    def connected(self, now_ns: int) -> None:
        """Record a new connection. Batches sent since the last connection ended were not received."""
        self._is_connected = True
        self._last_live = -1
        self._begin(now_ns)
        if not self._can_replay and self._next is not None:
            self._lose(now_ns)

    def disconnected(self, now_ns: int) -> None:
        """Record the end of the connection. The cache contents count as unknown after `silence_ns`."""
        self._is_connected = False
        self._replay = None
        self._drop_waiting()
        self._silent_at_ns = now_ns + self._rules.silence_ns

    def live(self, seq: int, payload: bytes, now_ns: int) -> None:
        """Process a batch that was published live."""
        if seq <= self._last_live:
            self._restart(now_ns)
        self._last_live = seq
        if self._replay is None:
            self._take(seq, payload, now_ns)
        else:
            self._hold_back(seq, payload)
            if self.num_waiting_bytes > self._rules.max_waiting_bytes:
                self.give_up(f"more than {self._rules.max_waiting_bytes >> 20} MiB of events wait for a replay", now_ns)

    def replayed(self, seq: int, payload: bytes, now_ns: int) -> None:
        """Process a batch of the requested replay."""
        replay = self._replay
        if replay is None or replay.is_foreign:
            return
        replay.deadline_ns = min(now_ns + self._rules.reply_ns, replay.end_ns)
        if self._next and seq < self._next - 1:
            return  # a batch before the requested ones
        is_first, replay.is_answered = not replay.is_answered, True
        if is_first and self._next:  # expected: the batch applied last
            if seq == self._next - 1:
                replay.is_foreign = payload != self._last_payload
                return
            self._lose(now_ns)  # the publisher no longer keeps that batch
        if self._next is not None and seq > self._next:
            self._lose(now_ns)
        if self._next is None or seq == self._next:
            replay.is_whole |= self._next is None
            self._counts.replayed += 1
            self._apply(seq, payload, now_ns)

    def replay_ended(self, now_ns: int) -> None:
        """Process the end of the requested replay."""
        replay = self._replay
        if replay is None:
            return
        self._replay = self._rest_until_ns = None
        if replay.is_foreign or (self._next and not replay.is_answered):
            self._restart(now_ns)
            return
        if self._next is None:
            self._next, self.is_complete, replay.is_whole = 0, True, True  # no batch was published yet
            self._consumer.began(now_ns)
        self._is_rebuild_due &= not replay.is_whole
        self._release(now_ns)

    def tick(self, now_ns: int) -> None:
        """Handle an expired deadline, if any."""
        if self.deadline_ns is None or now_ns < self.deadline_ns:
            return
        if self._replay is not None:
            self._counts.unanswered += 1
            if now_ns >= self._replay.end_ns:
                self.give_up("a replay does not end", now_ns)
            else:
                self._not_answered(now_ns, self._replay)
        elif self._is_connected and self._is_rebuild_due:
            self._rebuild(now_ns)
        elif self._is_connected:
            self._ask(now_ns, is_doubtful=False)
        else:
            self._silent_at_ns = None
            if self._next is not None:
                self._lose(now_ns)

    def give_up(self, why: str, now_ns: int) -> None:
        """Drop what was built up, and continue with what comes, because batches are missing or cannot be used.

        A replay would bring the same batches again, so none is requested for a while.
        """
        self._consumer.gave_up(why)
        self._replay = None
        self._rest_until_ns = now_ns + self._rules.rest_ns
        self._is_rebuild_due = True
        if self._next is not None:
            self._lose(now_ns)
        self._release(now_ns)

    # --- output

    def request(self) -> int | None:
        """Return the first batch number of a replay to request now, once per request; None means no request."""
        if self._replay is None or self._replay.is_sent:
            return None
        self._replay.is_sent = True
        return self._next - 1 if self._next else 0

    @property
    def deadline_ns(self) -> int | None:
        """Time of the next `tick`; None means none is needed."""
        return self._silent_at_ns if self._replay is None else self._replay.deadline_ns

    @property
    def awaits_replay(self) -> bool:
        """Whether messages of the requested replay are expected. Without, the caller closes its connection."""
        return self._replay is not None

    @property
    def is_certain(self) -> bool:
        """Whether the stream is connected and awaits no replay, so that no restart or gap is suspected."""
        return self._is_connected and self._replay is None

    # --- inside

    def _begin(self, now_ns: int) -> None:
        """Find the publisher's position after a new connection or a restart."""
        self._drop_waiting()
        self._replay = self._rest_until_ns = self._silent_at_ns = None
        self._num_tries = 0
        if self._can_replay:
            self._ask(now_ns, is_doubtful=True)

    def _take(self, seq: int, payload: bytes, now_ns: int) -> None:
        """Process a live batch while no replay is awaited."""
        if self._is_rebuild_due and self._may_ask(now_ns):
            self._hold_back(seq, payload, is_first=True)
            self._rebuild(now_ns)
        elif self._next is None or seq == self._next:
            self._num_tries = 0
            self._apply(seq, payload, now_ns)
        elif seq > self._next:
            self._counts.gaps += 1
            if self._may_ask(now_ns):
                self._hold_back(seq, payload, is_first=True)
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
        """Process the batches held back, up to a gap that needs another replay."""
        self._listen(now_ns)
        while self._waiting and self._replay is None:
            seq, payload = self._waiting.popleft()
            self.num_waiting_bytes -= BATCH_BYTES + len(payload)
            self._take(seq, payload, now_ns)

    def _hold_back(self, seq: int, payload: bytes, *, is_first: bool = False) -> None:
        self.num_waiting_bytes += BATCH_BYTES + len(payload)
        if is_first:
            self._waiting.appendleft((seq, payload))
        else:
            self._waiting.append((seq, payload))

    def _drop_waiting(self) -> None:
        self._waiting.clear()
        self.num_waiting_bytes = 0

    def _may_ask(self, now_ns: int) -> bool:
        is_resting = self._rest_until_ns is not None and now_ns < self._rest_until_ns
        return self._can_replay and not is_resting and self._num_tries < self._rules.num_tries

    def _ask(self, now_ns: int, *, is_doubtful: bool) -> None:
        self._num_tries += is_doubtful
        self._replay = _Replay(now_ns + self._rules.replay_ns, now_ns + self._rules.reply_ns, is_doubtful)

    def _rebuild(self, now_ns: int) -> None:
        """Start over from the first batch that the publisher keeps."""
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
            self.give_up("no replay is answered", now_ns)

    def _lose(self, now_ns: int) -> None:
        self._next, self.is_complete = None, False
        self._is_rebuild_due = self._can_replay
        self._counts.lost += 1
        self._consumer.lost(now_ns)

    def _restart(self, now_ns: int) -> None:
        """Start over with the first batch of a new publisher process."""
        self._next, self.is_complete, self._is_rebuild_due = None, False, False
        self._counts.restarts += 1
        self._consumer.restarted(now_ns)
        self._begin(now_ns)
