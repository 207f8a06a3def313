"""Predictions of TTFT: learned from answers in any router, priced in simulations; one construction for both."""

from __future__ import annotations

import numpy as np
import pytest
from support.routers import request, router

from moestro.cost.gpus import H20
from moestro.cost.hf_config import network_named
from moestro.cost.model import Batch
from moestro.cost.roofline import Roofline, RooflineSettings
from moestro.routing.policy_contract import RouteInputs
from moestro.routing.registry import policy_from
from moestro.routing.ttft import DEFAULT_TOKENS_PER_S, LearnedTtft, priced_ttft

MS = 1_000_000


def test_before_any_sample_the_default_rate_counts():
    tokens = np.array([0.0, DEFAULT_TOKENS_PER_S])
    assert LearnedTtft()(tokens, tokens, np.array([3, 5])).tolist() == pytest.approx([0, 1e9])


def test_a_linear_ttft_is_learned_and_a_change_of_it_too():
    learned, rng = LearnedTtft(), np.random.default_rng(0)
    tokens, batch = np.array([1000.0, 1000.0, 9000.0]), np.array([0, 20, 20])
    for per_token, per_request in ((20_000, 3 * MS), (50_000, MS)):
        for _ in range(6000):
            p, b = float(rng.integers(1, 10_000)), float(rng.integers(0, 40))
            learned.learn(p, b, int(5 * MS + per_token * p + per_request * b))
        expected = 5 * MS + per_token * tokens + per_request * batch
        assert learned(tokens, tokens, batch) == pytest.approx(expected, rel=0.02)


def test_noise_never_makes_a_longer_queue_look_shorter():
    learned, rng = LearnedTtft(), np.random.default_rng(1)
    for _ in range(100):
        learned.learn(float(rng.integers(1, 100)), float(rng.integers(0, 5)), int(1e9 - 1e6 * rng.integers(0, 99)))
    found = learned(np.array([1.0, 1000, 1e6]), np.zeros(3), np.array([0, 50, 500]))
    assert (np.diff(found) >= 0).all()


def test_llm_d_learns_from_first_tokens_in_any_router():
    """Engine 1 has a batch that takes no prompt tokens; only a learned time per request tells that it is slower."""
    policy = policy_from("llm-d")
    it = router(2, policy)
    rng = np.random.default_rng(2)
    for i in range(400):
        now = i * 10_000 * MS
        names = [f"{i}.{j}" for j in range(int(rng.integers(1, 12)))]
        for name in names:
            it.submit(request(name, num_prompt_tokens=int(rng.integers(1, 50))), now)
        for j, name in enumerate(names):
            it.first_token(name, now + (1 + 10 * j) * MS)
        for name in names:
            it.ended(name, now + 5_000 * MS)
    weights = policy._learned._weights
    assert weights[2] > MS, "a request in the batch costs time"
    assert policy._sent == {}


def test_a_given_predictor_replaces_what_is_learned_and_is_no_setting():
    def upside_down(p_tokens, queued_tokens, batch):
        return -1.0 * p_tokens

    policy = policy_from("llm-d", inputs=RouteInputs(predict_ttft_ns=upside_down))
    it = router(2, policy)
    chosen = it.submit(request("a", num_prompt_tokens=100), 0).engine
    assert it.submit(request("b", num_prompt_tokens=1), 1).engine == chosen


def test_prices_are_those_of_full_steps_and_a_rest():
    cost = Roofline(RooflineSettings(network=network_named("qwen3-30b-a3b"), gpu=H20))
    predict = priced_ttft(cost.step_ns, 2048)
    found = predict(np.array([2048.0, 4096 + 640]), np.zeros(2), np.array([0, 2]))
    full = cost.step_ns(Batch(np.array([0]), np.array([2048])))
    assert found[0] == full
    beside = [cost.step_ns(Batch(np.array([1024, 1024, 0]), np.array([1, 1, n]))) for n in (2048, 640)]
    assert found[1] == 2 * beside[0] + beside[1]
