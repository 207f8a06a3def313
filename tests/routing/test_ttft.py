"""Predictions of TTFT: learned from answers in any router, priced in simulations; one construction for both."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from support.routers import BLOCK_SIZE, request, router

from moestro.cost.gpus import H20
from moestro.cost.model import Batch
from moestro.cost.networks import network_named
from moestro.cost.roofline import Roofline, RooflineSettings
from moestro.cost.tables import FORMAT, DecodePoint, HostTimes, PrefillPoint, Table
from moestro.errors import ConfigError
from moestro.routing.decision_record import PolicyText, RecordedRouter, encode_entry, replay
from moestro.routing.policy_contract import RouteInputs
from moestro.routing.registry import policy_from
from moestro.routing.scoring import DEFAULT_TOKENS_PER_S, LearnedTtft, described_ttft, priced_ttft
from moestro.routing.settings import RouterSettings

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


@pytest.fixture
def described(tmp_path):
    """An engine of 10 ms a step, 1 ms a row and 0.1 ms a token of a prompt, with a budget of 100 tokens."""
    table = Table(
        format=FORMAT,
        model="m",
        device="server",
        prefill=tuple(
            PrefillPoint(new=new, cached=cached, ns=1e7 + 1e5 * new, spread=0)
            for new in (1, 100)
            for cached in (0, 1000)
        ),
        short_chunks=(),
        decode=tuple(
            DecodePoint(sequences=rows, context=context, ns=1e7 + 1e6 * rows, spread=0)
            for rows in (1, 10)
            for context in (16, 1000)
        ),
        host=HostTimes(step_ns=0, sequence_ns=0),
    )
    (tmp_path / "engine.json").write_bytes(msgspec.json.encode(table))
    path = tmp_path / "engine.toml"
    path.write_text('[engines]\ntable = "engine.json"\nnum_blocks = 10\nmax_num_batched_tokens = 100\n')
    return path


def test_a_described_engine_predicts_with_its_own_steps_and_budget(described):
    predicted = described_ttft(described)(np.array([50.0, 200.0]), np.zeros(2), np.array([0, 0]))
    assert predicted / MS == pytest.approx([15, 40])
    beside = described_ttft(described)(np.array([50.0]), np.zeros(1), np.array([5]))
    assert beside / MS == pytest.approx([10 + 5 + 5])


@pytest.mark.parametrize("name", ["llm-d", "llm-d-affinity", "preble"])
def test_policies_predict_with_a_described_engine_and_a_replay_repeats_them(name, described):
    lines: list[bytes] = []
    it = RecordedRouter(
        PolicyText(f"{name}:prices={described}"),
        RouterSettings(block_size=BLOCK_SIZE),
        lambda e: lines.append(encode_entry(e)),
    )
    for _ in range(3):
        it.set_routable(it.add_engine(), routable=True)
    for i in range(12):
        it.submit(request(f"r{i}", num_prompt_tokens=37 * i + 1), i * MS)
    pairs = list(replay(lines))
    assert len(pairs) == 12
    assert all(was.decision.engine == now.decision.engine for was, now in pairs)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (None, "cannot be read"),
        ("[engines", "prices="),
        ("[engines]\nnum_blocks = 1\n", r"has no table \[engines\] with a cost table"),
        ('[engines]\ntable = "missing.json"\n', "missing.json cannot be read"),
    ],
)
def test_a_file_that_describes_no_engine_gets_a_sentence(text, words, tmp_path):
    path = tmp_path / "engine.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        policy_from(f"llm-d:prices={path}")
