"""Streams that are cut anywhere, and continued by other engines: the client's stream is that of one engine."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.token_engine import CHAT, TokenEngine, random_groups

from moestro.gateway.resume.request import (
    COMPLETION_PATH,
    CONTINUED_FIELDS,
    InContinuation,
    ResumableRequest,
    resumable,
)
from moestro.gateway.resume.stream import ModelTraits, ResumableStream

ENGINE_DIED = b'event: error\ndata: {"error":{"message":"x","type":"server_error","code":"engine_error"}}\n\n'


def body_of(path: str, **fields: Any) -> bytes:
    prompt = {"messages": [{"role": "user", "content": "hello"}]} if path == CHAT else {"prompt": "hello"}
    return json.dumps({"model": "m", "stream": True, "temperature": 0, **prompt, **fields}).encode()


def request_of(path: str, **fields: Any) -> ResumableRequest:
    made = resumable(path, body_of(path, **fields), lambda _model: 512)
    assert isinstance(made, ResumableRequest), made
    return made


def chunks_of(stream: bytes) -> list[Any]:
    events = [event.removeprefix(b"data: ") for event in stream.split(b"\n\n") if event]
    return [json.loads(event) if event != b"[DONE]" else "[DONE]" for event in events]


def text_of(stream: bytes) -> str:
    """The text that a client reads."""
    choices = [chunk["choices"][0] for chunk in chunks_of(stream) if chunk != "[DONE]" and chunk["choices"]]
    return "".join(each["text"] if "text" in each else each["delta"].get("content") or "" for each in choices)


def check_as_one_answer(got: bytes, calm: bytes, *, path: str, has_ids: bool) -> None:
    """Compare a stream of several engines with a calm one: all but how the text is cut into chunks."""
    chunks, expected = chunks_of(got), chunks_of(calm)
    assert text_of(got) == text_of(calm)
    assert chunks[-1] == "[DONE]"
    assert chunks.count("[DONE]") == 1
    heads = {
        json.dumps({name: chunk.get(name) for name in ("id", "created", "model", "object")}) for chunk in chunks[:-1]
    }
    assert len(heads) == 1
    with_choice = [chunk["choices"][0] for chunk in chunks[:-1] if chunk["choices"]]
    reasons = [each["finish_reason"] for each in with_choice]
    assert [reason for reason in reasons if reason] == [
        each["choices"][0]["finish_reason"]
        for each in expected[:-1]
        if each["choices"] and each["choices"][0]["finish_reason"]
    ]
    if path == CHAT:
        assert [("role" in each["delta"]) for each in with_choice] == [True] + [False] * (len(with_choice) - 1)
    assert closing_usages(chunks) == closing_usages(expected)
    ids = [token_id for each in with_choice for token_id in each.get("token_ids") or []]
    calm_ids = [i for chunk in expected[:-1] if chunk["choices"] for i in chunk["choices"][0].get("token_ids") or []]
    assert ids == (calm_ids if has_ids else [])


def closing_usages(chunks: list[Any]) -> list[list[int]]:
    """Token counts of the chunks without choices."""
    names = ("prompt_tokens", "completion_tokens", "total_tokens")
    return [[chunk["usage"][name] for name in names] for chunk in chunks[:-1] if not chunk["choices"]]


@given(
    path=st.sampled_from([CHAT, COMPLETION_PATH]),
    forms=st.lists(st.sampled_from(["vllm", "moestro"]), min_size=1, max_size=5),
    cuts=st.lists(st.integers(0, 1 << 16), max_size=4),
    most=st.integers(1, 5),
    seed=st.integers(0, 99),
    piece=st.integers(1, 400),
    limit=st.sampled_from([None, 1, 2, 7, 40, 100]),
    least=st.sampled_from([0, 3, 30]),
    wants=st.fixed_dictionaries({"ids": st.booleans(), "usage": st.booleans(), "all_usage": st.booleans()}),
    dies_aloud=st.booleans(),
)
@settings(max_examples=100, deadline=None)
def test_stream_cut_anywhere_equals_a_calm_one(path, forms, cuts, most, seed, piece, limit, least, wants, dies_aloud):
    fields = wanted_fields(path, seed, limit, least, wants)
    request = request_of(path, **fields)
    calm = b"".join(TokenEngine(forms[0]).answer(path, body_of(path, **fields)))
    engines = [TokenEngine(form, f"e{i}", random_groups(seed + i, most)) for i, form in enumerate(forms)]
    got = passed_on(request, engines, cuts, piece, dies_aloud=dies_aloud)
    if got is not None:
        check_as_one_answer(got, calm, path=path, has_ids=wants["ids"])


def wanted_fields(path: str, seed: int, limit: int | None, least: int, wants: dict[str, bool]) -> dict[str, Any]:
    text = f"hello {seed}"
    fields: dict[str, Any] = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    fields["min_tokens"] = min(least, limit or 16)
    if limit is not None:
        fields["max_tokens"] = limit
    if wants["ids"]:
        fields["return_token_ids"] = True
    if wants["usage"] or wants["all_usage"]:
        fields["stream_options"] = {"include_usage": wants["usage"], "continuous_usage_stats": wants["all_usage"]}
    return fields


def passed_on(
    request: ResumableRequest, engines: list[TokenEngine], cuts: list[int], piece: int, *, dies_aloud: bool
) -> bytes | None:
    """What the client gets where an engine dies at each of `cuts`; None where the stream cannot go on."""
    stream = ResumableStream(request, ModelTraits())
    got, target, body = b"", request.path, request.body
    for i, cut in enumerate([*cuts, None]):
        whole = b"".join(engines[i % len(engines)].answer(target, body))
        end = len(whole) if cut is None else cut % (len(whole) + 1)
        for at in range(0, end, piece):
            got += stream.feed(whole[at : min(at + piece, end)])
        if stream.is_complete:
            break
        if dies_aloud and whole[:end].endswith((b"\n\n", b"")[end == 0]):
            got += stream.feed(ENGINE_DIED)
        assert not stream.obstacle
        if left := stream.end():
            return got + left
        if not stream.can_resume:
            return None  # More than 16 events without a safe one.
        target, body, _ = stream.resume()
    return got


@pytest.mark.parametrize("path", [CHAT, COMPLETION_PATH])
@pytest.mark.parametrize("form", ["vllm", "moestro"])
def test_calm_stream_has_the_bytes_of_a_request_without_ids(path, form):
    request = request_of(path, max_tokens=80)
    engine = TokenEngine(form)
    stream = ResumableStream(request, ModelTraits())
    got = b"".join(stream.feed(event) for event in engine.answer(path, request.body))
    calm = b"".join(TokenEngine(form).answer(path, body_of(path, max_tokens=80)))
    assert got.replace(b',"prompt_token_ids":null', b"") == calm.replace(b',"prompt_token_ids":null', b"")
    assert not re.search(rb"token_ids\":\[", got)


@pytest.mark.parametrize("path", [CHAT, COMPLETION_PATH])
def test_single_tokens_are_passed_on_at_once(path):
    request = request_of(path, max_tokens=80)
    stream = ResumableStream(request, ModelTraits())
    for event in TokenEngine().answer(path, request.body):
        passed = stream.feed(event)
        assert passed or not text_of(event) or "\ufffd" in text_of(event)


def test_last_token_that_was_seen_alone_ends_the_wait():
    request, traits = request_of(COMPLETION_PATH, max_tokens=80, min_tokens=80), ModelTraits()
    alone = ResumableStream(request, traits)
    for event in TokenEngine().answer(COMPLETION_PATH, request.body):
        alone.feed(event)
    known, unknown = ResumableStream(request, traits), ResumableStream(request, ModelTraits())
    events = TokenEngine(groups=lambda: 3).answer(COMPLETION_PATH, request.body)
    num_passed = [sum(bool(stream.feed(event)) for event in events[:12]) for stream in (known, unknown)]
    assert num_passed[0] > 3
    assert num_passed[1] == 0


def test_stream_without_a_safe_chunk_waits_for_few_events():
    request = request_of(COMPLETION_PATH, max_tokens=200, min_tokens=200)
    stream = ResumableStream(request, ModelTraits())
    events = TokenEngine(groups=lambda: 2).answer(COMPLETION_PATH, request.body)
    got = [stream.feed(event) for event in events[:40]]
    assert got[16]
    assert all(got[17:])
    assert not stream.can_resume


def test_engine_without_token_ids_is_passed_through():
    request = request_of(CHAT, max_tokens=40)
    stream = ResumableStream(request, ModelTraits())
    events = TokenEngine(has_ids=False).answer(CHAT, request.body)
    assert [stream.feed(event) for event in events] == events
    assert stream.obstacle == "no token ids"


def test_reasoning_ends_the_chance_to_resume_and_is_remembered():
    request, traits = request_of(CHAT, max_tokens=40), ModelTraits()
    stream = ResumableStream(request, traits)
    events = TokenEngine().answer(CHAT, request.body)
    stream.feed(events[0])
    delta = b'data: {"choices":[{"index":0,"delta":{"reasoning":"hm"},"token_ids":[3]}]}\n\n'
    assert stream.feed(delta) == delta.replace(b"[3]", b"null")
    assert (stream.obstacle, stream.can_resume, traits.parses_reasoning) == ("reasoning parser", False, True)


def test_error_of_the_request_is_the_clients():
    request = request_of(CHAT, max_tokens=40)
    stream = ResumableStream(request, ModelTraits())
    error = b'data: {"error":{"message":"x","type":"BadRequestError","code":400}}\n\n'
    assert stream.feed(error) == error
    assert not stream.can_resume


REFUSED: list[tuple[str, str, dict[str, Any]]] = [
    (CHAT, "seed", {"seed": 1, "temperature": 1}),
    (CHAT, "seed", {"seed": 1, "temperature": None}),
    (CHAT, "presence_penalty", {"presence_penalty": 0.1}),
    (COMPLETION_PATH, "frequency_penalty", {"frequency_penalty": -1}),
    (CHAT, "stop", {"stop": "x"}),
    (CHAT, "stop", {"stop": ["x"]}),
    (COMPLETION_PATH, "logprobs", {"logprobs": 0}),
    (CHAT, "logprobs", {"logprobs": True}),
    (CHAT, "n", {"n": 2}),
    (COMPLETION_PATH, "prompt", {"prompt": ["a", "b"]}),
    (COMPLETION_PATH, "prompt", {"prompt": [[1], [2]]}),
    (COMPLETION_PATH, "echo", {"echo": True}),
    (CHAT, "response_format", {"response_format": {"type": "json_object"}}),
    (CHAT, "structured_outputs", {"structured_outputs": {"regex": "a"}}),
    (CHAT, "guided_json", {"guided_json": {}}),
    (CHAT, "tools", {"tools": [{"type": "function", "function": {"name": "f"}}]}),
    (CHAT, "bad_words", {"bad_words": ["x"]}),
    (CHAT, "thinking_token_budget", {"thinking_token_budget": 5}),
    (CHAT, "another field", {"frobnicate": 5}),
    (CHAT, "messages", {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}),
    (CHAT, "messages", {"messages": [{"role": "user", "content": [{"image_url": {"url": "x"}}]}]}),
    (CHAT, "messages", {"messages": [{"role": "user", "content": [{"type": "input_audio", "input_audio": {}}]}]}),
    ("/v1/responses", "path", {}),
    ("/v1/messages", "path", {}),
]


@pytest.mark.parametrize(("path", "name", "fields"), REFUSED)
def test_field_without_an_exact_continuation_makes_a_stream_not_resumable(path, name, fields):
    assert resumable(path, body_of(path, **{"max_tokens": 5} | fields), lambda _model: None) == name


def test_every_refused_field_is_refused_with_an_unusual_value():
    for field in CONTINUED_FIELDS:
        if field.treatment is InContinuation.REFUSED and field.without is None:
            found = resumable(
                CHAT, body_of(CHAT, max_tokens=5, temperature=1, **{field.name: [["odd"], 7]}), lambda _: None
            )
            assert found == field.name


HARMLESS: list[dict[str, Any]] = [
    {"seed": 1, "temperature": 0},
    {"presence_penalty": 0, "frequency_penalty": 0.0, "repetition_penalty": 1.2},
    {"stop": []},
    {"stop": None},
    {"n": 1},
    {"response_format": {"type": "text"}},
    {"tools": [], "tool_choice": "auto"},
    {"tools": [{"type": "function", "function": {"name": "f"}}], "tool_choice": "none"},
    {"frobnicate": None},
    {"messages": [{"role": "user", "content": [{"type": "text", "text": '"image_url": {"type": "image"'}]}]},
    {"messages": [{"role": "assistant", "tool_calls": [{"type": "function", "function": {"name": "f"}}]}]},
    {"logprobs": False},
    {"stop_token_ids": [3], "ignore_eos": True, "logit_bias": {"3": 1}},
]


@pytest.mark.parametrize("fields", HARMLESS)
def test_field_that_requests_nothing_is_no_obstacle(fields):
    assert isinstance(resumable(CHAT, body_of(CHAT, max_tokens=5, **fields), lambda _model: None), ResumableRequest)


def test_chat_without_a_limit_needs_the_context_of_the_model():
    assert resumable(CHAT, body_of(CHAT), lambda _model: None) == "max_tokens"
    assert isinstance(resumable(CHAT, body_of(CHAT), lambda _model: 512), ResumableRequest)
    assert isinstance(resumable(COMPLETION_PATH, body_of(COMPLETION_PATH), lambda _model: None), ResumableRequest)


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b'{"stream": "yes"}', b'{"stream": false}', b"\xff", b'{"stream": true, "n": 1}x']
)
def test_body_without_a_stream_is_left_alone(body):
    assert resumable(CHAT, body, lambda _model: None) is None


def test_continuation_counts_the_tokens_of_the_answer_so_far():
    request = request_of(COMPLETION_PATH, max_tokens=20, min_tokens=12, user="u", top_p=0.5, request_id="r")
    body = json.loads(request.continuation([1, 2], [3, 4, 5]))
    assert body == {
        "model": "m", "stream": True, "temperature": 0, "user": "u", "top_p": 0.5,
        "prompt": [1, 2, 3, 4, 5], "max_tokens": 17, "min_tokens": 9, "return_token_ids": True,
    }  # fmt: skip
    assert "min_tokens" not in json.loads(request.continuation([1], list(range(12))))
