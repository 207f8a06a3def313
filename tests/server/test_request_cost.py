"""What a request costs others: work on the event loop is bounded, counted in tokens, bytes and scores."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from support.fake_rank import INFO

from moestro.core.request import FinishReason, Output, PackedLogprobs, Request, SamplingParams, TokenLogprobs
from moestro.errors import PromptTooLongError, QueueFullError, RequestError
from moestro.server.api import request_builder
from moestro.server.api.generation import RETRY_S, Generation
from moestro.server.api.request_builder import Arrival, Job, ServedModel, completion_jobs, prepare_chat_ask
from moestro.server.api.validation import MAX_BAD_WORDS, parse_chat, parse_completion
from moestro.text.thread_pool import PrepareThreads
from moestro.wire.messages import MAX_MESSAGE_BYTES

ARRIVAL = Arrival("cmpl-1", 42)


@pytest.fixture
def model(tokenizer) -> ServedModel:
    return ServedModel(names=("m",), created=0, fingerprint="fp", info=INFO, tokenizer=tokenizer)


def jobs(model: ServedModel, **fields: object) -> list[Job]:
    return completion_jobs(parse_completion(json.dumps(fields).encode()), model, ARRIVAL)


class CountingTokenizer:
    """A tokenizer of one token for each word, which counts the characters that it reads and the ids that it copies."""

    max_token_chars = 1024

    def __init__(self) -> None:
        self.num_chars = self.num_ids = 0

    def encoding(self, text: str, *, add_special_tokens: bool) -> CountingTokenizer.Encoding:
        self.num_chars += len(text)
        return self.Encoding(self, len(text.split()))

    @dataclasses.dataclass
    class Encoding:
        tokenizer: CountingTokenizer
        num_tokens: int

        def __len__(self) -> int:
            return self.num_tokens

        @property
        def ids(self) -> list[int]:
            self.tokenizer.num_ids += self.num_tokens
            return [7] * self.num_tokens


@pytest.mark.parametrize("num_words", [5000, 1_000_000])
def test_a_prompt_that_cannot_fit_is_refused_before_its_ids_are_copied(model, num_words):
    tokenizer = CountingTokenizer()
    with pytest.raises(PromptTooLongError, match="maximum context length is 4096"):
        jobs(dataclasses.replace(model, tokenizer=tokenizer), prompt="abc " * num_words)
    assert tokenizer.num_ids == 0
    assert tokenizer.num_chars <= 16 * INFO.max_model_len, "its beginning shows that it is too long"


def test_a_long_text_of_few_tokens_fits_and_a_truncated_one_too(model):
    tokenizer = CountingTokenizer()
    counting = dataclasses.replace(model, tokenizer=tokenizer)
    [job] = jobs(counting, prompt=("a" * 999 + " ") * 4000)
    assert job.request.num_prompt_tokens == 4000
    [job] = jobs(counting, prompt="abc " * 100_000, truncate_prompt_tokens=9)
    assert job.request.num_prompt_tokens == 9


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": "a", "bad_words": ["!?" * 100 + str(i) for i in range(MAX_BAD_WORDS)]}, "bad_words"),
        ({"prompt": [[5] * 4000] * 33, "n": 30}, "n"),
        ({"prompt": [[5] * 4000] * 3, "n": 100, "echo": True}, "n"),
        ({"prompt": [[5] * 4000] * 3, "n": 100, "return_token_ids": True}, "n"),
        ({"prompt": "a", "n": 128, "max_tokens": 500, "logprobs": 20}, "logprobs"),
    ],
)
def test_what_would_cost_engines_or_the_server_too_much_is_refused(model, monkeypatch, fields, param):
    monkeypatch.setattr(request_builder, "MAX_CHOICE_TOKENS", 1 << 21)
    with pytest.raises(RequestError) as refused:
        jobs(model, **fields)
    assert (refused.value.http_status, refused.value.param) == (400, param)


def test_a_single_answer_and_a_stream_may_have_any_number_of_log_probabilities(model):
    long = dataclasses.replace(model, info=msgspec.structs.replace(INFO, max_model_len=1 << 17))
    assert len(jobs(long, prompt="a", max_tokens=100_000, logprobs=20)) == 1
    assert len(jobs(long, prompt="a", n=9, max_tokens=100_000, logprobs=20, stream=True)) == 9


def test_a_request_with_the_most_choices_fits_into_messages(model):
    """Tokens of all choices are bounded, and so are those of the largest one."""
    long = dataclasses.replace(model, info=msgspec.structs.replace(INFO, max_model_len=1 << 17))
    found = jobs(long, prompt=[5] * 100_000, n=128)
    assert len(msgspec.msgpack.encode(found[0].request)) < MAX_MESSAGE_BYTES


@pytest.mark.parametrize("num_top", [0, 1, 20])
def test_scores_of_a_prompt_travel_in_pieces_of_bounded_size(num_top):
    top = tuple((i, -float(i)) for i in range(num_top))
    entries = tuple(TokenLogprobs(i, -0.5 * i, i + 1, top) for i in range(10_001))
    packed = PackedLogprobs.pack(entries)
    assert tuple(packed) == entries
    assert (len(packed), packed.num_scores) == (len(entries), len(entries) * (1 + num_top))
    most = max(len(msgspec.msgpack.decode(piece)) for piece in packed.pieces)
    assert most * (1 + num_top) <= 4096
    assert len(packed.pieces) <= 2 * packed.num_scores / 4096 + 1
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(packed), type=PackedLogprobs) == packed


def test_no_scores_are_packed_as_none():
    assert not PackedLogprobs.pack(())
    assert list(PackedLogprobs.pack(())) == []


class Engines:
    """Engines that note, for each submitted request, the turn of the event loop and the bytes of its prompt."""

    def __init__(self) -> None:
        self.turn = 0
        self.submitted: list[tuple[int, int]] = []
        self.inbox = None

    def submit(self, request: Request, inbox, choices) -> None:
        self.submitted.append((self.turn, len(request.token_ids)))
        self.inbox = inbox

    def abort(self, *_args: object) -> None:
        pass

    def unused_id(self, name: str) -> str:
        return name

    async def count_turns(self) -> None:
        while True:
            self.turn += 1
            await asyncio.sleep(0)


def made_jobs(num: int, num_tokens: int) -> list[Job]:
    return [
        Job(
            request=Request(
                request_id=str(i),
                num_prompt_tokens=num_tokens,
                sampling=SamplingParams(max_tokens=100),
                arrival_ns=0,
                token_ids=np.full(num_tokens, 70, np.int32).tobytes(),
            ),
            is_copy=i % 4 > 0,
        )
        for i in range(num)
    ]


def plain_model(tokenizer) -> SimpleNamespace:
    return SimpleNamespace(tokenizer=tokenizer, chat=SimpleNamespace(reasoning=None), max_choices_at_once=1024)


@pytest.mark.parametrize(("num_jobs", "num_tokens"), [(1024, 4), (40, 131_072)])
def test_choices_are_submitted_in_pieces_with_turns_for_others_between(tokenizer, num_jobs, num_tokens):
    async def submit() -> list[tuple[int, int]]:
        engines = Engines()
        turns = asyncio.create_task(engines.count_turns())
        async with Generation(engines, plain_model(tokenizer), made_jobs(num_jobs, num_tokens), PrepareThreads()):
            turns.cancel()
        return engines.submitted

    submitted = asyncio.run(submit())
    assert len(submitted) == num_jobs
    for turn in {turn for turn, _ in submitted}:
        at_once = [num_bytes for at, num_bytes in submitted if at == turn]
        assert len(at_once) <= 16
        assert sum(at_once) <= 2 << 20


@pytest.mark.parametrize("follows_end", [True, False])
def test_choices_beyond_a_share_follow_the_end_of_earlier_ones_and_wait_anew(tokenizer, follows_end):
    """One request with many choices never takes all places of the engines, nor the front of their queues."""

    async def run() -> None:
        engines, model = Engines(), plain_model(tokenizer)
        model.max_choices_at_once = 4
        arrivals: list[int] = []
        plain_submit, is_full = engines.submit, False

        def submit(request: Request, inbox, choices) -> None:
            if is_full:
                raise QueueFullError(1)
            arrivals.append(request.arrival_ns)
            assert choices.num_choices == 4, "siblings are counted before the first answer"
            plain_submit(request, inbox, choices)

        engines.submit = submit
        async with Generation(engines, model, made_jobs(8, 5), PrepareThreads()) as generation:
            assert arrivals == [0] * 4
            end = Output(request_id="2", token_ids=(70,), finish_reason=FinishReason.LENGTH)
            engines.inbox.put_nowait(end)
            assert (await generation.next_piece()).index == 2
            assert len(arrivals) == 5
            assert arrivals[-1] > 0
            is_full = True
            engines.inbox.put_nowait(msgspec.structs.replace(end, request_id="0"))
            await generation.next_piece()
            assert len(arrivals) == 5, "a full queue holds the choice back"
            engines.inbox.put_nowait(msgspec.structs.replace(end, request_id="1"))
            await generation.next_piece()
            assert len(arrivals) == 5, "a full queue holds this choice back too"
            is_full = False
            await asyncio.sleep(2 * RETRY_S)
            if follows_end:
                engines.inbox.put_nowait(msgspec.structs.replace(end, request_id="3"))
            else:
                engines.inbox.put_nowait(Output(request_id="3", token_ids=(70,)))
            assert (await generation.next_piece()).index == 3
            assert len(arrivals) == 7 + follows_end, "all of them follow at once"
            for number in (4, 5, 6, 7) if follows_end else (3, 4, 5, 6, 7):
                engines.inbox.put_nowait(msgspec.structs.replace(end, request_id=str(number)))
                assert (await generation.next_piece()).index == number
            assert await generation.next_piece() is None
        assert len(arrivals) == 8

    asyncio.run(run())


class Unlisted(list):
    """Choices that may not be gone through."""

    def __iter__(self):
        raise AssertionError("the cost grows with the number of choices")


def test_the_usage_of_each_chunk_is_kept_and_not_added_up(tokenizer):
    async def count() -> None:
        engines, rng = Engines(), np.random.default_rng(0)
        async with Generation(engines, plain_model(tokenizer), made_jobs(8, 5), PrepareThreads()) as generation:
            generation._choices = Unlisted(generation._choices)
            generated, cached = [0] * 8, [0] * 8
            for _ in range(200):
                which = int(rng.integers(8))
                num_cached = 0 if generated[which] else int(rng.integers(5))
                cached[which] += num_cached
                tokens = tuple(rng.integers(40, 90, rng.integers(1, 4)).tolist())
                generated[which] += len(tokens)
                engines.inbox.put_nowait(Output(request_id=str(which), token_ids=tokens, num_cached_tokens=num_cached))
                await generation.next_piece()
                usage = generation.usage()
                assert (usage.prompt_tokens, usage.completion_tokens) == (10, sum(generated))
                assert usage.prompt_tokens_details.cached_tokens == cached[0] + cached[4]

    asyncio.run(count())


def test_a_chat_that_cannot_fit_names_its_messages(model):
    body = json.dumps({"messages": [{"role": "user", "content": "a b " * 5000}]}).encode()
    with pytest.raises(PromptTooLongError) as refused:
        prepare_chat_ask(parse_chat(body), model, ARRIVAL)
    assert refused.value.param == "messages"
