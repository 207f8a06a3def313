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


CLAUDE = (
    (
        b'event: message_delta\ndata: {"type":"message_delta","delta":{},"usage":{"input_tokens":9,'
        b'"cache_creation_input_tokens":0,"cache_read_input_tokens":32,"output_tokens":7}}\n\n'
    ),
    b'event: message_stop\ndata: {"type":"message_stop"}\n\n',
)
RESPONSE = (
    (
        b'event: response.completed\ndata: {"type":"response.completed","response":{"usage":{"input_tokens":41,'
        b'"input_tokens_details":{"cached_tokens":32},"output_tokens":7,"output_tokens_details":{"reasoning_tokens":3},'
        b'"total_tokens":48}}}\n\n'
    ),
)


@pytest.mark.parametrize(("path", "events"), [("/v1/messages", CLAUDE), ("/v1/responses", RESPONSE)])
@looped
async def test_usage_has_one_meaning_in_all_apis(path, events):
    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        wire.write(HEAD + chunked(*events))

    async with rig(FakeEngine("e", script)) as it:
        headers = (await it.call(path, STREAMED)).headers
        await it.until_idle()
        assert figures(it) == (41, 32)
        assert it.app.shared.decision_log.trace(headers["x-request-id"]).usage["completion_tokens"] == 7


@looped
async def test_a_client_that_hangs_up_at_the_end_of_a_message_has_had_its_answer():
    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        wire.write(HEAD + chunked(*CLAUDE).removesuffix(b"0\r\n\r\n"))
        await wire.is_lost.wait()

    async with rig(FakeEngine("e", script)) as it:
        caller = await it.caller()
        caller.ask("/v1/messages", STREAMED)
        await caller.head()
        await caller.reader.readuntil(b'"message_stop"}\n\n')
        caller.hang_up()
        await it.until_idle()
        assert it.engine("e").counts.num_left == 0


@looped
async def test_errors_of_the_router_have_the_form_of_the_path():
    async def script(engine: FakeEngine, wire: Wire, request: Received) -> None:
        wire.write(HEAD + chunked(CLAUDE[0]).removesuffix(b"0\r\n\r\n"))
        await asyncio.sleep(0.02)
        wire.transport.abort()

    async with rig(FakeEngine("e", script)) as it:
        refused = await it.call("/v1/messages", method="GET")
        assert refused.status == 405
        body = json.loads(refused.body)
        assert (body["type"], body["error"]["type"]) == ("error", "invalid_request_error")
        assert body["request_id"] == refused.headers["x-request-id"]
        assert json.loads((await it.call("/v1/responses", method="GET")).body)["error"]["code"] == "method_not_allowed"
        caller = await it.caller()
        caller.ask("/v1/messages", STREAMED)
        await caller.head()
        rest = await caller.reader.read(-1)
        assert b'event: error\ndata: {"type":"error","error":{"type":"api_error"' in rest


@looped
async def test_a_client_that_leaves_early_has_left_and_its_tokens_are_counted():
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
