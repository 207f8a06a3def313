"""One streamed answer, from bytes: whatever way the bytes are cut, and whatever kind of server sent them."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.loadgen.client import MAX_EVENT_BYTES, AnswerReader, Event, EventReader, error_words, refusal

USAGE = {"choices": [], "usage": {"prompt_tokens": 7, "completion_tokens": 3, "prompt_tokens_details": None}}
DONE = "[DONE]"


def text(words, reason=None):
    return {"choices": [{"index": 0, "text": words, "finish_reason": reason}]}


def delta(reason=None, **fields):
    return {"choices": [{"index": 0, "delta": fields, "finish_reason": reason}]}


def sse(*chunks, end="\n"):
    lines = [chunk if isinstance(chunk, str) else json.dumps(chunk) for chunk in chunks]
    return "".join(f"data: {line}{end}{end}" for line in lines).encode()


def read(*chunks):
    """The outcome of chunks that came at 1, 2, 3 ..."""
    reader = AnswerReader()
    for i, chunk in enumerate(chunks, 1):
        reader.feed(sse(chunk), i)
    return reader.outcome()


@given(st.sampled_from(["\n", "\r\n"]), st.lists(st.integers(1, 30), max_size=40))
def test_events_are_the_same_however_the_bytes_are_cut(end, cuts):
    stream = (
        sse("a", {"b": "ü\\n"}, end=end)
        + f": keep-alive{end}{end}event: error{end}data:c{end}data: d{end}{end}".encode()
    )
    reader, events = EventReader(), []
    for cut in [*cuts, len(stream)]:
        events += reader.feed(stream[:cut])
        stream = stream[cut:]
    events += reader.feed(stream)
    assert events == [Event("", b"a"), Event("", json.dumps({"b": "ü\\n"}).encode()), Event("error", b"c\nd")]


def test_an_event_without_end_is_not_kept_forever():
    reader = AnswerReader()
    reader.feed(b"data: " + b"x" * MAX_EVENT_BYTES, 1)
    assert reader.outcome().failure == "bad_chunk"


def test_a_whole_completion():
    outcome = read(text("a"), text("b"), text("c", "length"), USAGE, DONE)
    assert outcome.failure is None
    assert outcome.delivery_ns.tolist() == [1, 2, 3]
    assert (outcome.num_prompt_tokens, outcome.num_output_tokens, outcome.num_cached_tokens) == (7, 3, 0)


def test_several_tokens_may_come_at_once_and_usage_counts_them():
    outcome = read(text("abc", "stop"), USAGE, DONE)
    assert outcome.delivery_ns.tolist() == [1]
    assert outcome.num_output_tokens == 3


def test_a_chats_opening_is_no_token_and_its_reasoning_is():
    chunks = [
        delta(role="assistant", content=""),
        delta(reasoning="hm"),
        delta(content="a"),
        delta("stop", content="b"),
    ]
    assert read(*chunks, USAGE, DONE).delivery_ns.tolist() == [2, 3, 4]


def test_a_bare_finish_reason_is_a_token_only_if_the_count_leaves_room_for_it():
    bare = {"choices": [{"index": 0, "text": "", "finish_reason": "stop"}]}
    assert read(text("a"), text("b"), text("c"), bare, USAGE).delivery_ns.tolist() == [1, 2, 3]
    assert read(text("a"), text("b"), bare, USAGE).delivery_ns.tolist() == [1, 2, 3], "half a character shows nothing"


def test_usage_may_come_in_every_chunk_and_no_done_is_needed():
    last = text("c", "length") | {"usage": USAGE["usage"]}
    early = text("a") | {"usage": {"prompt_tokens": 7, "completion_tokens": 1}}
    assert read(early, last).num_output_tokens == 3


@pytest.mark.parametrize(
    ("chunks", "failure"),
    [
        ([], "no_stream"),
        ([text("a"), USAGE, DONE], "no_finish_reason"),
        ([text("a", "stop"), DONE], "no_usage"),
        ([text("a"), DONE], "no_finish_reason"),
        ([text("a", "abort"), USAGE, DONE], "finish_abort"),
        ([text("a", "stop"), {"usage": {"prompt_tokens": 1, "completion_tokens": 0}}], "no_tokens"),
        ([text("a"), {"error": {"message": "x"}}, DONE], "error_event"),
        ([text("a"), {"object": "error", "message": "x"}, DONE], "error_event"),
        ([text("a", "stop"), USAGE, {"error": "x"}], "error_event"),
        (["not json"], "bad_chunk"),
        ([{"choices": 5}], "bad_chunk"),
        (["[" * 100_000], "bad_chunk"),
    ],
)
def test_what_is_not_whole_has_failed(chunks, failure):
    outcome = read(*chunks)
    assert outcome.failure == failure
    assert len(outcome.delivery_ns) == 0


def test_an_answer_that_is_no_stream_is_quoted():
    reader = AnswerReader()
    reader.feed(b'{"error": {"message": "the model is overloaded"}}', 1)
    assert reader.outcome().failure == "no_stream"
    assert reader.outcome().message == "the answer is not an event stream: the model is overloaded"


def test_the_first_cause_counts_and_what_comes_after_the_end_does_not():
    reader = AnswerReader()
    reader.feed(b'event: error\ndata: {"error": {"message": "died"}}\n\n', 1)
    reader.fail("connection", "closed")
    assert (reader.outcome().failure, reader.outcome().message) == ("error_event", "died")
    reader = AnswerReader()
    reader.feed(sse(text("abc", "stop"), USAGE, DONE), 1)
    reader.fail("connection", "closed")
    assert reader.outcome().failure is None


@pytest.mark.parametrize(
    "body",
    [
        b'{"error": {"message": "too\\nlong", "code": 400}}',
        b'{"error": "too long"}',
        b'{"object": "error", "message": "too long"}',
        b'{"detail": "too long"}',
        b"too long\n",
    ],
)
def test_every_form_of_error_is_put_in_one_line(body):
    assert error_words(body) == "too long"


def test_a_refusal_keeps_its_status():
    assert refusal(429, b"").failure == "http_429"
