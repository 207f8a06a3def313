"""`moestro serve` on the imitated accelerator, over HTTP: which requests let a batch run ahead of the host."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support import imitated_server
from support.running import Running, call, metrics

COMMAND = (sys.executable, str(Path(imitated_server.__file__)), "serve", "--device", "cuda", "--dtype", "float32",
           "--kv-cache-memory-bytes", "100000000")  # fmt: skip
NUM_TOKENS = 24
PLAIN = {"temperature": 1, "seed": 3}
WISHES = {
    "penalties": {"frequency_penalty": 0.7, "presence_penalty": 0.3, "repetition_penalty": 1.3, "seed": 5},
    "minimum": {"min_tokens": NUM_TOKENS - 5, "temperature": 0, "stop_token_ids": [5, 6, 7]},
    "bias": {"logit_bias": {"40": 3, "41": -50}, "seed": 7},
    "bad words": {"bad_words": ["e", " the", " of the"], "temperature": 0},
    "log probabilities": {"logprobs": 2, "prompt_logprobs": 1, "seed": 8},
}


@pytest.fixture(scope="module")
def server(short_demo, tmp_path_factory) -> Iterator[Running]:
    model = ("--model", str(short_demo), "--served-model-name", "moestro-demo")
    running = Running((*COMMAND, *model), tmp_path_factory.mktemp("imitated"))
    try:
        yield running
        assert running.stop() == 0
    finally:
        running.kill()


def text_of(server: Running, fields: dict) -> str:
    body = {"model": "moestro-demo", "prompt": "The engine takes", "max_tokens": NUM_TOKENS, **fields}
    reply = call(server, "POST", "/v1/completions", body)
    assert reply.status == 200, reply.body
    return "".join(choice["text"] for choice in reply.json["choices"])


def steps_ahead(server: Running) -> float:
    return sum(value for name, value in metrics(server).items() if name.startswith("moestro:steps_ahead_total"))


def served_at_once(server: Running, *requests: dict) -> tuple[list[str], float]:
    """Texts of requests, and how many steps ran ahead."""
    before = steps_ahead(server)
    with ThreadPoolExecutor(len(requests)) as pool:
        texts = list(pool.map(lambda fields: text_of(server, fields), requests))
    return texts, steps_ahead(server) - before


def test_requests_that_change_logits_let_their_batch_run_ahead(server):
    """Each of them alone would have kept the batch from it."""
    alone = text_of(server, WISHES["penalties"])
    texts, num_ahead = served_at_once(server, {**PLAIN, "ignore_eos": True}, *WISHES.values())
    assert texts[1] == alone
    assert num_ahead >= NUM_TOKENS - 8


def test_one_grammar_among_many_requests_does_not_keep_them_from_running_ahead(server):
    structured = {"response_format": {"type": "json_object"}, "temperature": 0}
    texts, num_ahead = served_at_once(server, structured, {**PLAIN, "n": 12, "ignore_eos": True})
    assert texts[0].lstrip().startswith("{")
    assert num_ahead >= NUM_TOKENS - 8
