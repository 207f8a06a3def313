"""The compiled passes of a decision, against NumPy's code, to the bit."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.routers import drawn_table, request, router, table, view

from moestro.core.rng import Draws
from moestro.core.views import EngineTable
from moestro.native.compiler import ROUTE_KERNEL, CompilerError, find_compiler
from moestro.routing import prefix_index
from moestro.routing.kernel.passes import route_kernel
from moestro.routing.policies.lmetric import LMetric, _count_holders, _is_lower_on, lmetric_score
from moestro.routing.policies.moestro import Moestro
from moestro.routing.policy_contract import Ended, Routed
from moestro.routing.scoring import choose

SIZES = (1, 2, 7, 16, 63, 130)


@pytest.fixture(autouse=True)
def kernel():
    try:
        find_compiler()
    except CompilerError as error:
        pytest.skip(str(error))
    assert route_kernel.search().wait(120), "a compiler is there"
    return route_kernel.look()


def drawn(rng: random.Random, num: int) -> EngineTable:
    routable = [True] * num if rng.random() < 0.5 else [row == 0 or rng.random() < 0.7 for row in range(num)]
    foreign = {"num_foreign": [rng.randrange(3) for _ in range(num)]} if rng.random() < 0.2 else {}
    return drawn_table(rng, num, routable=routable, **foreign)


@pytest.mark.parametrize("num", SIZES)
def test_scores_and_choices_are_those_of_numpy_to_the_bit(num):
    rng = random.Random(num)
    for _ in range(60):
        tokens = rng.randrange(1, 4000)
        hits = [16 * rng.randrange(tokens // 16 + 1) for _ in range(num)]
        hosted = rng.choice([None, [rng.randrange(hit + 1) for hit in hits]])
        wanted = request(num_prompt_tokens=tokens)
        seen = view(drawn(rng, num), hits, wanted, rng.choice([0, 5 * 10**9 + 1]), host_tokens=hosted)
        policy = Moestro()
        for _ in range(rng.randrange(4)):
            policy.observe(Ended("r", 0, 0, rng.randrange(1, 10**9), rng.randrange(1, 300)))
            policy.observe(Routed(wanted, rng.randrange(num), 0, {}, 0))
        for score in (policy.scores, lmetric_score):
            found = score(seen)
            with route_kernel.left_out():
                assert found.tobytes() == score(seen).tobytes()
        for scores in (found, np.array([rng.choice([0.0, 1.0, np.nan, np.inf, -np.inf]) for _ in range(num)])):
            chosen = choose(seen, scores, Draws(1, 2), "")
            with route_kernel.left_out():
                assert chosen.engine == choose(seen, scores, Draws(1, 2), "").engine


@pytest.mark.parametrize("num", SIZES)
def test_holders_of_a_prefix_are_counted_and_compared_as_by_numpy(num):
    rng = random.Random(num)
    for _ in range(60):
        hits, least = [16 * rng.randrange(4) for _ in range(num)], 16 * rng.randrange(4)
        seen = view(drawn(rng, num), hits)
        holders, scores = seen.engines.routable & (seen.hit_tokens >= least), np.array([rng.random() for _ in hits])
        found = _count_holders(seen, least), _is_lower_on(holders, scores, seen, least)
        with route_kernel.left_out():
            assert found == (_count_holders(seen, least), _is_lower_on(holders, scores, seen, least))


@pytest.mark.parametrize("num", [65, 66, 200])
def test_sets_of_engines_are_filled_in_as_by_numpy(num):
    rng, everyone = random.Random(num), (1 << num) - 1
    for _ in range(40):
        first = rng.choice([0, 1 << rng.randrange(num), rng.getrandbits(num)])
        second = rng.getrandbits(num) & ~first
        steps = [(0, everyone ^ first ^ second), (5, first), (rng.randrange(9), second)]
        found = prefix_index._filled(num, steps, 16)
        with route_kernel.left_out():
            assert found.tobytes() == prefix_index._filled(num, steps, 16).tobytes()


def test_a_table_of_another_type_is_left_to_numpy():
    seen = view(table(num_in_flight=[3, 1]), req=request(num_prompt_tokens=10))
    object.__setattr__(seen.engines, "num_in_flight", np.array([3, 1], np.int32))
    assert lmetric_score(seen).tolist() == [40, 20]


def test_a_router_takes_decisions_by_the_kernel(monkeypatch):
    two, calls = router(2, LMetric()), []
    products = type(route_kernel.look()).products
    monkeypatch.setattr(type(route_kernel.look()), "products", lambda *a: calls.append(1) or products(*a))
    two.submit(request("a", prompt=range(40)), 0)
    assert calls


def test_the_kernel_has_one_function_for_each_pass():
    sources = [path.read_text() for path in ROUTE_KERNEL.files()]
    assert sum(text.count("\nEXPORTED") for text in sources) == 6
