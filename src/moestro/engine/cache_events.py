"""Changes of a rank's prefix cache: with the tokens of each stored block for a publisher, as names for a router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moestro.engine.block_pool import CacheEvent, Place
from moestro.engine.scheduler import Scheduler
from moestro.engine.sequences import BlockContent


class StoredBlocks(NamedTuple):
    """Consecutive blocks of a prompt that entered the prefix cache.

    Attributes:
        parent: name of the block before the first one. None means that the first one begins a prompt.
        names: hashes of the blocks.
        token_ids: packed int32, the tokens of all blocks.
        cache_salt: salt of the names, where the first block begins a prompt.
        is_on_host: whether they entered host memory. They have neither parent nor tokens then, which were reported when
            they entered the device's cache.
    """

    parent: bytes | None
    names: tuple[bytes, ...]
    token_ids: bytes
    cache_salt: str | None
    is_on_host: bool = False


class RemovedBlocks(NamedTuple):
    """Blocks that left the prefix cache on the device, or in host memory."""

    names: tuple[bytes, ...]
    is_on_host: bool = False


class CacheChanges(NamedTuple):
    """Blocks by which a prefix cache differs from an earlier state of itself, as packed hashes in the order of events.

    Attributes:
        stored: blocks that are on the device now.
        removed: blocks that no tier has any more.
        hosted: blocks that host memory alone has now.
    """

    stored: bytes = b""
    removed: bytes = b""
    hosted: bytes = b""


UNCHANGED = CacheChanges()


def changes_of(journal: Sequence[CacheEvent]) -> CacheChanges:
    """Return the net changes of a journal. A block that entered and left in it counts as removed, which is harmless."""
    place_of: dict[bytes, Place] = {}
    for event in journal:
        place = event.place
        if place is not None:
            place_of.pop(event.block_hash, None)  # so that the order is that of the last events
            place_of[event.block_hash] = place
    by_place: dict[Place, list[bytes]] = {place: [] for place in Place}
    for name, last in place_of.items():
        by_place[last].append(name)
    return CacheChanges(*(b"".join(by_place[place]) for place in (Place.DEVICE, Place.GONE, Place.HOST)))


class CacheEvents:
    """Collects the events of `scheduler`'s prefix cache, from an empty cache on."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._journal: list[CacheEvent] = []
        self._contents: dict[bytes, BlockContent] = {}
        scheduler.pool.journal, scheduler.state.block_contents = self._journal, self._contents

    def take(self) -> list[StoredBlocks | RemovedBlocks]:
        """The events since the last call, in order; consecutive blocks are merged into one event."""
        events: list[StoredBlocks | RemovedBlocks] = []
        for each in self._journal:
            last = events[-1] if events else None
            if each.is_on_host or not each.is_stored:
                kind = StoredBlocks if each.is_stored else RemovedBlocks
                if isinstance(last, kind) and last.is_on_host == each.is_on_host:
                    events[-1] = last._replace(names=(*last.names, each.block_hash))
                else:
                    events.append(_without_tokens(each))
                continue
            content = self._contents[each.block_hash]
            follows = isinstance(last, StoredBlocks) and not last.is_on_host and content.parent == last.names[-1]
            if isinstance(last, StoredBlocks) and follows:
                names, token_ids = (*last.names, each.block_hash), last.token_ids + content.token_ids
                events[-1] = last._replace(names=names, token_ids=token_ids)
            else:
                events.append(StoredBlocks(content.parent, (each.block_hash,), content.token_ids, content.cache_salt))
        self._journal.clear()
        self._contents.clear()
        return events


def _without_tokens(event: CacheEvent) -> StoredBlocks | RemovedBlocks:
    """Make the event of a block whose tokens are not reported with it."""
    if event.is_stored:
        return StoredBlocks(None, (event.block_hash,), b"", None, event.is_on_host)
    return RemovedBlocks((event.block_hash,), event.is_on_host)
