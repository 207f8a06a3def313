"""Saturation of engines by their figures and by the router's own counts since then."""

from __future__ import annotations

import pytest

from moestro.core.load_figures import LoadFigures
from moestro.core.request import Request, SamplingParams
from moestro.routing.registry import policy_from
from moestro.routing.route_queue import EngineSaturation, SaturationRules
from moestro.routing.router import Router

SECOND = 1_000_000_000
FRESH_NS = 5 * SECOND


def request(name: str, tokens: int = 100) -> Request:
    return Request(request_id=name, num_prompt_tokens=tokens, sampling=SamplingParams(max_tokens=8), arrival_ns=0)


class Engine:
    """A router with one engine, and the judgement of it."""

    def __init__(self, **rules) -> None:
        self.router = Router(policy_from("least_loaded"))
        self.router.set_routable(self.router.add_engine(), routable=True)
        self.judge = EngineSaturation(SaturationRules(**rules), FRESH_NS)
        self.num_sent = self.num_ended = 0

    def report(self, now_ns: int, **figures) -> None:
        load = LoadFigures(**figures)
        self.router.report(0, load, now_ns, now_ns)
        self.judge.reported(0, load)

    def send(self, num: int, now_ns: int) -> None:
        for _ in range(num):
            sent = request(f"{self.num_sent}")
            self.router.submit(sent, now_ns)
            self.judge.sent(sent, 0, self.router.table, now_ns)
            self.num_sent += 1

    def begin(self, num: int, now_ns: int) -> None:
        for at in range(num):
            self.router.first_token(f"{at}", now_ns)
            self.judge.first_token(f"{at}", now_ns)

    def end(self, num: int, now_ns: int) -> None:
        for _ in range(num):
            self.router.ended(f"{self.num_ended}", now_ns)
            self.judge.ended(f"{self.num_ended}")
            self.num_ended += 1

    def is_full(self, now_ns: int) -> bool:
        return bool(self.judge.full(self.router.table, now_ns)[0])


def test_an_engine_where_requests_wait_is_full_and_has_room_again_for_each_that_ends():
    engine = Engine(num_waiting=2)
    engine.report(0, num_running=0, num_waiting=0)
    engine.send(10, 1)
    engine.report(2, num_running=8, num_waiting=2)
    assert engine.is_full(3)
    engine.end(1, 4)
    assert not engine.is_full(5)
    engine.send(1, 6)
    assert engine.is_full(7), "between two reports, the router's own counts tell"


def test_an_engine_that_was_full_before_is_known_to_run_as_many_again():
    engine = Engine(num_waiting=2)
    engine.report(0, num_running=8, num_waiting=3)
    engine.report(1, num_running=0, num_waiting=0)
    engine.send(9, 2)
    assert not engine.is_full(3)
    engine.send(1, 4)
    assert engine.is_full(5)


def test_requests_with_a_first_token_do_not_wait():
    engine = Engine(num_waiting=2)
    engine.report(0, num_running=0, num_waiting=0)
    engine.send(5, 1)
    assert engine.is_full(2)
    engine.begin(4, 3)
    assert not engine.is_full(4)


def test_a_full_cache_is_saturated_as_long_as_the_figure_is_fresh():
    engine = Engine(kv_usage=0.9)
    engine.report(0, num_running=1, num_waiting=0, kv_usage=0.9)
    assert engine.is_full(1)
    assert not engine.is_full(FRESH_NS + 1)
    engine.report(FRESH_NS + 2, num_running=1, num_waiting=0, kv_usage=0.89)
    assert not engine.is_full(FRESH_NS + 3)


def test_an_engine_without_figures_is_not_judged():
    engine = Engine(num_waiting=1)
    engine.send(50, 0)
    assert not engine.is_full(1)


def test_a_new_process_has_no_capacity_of_the_old_one():
    engine = Engine(num_waiting=2)
    engine.report(0, num_running=100, num_waiting=3)
    engine.router.engine_lost(0, 1)
    assert not engine.is_full(2)
    engine.report(3, num_running=0, num_waiting=0)
    engine.send(2, 4)
    assert engine.is_full(5)


@pytest.mark.parametrize("ttft_s", [0.5, 5.0])
def test_a_predicted_ttft_above_the_limit_is_saturated(ttft_s):
    """The router learns from answers: here a token takes 1 ms."""
    engine = Engine(ttft_ns=int(ttft_s * SECOND), num_waiting=1000)
    now_ns = 0
    for at in range(40):
        tokens = 100 + 50 * (at % 7)
        sent = request(f"{at}", tokens)
        engine.router.submit(sent, now_ns)
        engine.judge.sent(sent, 0, engine.router.table, now_ns)
        now_ns += tokens * SECOND // 1000
        engine.router.first_token(f"{at}", now_ns)
        engine.judge.first_token(f"{at}", now_ns)
        engine.router.ended(f"{at}", now_ns)
    assert not engine.is_full(now_ns)
    engine.router.submit(request("large", 2000), now_ns)
    assert engine.is_full(now_ns) == (ttft_s < 2)
