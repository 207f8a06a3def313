"""Streams: chunks made from a frame equal encoded ones, and outputs reach the connection in order, with or without a
waiting reader."""

from __future__ import annotations

import asyncio
import json
import random
import socket
from types import SimpleNamespace

import pytest
from support.running import PATIENCE_S, call, read_to_end, stream_request

from moestro.core.request import FinishReason, Output, Request, SamplingParams
from moestro.server.api.generation import Generation, _Choice
from moestro.server.api.protocol import PromptTokensDetails, Usage
from moestro.server.api.request_builder import Job
from moestro.server.api.responses import (
    ChatForm,
    ChunkEncoder,
    CompletionForm,
    Heading,
    OpenAIEncoding,
    UsageWanted,
    stream,
)
from moestro.server.engines.request_state import Inbox, Piece, Score
from moestro.text.parsing.answer_parser import ContentText
from moestro.text.thread_pool import PrepareThreads
from moestro.text.tokenizer import Tokenizer
from moestro.text.tokenizer_library import TokenText

HEADING = Heading('cmpl-"1"', 7, 'a "model" with \\ and é', "fp")
OPTIONS = SimpleNamespace(n=3, logprobs=1, prompt_logprobs=None, names_tokens_by_id=False)
USAGE = Usage(1, 2, 3, PromptTokensDetails(0))
TEXTS = ("", "a", ' "quoted" ', "\\", "\n\u2028\x00", "日本語 🙂", "data: [DONE]", "{}")


@pytest.mark.parametrize("form_class", [CompletionForm, ChatForm])
def test_law_a_stream_has_the_bytes_that_each_chunk_alone_would_have(form_class):
    rng, form, encoding = random.Random(0), form_class(HEADING, OPTIONS), OpenAIEncoding()
    encoders = ((None, ChunkEncoder(form, encoding, None)), (USAGE, ChunkEncoder(form, encoding, lambda: USAGE)))
    score = Score(1, TokenText("a", b"a"), -0.5, 1, 0, ())
    others = (
        {"finish_reason": "stop"}, {"finish_reason": "stop", "stop_reason": "x"}, {"scores": (score,)}, {"scores": ()},
        {"token_ids": (1, 2)}, {"token_ids": ()}, {"prompt_token_ids": (3,)}, {"parts": ()},
        {"parts": (ContentText("text"),)}, {"prompt_scores": ()},
    )  # fmt: skip
    for _ in range(500):
        fields = rng.choice(others) if rng.random() < 0.3 else {}
        piece = Piece(**({"index": rng.randrange(3), "text": rng.choice(TEXTS), "finish_reason": None} | fields))
        assert piece.has_only_text == (not fields)
        for usage, encoder in encoders:
            chunk = form.chunk(piece)
            if usage is not None:
                chunk.usage = usage
            assert encoder.encode(piece) == encoding.chunk(chunk)


def test_chunks_of_an_encoding_with_a_state_are_encoded_one_by_one():
    class Counting(OpenAIEncoding):
        repeats = False
        num_chunks = 0

        def chunk(self, answer) -> bytes:
            self.num_chunks += 1
            return b"%d" % self.num_chunks

    chunks = ChunkEncoder(ChatForm(HEADING, OPTIONS), Counting(), None)
    assert [chunks.encode(Piece(0, "a", None)) for _ in range(3)] == [b"1", b"2", b"3"]


def output(number: int, **fields) -> Output:
    return Output(request_id=str(number), **fields)


def test_events_come_in_order_and_those_that_are_intercepted_wake_no_reader():
    async def inside() -> None:
        inbox, intercepted, read = Inbox(), [], []

        def intercept(event):
            intercepted.append(event.request_id)
            return event if int(event.request_id) % 3 == 0 else None

        async def reader() -> None:
            while len(read) < 6:
                read.append((await inbox.get()).request_id)
                await asyncio.sleep(0.01)  # What comes meanwhile waits for the reader.

        inbox.intercept = intercept
        inbox.put_nowait(output(1))  # No reader waits yet.
        reading = asyncio.create_task(reader())
        await asyncio.sleep(0.05)
        for number in (2, 4, 3, 5, 7, 6):
            inbox.put_nowait(output(number))
        await asyncio.sleep(0.2)
        for number in (8, 9):
            inbox.put_nowait(output(number))
        await asyncio.wait_for(reading, PATIENCE_S)
        assert intercepted == ["2", "4", "3", "8", "9"]
        assert read == ["1", "3", "5", "7", "6", "9"]

    asyncio.run(inside())


def test_a_failure_while_an_event_is_passed_on_reaches_its_reader_alone():
    def broken(event):
        raise ZeroDivisionError

    async def read() -> object:
        inbox = Inbox()
        inbox.intercept = broken
        reader = asyncio.ensure_future(inbox.get())
        await asyncio.sleep(0)
        inbox.put_nowait(Piece(0, "a", None))
        return await asyncio.wait_for(reader, 10)

    assert isinstance(asyncio.run(read()), ZeroDivisionError)


