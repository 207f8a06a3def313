"""KV feed: turns one publisher's KV events into calls that update the router's view of an engine's cache.

    frames ── kv_wire ──▶ batches ── kv_stream ──▶ each once, in order ── kv_names ──▶ our blocks ──▶ Router.kv_stored …

The feed uses neither sockets nor a clock: `moestro route` reads the sockets, tests read files.

Batches in order wait as jobs, and `work` does a bounded part of them. A caller that passes no message while the feed
is behind holds one batch and what the stream releases, which `StreamRules.max_waiting_bytes` bounds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Protocol

import msgspec

from moestro.core.hashing import HASH_BYTES
from moestro.routing.kv.kv_stream import KvStream, StreamCounts, StreamRules
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
                for part in stored_parts(event, _PART_BLOCKS):
                    self._store(part)
                    yield len(part.block_hashes)
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
