"""What a router learns of its engines' speeds: against engines whose speeds are known, and against noise."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.routers import request

from moestro.core.views import DEFAULT_COPY_PRICE
from moestro.routing.policies.moestro import Moestro
from moestro.routing.registry import expression_policy
from moestro.routing.router import Router
from moestro.routing.settings import EngineSpec, RouterSettings

MS = 1_000_000
BLOCK_SIZE = 16


class Fleet:
    """Answers one request after the other, as fast as each engine is."""

    def __init__(self, speeds: list[float], *, noise: float = 0.0, seed: int = 0, specs=None, policy=None) -> None:
        self.rng = random.Random(seed)
        self.speeds, self.noise, self.now_ns = speeds, noise, 0
        self.router = Router(policy or Moestro(), RouterSettings(block_size=BLOCK_SIZE))
        for spec in specs or [EngineSpec()] * len(speeds):
            self.router.set_routable(self.router.add_engine(spec), routable=True)
        self.number = 0

    def factor(self) -> float:
        return self.rng.lognormvariate(0, self.noise) if self.noise else 1.0

    def answer(self, engine: int, *, num_output: int = 20, is_streamed: bool = True, host_share: float | None = None):
        """One prompt on an idle engine: 5 ms, 0.1 ms a token, 0.02 ms a copied one, and 10 ms a token of the answer."""
        name, tokens = f"r{self.number}", self.rng.choice([100, 400, 1500, 6000])
        self.number += 1
        others = [each for each in range(len(self.speeds)) if each != engine]
        self.router.submit(request(name, num_prompt_tokens=tokens), self.now_ns, others)
        new = tokens * (1 - (host_share or 0))
        ttft_ms = 5 + 0.1 * new * self.factor() / self.speeds[engine] + 0.02 * (tokens - new)
        gap_ms = 10 * self.factor() / self.speeds[engine]
        first_ns = self.now_ns + int(ttft_ms * MS)
        end_ns = first_ns + int(gap_ms * MS * (num_output - 1))
        self.router.first_token(name, first_ns if is_streamed else end_ns)
        self.router.ended(name, end_ns, num_output, host_share, host_share)
        self.now_ns = end_ns + MS

    def serve(self, num: int, **how) -> None:
        for _ in range(num):
            self.answer(self.rng.randrange(len(self.speeds)), **how)

    @property
    def learnt(self) -> np.ndarray:
        return self.router.table.speed.copy()


def test_engines_of_unequal_speed_are_learnt_in_their_ratio():
    fleet = Fleet([0.5, 0.5, 2.0], noise=0.2)
    fleet.serve(300)
    for column in (fleet.router.table.speed, fleet.router.table.decode_speed):
        assert (column / column[0]).tolist() == pytest.approx([1, 1, 4], rel=0.1)


@pytest.mark.parametrize("seed", range(10))
def test_equal_engines_stay_equal_whatever_the_noise(seed):
    fleet = Fleet([1.0] * 12, noise=0.5, seed=seed)
    for _ in range(20):
        fleet.serve(100)
        for column in (fleet.router.table.speed, fleet.router.table.decode_speed):
            assert np.abs(column - 1).max() < 0.08


def test_a_new_engine_counts_as_the_mean_until_its_samples_weigh_more_than_their_errors():
    fleet = Fleet([1.0, 1.0, 1.0, 0.25], noise=0.2)
    for _ in range(150):
        fleet.answer(fleet.rng.randrange(3))
    assert fleet.learnt.tolist() == pytest.approx([1, 1, 1, 1], abs=0.05)
    for _ in range(100):
        fleet.answer(fleet.rng.randrange(4))
    learnt = fleet.learnt
    assert learnt[3] / learnt[:3].mean() == pytest.approx(0.25, rel=0.2)


def test_an_operators_speed_overrides_and_is_shown_at_once():
    fleet = Fleet([1.0, 1.0], specs=[EngineSpec(speed=2.0, copy_price=0.5), EngineSpec()])
    assert fleet.learnt.tolist() == [2, 1]
    fleet.serve(100)
    assert fleet.learnt[0] == fleet.router.table.decode_speed[0] == 2
    assert fleet.router.table.copy_price.tolist() == [0.5, DEFAULT_COPY_PRICE]
    fleet.router.set_spec(0, EngineSpec())
    assert fleet.learnt[0] == pytest.approx(1)


def test_an_answer_that_was_not_streamed_says_nothing_of_the_speed():
    fleet = Fleet([1.0, 0.2])
    fleet.serve(200, is_streamed=False)
    assert fleet.learnt.tolist() == [1, 1]


def test_a_prompt_that_met_a_queue_says_nothing_of_the_speed():
    fleet = Fleet([1.0, 1.0])
    for number in range(200):
        engine, name = number % 2, f"q{number}"
        if engine:  # a long prompt is ahead, as ever
            fleet.router.submit(request(f"ahead {name}", 1000), fleet.now_ns, [0])
        fleet.router.submit(request(name, 1000), fleet.now_ns, [1 - engine])
        first_ns = fleet.now_ns + (1000 if engine else 100) * MS
        fleet.router.first_token(name, first_ns)
        fleet.router.ended(name, first_ns + 190 * MS, 20)
        if engine:
            fleet.router.ended(f"ahead {name}", first_ns + 190 * MS, 0)
        fleet.now_ns = first_ns + 200 * MS
    assert fleet.learnt.tolist() == [1, 1]


def test_a_lost_engine_is_learnt_anew():
    fleet = Fleet([0.25, 1.0, 1.0], noise=0.1)
    fleet.serve(200)
    assert fleet.learnt[0] < 0.4 * fleet.learnt[1]
    fleet.router.engine_lost(0, fleet.now_ns)
    assert fleet.learnt[0] == 1
    fleet.speeds[0] = 1.0
    fleet.serve(200)
    assert (fleet.learnt / fleet.learnt[1]).tolist() == pytest.approx([1, 1, 1], rel=0.1)


def test_an_answer_of_a_replaced_process_says_nothing_of_its_successor():
    fleet = Fleet([1.0, 1.0])
    fleet.router.submit(request("old", 100), 0, [1])
    fleet.router.engine_lost(0, 1)
    fleet.router.first_token("old", 500_000 * MS)
    fleet.router.ended("old", 900_000 * MS, 20)
    fleet.serve(100)
    assert fleet.learnt.tolist() == pytest.approx([1, 1], abs=1e-6)


def test_the_price_of_a_copy_is_learnt_from_what_answers_say_of_their_tiers():
    fleet = Fleet([1.0, 1.0], noise=0.05)
    assert fleet.router.table.copy_price.tolist() == [DEFAULT_COPY_PRICE] * 2
    for _ in range(300):
        fleet.answer(fleet.rng.randrange(2), host_share=fleet.rng.choice([None, 0.9]))
    assert fleet.router.table.copy_price.tolist() == pytest.approx([0.2, 0.2], rel=0.15)


def test_a_policy_that_reads_no_speed_has_none_learnt_and_a_score_may_read_one():
    fleet = Fleet([1.0, 0.2], policy=expression_policy("p_tokens"))
    fleet.serve(100)
    assert fleet.learnt.tolist() == [1, 1]
    reading = Fleet([1.0, 0.2], policy=expression_policy("p_tokens / speed"))
    reading.serve(100)
    assert reading.learnt[0] > 2 * reading.learnt[1]
