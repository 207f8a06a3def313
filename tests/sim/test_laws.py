"""Laws of the simulator: jumps change nothing, one seed gives one record, requests and blocks are conserved."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.routers import router

from moestro.core.hashing import split_hashes
from moestro.cost.gpus import H20
from moestro.cost.networks import network_named
from moestro.cost.roofline import Roofline, RooflineSettings
from moestro.engine.decode_horizon import DecodeJumps
from moestro.engine.registry import BATCH_POLICIES, ORDER_POLICIES
from moestro.engine.settings import SchedulerSettings
from moestro.sim.cluster import AtTimes, Cluster
from moestro.sim.groups.group import Barrier, Group, OneRank
from moestro.sim.results import ANSWERED, PENDING, REFUSED
from moestro.sim.signals import AT_ONCE, ChannelSettings, ReportChannel, SignalSettings
from moestro.workload.rows import RequestForm, RequestMaker, Rows, Streams

BLOCK_SIZE = 4
NETWORK = network_named("gpt-oss-20b")
PRICES = {
    1: OneRank(Roofline(RooflineSettings(network=NETWORK, gpu=H20))),
    2: Barrier(Roofline(RooflineSettings(network=NETWORK, gpu=H20, num_ep_ranks=2))),
}
# Policies that go together; ages of a few steps, so that time alone changes orders.
AGED = ":theta_age_s=0.03"
COMBINATIONS = [
    *[
        {"scheduling_policy": order + AGED if order in {"sjf", "prefill_aware", "qllm"} else order}
        for order in ORDER_POLICIES.names()
    ],
    *[{"batch_policy": batch} for batch in BATCH_POLICIES.names()],
    *[
        {
            "scheduling_policy": "qllm" + AGED,
            "batch_policy": batch,
            "evict_policy": "least_computed_be_first",
        }
        for batch in BATCH_POLICIES.names()
    ],
]


def draw_rows(rng: np.random.Generator, num: int, ls_share: float = 0.5) -> Rows:
    """Short requests, many of which continue a conversation, some longer than an engine can ever hold.

    Half of the draws name the blocks of prompts alone, as Mooncake's traces do.
    """
    num_streams = 4
    prompts = np.where(rng.random(num) < 0.03, 200, rng.integers(1, 40, num))
    outputs, is_ls = rng.integers(1, 30, num), rng.random(num) < ls_share
    if rng.random() < 0.5:
        stems = rng.integers(num_streams, size=num)
        names = tuple(np.arange(n // BLOCK_SIZE) + 100 * stem for n, stem in zip(prompts, stems, strict=True))
        return Rows(prompts, outputs, hash_ids=names, block_size=BLOCK_SIZE, is_ls=is_ls)
    streams = Streams(np.full(num_streams, -1), np.zeros(num_streams, np.int64))
    return Rows(prompts, outputs, streams=streams, stream=rng.integers(0, num_streams, num), is_ls=is_ls)


class Listener:
    """A router that notes all reports that it receives."""

    def __init__(self, num_engines: int) -> None:
        self.router = router(num_engines, "least_loaded")
        self.received = []

    def __getattr__(self, name):
        if name in {"report", "first_token", "ended", "kv_stored", "kv_removed"}:
            return lambda *args: (self.received.append((name, *args)), getattr(self.router, name)(*args))
        return getattr(self.router, name)


def draw_signals(rng: np.random.Generator) -> SignalSettings:
    """Return settings in which each figure has its own channel and a delay of up to a few steps, or nothing is sent."""
    if rng.random() < 0.4:
        return SignalSettings(response_delay_ms=float(rng.choice([0, 5])))
    channels = tuple(
        ChannelSettings(
            figures=(name,),
            channel=rng.choice(list(ReportChannel)),
            delay_ms=float(rng.choice([0, 1, 40])),
            period_ms=float(rng.choice([1, 7, 100])),
        )
        for name in ("num_waiting", "num_running", "kv_usage", "queued_prefill_tokens", "num_tokens")
    )
    return SignalSettings(
        response_delay_ms=float(rng.choice([0, 5])),
        channels=channels if rng.random() < 0.7 else (),
        kv_events_delay_ms=rng.choice([None, 0.0, 30.0]),
    )


def run(rows: Rows, offsets, bounds: SchedulerSettings, setting: tuple[int, SignalSettings], *, jump: bool) -> Cluster:
    num_ep_ranks, signals = setting
    groups = [Group(bounds, PRICES[num_ep_ranks], jump=jump) for _ in range(2)]
    cluster = Cluster(groups, Listener(2 * num_ep_ranks), signals)
    cluster.results = cluster.run(RequestMaker(rows, RequestForm(block_size=BLOCK_SIZE)), AtTimes(offsets))
    return cluster


def pools(cluster: Cluster) -> list:
    """What the engines' block pools look like: a jump must leave the very same blocks in the very same order."""
    found = []
    for engine in cluster.engines:
        scheduler = engine.seat.rank.scheduler
        scheduler.check()
        pool = scheduler.pool
        found.append((list(pool._blank), pool.cached(), list(pool._hash_of), scheduler.counts))
    return found


