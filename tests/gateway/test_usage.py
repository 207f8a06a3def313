"""What answers tell of their tokens, however they come in."""

from __future__ import annotations

import asyncio
import json

import pytest
from gateway.rig import FakeEngine, Received, Wire, looped, rig

STREAMED = {"stream": True, "stream_options": {"include_usage": True}}
USAGE = {
    "prompt_tokens": 41, "total_tokens": 48, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 32},
}  # fmt: skip
EVENTS = (
    b'data: {"choices":[{"delta":{"content":"\xc3\xa9 \\"usage\\": 1"}}],"usage":null}\n\n',
    b"data: %b\n\n" % json.dumps({"choices": [], "usage": USAGE}, separators=(",", ":")).encode(),
    b"data: [DONE]\n\n",
)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunked(*pieces: bytes) -> bytes:
    return b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces) + b"0\r\n\r\n"


ANSWER = HEAD + chunked(*EVENTS)


def figures(it):
    counts = it.engine("e").counts
    return counts.num_prompt_tokens, counts.num_hit_tokens


@pytest.mark.parametrize("at", range(len(HEAD), len(ANSWER), 37))
@looped
async def test_usage_is_seen_wherever_reads_and_chunks_are_cut(at):
    """37 borders in each of the cases: together, every one after the head."""
    borders = iter(range(at, min(at + 37, len(ANSWER))))

    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        border = next(borders)
        wire.write(ANSWER[:border])
        await asyncio.sleep(0.001)
        wire.write(ANSWER[border:])

    async with rig(FakeEngine("e", script)) as it:
        caller = await it.caller()
        for _ in range(at, min(at + 37, len(ANSWER))):
            before = figures(it)
            caller.ask(body=STREAMED)
            assert (await caller.answer()).body == b"".join(EVENTS)
            await it.until_idle()
            assert figures(it) == (before[0] + 41, before[1] + 32)


@looped
async def test_usage_is_seen_when_chunks_are_cut_anywhere():
    text = b"".join(EVENTS)
    sizes = iter(range(1, 60))

    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        size = next(sizes)
        wire.write(HEAD + chunked(*(text[i : i + size] for i in range(0, len(text), size))))

    async with rig(FakeEngine("e", script)) as it:
        for number in range(1, 60):
            assert (await it.call(body=STREAMED)).body == text
            await it.until_idle()
            assert figures(it) == (41 * number, 32 * number)


@looped
async def test_usage_is_seen_after_a_retry():
    async def busy(engine: FakeEngine, wire: Wire, request: Received) -> None:
        wire.reply(b'{"usage": {"prompt_tokens": 5}}', 503)

    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        wire.write(ANSWER)

    async with rig(FakeEngine("busy", busy), FakeEngine("e", script), route_policy="round_robin") as it:
        for _ in range(4):
            assert (await it.call(body=STREAMED)).status == 200
        await it.until_idle()
        assert figures(it) == (4 * 41, 4 * 32)
        assert it.engine("busy").counts.num_prompt_tokens == 0


@looped
async def test_a_client_that_hangs_up_at_the_last_event_has_had_its_answer():
    """As clients do that stop reading there, while the end of the last chunk is still on its way."""

    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        wire.write(ANSWER.removesuffix(b"0\r\n\r\n"))
        await wire.is_lost.wait()

    async with rig(FakeEngine("e", script)) as it:
        caller = await it.caller()
        caller.ask(body=STREAMED)
        _, headers = await caller.head()
        await caller.reader.readuntil(b"data: [DONE]\n\n")
        caller.hang_up()
        await it.until_idle()
        assert figures(it) == (41, 32)
        assert it.engine("e").counts.num_left == 0
        story = it.app.shared.decision_log.trace(headers["x-request-id"])
        assert (story.status, story.usage["completion_tokens"]) == (200, 7)


@looped
async def test_a_client_that_leaves_before_the_last_event_has_left_and_what_was_told_is_counted():
    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        wire.write(HEAD + chunked(*EVENTS[:2]).removesuffix(b"0\r\n\r\n"))
        await wire.is_lost.wait()

    async with rig(FakeEngine("e", script)) as it:
        caller = await it.caller()
        caller.ask(body=STREAMED)
        _, headers = await caller.head()
        await caller.reader.readuntil(b"}}}\n\n")
        caller.hang_up()
        await it.until_idle()
        assert figures(it) == (41, 32)
        assert it.engine("e").counts.num_left == 1
        assert it.app.shared.decision_log.trace(headers["x-request-id"]).status == 499
