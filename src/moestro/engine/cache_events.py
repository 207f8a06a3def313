"""What a rank's prefix cache stores and removes, with the tokens of each block: for whoever publishes it."""

from __future__ import annotations

from typing import NamedTuple

from moestro.engine.block_pool import CacheEvent
from moestro.engine.scheduler import Scheduler
from moestro.engine.sequences import BlockContent


class StoredBlocks(NamedTuple):
    """Blocks that can be found from now on, one after the other.

    Attributes:
        parent: name of the block before them; None: a prompt begins with them.
        names: of each.
        token_ids: int32 of all, packed.
        cache_salt: under which they were named, if a prompt begins with them.
    """

    parent: bytes | None
    names: tuple[bytes, ...]
    token_ids: bytes
    cache_salt: str | None


class RemovedBlocks(NamedTuple):
    """Blocks that can be found no more."""

    names: tuple[bytes, ...]


class CacheEvents:
    """Writes down what `scheduler`'s prefix cache does, from its beginning on."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._journal: list[CacheEvent] = []
        self._contents: dict[bytes, BlockContent] = {}
        scheduler.pool.journal, scheduler.state.block_contents = self._journal, self._contents

    def take(self) -> list[StoredBlocks | RemovedBlocks]:
        """What happened since the last call, in order; neighbours that belong together as one."""
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
