"""Engines that are killed while they answer: which answers go on elsewhere, to the byte, and which ones end."""

from __future__ import annotations

import http.client
import json
import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from support.fake_rank import CRASH
from support.running import ANSWER_S, REAL, Reply, Running, call, is_idle, load, metrics, wait_until

from moestro.workload.request_record import read_request_record

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
EXACT = ("--dtype", "float32")
RESTART_S = 30.0  # until an engine that was killed is ready again, on a busy machine


@contextmanager
def running(command: tuple[str, ...], directory: Path) -> Iterator[Running]:
    server = Running(command, directory)
    try:
        yield server
        assert server.stop() == 0
    finally:
        server.kill()


class Asked:
    """Requests that are answered in threads; `bodies`: (path, body)."""

    def __init__(self, server: Running, bodies: list[tuple[str, dict[str, Any]]]) -> None:
        self._pool = ThreadPoolExecutor(len(bodies))
        self._replies: list[Future[Reply]] = [self._pool.submit(ask, server, path, body) for path, body in bodies]

    def answers(self) -> list[tuple[int, bytes]]:
        """Status and body of each, without what differs from answer to answer."""
        with self._pool:
            return [(reply.status, bare(reply.body)) for reply in (future.result(ANSWER_S) for future in self._replies)]


def ask(server: Running, path: str, body: dict[str, Any]) -> Reply:
    try:
        return call(server, "POST", path, body)
    except http.client.IncompleteRead as cut_off:
        return Reply(200, {}, cut_off.partial)


def bare(body: bytes) -> bytes:
    return re.sub(rb'"(id|created)":("[^"]*"|\d+),?', b"", body)


def completion(prompt: str, **fields: object) -> tuple[str, dict[str, Any]]:
    return COMPLETIONS, {"prompt": prompt, "max_tokens": 200, "temperature": 0, "ignore_eos": True} | fields


def stream(prompt: str, **fields: object) -> tuple[str, dict[str, Any]]:
    return completion(prompt, **{"stream": True, "stream_options": {"include_usage": True}} | fields)


def chat(text: str, **fields: object) -> tuple[str, dict[str, Any]]:
    asked = {"messages": [{"role": "user", "content": text}], "max_tokens": 200, "ignore_eos": True}
    return CHAT, asked | fields


def ready(server: Running) -> bool:
    return all(value for name, value in metrics(server).items() if name.startswith("moestro:engine_ready"))


def total(server: Running, name: str) -> float:
    """A counter, of all engines together."""
    return sum(value for key, value in metrics(server).items() if key.startswith(f"moestro:{name}{{"))


BEGUN = "time_to_first_token_seconds_count"


def tokens_come(server: Running, num_tokens: int = 20) -> None:
    """Wait until `num_tokens` have been generated from now on."""
    before = total(server, "generation_tokens_total")
    wait_until(lambda: total(server, "generation_tokens_total") >= before + num_tokens, 20)


def kill_an_engine(server: Running, at: int = 0) -> None:
    os.kill(server.ranks()[at].pid, signal.SIGKILL)


# --- the real network ---------------------------------------------------------------------------------------------

LONG = "class Stack:\n    def push(self, item):\n        self.items.append(item)\n" * 3
SAMPLED = {"temperature": 1.0, "seed": 11}
# Rounding in float32 depends on the batch and moves logits by some 1e-6. That changes about 3 in a million sampled
# tokens (docs/log.md), so the 4,000 below meet such a near-tie in one run of a hundred, and two in one of ten thousand.
NEAR_TIES = 1


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


def salted(bodies: list[tuple[str, dict[str, Any]]], salt: int) -> list[tuple[str, dict[str, Any]]]:
    """The same requests, of which no prefix cache knows anything; shorter than those to fake ranks."""
    return [(path, body | {"max_tokens": 100, "cache_salt": f"{salt} {i}"}) for i, (path, body) in enumerate(bodies)]


def texts(answers: list[tuple[int, bytes]]) -> list[list[str]]:
    choices = [json.loads(b"{" + body[1:].lstrip(b","))["choices"] for _, body in answers]
    return [[each["message"]["content"] if "message" in each else each["text"] for each in these] for these in choices]


