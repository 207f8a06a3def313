"""Index transfer: hands a router's prompt history to a standby router, which then knows what the caches hold.

Contents known from KV events are not transferred, because a standby receives these events itself.

The transfer is a sequence of msgpack messages, each after its length (4 bytes, big-endian): a `TransferHead`,
`PromptsPart`s, and an empty message. Blocks shared by prompts occur once, so the sequence is no larger than the index.
Neither router ever stops for the whole transfer, and a body that no router would send is refused: its messages, its
prompts and the work between two turns of the event loop are bounded.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Annotated

import msgspec
from aiohttp import StreamReader, web
from msgspec import Meta

from moestro.core.hashing import HASH_BYTES
from moestro.core.prefix_tree import BlockRun
from moestro.errors import RequestError
from moestro.gateway.engines.fleet import Fleet, RoutedEngine
from moestro.web.bodies.packed_bodies import coding_in
from moestro.web.errors import HttpError

MAX_INDEX_BYTES = 1 << 30
_PART_PROMPTS = 256  # a few milliseconds of work, after which requests are served
_PART_BYTES = 256 << 10
_LENGTH_BYTES = 4
_MAX_MESSAGE_BYTES = 32 << 20  # a part has _PART_BYTES, and one prompt more
_MAX_ENGINES = 1 << 14
_MAX_RUNS = 1 << 17  # of one part, each of a block at least
_MAX_DEPTH = 1 << 20  # blocks of one prompt
_TURN_BLOCKS = 1 << 14  # blocks that are put together before requests are served
_MESSAGE_S = 60.0  # a sender that stands must not keep others out
_NO_PARENT = -1


class TransferHead(msgspec.Struct, frozen=True):
    """First message of a transfer.

    Attributes:
        reading: method of hashing prompts, in words, which both routers must share.
        engines: URLs of the engines.
    """

    reading: Annotated[str, Meta(max_length=1000)]
    engines: Annotated[list[str], Meta(max_length=_MAX_ENGINES)]


class PromptsPart(msgspec.Struct, frozen=True):
    """Some prompts of one engine, oldest first.

    Attributes:
        engine: index into `TransferHead.engines`.
        runs: new runs as (number of the parent run or -1, packed blocks). Runs are numbered from 0 in order of
            transfer, across all parts.
        prompts: number of each prompt's last run.
    """

    engine: int
    runs: Annotated[list[tuple[int, bytes]], Meta(max_length=_MAX_RUNS)]
    prompts: Annotated[list[int], Meta(max_length=_PART_PROMPTS)]


_decode_head = msgspec.msgpack.Decoder(TransferHead).decode
_decode_part = msgspec.msgpack.Decoder(PromptsPart).decode


class IndexTransfer:
    """Sends the history of this router's engines, and receives another router's.

    Args:
        reading: method of hashing prompts, in words.
    """

    def __init__(self, fleet: Fleet, reading: str) -> None:
        self._fleet = fleet
        self._reading = reading
        self._taking = asyncio.Lock()  # each transfer replaces the previous one, so two must not run at once

    def routes(self) -> list[web.RouteDef]:
        """Return the routes for the admin plane."""
        return [web.get("/admin/index", self.give), web.put("/admin/index", self.take)]

    async def give(self, http: web.Request) -> web.StreamResponse:
        """Handle GET /admin/index: send the current history in the form that `take` accepts."""
        prompts = {engine.url: self._fleet.router.prompts_sent(engine.row) for engine in self._fleet}
        answer = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        await answer.prepare(http)
        await answer.write(_message(TransferHead(self._reading, list(prompts))))
        numbers: dict[BlockRun, int] = {}
        for engine, last_runs in enumerate(prompts.values()):
            for part in _parts(engine, last_runs, numbers):
                await answer.write(_message(part))
                await asyncio.sleep(0)
        await answer.write(_message(None))
        await answer.write_eof()
        return answer

    async def take(self, http: web.Request) -> web.Response:
        """Handle PUT /admin/index: add another router's history to this one's.

        The prompts count as sent now, and replace those of an earlier transfer. Engines unknown here are skipped.
        """
        if coding_in(http.headers.get("Content-Encoding", "")) is not None:
            raise HttpError(
                415, "An index is sent unpacked: leave Content-Encoding out.", "unsupported_content_encoding"
            )
        try:
            async with self._taking:
                num_prompts = await self._take(_messages(http.content))
        except (msgspec.MsgspecError, ValueError, asyncio.IncompleteReadError, TimeoutError) as error:
            raise RequestError(
                f"The body is not a complete index of another router: {error}", code="invalid_value"
            ) from None
        return web.json_response({"prompts": num_prompts})

    async def _take(self, messages: AsyncIterator[bytes]) -> int:
        head = _decode_head(await anext(messages, b""))
        if head.reading != self._reading:
            text = f"That router compares prompts {head.reading}, this one {self._reading}: the hashes do not match."
            raise HttpError(409, text, "invalid_value")
        for url in head.engines:
            if (engine := self._at(url)) is not None:
                self._fleet.router.forget_elsewhere(engine.row)
                await asyncio.sleep(0)
        runs = _Runs()
        num_prompts = 0
        async for message in messages:
            part = _decode_part(message)
            if not 0 <= part.engine < len(head.engines):
                raise ValueError("a part refers to an unknown engine")
            runs.add(part.runs)
            num_blocks = 0
            for last in part.prompts:
                prompt = runs.prompt(last)
                if (engine := self._at(head.engines[part.engine])) is not None:
                    self._fleet.router.sent_elsewhere(engine.row, prompt, time.monotonic_ns())
                    num_prompts += 1
                num_blocks += len(prompt) // HASH_BYTES
                if num_blocks > _TURN_BLOCKS:
                    num_blocks = 0
                    await asyncio.sleep(0)
            await asyncio.sleep(0)
        return num_prompts

    def _at(self, url: str) -> RoutedEngine | None:
        """Return the engine at `url`, looked up each time because engines may be removed during a transfer."""
        return next((engine for engine in self._fleet if engine.url == url), None)


def _parts(engine: int, last_runs: Iterable[BlockRun], numbers: dict[BlockRun, int]) -> Iterator[PromptsPart]:
    """Yield the history of an engine in parts, while the router keeps changing it.

    The blocks of a transferred run stay valid up to its end, even if the run is split or dropped.
    """
    part, num_bytes = PromptsPart(engine, [], []), 0
    for last in last_runs:
        num_before = len(part.runs)
        part.prompts.append(_number(last, numbers, part.runs))
        num_bytes += sum(len(blocks) for _, blocks in part.runs[num_before:])
        if len(part.prompts) == _PART_PROMPTS or num_bytes >= _PART_BYTES:
            yield part
            part, num_bytes = PromptsPart(engine, [], []), 0
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


class _Runs:
    """Received runs, each a number of blocks behind an earlier one."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, bytes]] = []
        self._depths: list[int] = []  # blocks of a prompt up to the end of each run

    def add(self, runs: list[tuple[int, bytes]]) -> None:
        """Add runs. Raises ValueError for what no router would send."""
        for parent, blocks in runs:
            if not blocks or len(blocks) % HASH_BYTES or not _NO_PARENT <= parent < len(self._runs):
                raise ValueError("a run is not a whole number of blocks, or precedes its parent")
            depth = len(blocks) // HASH_BYTES + (0 if parent == _NO_PARENT else self._depths[parent])
            if depth > _MAX_DEPTH:
                raise ValueError(f"a prompt has more than {_MAX_DEPTH:,} blocks")
            self._runs.append((parent, blocks))
            self._depths.append(depth)

    def prompt(self, last: int) -> bytes:
        """Return the packed blocks of the prompt that ends with run `last`."""
        if not 0 <= last < len(self._runs):
            raise ValueError("a part refers to an unknown run")
        pieces = []
        while last != _NO_PARENT:
            last, blocks = self._runs[last]
            pieces.append(blocks)
        return b"".join(reversed(pieces))


def _message(content: TransferHead | PromptsPart | None) -> bytes:
    encoded = b"" if content is None else msgspec.msgpack.encode(content)
    return len(encoded).to_bytes(_LENGTH_BYTES) + encoded


async def _messages(content: StreamReader) -> AsyncIterator[bytes]:
    """Yield the messages up to the empty one."""
    num_bytes = 0
    while length := int.from_bytes(await _read(content, _LENGTH_BYTES)):
        num_bytes += length
        if num_bytes > MAX_INDEX_BYTES:
            raise HttpError(413, f"An index may have at most {MAX_INDEX_BYTES} bytes.", "invalid_value")
        if length > _MAX_MESSAGE_BYTES:
            raise HttpError(413, f"A part of an index may have at most {_MAX_MESSAGE_BYTES} bytes.", "invalid_value")
        yield await _read(content, length)


async def _read(content: StreamReader, num_bytes: int) -> bytes:
    async with asyncio.timeout(_MESSAGE_S):
        return await content.readexactly(num_bytes)
