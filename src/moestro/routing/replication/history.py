"""History: the prompts that a router knows of, for a router that joins, in parts of bounded size.

Contents known from KV events are left out, because the other router receives these events itself. Blocks shared by
prompts occur once, so all parts together are no larger than the index.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from moestro.core.hashing import HASH_BYTES
from moestro.core.prefix_tree import BlockRun
from moestro.routing.replication.messages import (
    MAX_HISTORY_BLOCKS,
    MAX_HISTORY_BYTES,
    MAX_HISTORY_PROMPTS,
    HistoryPart,
)
from moestro.routing.router import Router

_NO_PARENT = -1


def history_parts(router: Router, engines: Iterable[tuple[str, int]]) -> Iterator[HistoryPart]:
    """Yield the prompts of each engine, oldest first, while the router keeps changing them.

    The blocks of a yielded run stay valid up to its end, even if the run is split or dropped.

    Args:
        engines: URL and number in the router of each engine.
    """
    numbers: dict[BlockRun, int] = {}
    for url, row in engines:
        yield from _parts_of(url, router.prompts_sent(row), numbers)
    yield HistoryPart("", [], [], is_last=True)


def _parts_of(engine: str, last_runs: Iterable[BlockRun], numbers: dict[BlockRun, int]) -> Iterator[HistoryPart]:
    part, num_bytes = HistoryPart(engine, [], []), 0
    for last in last_runs:
        if last.depth > MAX_HISTORY_BLOCKS:
            continue
        num_before = len(part.runs)
        part.prompts.append(_number(last, numbers, part.runs))
        num_bytes += sum(len(blocks) for _, blocks in part.runs[num_before:])
        if len(part.prompts) == MAX_HISTORY_PROMPTS or num_bytes >= MAX_HISTORY_BYTES:
            yield part
            part, num_bytes = HistoryPart(engine, [], []), 0
    if part.prompts:
        yield part


def _number(last: BlockRun, numbers: dict[BlockRun, int], runs: list[tuple[int, bytes]]) -> int:
    """Return the number of a run, and append the run and its new ancestors to `runs` if needed."""
    new, run = [], last
    number = _NO_PARENT
    while run not in numbers:
        new.append(run)
        if run.parent is None:
            break
        run = run.parent
    else:
        number = numbers[run]
    for each in reversed(new):
        runs.append((number, each.blocks))
        number = numbers[each] = len(numbers)
    return number


class HistoryReader:
    """Reads the parts of one history, in order."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, bytes]] = []
        self._depths: list[int] = []  # blocks of a prompt up to the end of each run

    def prompts(self, part: HistoryPart) -> Iterator[bytes]:
        """Yield the packed blocks of each prompt of a part.

        Raises:
            ValueError: no router would send this part.
        """
        for parent, blocks in part.runs:
            if not blocks or len(blocks) % HASH_BYTES or not _NO_PARENT <= parent < len(self._runs):
                raise ValueError("a run is not a whole number of blocks, or precedes its parent")
            depth = len(blocks) // HASH_BYTES + (0 if parent == _NO_PARENT else self._depths[parent])
            if depth > MAX_HISTORY_BLOCKS:
                raise ValueError(f"a prompt has more than {MAX_HISTORY_BLOCKS:,} blocks")
            self._runs.append((parent, blocks))
            self._depths.append(depth)
        for last in part.prompts:
            yield self._prompt(last)

    def _prompt(self, last: int) -> bytes:
        if not 0 <= last < len(self._runs):
            raise ValueError("a part refers to an unknown run")
        pieces = []
        while last != _NO_PARENT:
            last, blocks = self._runs[last]
            pieces.append(blocks)
        return b"".join(reversed(pieces))
