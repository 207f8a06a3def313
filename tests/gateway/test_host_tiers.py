"""`moestro route` before real engines with host memory: sessions come back to the tier that holds them."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from support.kv_listener import DEMO, MODEL, free_ports, publishing_config
from support.running import EXACT, MOESTRO, Running, call_admin, complete, free_port, metrics, wait_until

SCARCE = ("--num-gpu-blocks-override", "40", "--max-model-len", "480", *EXACT, "--block-size", "16")
METRICS_S = 0.2
TIER = ("--kv-offloading-size", "0.05")
PROMPTS = ["def quicksort(items):\n    return items\n" * 10, "while stack:\n    node = stack.pop()\n" * 11]
OTHERS = ["import os\n" * 100, "class Tree:\n    pass\n" * 60, "for i in range(3):\n    print(i)\n" * 35]


@dataclass
class Pair:
    """A router, and the engines behind it by name."""

    router: Running
    engines: dict[str, Running]

    def ask(self, prompt: str, **fields) -> tuple[str, str, int, int, str]:
        """The answer, its engine, its cached tokens, those of them from host memory, and the id of the request."""
        reply = complete(self.router, model=MODEL, prompt=prompt, max_tokens=8, temperature=0, **fields)
        assert reply.status == 200, reply.body
        details = reply.json["usage"]["prompt_tokens_details"]
        where = reply.headers["x-moestro-engine"], details["cached_tokens"], details.get("host_cached_tokens", 0)
        return reply.json["choices"][0]["text"], *where, reply.headers["x-request-id"]

    def push_out(self, engine: str) -> None:
        """Fill the device of an engine with other prompts, past the router."""
        for other in OTHERS:
            assert complete(self.engines[engine], prompt=other, max_tokens=8, temperature=0).status == 200
        # The router may have read figures in between, by which this engine has requests of others.
        time.sleep(2 * METRICS_S)

    def expected(self, request_id: str) -> dict[str, tuple[int, int]]:
        """Hits, and those in host memory alone, that the router expected of each engine."""
        trace = wait_until(lambda: _found(self.router, request_id))
        return {
            each["engine"]: (each["hit_tokens"], each["host_tokens"]) for each in trace["attempts"][0]["candidates"]
        }

    def figure(self, name: str, engine: str) -> float:
        return metrics(self.router).get(f'moestro:route_{name}{{engine="{engine}"}}', 0)


def _found(router: Running, request_id: str):
    reply = call_admin(router, "GET", f"/admin/explain/{request_id}")
    return reply.json if reply.status == 200 and reply.json["status"] else None


@contextlib.contextmanager
def pair(command: tuple[str, ...], directory: Path) -> Iterator[Pair]:
    engines: dict[str, Running] = {}
    with contextlib.ExitStack() as stack:
        flags: list[str] = []
        for name in ("a", "b"):
            (directory / name).mkdir()
            ports = free_ports(1)
            config = ("--kv-events-config", publishing_config(ports))
            engines[name] = Running((*command, *SCARCE, *TIER, *config), directory / name)
            stack.callback(engines[name].kill)
            flags += ["--engine", f"{name}={engines[name].url}", "--kv-events", f"{name}=tcp://127.0.0.1:{ports[0]}"]
            flags += ["--kv-replay", f"{name}=tcp://127.0.0.1:{ports[1]}"]
        (directory / "route").mkdir()
        own = ("--tokenizer", str(DEMO), "--block-size", "16", "--metrics-interval", str(METRICS_S))
        router = Running((MOESTRO, "route", *flags, *own), directory / "route", admin_port=free_port())
        stack.callback(router.kill)
        made = Pair(router, engines)
        wait_until(lambda: all(made.figure("kv_complete", name) == 1 for name in engines))
        yield made


@pytest.fixture(scope="module")
def two(short_command, tmp_path_factory) -> Iterator[Pair]:
    with pair(short_command, tmp_path_factory.mktemp("tiers")) as made:
        yield made


def test_a_session_comes_back_to_the_engine_whose_host_memory_holds_it(two):
    answer, home, cached, _, _ = two.ask(PROMPTS[0])
    assert cached == 0
    two.push_out(home)
    wait_until(lambda: two.figure("kv_hosted_blocks", home) >= 4)
    before = two.figure("host_hit_tokens_total", home)
    again, came_to, cached, copied, request_id = two.ask(PROMPTS[0])
    assert (again, came_to) == (answer, home)
    assert cached >= copied >= 64
    hits = two.expected(request_id)
    (other,) = set(two.engines) - {home}
    assert hits[home][0] >= hits[home][1] >= 64
    assert hits[other] == (0, 0)
    assert two.figure("host_hit_tokens_total", home) - before == copied
    _, came_to, _, copied, request_id = two.ask(PROMPTS[0])
    assert (came_to, copied) == (home, 0), "it is on the device now"
    assert two.expected(request_id)[home][1] == 0


def test_an_engine_that_restarts_loses_its_tier_and_the_index_knows(two):
    answer, home, *_ = two.ask(PROMPTS[1])
    two.push_out(home)
    wait_until(lambda: two.figure("kv_hosted_blocks", home) >= 4)
    for rank in two.engines[home].ranks():
        rank.kill()
    wait_until(lambda: two.figure("kv_hosted_blocks", home) == 0)
    wait_until(lambda: complete(two.engines[home], prompt="x", max_tokens=1).status == 200)
    again, _, cached, copied, request_id = two.ask(PROMPTS[1])
    assert again == answer
    assert two.expected(request_id)[home][1] == 0
    assert (cached, copied) == (0, 0)


def test_killing_an_engine_between_copies_loses_no_request_and_changes_no_token(two):
    many = [f"value_{number} = {number}\n" * 24 for number in range(12)]  # more than both devices hold
    prompts = [*PROMPTS, *OTHERS, *many]
    expected = {prompt: two.ask(prompt)[0] for prompt in prompts}
    wrong: list[object] = []
    is_over = threading.Event()

    def ask_on(own: list[str]) -> None:
        while not is_over.is_set():
            for prompt in own:
                reply = complete(two.router, model=MODEL, prompt=prompt, max_tokens=8, temperature=0)
                if reply.status != 200 or reply.json["choices"][0]["text"] != expected[prompt]:
                    wrong.append((reply.status, reply.body[:300]))

    threads = [threading.Thread(target=ask_on, args=(prompts[at:] + prompts[:at],)) for at in range(0, 16, 4)]
    for each in threads:
        each.start()
    try:
        for name in ("a", "b", "a"):
            server = two.engines[name]

            def copied(server: Running = server) -> float:
                moved = metrics(server)
                return sum(moved[f'vllm:kv_offload_{way}_bytes_total{{engine="0"}}'] for way in ("load", "store"))

            begun = copied()
            wait_until(lambda begun=begun, copied=copied: copied() > begun)  # copies are being made
            for rank in server.ranks():
                rank.kill()
            wait_until(lambda server=server: complete(server, prompt="x", max_tokens=1).status == 200)
    finally:
        is_over.set()
        for each in threads:
            each.join()
    assert not wrong