@pytest.fixture(scope="module")
def exact(real_command, tmp_path_factory) -> Iterator[Running]:
    command = (*real_command, *EXACT, "--engines", "2", "--route-policy", "round_robin")
    with running(command, tmp_path_factory.mktemp("exact")) as server:
        yield server


def test_answers_are_the_same_to_the_byte_whichever_engine_is_killed_and_when(exact, tokenizer):
    rng = random.Random(3)
    bodies = [*streams(tokenizer.encode("日é🙂", add_special_tokens=False)), *WHOLE]
    began = time.monotonic()
    expected, scored = (Asked(exact, salted(each, 0)).answers() for each in (bodies, SCORED))
    undisturbed_s = time.monotonic() - began
    assert [body for status, body in expected if status != 200] == []
    assert max(map(ord, "".join(body.decode() for _, body in expected))) > 0x7F, "no text of many bytes"
    differing: list[tuple[object, object]] = []
    for salt in range(1, 4):
        wait_until(lambda: ready(exact), RESTART_S)
        asked, asked_for_scores = Asked(exact, salted(bodies, salt)), Asked(exact, salted(SCORED, salt))
        time.sleep(rng.uniform(0.1, 0.6) * undisturbed_s)
        kill_an_engine(exact, rng.randrange(2))
        answers, found = asked.answers(), asked_for_scores.answers()
        assert [body for status, body in answers + found if status != 200] == []
        given, wanted = [*answers, *texts(found)], [*expected, *texts(scored)]
        differing += [(a, b) for a, b in zip(given, wanted, strict=True) if a != b]
    print("near-ties:", differing)
    assert len(differing) <= NEAR_TIES
    assert total(exact, "streams_resumed_total") >= 6
    assert total(exact, "requests_moved_total") > total(exact, "streams_resumed_total")
    wait_until(lambda: is_idle(exact))


# --- the rules, before fake ranks that repeat the prompt ------------------------------------------------------------


@pytest.fixture
def start(fake_command, tmp_path) -> Iterator[Callable[..., Running]]:
    """Starts a server with two engines, which take requests in turn."""
    servers: list[Running] = []

    def start(*flags: str, engines: int = 2) -> Running:
        command = (*fake_command, "--engines", str(engines), "--route-policy", "round_robin", *flags)
        servers.append(Running(command, tmp_path))
        return servers[-1]

    yield start
    for server in servers:
        try:
            assert server.stop() == 0
        finally:
            server.kill()


TEXT = "日本語 🙂 naïve: def f(x): return x"


def disturbed(server: Running, *bodies: tuple[str, dict[str, Any]]) -> tuple[list[Any], list[Any]]:
    """Answers to each of `bodies`, twice, when nothing happens and when one of two engines is killed.

    Engines take requests in turn. So in whatever order they come, the two of a kind go to different engines if there is
    an even number of all others, and so do the two choices of one.
    """
    bodies = bodies * 2
    expected = Asked(server, [*bodies]).answers()
    num_begun = total(server, BEGUN) + len(bodies)
    asked = Asked(server, [*bodies])
    wait_until(lambda: total(server, BEGUN) >= num_begun, 20)
    tokens_come(server)
    kill_an_engine(server)
    found = asked.answers()
    wait_until(lambda: is_idle(server))
    return expected, found


def is_broken(answer: tuple[int, bytes]) -> bool:
    """Whether a stream began, and ended with an error event and nothing after it."""
    status, body = answer
    begun, _, error = body.partition(b"event: error\n")
    return status == 200 and b'"finish_reason":null' in begun and b"engine_died" in error and b"[DONE]" not in body


def test_in_bfloat16_a_stream_that_has_begun_ends_and_an_answer_of_which_nothing_has_left_is_run_again(start):
    server = start()
    expected, found = disturbed(server, stream(TEXT), completion(TEXT, n=2), completion(TEXT, logprobs=1, n=2))
    broken = [i for i, answer in enumerate(found) if is_broken(answer)]
    assert len(broken) == 1
    assert broken[0] in (0, 3), "a stream"
    assert [found[i] for i in range(6) if i not in broken] == [expected[i] for i in range(6) if i not in broken]
    assert total(server, "streams_resumed_total") == 0
    assert total(server, "requests_moved_total") == 4


