"""Engines that are killed while they answer: which answers go on elsewhere, to the byte, and which ones end."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator

import pytest
from support.fake_rank import CRASH, FAKE_STEP_S
from support.interrupted_answers import (
    LENGTH,
    NEAR_TIES,
    SAMPLED,
    SCORED,
    STEP_S,
    TEXT,
    WHOLE,
    SentRequests,
    ask,
    chat,
    completion,
    disturbed,
    kill_an_engine,
    ready,
    running,
    salted,
    stream,
    streams,
    texts,
    tokens_come,
    total,
)
from support.running import EXACT, Running, call, is_idle, load, wait_until

from moestro.workload.traces.request_record import read_request_record

# --- the real network ---------------------------------------------------------------------------------------------

NUM_TOKENS = 50  # of an answer: all of them together last some seconds


@pytest.fixture(scope="module")
def exact(real_command, tmp_path_factory) -> Iterator[Running]:
    command = (*real_command, *EXACT, "--engines", "2", "--route-policy", "round_robin")
    with running(command, tmp_path_factory.mktemp("exact")) as server:
        yield server


def test_answers_are_the_same_to_the_byte_whichever_engine_is_killed_and_when(exact, tokenizer):
    rng = random.Random(3)
    bodies = [*streams(tokenizer.encode("日é🙂", add_special_tokens=False)), *WHOLE]
    before = total(exact, "generation_tokens_total")
    expected, scored = (SentRequests(exact, salted(each, 0, NUM_TOKENS)).answers() for each in (bodies, SCORED))
    num_tokens = total(exact, "generation_tokens_total") - before
    assert [body for status, body in expected if status != 200] == []
    assert max(map(ord, "".join(body.decode() for _, body in expected))) > 0x7F, "no text of many bytes"
    differing: list[tuple[object, object]] = []
    for salt in range(1, 4):
        wait_until(lambda: ready(exact))
        sent, score_requests = (
            SentRequests(exact, salted(bodies, salt, NUM_TOKENS)),
            SentRequests(exact, salted(SCORED, salt, NUM_TOKENS)),
        )
        tokens_come(exact, round(rng.uniform(0.1, 0.5) * num_tokens))
        kill_an_engine(exact, rng.randrange(2))
        answers, found = sent.answers(), score_requests.answers()
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
def start(fake_command, tmp_path, monkeypatch) -> Iterator[Callable[..., Running]]:
    """Starts a server with two engines, which take requests in turn."""
    monkeypatch.setenv(FAKE_STEP_S, str(STEP_S))
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
    # Three streams are on the engine that is killed; on a busy machine one of them may have ended before.
    assert 3 >= total(server, "streams_resumed_total") == total(server, "requests_moved_total") >= 1


def test_a_request_that_moves_is_counted_once(start, tmp_path):
    server = start(*EXACT, "--record", str(tmp_path / "record"))
    disturbed(server, stream(TEXT), completion(TEXT))
    prompt = call(server, "POST", "/tokenize", {"prompt": TEXT}).json["count"]
    counts = ("request_success_total", "time_to_first_token_seconds_count", "request_queue_time_seconds_count")
    assert [total(server, name) for name in counts] == [8, 8, 8]
    assert total(server, "prompt_tokens_total") == 8 * prompt
    assert total(server, "generation_tokens_total") == 8 * LENGTH
    assert total(server, "inter_token_latency_seconds_count") == 8 * (LENGTH - 1)
    assert total(server, "request_generation_tokens_sum") == 8 * LENGTH
    server.stop()
    recorded = read_request_record(tmp_path / "record").requests
    assert [(each.num_prompt_tokens, each.num_output_tokens) for each in recorded] == [(prompt, LENGTH)] * 8


@pytest.mark.parametrize("fields", [{"n": 2}, {"logprobs": 1}])
def test_streams_of_several_choices_or_with_log_probabilities_end_with_an_error(start, fields):
    server = start(*EXACT, "--resume-streams")
    expected, found = disturbed(server, stream(TEXT, **fields))
    assert any(map(is_broken, found))
    assert all(answer == whole for answer, whole in zip(found, expected, strict=True) if not is_broken(answer))
    assert total(server, "streams_resumed_total") == 0


def test_a_stream_outlives_both_engines_if_it_got_on_in_between(start):
    server = start(*EXACT)
    bodies = [stream(TEXT), completion(TEXT)] * 2
    expected = SentRequests(server, bodies).answers()
    sent = SentRequests(server, bodies)
    tokens_come(server)
    first, second = server.ranks()
    first.kill()
    wait_until(lambda: total(server, "requests_moved_total") == 2)
    tokens_come(server, 100)
    second.kill()
    assert sent.answers() == expected
    assert total(server, "requests_moved_total") >= 4


def test_a_stream_waits_for_the_next_life_of_the_only_engine(start):
    server = start(*EXACT, engines=1)
    bodies = [stream(TEXT), completion(TEXT)]
    expected = SentRequests(server, bodies).answers()
    sent = SentRequests(server, bodies)
    tokens_come(server)
    kill_an_engine(server)
    assert sent.answers() == expected
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
        ("--dtype", "float32"),
        ("--device", "paced:h20", "--paced-arithmetic", "none"),
        ("--device", "paced:h20", "--mode", "preemptive", "--num-gpu-blocks-override", "500", *EXACT),
    ],
    ids=["preemptive", "float32", "paced", "paced demo, preemptive"],
)
def test_other_engines_resume_as_well(flags, real_command, tmp_path):
    length = {"max_tokens": 200 if "none" in flags else 90}  # of steps that take less time
    bodies = [
        stream("def f(x):", **length),
        stream("x = [", **SAMPLED, service_class="be", **length),
        completion("import", n=2, **length),
    ]
    with running((*real_command, "--engines", "2", "--route-policy", "round_robin", *flags), tmp_path) as server:
        expected, found = disturbed(server, *bodies)
        assert found == expected
        assert total(server, "streams_resumed_total") >= 1
