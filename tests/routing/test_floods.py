"""What routing does to a cluster under the traffic that is known to break it, on a queue model of a few lines."""

from __future__ import annotations

import random

import numpy as np
import pytest
from support.queue_model import QueueModel
from support.routers import BLOCK_SIZE, request, router

from moestro.routing.settings import EngineSpec

PREFIX, OUTPUT = 2048, 60


def flood(policy: str, tail: int, per_tick: float, share: float) -> tuple[QueueModel, float]:
    """One prefix for `share` of the requests, and a tail of its own for each; and the best possible hit ratio."""
    rng, num_ticks = random.Random(1), 1500
    model = QueueModel(router(8, policy), BLOCK_SIZE)
    prefix, number, num_hot, due = list(range(PREFIX)), 0, 0, 0.0
    for tick in range(num_ticks):
        due += per_tick * rng.expovariate(1)
        while due >= 1:
            due -= 1
            first = 10_000 * (number + 1)
            is_hot = rng.random() < share
            num_hot += is_hot
            tokens = [*(prefix if is_hot else ()), *range(first, first + tail)]
            model.submit(request(str(number), prompt=tokens, arrival_ns=model.now_ns), OUTPUT)
            number += 1
        model.tick()
        if tick == num_ticks // 10:
            model.load[:] = 0
    return model, (num_hot - 1) * PREFIX / model.num_prompt


@pytest.mark.parametrize("policy", ["lmetric", "moestro"])
@pytest.mark.parametrize(
    ("tail", "per_tick", "share"), [(200, 0.8, 1.0), (200, 1.5, 1.0), (0, 1.5, 1.0), (200, 1.5, 0.5)]
)
def test_a_flood_of_one_prefix_is_spread_and_still_hits(policy, tail, per_tick, share):
    model, best = flood(policy, tail, per_tick, share)
    assert model.load.max() <= 1.3 * model.load.mean()
    assert model.num_hit / model.num_prompt >= 0.9 * best


def paced(policy: str) -> np.ndarray:
    """32 conversations of 14 turns, never two requests at a time. Returns requests by engine."""
    model = QueueModel(router(2, policy), BLOCK_SIZE)
    sent = np.zeros(2, np.int64)
    for turn in range(14):
        for session in range(32):
            first = 10_000 * (session + 1)
            tokens = [*range(1024), *range(first, first + 3000 + 64 * turn)]
            sent[model.submit(request(f"{session}/{turn}", prompt=tokens, arrival_ns=model.now_ns), 4)] += 1
            while model.router.num_in_flight:
                model.tick()
    return sent


def test_sessions_that_leave_nothing_in_flight_are_spread_by_what_was_sent_lately():
    """A product that sees no load sends all of them where the shared beginning is (Infera issue 103: 448 to 0)."""
    assert paced("lmetric:hotspots=off").max() == 448
    assert paced("lmetric").max() <= 0.55 * 448  # equation 2 sees a beginning that all requests have
    assert paced("moestro").max() <= 0.55 * 448


def test_engines_of_unequal_speed_get_unequal_shares():
    speeds = [0.5, 1.0, 1.0, 2.0]
    mean_ttft_ns = {}
    for policy in ("lmetric", "moestro"):
        made = router(4, policy)
        for engine, speed in enumerate(speeds):
            made.set_spec(engine, EngineSpec(speed=speed))
        model, sent, rng = QueueModel(made, BLOCK_SIZE, speeds), np.zeros(4), random.Random(2)
        for tick in range(1500):
            if rng.random() < 0.5:
                own = request(str(tick), num_prompt_tokens=500, arrival_ns=model.now_ns)
                sent[model.submit(own, OUTPUT)] += 1
            model.tick()
        mean_ttft_ns[policy] = np.mean(model.ttft_ns)
    assert sent[0] < sent[1] < sent[3]
    assert mean_ttft_ns["moestro"] < 0.9 * mean_ttft_ns["lmetric"]
