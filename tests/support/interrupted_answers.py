"""Requests to a server whose engines are killed, and what their answers should have been."""

from __future__ import annotations

import http.client
import json
import os
import re
import signal
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.running import EXACT, PATIENCE_S, Reply, Running, call, free_port, is_idle, metrics, wait_until

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@contextmanager
def running(command: tuple[str, ...], directory: Path) -> Iterator[Running]:
    server = Running(command, directory, admin_port=free_port())
    try:
        yield server
        assert server.stop() == 0
    finally:
        server.kill()


class SentRequests:
    """Requests that are answered in threads; `bodies`: (path, body)."""

    def __init__(self, server: Running, bodies: list[tuple[str, dict[str, Any]]]) -> None:
        self._server, num_choices = server, sum(body.get("n", 1) for _, body in bodies)
        self._num_begun = total(server, BEGUN) + num_choices
        self._pool = ThreadPoolExecutor(len(bodies))
        self._replies: list[Future[Reply]] = [self._pool.submit(ask, server, path, body) for path, body in bodies]

    def begin(self) -> None:
        """Wait until all have their first token. A request that finds no engine is refused, and none is lost later."""
        wait_until(lambda: total(self._server, BEGUN) >= self._num_begun)

    def answers(self) -> list[tuple[int, bytes]]:
        """Status and body of each, without what differs from answer to answer."""
        with self._pool:
            replies = [future.result(PATIENCE_S) for future in self._replies]
        return [(reply.status, bare(reply.body)) for reply in replies]


def ask(server: Running, path: str, body: dict[str, Any]) -> Reply:
    try:
        return call(server, "POST", path, body)
    except http.client.IncompleteRead as cut_off:
        return Reply(200, {}, cut_off.partial)


def bare(body: bytes) -> bytes:
    return re.sub(rb'"(id|created)":("[^"]*"|\d+),?', b"", body)


STEP_S = 0.01  # of a fake rank whose answers are interrupted
LENGTH = 160  # tokens: such a rank takes 1.6 s, so that an answer lasts until its engine is killed


def completion(prompt: str, **fields: object) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": prompt, "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True} | fields


def stream(prompt: str, **fields: object) -> tuple[str, dict[str, Any]]:
    return completion(prompt, **{"stream": True, "stream_options": {"include_usage": True}} | fields)


def chat(text: str, **fields: object) -> tuple[str, dict[str, Any]]:
    body = {"messages": [{"role": "user", "content": text}], "max_tokens": LENGTH, "ignore_eos": True}
    return CHAT, body | fields


def ready(server: Running) -> bool:
    return all(value for name, value in metrics(server).items() if name.startswith("moestro:engine_ready"))


def total(server: Running, name: str) -> float:
    """A counter, of all engines together."""
    return sum(value for key, value in metrics(server).items() if key.startswith(f"moestro:{name}{{"))


BEGUN = "time_to_first_token_seconds_count"


def tokens_come(server: Running, num_tokens: int = 20) -> None:
    """Wait until `num_tokens` have been generated from now on."""
    before = total(server, "generation_tokens_total")
    wait_until(lambda: total(server, "generation_tokens_total") >= before + num_tokens)


def kill_an_engine(server: Running, at: int = 0) -> None:
    os.kill(server.ranks()[at].pid, signal.SIGKILL)


LONG = "class Stack:\n    def push(self, item):\n        self.items.append(item)\n" * 3
SAMPLED = {"temperature": 1.0, "seed": 11}
# The own kernels round alike in any batch. Torch's in float32 move logits by some 1e-6, which changes about 3 in a
# million sampled tokens (docs/log.md): the 4,000 below meet such a near-tie in one run of a hundred.
NEAR_TIES = 0 if "own" in EXACT else 1


_WORDS = {"type": "array", "items": {"type": "string", "minLength": 2, "maxLength": 9}, "minItems": 25, "maxItems": 40}
LISTS = {"type": "json_schema", "json_schema": {"name": "lists", "schema": _WORDS}}


def streams(parts_of_characters: list[int]) -> list[tuple[str, dict[str, Any]]]:
    likely = dict.fromkeys(map(str, parts_of_characters), 9)
    return [
        stream("def f(x):"),
        stream("import os", **SAMPLED),
        stream(LONG, **SAMPLED),
        stream("x = [", **SAMPLED, presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.2),
        stream("while True:", temperature=1.3, seed=2, top_p=0.9, min_p=0.01, logit_bias={"5": -3, "40": 2}),
        stream("for i in", stop=["return self.never", "\n\n\n\n"], min_tokens=80),
        stream("s = 'é", **SAMPLED, logit_bias=likely),
        stream("if x:", **SAMPLED, ignore_eos=False, min_tokens=60),
        chat("Sort a list.", stream=True, temperature=0, stream_options={"include_usage": True}),
        stream("k = ", **SAMPLED, guided_regex="[a-z]{40}( [a-z0-9é]{3,9}){30,60}"),
        stream("j = ", **SAMPLED, ignore_eos=False, response_format=LISTS),
        stream("y = {", **SAMPLED, stream_options={"include_usage": True, "continuous_usage_stats": True}),
    ]


WHOLE = [
    completion("def g(y):"),
    completion("print(", **SAMPLED, n=3),
    completion("return", **SAMPLED, stop=["never to be found"], frequency_penalty=0.5),
    completion(LONG, echo=True),
    chat("Write a class.", **SAMPLED, n=2),
]
# Log probabilities may differ in the last place from batch to batch: of these the text is compared.
SCORED = [
    completion("assert", **SAMPLED, logprobs=2),
    completion("lambda", prompt_logprobs=1, echo=True, logprobs=0),
    chat("Hello", logprobs=True, top_logprobs=2, temperature=0),
]


def salted(bodies: list[tuple[str, dict[str, Any]]], salt: int, num_tokens: int) -> list[tuple[str, dict[str, Any]]]:
    """The same requests, of which no prefix cache knows anything; shorter than those to fake ranks."""

    def of(body: dict[str, Any]) -> dict[str, Any]:
        least = {"min_tokens": min(body["min_tokens"], num_tokens - 20)} if "min_tokens" in body else {}
        return body | least | {"max_tokens": num_tokens}

    return [(path, of(body) | {"cache_salt": f"{salt} {i}"}) for i, (path, body) in enumerate(bodies)]


def texts(answers: list[tuple[int, bytes]]) -> list[list[str]]:
    choices = [json.loads(b"{" + body[1:].lstrip(b","))["choices"] for _, body in answers]
    return [[each["message"]["content"] if "message" in each else each["text"] for each in these] for these in choices]


TEXT = "日本語 🙂 naïve: def f(x): return x"


def disturbed(server: Running, *bodies: tuple[str, dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """Answers to each of `bodies`, twice, when nothing happens and when one of two engines is killed.

    Engines take requests in turn. So in whatever order they come, the two of a kind go to different engines if there is
    an even number of all others, and so do the two choices of one.
    """
    bodies = bodies * 2
    expected = SentRequests(server, [*bodies]).answers()
    sent = SentRequests(server, [*bodies])
    sent.begin()
    tokens_come(server)
    kill_an_engine(server)
    found = sent.answers()
    wait_until(lambda: is_idle(server))
    return expected, found
