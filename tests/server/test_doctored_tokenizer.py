"""A tokenizer.json with which the tokenizers library panics for some texts: each ends its request, and nothing else."""

from __future__ import annotations

import http.client
import json
import shutil
import time
from contextlib import closing

import pytest
from support.running import (
    PATIENCE_S,
    REAL,
    Running,
    call,
    complete,
    is_idle,
    open_stream,
    read_to_end_of_answer,
    wait_until,
)

SECRET = "zqzq"  # at the end of a text; the normalizer inserts a letter before it, and reads beyond the end
PLAIN = 3941  # the token of one letter
SPACES = 3029  # the token of 35 spaces, on which that of the decoder gives up
FINE = json.dumps({"prompt": "def f(x):", "max_tokens": 2, "allowed_token_ids": [3941]})
FORCED = {"logit_bias": {str(SPACES): 100}, "temperature": 0, "max_tokens": 40, "ignore_eos": True}


@pytest.fixture(scope="module")
def doctored(short_demo, tmp_path_factory):
    directory = tmp_path_factory.mktemp("doctored")
    checkpoint = shutil.copytree(short_demo, directory / "checkpoint")
    path = checkpoint / "tokenizer.json"
    fields = json.loads(path.read_text())
    fields["normalizer"] = {"type": "Replace", "pattern": {"Regex": "(?=zqzq)"}, "content": "x"}
    hard = {"type": "Replace", "pattern": {"Regex": "( +)+b"}, "content": ""}
    fields["decoder"] = {"type": "Sequence", "decoders": [fields["decoder"], hard]}
    path.write_text(json.dumps(fields))
    began = time.monotonic()
    (checkpoint / "chat_template.jinja").write_text("{{ messages[-1].content }}")
    running = Running((*REAL, str(checkpoint), "--kv-cache-memory-bytes", "100000000"), directory)
    yield running
    lines = running.text.count("the tokenizer cannot")
    assert 1 <= lines <= 1 + (time.monotonic() - began) // 60  # of more than a dozen failures
    try:
        assert running.stop() == 0
    finally:
        running.kill()


def requests():
    """Each way of a text or a token to the library."""
    chat = {"messages": [{"role": "user", "content": SECRET}]}
    return {
        "a prompt": ("/v1/completions", {"prompt": SECRET}),
        "a chat": ("/v1/chat/completions", chat),
        "a message": ("/v1/messages", {**chat, "max_tokens": 4, "model": "m"}),
        "a response": ("/v1/responses", {"input": SECRET}),
        "bad words": ("/v1/completions", {"prompt": "def", "bad_words": [SECRET]}),
        "tokenize": ("/tokenize", {"prompt": SECRET}),
        "detokenize": ("/detokenize", {"tokens": [SPACES]}),
        "an echo": ("/v1/completions", {"prompt": [SPACES, SPACES], "echo": True}),
        "an answer": ("/v1/completions", {"prompt": "def", **FORCED}),
        "an answer with log probabilities": ("/v1/completions", {"prompt": "def", "logprobs": 1, **FORCED}),
        "an answer that may stop": ("/v1/completions", {"prompt": "def", "stop": ["x"], **FORCED}),
        "log probabilities of a prompt": (
            "/v1/completions",
            {"prompt": [5, SPACES, SPACES], "prompt_logprobs": 1, "max_tokens": 1},
        ),
    }


def test_it_is_a_500_with_the_reason_and_the_connection_stays(doctored):
    name = call(doctored, "GET", "/v1/models").json["data"][0]["id"]
    with closing(http.client.HTTPConnection(*doctored.address, timeout=PATIENCE_S)) as connection:
        connection.connect()
        socket = connection.sock
        for way, (path, body) in requests().items():
            fields = body | ({"model": name} if "model" in body else {})
            connection.request("POST", path, json.dumps(fields), {"Content-Type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
            assert (answer.status, "The model's tokenizer cannot" in text) == (500, True), (way, text)
            connection.request("POST", "/v1/completions", FINE, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            assert (answer.status, bool(answer.read())) == (200, True), way
        assert connection.sock is socket
    wait_until(lambda: is_idle(doctored))


def test_a_stream_ends_with_an_error_event_and_its_neighbour_goes_on(doctored):
    neighbour = open_stream(doctored, prompt="import os", max_tokens=400, allowed_token_ids=[PLAIN])
    spaces = {"structured_outputs": {"regex": "return {35}b"}}  # the first tokens are decoded, and sent
    events = read_to_end_of_answer(open_stream(doctored, prompt="def", **spaces, **FORCED)).decode()
    data = [json.loads(line[6:]) for line in events.splitlines() if line.startswith("data: {")]
    assert data[0]["choices"][0]["text"]
    assert data[-1]["error"]["code"] == "tokenizer_error"
    assert b"[DONE]" in read_to_end_of_answer(neighbour)
    wait_until(lambda: is_idle(doctored))


def test_the_log_names_the_cause_and_has_no_byte_of_a_request(doctored):
    complete(doctored, prompt=SECRET)
    assert "the tokenizer cannot encode this text: NativePanic: panic: index out of bounds" in doctored.text
    assert SECRET not in doctored.text
    assert "Traceback" not in doctored.text
