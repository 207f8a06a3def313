"""Streams that their clients do not read: outputs that wait are bounded, and the client with most is cut."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from types import SimpleNamespace

import uvloop
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from moestro.core.request import FinishReason, Output, Request, SamplingParams, TokenLogprobs
from moestro.server.api.request_builder import Job
from moestro.server.api.request_runner import RequestRunner
from moestro.server.api.responses import CompletionForm, Heading, OpenAIEncoding
from moestro.server.engines.request_state import UnreadMemory, UnreadStream
from moestro.text.tokenizer import Tokenizer
from moestro.web.access import Access
from moestro.web.errors import Refusals
from moestro.web.middleware import HttpMiddleware
from moestro.web.ports.connections import FrontLimits, bound_socket, http_front
from moestro.web.ports.faults import Fault, Faults, Port

MAX_BYTES = 1_000_000
SCORES = (TokenLogprobs(70, -0.5, 1, tuple((token_id, -1.0) for token_id in range(40, 60))),)
OUTPUT = Output(request_id="-", token_ids=(70,), finish_reason=None, logprobs=SCORES)


class Engines:
    """Engines whose outputs a test delivers."""

    def __init__(self) -> None:
        self.inboxes: dict[str, object] = {}
        self.loads: list[object] = []

    def submit(self, request: Request, inbox, choices) -> None:
        self.inboxes[request.request_id] = inbox

    def abort(self, request_id: str, *_: object) -> None:
        self.inboxes.pop(request_id, None)

    def unused_id(self, name: str) -> str:
        return name

    def deliver(self, name: str, *, is_last: bool = False) -> None:
        reason = FinishReason.LENGTH if is_last else None
        output = Output(request_id=name, token_ids=(70,), finish_reason=reason, logprobs=SCORES)
        if (inbox := self.inboxes.get(name)) is not None:
            inbox.put_nowait(output)


@contextlib.asynccontextmanager
async def streaming(tokenizer: Tokenizer, engines: Engines, faults: Faults):
    """A server that streams `/NAME`, each token with 20 log probabilities; yields its runner and port."""
    model = SimpleNamespace(
        tokenizer=tokenizer, chat=SimpleNamespace(reasoning=None), max_choices_at_once=8,
        info=SimpleNamespace(has_logits=False, is_exact=True), resumes_streams=False,
    )  # fmt: skip
    runner = RequestRunner(engines, model, 60.0)
    runner.unread = UnreadMemory(MAX_BYTES)
    options = SimpleNamespace(
        stream=True, include_usage=False, continuous_usage=False, unknown_fields=(), grammar=None, n=1, logprobs=20,
        prompt_logprobs=None, names_tokens_by_id=False, request_id=None,
    )  # fmt: skip

    async def answer(http: web.Request) -> web.StreamResponse:
        sampling = SamplingParams(max_tokens=10**6, logprobs=20)
        request = Request(
            request_id=http.path[1:], num_prompt_tokens=1, sampling=sampling, arrival_ns=0, token_ids=bytes(4)
        )
        prepared = SimpleNamespace(options=options, jobs=[Job(request=request)])
        form = CompletionForm(Heading("cmpl-1", 7, "m", "fp"), options)
        return await runner._generate(http, prepared, form, OpenAIEncoding())

    app, listener = web.Application(), bound_socket("127.0.0.1", 0)
    app.add_routes([web.get("/{name}", answer)])
    served = await HttpMiddleware(Access.of([]), Refusals(), 100, faults).runner(app, shutdown_timeout=1)
    front = http_front(Port.CLIENTS, served, listener, FrontLimits(99), faults).open()
    try:
        yield runner, listener.getsockname()[1]
    finally:
        front.close()
        await served.cleanup()
        listener.close()
        runner.close()


def ask(port: int, name: str, address: str) -> socket.socket:
    """Ask for a stream, of which nothing is read."""
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.bind((address, 0))
    client.connect(("127.0.0.1", port))
    client.sendall(f"GET /{name} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    client.setblocking(False)
    return client


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - the conditions are plain state
            await asyncio.sleep(0.005)


def test_the_client_with_most_unread_outputs_is_cut_and_others_lose_nothing(tokenizer):
    async def test() -> None:
        engines, faults = Engines(), Faults()
        async with streaming(tokenizer, engines, faults) as (runner, port), contextlib.AsyncExitStack() as stack:
            strangers = [stack.enter_context(ask(port, f"stranger-{n}", "127.0.0.2")) for n in range(4)]
            honest = stack.enter_context(ask(port, "honest", "127.0.0.1"))
            await until(lambda: len(engines.inboxes) == 5)
            num_honest = 0
            while faults.counts[Port.CLIENTS, Fault.UNREAD] < 3:
                for name in list(engines.inboxes):
                    num_waiting = sum(len(inbox._events) for inbox in engines.inboxes.values())
                    assert num_waiting < 2 * MAX_BYTES // 2000, "all that waits is bounded"
                    engines.deliver(name)
                num_honest += 1
                await asyncio.sleep(0)
                assert runner.unread.num_bytes <= MAX_BYTES
            await until(lambda: len(engines.inboxes) <= 2)
            assert "honest" in engines.inboxes
            engines.deliver("honest", is_last=True)
            text, loop = b"", asyncio.get_running_loop()
            while part := await loop.sock_recv(honest, 1 << 16):
                text += part
            assert text.count(b'"finish_reason":"length"') == 1
            assert text.count(b"data: {") == num_honest + 1
            for each in (*strangers, honest):
                each.close()
            await until(lambda: not engines.inboxes)
            await until(lambda: not runner.unread.num_bytes)

    uvloop.run(asyncio.wait_for(test(), 60))


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 2), st.booleans()), max_size=200))
def test_law_the_stream_with_most_of_the_client_with_most_is_cut(steps):
    size = UnreadMemory(10**9)
    UnreadStream(size, "x", lambda: None).waits(OUTPUT)
    memory, cut = UnreadMemory(10 * size.num_bytes), list[tuple[int, int]]()
    held = dict.fromkeys([(client, number) for client in range(3) for number in range(3)], 0)
    streams = {name: UnreadStream(memory, name[0], lambda name=name: cut.append(name)) for name in held}
    for client, number, is_taken in steps:
        name = client, number
        if name in cut:
            streams[name].waits(OUTPUT)
            streams[name].taken(OUTPUT)
            continue
        if is_taken and held[name]:
            held[name] -= 1
            streams[name].taken(OUTPUT)
        elif not is_taken:
            held[name] += 1
            streams[name].waits(OUTPUT)
        of_client = {each: sum(num for name, num in held.items() if name[0] == each) for each in range(3)}
        if sum(held.values()) > 10:
            most = cut[-1]
            assert of_client[most[0]] == max(of_client.values())
            assert held[most] == max(num for name, num in held.items() if name[0] == most[0])
            held[most] = 0
        assert memory.num_bytes == size.num_bytes * sum(held.values()) <= 10 * size.num_bytes
    for stream in streams.values():
        with stream:
            pass
    assert memory.num_bytes == 0
    assert not memory._of_client
