"""`moestro route --resume-streams` before real servers, of which one is killed and another is stopped."""

from __future__ import annotations

import contextlib
import json
import signal
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from gateway.resume.test_stream import check_as_one_answer
from support.running import MOESTRO, Reply, Running, call, metrics, wait_until

PATHS = ("/v1/completions", "/v1/chat/completions")
NUM_STREAMS = 10


@pytest.fixture
def engines(short_command, tmp_path) -> Iterator[list[Running]]:
    with contextlib.ExitStack() as stack:
        made = []
        for name in "abc":
            (tmp_path / name).mkdir()
            made.append(Running((*short_command, "--shutdown-timeout", "0"), tmp_path / name))
            stack.callback(made[-1].kill)
        yield made


@pytest.fixture
def router(engines, tmp_path) -> Iterator[Running]:
    flags = [part for name, engine in zip("abc", engines, strict=True) for part in ("--engine", f"{name}={engine.url}")]
    (tmp_path / "route").mkdir()
    command = (
        MOESTRO,
        "route",
        *flags,
        "--admin-port",
        "0",
        "--resume-streams",
        "--hang-timeout",
        "2",
        "--slow-start",
        "0",
    )
    running = Running((*command, "--route-policy", "round_robin"), tmp_path / "route")
    yield running
    running.kill()


def body_of(number: int, path: str) -> dict[str, Any]:
    """A long greedy request, whose answer has characters of several bytes where the model repeats them."""
    text = f"def naïve_{number}(日本, größe): return '€{number}"
    prompt = {"messages": [{"role": "user", "content": text}]} if "chat" in path else {"prompt": text}
    return prompt | {
        "stream": True, "temperature": 0, "max_tokens": 250, "ignore_eos": True, "model": "moestro-demo",
        "stream_options": {"include_usage": True}, "return_token_ids": number % 3 == 0,
    }  # fmt: skip


def paths_of_streams() -> list[str]:
    return [PATHS[number % 2] for number in range(NUM_STREAMS)]


def stream(place: Running, number: int, path: str) -> Reply:
    return call(place, "POST", path, body_of(number, path))


def resumed(router: Running) -> float:
    return sum(
        value for name, value in metrics(router).items() if name.startswith("moestro:route_streams_resumed_total")
    )


def check_streams(router: Running, engines: list[Running], disturb, calm: list[Reply]) -> None:
    """Send streams, `disturb` an engine meanwhile, and compare each stream with a calm one."""
    before = resumed(router)
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        answers = [threads.submit(stream, router, number, path) for number, path in enumerate(paths_of_streams())]
        victim = f'moestro:route_in_flight{{engine="{"abc"[engines.index(disturb.engine)]}"}}'
        wait_until(lambda: metrics(router)[victim] > 1)
        tokens = 'moestro:generation_tokens_total{engine="0"}'
        num_tokens = metrics(disturb.engine)[tokens]
        wait_until(lambda: metrics(disturb.engine)[tokens] > num_tokens + 10)  # the router has first bytes
        disturb()
        for number, (path, answer) in enumerate(zip(paths_of_streams(), answers, strict=True)):
            check_as_one_answer(answer.result().body, calm[number].body, path=path, has_ids=number % 3 == 0)
    assert resumed(router) > before


class Signal:
    """Sends a signal to a server."""

    def __init__(self, engine: Running, number: int) -> None:
        self.engine, self.number = engine, number

    def __call__(self) -> None:
        self.engine.process.send_signal(self.number)


def test_streams_survive_a_kill_a_stop_and_a_shutdown(router, engines):
    with ThreadPoolExecutor(NUM_STREAMS) as threads:
        calm = list(threads.map(stream, [engines[2]] * NUM_STREAMS, range(NUM_STREAMS), paths_of_streams()))
    first = next(json.loads(line[6:]) for line in calm[1].body.split(b"\n\n") if line)
    assert "prompt_token_ids" not in first or first["prompt_token_ids"] is None
    stopped = Signal(engines[1], signal.SIGSTOP)
    check_streams(router, engines, stopped, calm)
    engines[1].process.send_signal(signal.SIGCONT)
    wait_until(lambda: metrics(router)['moestro:route_engine_ready{engine="b"}'])
    check_streams(router, engines, Signal(engines[0], signal.SIGKILL), calm)
    check_streams(router, engines, Signal(engines[1], signal.SIGTERM), calm)