@pytest.mark.parametrize("flags", [EXACT, ("--resume-streams",)])
def test_where_that_is_exact_or_wanted_a_stream_goes_on_elsewhere(start, flags):
    server = start(*flags)
    expected, found = disturbed(server, stream(TEXT), stream(TEXT, stop=["never"]), chat(TEXT, stream=True))
    assert found == expected
    assert total(server, "streams_resumed_total") == total(server, "requests_moved_total") == 3


def test_a_request_that_moves_is_counted_once(start, tmp_path):
    server = start(*EXACT, "--record", str(tmp_path / "record"))
    disturbed(server, stream(TEXT), completion(TEXT))
    prompt = call(server, "POST", "/tokenize", {"prompt": TEXT}).json["count"]
    counts = ("request_success_total", "time_to_first_token_seconds_count", "request_queue_time_seconds_count")
    assert [total(server, name) for name in counts] == [8, 8, 8]
    assert total(server, "prompt_tokens_total") == 8 * prompt
    assert total(server, "generation_tokens_total") == 8 * 200
    assert total(server, "inter_token_latency_seconds_count") == 8 * 199
    assert total(server, "request_generation_tokens_sum") == 8 * 200
    server.stop()
    recorded = read_request_record(tmp_path / "record").requests
    assert [(each.num_prompt_tokens, each.num_output_tokens) for each in recorded] == [(prompt, 200)] * 8


@pytest.mark.parametrize("fields", [{"n": 2}, {"logprobs": 1}])
def test_streams_of_several_choices_or_with_log_probabilities_end_with_an_error(start, fields):
    server = start(*EXACT, "--resume-streams")
    expected, found = disturbed(server, stream(TEXT, **fields))
    assert any(map(is_broken, found))
    assert all(answer == whole for answer, whole in zip(found, expected, strict=True) if not is_broken(answer))
    assert total(server, "streams_resumed_total") == 0


def test_a_stream_outlives_both_engines_if_it_got_on_in_between(start):
    server = start(*EXACT)
    bodies = [stream(TEXT, max_tokens=600), completion(TEXT, max_tokens=600)] * 2
    expected = Asked(server, bodies).answers()
    asked = Asked(server, bodies)
    tokens_come(server)
    first, second = server.ranks()
    first.kill()
    wait_until(lambda: total(server, "requests_moved_total") == 2)
    tokens_come(server, 100)
    second.kill()
    assert asked.answers() == expected
    assert total(server, "requests_moved_total") >= 4


def test_a_stream_waits_for_the_next_life_of_the_only_engine(start):
    server = start(*EXACT, engines=1)
    bodies = [stream(TEXT), completion(TEXT)]
    expected = Asked(server, bodies).answers()
    asked = Asked(server, bodies)
    tokens_come(server)
    kill_an_engine(server)
    assert asked.answers() == expected
    assert total(server, "streams_resumed_total") == 1


def test_a_stream_that_ends_every_engine_at_one_token_ends_two_at_most(start):
    server = start(*EXACT, engines=3)
    reply = ask(server, *stream(TEXT, priority=CRASH))
    assert is_broken((reply.status, reply.body))
    assert server.text.count("it restarts in") == 2
    assert sum(engine["num_running"] for engine in load(server)) == 0


# --- other engines --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "flags",
    [
        ("--mode", "preemptive", "--max-num-batched-tokens", "128", "--max-num-seqs", "8", *EXACT),
        ("--device", "paced:h20", "--paced-arithmetic", "none"),
        ("--device", "paced:h20", "--mode", "preemptive", "--num-gpu-blocks-override", "500", *EXACT),
    ],
    ids=["preemptive", "paced", "paced demo, preemptive"],
)
def test_preemptive_and_paced_engines_resume_as_well(flags, tmp_path):
    bodies = [
        stream("def f(x):", max_tokens=80),
        stream("x = [", **SAMPLED, service_class="be", max_tokens=80),
        completion("import", n=2, max_tokens=80),
    ]
    with running((*REAL, "--engines", "2", "--route-policy", "round_robin", *flags), tmp_path) as server:
        expected, found = disturbed(server, *bodies)
        assert found == expected
        assert total(server, "streams_resumed_total") >= 1
