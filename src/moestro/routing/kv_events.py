"""KV feed: turns one publisher's KV events into calls that update the router's view of an engine's cache.

    frames ── kv_wire ──▶ batches ── kv_stream ──▶ each once, in order ── kv_names ──▶ our blocks ──▶ Router.kv_stored …

The feed uses neither sockets nor a clock: `moestro route` reads the sockets, tests read files.

Batches in order wait as jobs, and `work` does a bounded part of them. A caller that passes no message while the feed
is behind holds one batch and what the stream releases, which `StreamRules.max_waiting_bytes` bounds.

A publisher numbers its batches from 0 and keeps the latest (vLLM: 10,000) for replay. Publishers send no snapshot, and
their messages do not identify the process. So when batches may have been missed, the requested replay begins with the
batch applied last. If that batch returns unchanged, the publisher did not restart. If another batch returns, or none,
the publisher restarted, and the old process's cache is gone. Live batches are held back while a replay is awaited.

After some silence the stream requests a replay too. Otherwise a publisher that drops the last batches of a burst would
leave a gap that remains unnoticed until the next burst.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import msgspec

from moestro.core.hashing import HASH_BYTES
from moestro.wire.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    KvEventError,
    KvMessage,
    UnknownEvent,
    UnreadableRemoval,
    UnreadableStore,
    decode_batch,
    decode_event,
    decode_frames,
    removed_parts,
    stored_parts,
)
from moestro.wire.kv_names import GAPS_IN_WORDS, NamedBlocks, NamingCounts, NamingGap, NamingRules, PlacedBlocks


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


_DEFAULT_STREAM = StreamRules()
_PART_BLOCKS = 64  # blocks that a job processes at once, in about 0.2 ms
_UNIT_BYTES = 256  # bytes whose decoding takes as long as the work on a block

UNLIMITED = 1 << 62


class KvSink(Protocol):
    """Receives the contents of engines' caches; the router implements it."""

    def kv_stored(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """Record that `engine` holds these blocks (packed hashes, in prompt order)."""

    def kv_hosted(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """Record that `engine` holds these blocks in host memory alone."""

    def kv_removed(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """Record that `engine` holds these blocks no more."""

    def kv_cleared(self, engine: int, now_ns: int) -> None:
        """Record that `engine` holds no block and reports all its blocks from now on, until `kv_lost`."""

    def kv_incomplete(self, engine: int, now_ns: int) -> None:
        """Record that `engine` holds blocks that are not reported, beside those that are."""

    def kv_lost(self, engine: int, now_ns: int) -> None:
        """Record that the blocks reported by `engine` are no longer reliable."""

    def reports_all_blocks(self, engine: int) -> bool:
        """Return whether all blocks of `engine` are kept since `kv_cleared`; False after one was dropped for memory."""


class Incomplete(StrEnum):
    """Reasons for which the known blocks of a cache are no longer all of them."""

    MISSED = "missed_batches"
    UNREADABLE_BATCH = "unreadable_batch"
    UNREADABLE_EVENT = "unreadable_event"
    UNKNOWN_EVENT = "unknown_event"
    OTHER_RANK = "other_rank"
    ORPHANED = NamingGap.ORPHANED.value
    MALFORMED = NamingGap.MALFORMED.value
    OTHER_SIZE = NamingGap.OTHER_SIZE.value
    INDEX_MEMORY = "index_memory"
    NOT_FOLLOWED = "not_followed"  # the cache claims to hold too many blocks, or its hashes are ambiguous


class KvFeedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings of a feed.

    Attributes:
        engine: number of the engine in the router.
        name: name of the engine, for log lines.
        can_replay: whether the publisher has a replay endpoint.
    """

    engine: int
    name: str
    naming: NamingRules
    can_replay: bool
    stream: StreamRules = _DEFAULT_STREAM


@dataclass(slots=True)
class KvFeedCounts:
    """Cumulative counts of a feed.

    Attributes:
        illegible: messages or stored blocks that could not be decoded.
        unknown: events of unknown types.
        other_rank: batches of another data-parallel rank than the stream's first.
        cleared: number of times that the engine emptied its cache.
        incomplete: number of times that the known blocks ceased to be all of them, by reason.
        newest_ts_s: publication time of the newest batch by the publisher's clock, seconds.
    """

    blocks: NamingCounts = field(default_factory=NamingCounts)
    stream: StreamCounts = field(default_factory=StreamCounts)
    illegible: int = 0
    unknown: int = 0
    other_rank: int = 0
    cleared: int = 0
    incomplete: dict[Incomplete, int] = field(default_factory=lambda: dict.fromkeys(Incomplete, 0))
    newest_ts_s: float = 0.0


class KvFeed:
    """Reports the contents of one cache to a sink: the cache of an engine, or of one of its data-parallel ranks.

    Callers pass messages to `live` and `replayed`, and connections and time to `stream`, and call `work` afterwards.

    Args:
        sink: receiver of the cache's contents.
        settings: settings of the feed.
        warn: callback for irregularities, given a kind and a log line that begins with the engine's name. The callback
            limits the rate of lines by kind.

    Attributes:
        stream: puts the batches in order; its `request` and `deadline_ns` tell the caller what to do next.
        counts: cumulative counts.
        dp_rank: data-parallel rank of the publisher; None until the first batch.
        is_complete: whether the sink has the cache's complete contents.
    """

    def __init__(self, sink: KvSink, settings: KvFeedSettings, warn: Callable[[str, str], None]) -> None:
        self.counts = KvFeedCounts()
        self.dp_rank: int | None = None
        self.stream = KvStream(self, can_replay=settings.can_replay, rules=settings.stream, counts=self.counts.stream)
        self._sink = sink
        self._settings = settings
        self._tell = warn
        self._engine = settings.engine
        self._blocks = NamedBlocks(settings.naming, self.counts.blocks)
        self._jobs: deque[Iterator[int]] = deque()  # each yields the units of work that it has done
        self._dropped: list[NamedBlocks] = []  # have dropped blocks whose memory is not free
        self._now_ns = 0
        self.is_complete = False

    # --- from the sockets

    def live(self, frames: list[bytes], now_ns: int) -> None:
        """Process a message that the publisher sent live."""
        message = self._decoded(frames)
        if message is not None and message.seq is not None:
            self.stream.live(message.seq, message.payload, now_ns)

    def replayed(self, frames: list[bytes], now_ns: int) -> bool:
        """Process a message of a replay, and return whether it was the last."""
        message = self._decoded(frames)
        if message is None:
            return False
        if message.seq is None:
            self.stream.replay_ended(now_ns)
            return True
        self.stream.replayed(message.seq, message.payload, now_ns)
        return False

    def work(self, now_ns: int, most: int = UNLIMITED) -> int:
        """Process about `most` units of the waiting jobs: one for each event, each block and each 256 bytes.

        Returns:
            The units that are left; 0 or less means that jobs may be waiting.
        """
        self._now_ns = now_ns
        while most > 0 and self._jobs:
            job = self._jobs[0]
            for num_units in job:
                most -= num_units
                if most <= 0:
                    return most
            if self._jobs and self._jobs[0] is job:  # unless the job gave up all jobs
                self._jobs.popleft()
        while most > 0 and self._dropped:
            num_freed = self._dropped[-1].tidy(_PART_BLOCKS)
            most -= num_freed
            if not num_freed:
                self._dropped.pop()
        return most

    def tell_again(self) -> None:
        """Report all held blocks again, to a sink that has forgotten them."""
        self._jobs.append(self._report_again())

    # --- from the stream

    def apply(self, payload: bytes, now_ns: int) -> None:
        """Make a job of the next batch."""
        self._jobs.append(self._apply(payload))

    def began(self, now_ns: int) -> None:
        """Start an empty index, which is complete from here on."""
        self._jobs.clear()
        self.is_complete = True
        self._sink.kv_cleared(self._engine, now_ns)

    def lost(self, now_ns: int) -> None:
        """Discard the known blocks."""
        self._jobs.clear()
        self._end(Incomplete.MISSED)
        self._forget()
        self._sink.kv_lost(self._engine, now_ns)

    def restarted(self, now_ns: int) -> None:
        """Discard everything known about the old publisher."""
        self._jobs.clear()
        self.dp_rank = None
        self.is_complete = False
        self._forget()
        self._blocks = NamedBlocks(self._settings.naming, self.counts.blocks)
        self._sink.kv_cleared(self._engine, now_ns)
        self._sink.kv_lost(self._engine, now_ns)  # incomplete until the new publisher's first batch

    def gave_up(self, why: str) -> None:
        """Report that the cache is predicted from now on."""
        self._warn("given up", f"the index of the engine's cache is given up, and its cache is predicted: {why}")

    # --- state

    @property
    def is_behind(self) -> bool:
        """Whether jobs or dropped blocks wait for `work`."""
        return bool(self._jobs or self._dropped)

    @property
    def num_blocks(self) -> int:
        """Number of known blocks in the cache."""
        return self._blocks.num_blocks

    @property
    def num_hosted_blocks(self) -> int:
        """Number of those that are in other tiers than the device alone."""
        return self._blocks.num_hosted

    @property
    def block_size_seen(self) -> int | None:
        """Block size of the publisher in tokens; None until known. Blocks count only if it equals the router's."""
        return self._blocks.block_size_seen

    # --- jobs

    def _report_again(self) -> Iterator[int]:
        if self.is_complete:
            self._sink.kv_cleared(self._engine, self._now_ns)
        placed, size = self._blocks.placed(), _PART_BLOCKS * HASH_BYTES
        for at in range(0, len(placed.stored), size):
            self._place(PlacedBlocks(stored=placed.stored[at : at + size]))
            yield _PART_BLOCKS
        for at in range(0, len(placed.hosted), size):
            self._place(PlacedBlocks(hosted=placed.hosted[at : at + size]))
            yield _PART_BLOCKS

    def _apply(self, payload: bytes) -> Iterator[int]:
        """Report a batch's events to the sink."""
        yield len(payload) // _UNIT_BYTES
        try:
            batch = decode_batch(payload)
        except KvEventError as error:
            self.counts.illegible += 1
            self._end(Incomplete.UNREADABLE_BATCH)
            self.stream.give_up(f"a batch of KV events cannot be decoded ({error})", self._now_ns)
            return
        if self.dp_rank is None:
            self.dp_rank = batch.dp_rank
        if batch.dp_rank != self.dp_rank:
            self.counts.other_rank += 1
            self._warn(
                "other rank",
                f"one stream of KV events carries ranks {self.dp_rank} and {batch.dp_rank}; the latter is ignored",
            )
            self._leave_out(Incomplete.OTHER_RANK, f"events of rank {batch.dp_rank} are ignored")
            return
        self.counts.newest_ts_s = batch.ts_s
        for encoded in batch.events:
            yield 1
            yield from self._event(decode_event(encoded))

    def _event(self, event: Event) -> Iterator[int]:
        """Report an event to the sink, in parts."""
        match event:
            case BlockStored():
                per_hash = min(max(event.block_size // self._settings.naming.block_size, 1), _PART_BLOCKS)
                for part in stored_parts(event, _PART_BLOCKS // per_hash):
                    self._store(part)
                    yield len(part.block_hashes) * per_hash
            case BlockRemoved():
                for removal in removed_parts(event, _PART_BLOCKS):
                    self._place(self._blocks.remove(removal))
                    yield len(removal.block_hashes)
            case AllBlocksCleared():
                self.counts.cleared += 1
                self._forget()
                self._blocks.cleared()
                self.is_complete = not self._blocks.fault
                self._sink.kv_cleared(self._engine, self._now_ns)
            case UnknownEvent():
                self.counts.unknown += 1
                self._leave_out(Incomplete.UNKNOWN_EVENT, "an event has an unknown type")
            case UnreadableStore():
                self.counts.illegible += 1
                self._leave_out(Incomplete.UNREADABLE_EVENT, "an event that stores blocks cannot be read")
            case UnreadableRemoval():
                self.counts.illegible += 1
                self._warn_incomplete("an event that removes blocks cannot be read, so no known block counts")
                self._end(Incomplete.UNREADABLE_EVENT)
                self._forget()
                self._sink.kv_lost(self._engine, self._now_ns)

    def _store(self, event: BlockStored) -> None:
        blocks = self._blocks
        had_fault = bool(blocks.fault)
        placed = blocks.store(event)
        if placed.stored or placed.hosted:
            self._place(placed)
            if not self._sink.reports_all_blocks(self._engine):
                self._leave_out(
                    Incomplete.INDEX_MEMORY, "they exceed the engine's share of --index-memory-bytes; raise it"
                )
        elif blocks.fault and not had_fault:
            self.gave_up(blocks.fault)
            self._forget()
            self._end(Incomplete.NOT_FOLLOWED)
            self._sink.kv_lost(self._engine, self._now_ns)
        elif blocks.block_size_seen not in (None, self._settings.naming.block_size):
            self._warn(
                "block size",
                f"the engine's KV blocks have {blocks.block_size_seen} tokens, the router's"
                f" {self._settings.naming.block_size}, so its cache is predicted. Exact hits need one block size in"
                " router and engines",
            )
        if blocks.gap is not None:
            self._leave_out(Incomplete(blocks.gap), GAPS_IN_WORDS.get(blocks.gap))

    def _place(self, blocks: PlacedBlocks) -> None:
        """Report to the sink where blocks are now."""
        sink, engine, now_ns = self._sink, self._engine, self._now_ns
        if blocks.removed:
            sink.kv_removed(engine, blocks.removed, now_ns)
        if blocks.stored:
            sink.kv_stored(engine, blocks.stored, now_ns)
        if blocks.hosted:
            sink.kv_hosted(engine, blocks.hosted, now_ns)

    def _leave_out(self, reason: Incomplete, why: str | None) -> None:
        """Record that the cache holds more than what is known; what is known still holds.

        Args:
            why: the reason for the log; None means that it is logged elsewhere.
        """
        if self.is_complete:
            if why is not None:
                self._warn_incomplete(why)
            self._end(reason)
            self._sink.kv_incomplete(self._engine, self._now_ns)

    def _warn_incomplete(self, why: str) -> None:
        if self.is_complete:
            self._warn(
                "incomplete",
                f"KV events no longer report all blocks of the engine's cache, and the rest is predicted: {why}",
            )

    def _end(self, reason: Incomplete) -> None:
        """Record that the known blocks are not all that the cache holds; counted once until they are again."""
        self.counts.incomplete[reason] += self.is_complete
        self.is_complete = False

    def _forget(self) -> None:
        self._blocks.forget()
        self._dropped.append(self._blocks)

    # --- inside

    def _decoded(self, frames: list[bytes]) -> KvMessage | None:
        try:
            return decode_frames(frames)
        except KvEventError as error:
            self.counts.illegible += 1
            self._warn("stranger", f"a message is not from a KV event publisher ({error})")
            return None

    def _warn(self, kind: str, text: str) -> None:
        self._tell(kind, f"{self._settings.name}: {text}")