def test_law_tokens_of_which_only_the_text_is_wanted_give_the_text_of_the_long_way(demo_dir):
    tokenizer, rng = Tokenizer(demo_dir), random.Random(0)
    request = Request(
        request_id="a", num_prompt_tokens=2, sampling=SamplingParams(max_tokens=99), arrival_ns=0, token_ids=bytes(8)
    )
    for _ in range(50):
        ways = [_Choice(0, Job(request=request, stop=stop), tokenizer) for stop in ((), ("\U0010fffd never",))]
        assert [way._wants_text_alone for way in ways] == [True, False]
        ids = [rng.randrange(tokenizer.backend.get_vocab_size()) for _ in range(30)]
        while ids:
            num_taken = rng.choice((1, 1, 1, 2, 3))
            taken, ids = tuple(ids[:num_taken]), ids[num_taken:]
            reason = None if ids else FinishReason.LENGTH
            pieces = [way.take(Output(request_id="a", token_ids=taken, finish_reason=reason)) for way in ways]
            assert pieces[0] == pieces[1]
        assert ways[0].resumed() == ways[1].resumed()
        assert ways[0].num_generated == ways[1].num_generated == 30


class Connection:
    """A fake connection that records what `stream` sends, and has room in its buffer at random moments."""

    request_id = "r"

    def __init__(self, encoding, rng: random.Random) -> None:
        self.encoding, self.sent, self.num_put, self._rng = encoding, [], 0, rng

    async def open(self) -> None: ...

    def has_room(self) -> bool:
        return self._rng.random() < 0.7

    def put(self, events: bytes) -> None:
        self.num_put += 1
        self.sent.append(events)

    async def send(self, events: bytes) -> None:
        for _ in range(self._rng.randrange(4)):
            await asyncio.sleep(0)
        self.sent.append(events)

    async def finish(self) -> None:
        self.sent.append(b"end")


class Numbering(OpenAIEncoding):
    """Encodes a chunk as its number and text, as an encoding with a state does."""

    repeats = False
    num_chunks = 0

    def chunk(self, answer) -> bytes:
        self.num_chunks += 1
        return f"{self.num_chunks}:{answer.choices[0].index}:{answer.choices[0].text}".encode()


def test_law_each_piece_is_encoded_once_and_sent_in_order_whenever_there_is_room(demo_dir):
    tokenizer, num_put = Tokenizer(demo_dir), 0
    model = SimpleNamespace(tokenizer=tokenizer, chat=SimpleNamespace(reasoning=None), max_choices_at_once=8)
    for seed in range(30):
        rng, inboxes = random.Random(seed), []
        engines = SimpleNamespace(
            submit=lambda request, inbox, choices: inboxes.append(inbox),  # noqa: B023
            abort=lambda *args: None, unused_id=lambda name: name,
        )  # fmt: skip
        jobs = [
            Job(
                request=Request(
                    request_id=str(i), num_prompt_tokens=1, sampling=SamplingParams(max_tokens=9), arrival_ns=0,
                    token_ids=bytes(4),
                ),
                stop=("stop",),
            )
            for i in range(2)
        ]  # fmt: skip
        words = [(rng.randrange(2), rng.randrange(40, 90)) for _ in range(60)] + [(0, 41), (1, 42)]

        async def inside(rng=rng, inboxes=inboxes, engines=engines, jobs=jobs, words=words) -> Connection:
            connection = Connection(Numbering(), rng)
            async with Generation(engines, model, jobs, PrepareThreads()) as generation:
                running = asyncio.create_task(
                    stream(connection, generation, CompletionForm(HEADING, OPTIONS), UsageWanted(False, False))
                )
                for at, (choice, token) in enumerate(words):
                    for _ in range(rng.randrange(4)):
                        await asyncio.sleep(0)
                    reason = FinishReason.LENGTH if at >= len(words) - 2 else None
                    inboxes[0].put_nowait(output(choice, token_ids=(token,), finish_reason=reason))
                await asyncio.wait_for(running, PATIENCE_S)
            return connection

        connection = asyncio.run(inside())
        num_put += connection.num_put
        assert connection.sent[-1] == b"end"
        heads = [events.decode().split(":")[:2] for events in connection.sent[:-1]]
        assert heads == [[str(at), str(choice)] for at, (choice, _) in enumerate(words, 1)]
    assert num_put > 30


def test_a_client_of_http_1_0_gets_the_events_without_chunks(server):
    request = stream_request(max_tokens=20, seed=1).replace(b"HTTP/1.1", b"HTTP/1.0", 1)
    with socket.create_connection(server.address, timeout=PATIENCE_S) as connection:
        connection.sendall(request)
        head, _, body = read_to_end(connection).partition(b"\r\n\r\n")
    assert b"chunked" not in head
    *events, done, end = body.split(b"\n\n")
    assert (done, end) == (b"data: [DONE]", b"")
    text = "".join(json.loads(event.removeprefix(b"data: "))["choices"][0]["text"] for event in events)
    whole = call(server, "POST", "/v1/completions", json.loads(request.partition(b"\r\n\r\n")[2]) | {"stream": False})
    assert text == whole.json["choices"][0]["text"]
