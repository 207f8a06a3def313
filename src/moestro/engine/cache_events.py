"""Changes of a rank's prefix cache: with the tokens of each stored block for a publisher, as names for a router."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from moestro.engine.block_pool import CacheEvent
from moestro.engine.scheduler import Scheduler
from moestro.engine.sequences import BlockContent


class StoredBlocks(NamedTuple):
    """Consecutive blocks of a prompt that entered the prefix cache.

    Attributes:
        parent: name of the block before the first one. None means that the first one begins a prompt.
        names: hashes of the blocks.
        token_ids: packed int32, the tokens of all blocks.
        cache_salt: salt of the names, where the first block begins a prompt.
    """

    parent: bytes | None
    names: tuple[bytes, ...]
    token_ids: bytes
    cache_salt: str | None


class RemovedBlocks(NamedTuple):
    """Blocks that left the prefix cache."""

    names: tuple[bytes, ...]


class CacheChanges(NamedTuple):
    """Blocks by which a prefix cache differs from an earlier state of itself.

    Attributes:
        stored: packed hashes of the blocks that it has gained, in the order of their entries.
        removed: packed hashes of the blocks that it has lost.
    """

    stored: bytes = b""
    removed: bytes = b""


UNCHANGED = CacheChanges()


def changes_of(journal: Sequence[CacheEvent]) -> CacheChanges:
    """Return the net changes of a journal. A block that entered and left in it counts as removed, which is harmless."""
    is_stored: dict[bytes, bool] = {}
    for event in journal:
        is_stored.pop(event.block_hash, None)  # so that the order is that of the last events
        is_stored[event.block_hash] = event.is_stored
    return CacheChanges(
        b"".join([name for name, stays in is_stored.items() if stays]),
        b"".join([name for name, stays in is_stored.items() if not stays]),
    )


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
            if not each.is_stored:
                if isinstance(last, RemovedBlocks):
                    events[-1] = RemovedBlocks((*last.names, each.block_hash))
                else:
                    events.append(RemovedBlocks((each.block_hash,)))
                continue
            content = self._contents[each.block_hash]
            if isinstance(last, StoredBlocks) and content.parent == last.names[-1]:
                names, token_ids = (*last.names, each.block_hash), last.token_ids + content.token_ids
                events[-1] = last._replace(names=names, token_ids=token_ids)
            else:
                events.append(StoredBlocks(content.parent, (each.block_hash,), content.token_ids, content.cache_salt))
        self._journal.clear()
        self._contents.clear()
        return events