@settings(max_examples=90)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(18, 60),
    max_num_seqs=st.integers(1, 12),
    combination=st.sampled_from(COMBINATIONS),
    caching=st.booleans(),
    num_ep_ranks=st.sampled_from([1, 1, 2]),
    max_num_queued_reqs=st.sampled_from([3, 1000]),
    ls_share=st.sampled_from([0.5, 1.0]),
)
def test_a_jump_leaves_the_record_that_single_steps_leave(
    seed, num_blocks, max_num_seqs, combination, caching, num_ep_ranks, max_num_queued_reqs, ls_share
):
    rng = np.random.default_rng(seed)
    rows = draw_rows(rng, 40, ls_share)
    offsets = np.sort(rng.integers(0, int(rng.integers(1, 400)) * 1_000_000, len(rows)))
    bounds = SchedulerSettings(
        num_blocks=num_blocks,
        block_size=BLOCK_SIZE,
        max_model_len=72,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=24,
        max_num_queued_reqs=max_num_queued_reqs,
        enable_prefix_caching=caching,
        **combination,
    )
    setting = num_ep_ranks, draw_signals(rng)
    jumping = run(rows, offsets, bounds, setting, jump=True)
    stepwise = run(rows, offsets, bounds, setting, jump=False)
    assert jumping.router.received == stepwise.router.received
    assert jumping.results.digest() == stepwise.results.digest()
    assert pools(jumping) == pools(stepwise)
    check_conserved(jumping, rows)
    if setting[1].kv_events_delay_ms is not None:
        check_received(jumping)


class EqualSteps:
    """Prices by which all steps take as long, so that steps of several engines end in the same nanosecond."""

    def step_ns(self, batch) -> int:
        return 10_000_000

    def decode_steps_ns(self, start, num_steps):
        return np.full(num_steps, 10_000_000)


def leaps(monkeypatch, rows: Rows, offsets, bounds: SchedulerSettings, setting) -> list[tuple[int, int, int]]:
    """Run requests, and list the leaps: steps with prompts, all steps, and steps taken before an arrival cut it."""
    found, land = [], DecodeJumps.land

    def note(self, leap, num_steps, block_hashes=None):
        found.append((len(leap.chunks), len(leap.chunks) + leap.num_decode_steps, num_steps))
        return land(self, leap, num_steps, block_hashes)

    monkeypatch.setattr(DecodeJumps, "land", note)
    jumping = run(rows, offsets, bounds, setting, jump=True)
    monkeypatch.setattr(DecodeJumps, "land", land)
    stepwise = run(rows, offsets, bounds, setting, jump=False)
    assert jumping.router.received == stepwise.router.received
    assert jumping.results.digest() == stepwise.results.digest()
    assert pools(jumping) == pools(stepwise)
    return found


@pytest.mark.parametrize("prices", [PRICES[1], OneRank(EqualSteps())], ids=["roofline", "equal_steps"])
def test_prompts_and_the_decodes_behind_them_are_taken_at_once(monkeypatch, prices):
    monkeypatch.setitem(PRICES, 1, prices)
    rng = np.random.default_rng(0)
    rows = Rows(rng.integers(1, 60, 200), rng.integers(1, 30, 200))
    bounds = SchedulerSettings(
        num_blocks=200, block_size=BLOCK_SIZE, max_model_len=96, max_num_seqs=12, max_num_batched_tokens=24
    )
    found = leaps(monkeypatch, rows, np.sort(rng.integers(0, 600, 200)) * 5_000_000, bounds, (1, AT_ONCE))
    assert any(num_prompt_steps > 1 for num_prompt_steps, _, _ in found), "a prompt in chunks"
    assert any(taken == num_steps for _, num_steps, taken in found), "a leap up to its end"
    assert any(taken < num_prompt_steps for num_prompt_steps, _, taken in found), "one cut between chunks"
    assert any(num_prompt_steps <= taken < num_steps for num_prompt_steps, num_steps, taken in found)


def check_received(cluster: Cluster) -> None:
    """KV events are what a cache stores and removes: received one after the other, they leave what it holds."""
    held = [set() for _ in cluster.engines]
    kv_events = (each for each in cluster.router.received if each[0] in {"kv_stored", "kv_removed"})
    for name, engine, packed, *_ in kv_events:
        for block in split_hashes(packed):
            assert (block in held[engine]) == (name == "kv_removed"), "stored twice, or removed and not there"
            held[engine] ^= {block}
    assert held == [set(engine.seat.rank.scheduler.pool._block_of) for engine in cluster.engines]


def check_conserved(cluster: Cluster, rows: Rows) -> None:
    results = cluster.results
    assert not (results.status == PENDING).any(), "every request is answered or refused"
    assert sum(count for count, _ in results.refusals.values()) == (results.status == REFUSED).sum()
    answered = results.status == ANSWERED
    assert (results.num_tokens[answered] == rows.num_output_tokens[answered]).all()
    times = (results.arrival_ns, results.admitted_ns, results.first_token_ns, results.last_token_ns)
    for earlier, later in pairwise(times):
        assert (earlier[answered] <= later[answered]).all()
    assert (results.num_hit_tokens < results.num_prompt_tokens).all()
    assert cluster.router.num_in_flight == 0
    for engine in cluster.engines:
        pool = engine.seat.rank.scheduler.pool
        assert pool.num_free == pool.num_blocks
        assert not engine.row_of
        assert not engine.without_token
