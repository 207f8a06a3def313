"""One publisher's KV events, turned into what the router knows of an engine's cache.

    frames ── kv_wire ──▶ batches ── kv_stream ──▶ each once, in order ── kv_names ──▶ our blocks ──▶ Router.kv_stored …

All of it without sockets or clock: `serve` reads the sockets, tests read files.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from moestro.routing.kv_stream import KvStream, StreamCounts, StreamRules
from moestro.wire.kv_events import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    Event,
    KvEventError,
    KvMessage,
    decode_batch,
    decode_frames,
)
from moestro.wire.kv_names import NamedBlocks, NamingCounts, NamingRules

_DEFAULT_STREAM = StreamRules()


class KvSink(Protocol):
    """Who is told what an engine's cache holds: the router."""

    def kv_stored(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """`engine` holds these blocks (packed, a prompt's in order)."""

    def kv_removed(self, engine: int, hashes: bytes, now_ns: int) -> None:
        """`engine` holds these blocks no more."""

    def kv_cleared(self, engine: int, now_ns: int) -> None:
        """`engine` holds no block; and all that it will hold is going to be told, until `kv_lost`."""

    def kv_lost(self, engine: int, now_ns: int) -> None:
        """What `engine` said it holds cannot be relied on any more."""


class KvFeedSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a feed is told once.

    Attributes:
        engine: its number in the router.
        name: for the log.
        can_replay: whether the publisher has a replay endpoint.
    """

    engine: int
    name: str
    naming: NamingRules
    can_replay: bool
    stream: StreamRules = _DEFAULT_STREAM


@dataclass(slots=True)
class KvFeedCounts:
    """What came, of all times.

    Attributes:
        illegible: messages or stored blocks that could not be read.
        unknown: events of types that are not known here.
        other_rank: batches of another data-parallel rank than the stream's first.
        cleared: times that the engine emptied its cache.
        newest_ts_s: when the newest batch was published, by the publisher's clock.
    """

    blocks: NamingCounts = field(default_factory=NamingCounts)
    stream: StreamCounts = field(default_factory=StreamCounts)
    illegible: int = 0
    unknown: int = 0
    other_rank: int = 0
    cleared: int = 0
    newest_ts_s: float = 0.0


class KvFeed:
    """Tells a sink what one cache holds: that of an engine, or of one data-parallel rank of it.

    What comes from the sockets goes in by `live` and `replayed`, connections and time by `stream`.

    Args:
        sink: is told.
        settings: see there.
        warn: Takes a kind and a log line that begins with the engine's name, as often as something is odd. The caller
            bounds the rate of lines by kind.

    Attributes:
        stream: puts the batches in order; its `request` and `deadline_ns` say what is to be done next.
        counts: what came.
        dp_rank: the publisher's data-parallel rank; None until it has said.
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
        self._is_whole = False  # all that the cache holds was told, or will be

    # --- from the sockets

    def live(self, frames: list[bytes], now_ns: int) -> None:
        """A message of the publisher's."""
        message = self._decoded(frames)
        if message is not None and message.seq is not None:
            self.stream.live(message.seq, message.payload, now_ns)

    def replayed(self, frames: list[bytes], now_ns: int) -> bool:
        """A message of a replay. Returns whether it was the last."""
        message = self._decoded(frames)
        if message is None:
            return False
        if message.seq is None:
            self.stream.replay_ended(now_ns)
            return True
        self.stream.replayed(message.seq, message.payload, now_ns)
        return False

    def tell_again(self, now_ns: int) -> None:
        """Tell the sink all that is held: it has forgotten."""
        if self._is_whole:
            self._sink.kv_cleared(self._engine, now_ns)
        hashes = self._blocks.names()
        if hashes:
            self._sink.kv_stored(self._engine, hashes, now_ns)

    # --- from the stream

    def apply(self, payload: bytes, now_ns: int) -> None:
        """The next batch."""
        try:
            batch = decode_batch(payload)
        except KvEventError as error:
            self.counts.illegible += 1
            self._warn("illegible", f"a batch of KV events cannot be read ({error})")
            self.lost(now_ns)
            return
        if self.dp_rank is None:
            self.dp_rank = batch.dp_rank
        if batch.dp_rank != self.dp_rank:
            self.counts.other_rank += 1
            self._warn(
                "other rank",
                f"one stream of KV events carries ranks {self.dp_rank} and {batch.dp_rank}; the second is ignored",
            )
            return
        self.counts.illegible += batch.num_illegible
        self.counts.unknown += batch.num_unknown
        self.counts.newest_ts_s = batch.ts_s
        for event in batch.events:
            self._event(event, now_ns)

    def began(self, now_ns: int) -> None:
        """All batches there ever were are going to come."""
        self._is_whole = True
        self._sink.kv_cleared(self._engine, now_ns)

    def lost(self, now_ns: int) -> None:
        """Batches were missed."""
        self._is_whole = False
        self._blocks.forget()
        self._sink.kv_lost(self._engine, now_ns)

    def restarted(self, now_ns: int) -> None:
        """Another process publishes."""
        self.dp_rank = None
        self._is_whole = False
        self._blocks = NamedBlocks(self._settings.naming, self.counts.blocks)
        self._sink.kv_cleared(self._engine, now_ns)
        self._sink.kv_lost(self._engine, now_ns)  # until its first batch is found

    # --- what is known

    @property
    def num_blocks(self) -> int:
        """That are held."""
        return self._blocks.num_blocks

    @property
    def block_size_seen(self) -> int | None:
        """Tokens of the publisher's blocks; None until it has said. Unless it is the router's, no block is counted."""
        return self._blocks.block_size_seen

    # --- inside

    def _event(self, event: Event, now_ns: int) -> None:
        blocks = self._blocks
        if isinstance(event, BlockStored):
            was_ambiguous = blocks.is_ambiguous
            hashes = blocks.store(event)
            if hashes:
                self._sink.kv_stored(self._engine, hashes, now_ns)
            elif blocks.is_ambiguous and not was_ambiguous:
                self._warn("ambiguous", "one hash is given to different blocks: upgrade the engine (SGLang)")
                self._is_whole = False
                self._sink.kv_lost(self._engine, now_ns)
            elif blocks.block_size_seen not in (None, self._settings.naming.block_size):
                self._warn(
                    "block size",
                    f"its KV blocks have {blocks.block_size_seen} tokens, the router's"
                    f" {self._settings.naming.block_size}. Exact hits need one size in router and engines",
                )
        elif isinstance(event, BlockRemoved):
            hashes = blocks.remove(event)
            if hashes:
                self._sink.kv_removed(self._engine, hashes, now_ns)
        elif isinstance(event, AllBlocksCleared):
            self.counts.cleared += 1
            self._is_whole = not blocks.is_ambiguous
            blocks.forget()
            self._sink.kv_cleared(self._engine, now_ns)
        else:
            self.counts.illegible += 1
            self.lost(now_ns)

    def _decoded(self, frames: list[bytes]) -> KvMessage | None:
        try:
            return decode_frames(frames)
        except KvEventError as error:
            self.counts.illegible += 1
            self._warn("stranger", f"a message is not from a KV event publisher ({error})")
            return None

    def _warn(self, kind: str, text: str) -> None:
        self._tell(kind, f"{self._settings.name}: {text}")
