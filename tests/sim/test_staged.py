"""A rank in preemptive mode on virtual time: nothing is lost, urgent requests pass within a piece, prices add up."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.routers import router
from support.step_policies import ADVERSARIES, Random

from moestro.cost.model import Batch
from moestro.cost.networks import network_named
from moestro.cost.tables import QLLM, StagedEngine, qllm
from moestro.engine.settings import SchedulerSettings
from moestro.errors import ConfigError
from moestro.flow.policies.one_queue import in_order
from moestro.flow.policies.qllm import ExpertLevelPreemption
from moestro.sim.cluster import AtTimes, Cluster
from moestro.sim.groups.group import Group, OneRank
from moestro.sim.groups.worker_group import StagedRank
from moestro.sim.plots import save_plots
from moestro.sim.settings import read_settings
from moestro.sim.verb import simulate
from moestro.workload.rows import RequestForm, RequestMaker, Rows

BLOCK_SIZE = 4
MIXTRAL = network_named("mixtral-8x7b")
BOUNDS = SchedulerSettings(
    num_blocks=200, block_size=BLOCK_SIZE, max_model_len=100, max_num_seqs=6, max_num_batched_tokens=200
)
LS_FIRST = replace(
    BOUNDS,
    max_num_urgent_seqs=6,
    scheduling_policy="qllm",
    batch_policy="qllm",
    evict_policy="least_computed_be_first",
)
PREEMPTS = ExpertLevelPreemption(max_wait_ns=None)
SMALL = StagedEngine(QLLM, replace(MIXTRAL, groups=(replace(MIXTRAL.groups[0], layers=(0, 1, 2)),)))


def staged(policy=PREEMPTS) -> StagedRank:
    return StagedRank(LS_FIRST, qllm(), policy, passes_decodes=True)


def serve(ranks, rows: Rows, offsets_ns):
    cluster = Cluster([ranks], router(1, "round_robin"))
    results = cluster.run(RequestMaker(rows, RequestForm(block_size=BLOCK_SIZE)), AtTimes(np.array(offsets_ns)))
    scheduler = ranks.seats[0].rank.scheduler
    scheduler.check()
    assert not scheduler.has_work
    assert scheduler.pool.num_free == scheduler.pool.num_blocks, "no sequence holds a block"
    assert ranks.seats[0].scripts._progress == {}, "scripts are kept of sequences that have ended"
    return results


def draw(seed: int, num: int, ls_share: float, span_ns: int = 3_000_000_000) -> tuple[Rows, np.ndarray]:
    rng = np.random.default_rng(seed)
    rows = Rows(
        num_prompt_tokens=rng.integers(1, 60, num),
        num_output_tokens=rng.integers(1, 12, num),
        is_ls=rng.random(num) < ls_share,
    )
    return rows, np.sort(rng.integers(0, span_ns, num))


@pytest.mark.parametrize(("num_blocks", "host"), [(200, 0), (40, 0), (40, 30)])
@pytest.mark.parametrize("ls_share", [0.0, 1.0])
def test_in_order_it_takes_what_forward_passes_take_to_the_nanosecond(ls_share, num_blocks, host):
    """Every token visits every expert, so that a whole step is priced as the sum of its stages, not an expectation."""
    experts = replace(MIXTRAL.experts, top_k=8)
    cost = StagedEngine(replace(QLLM, zipf=0.0), replace(MIXTRAL, experts=experts))
    rows, offsets_ns = draw(3, 40, ls_share)
    bounds = replace(BOUNDS, num_blocks=num_blocks, num_host_blocks=host)
    in_line = OneRank(cost, copies_beside=False)  # as stages wait for all copies of their plan
    whole, pieces = Group(bounds, in_line), StagedRank(bounds, cost, in_order, passes_decodes=True)
    fused, staged = serve(whole, rows, offsets_ns), serve(pieces, rows, offsets_ns)
    for name in ("admitted_ns", "first_token_ns", "last_token_ns"):
        assert np.array_equal(getattr(fused, name), getattr(staged, name)), name
    stats = whole.seats[0].rank.stats()
    assert (stats.num_preemptions > 0) == (num_blocks == 40)
    assert (stats.num_restored_tokens > 0) == (host > 0)


@settings(max_examples=25)
@given(seed=st.integers(0, 2**32), ls_share=st.sampled_from([0.2, 0.5]), tight=st.booleans(), aged=st.booleans())
def test_whatever_runs_next_every_request_has_its_tokens(seed, ls_share, tight, aged):
    bounds = replace(LS_FIRST, scheduling_policy="qllm:theta_age_s=0.5" if aged else "qllm")
    bounds = replace(bounds, num_blocks=40 if tight else 200, num_host_blocks=seed % 3 * 20)
    rows, offsets_ns = draw(seed, 20, ls_share, 300_000_000)
    policies = [PREEMPTS, ExpertLevelPreemption(max_wait_ns=10**8, max_merged=0), Random(seed), *ADVERSARIES.values()]
    results = serve(StagedRank(bounds, SMALL, policies[seed % len(policies)], passes_decodes=True), rows, offsets_ns)
    assert results.is_answered.all()
    assert np.array_equal(results.num_tokens, rows.num_output_tokens)
    assert (results.first_token_ns > results.arrival_ns).all()


def test_one_seed_gives_one_record():
    rows, offsets_ns = draw(5, 30, 0.3)
    digests = {serve(staged(), rows, offsets_ns).digest() for _ in range(2)}
    assert len(digests) == 1


def test_an_urgent_request_waits_for_one_piece_and_then_as_if_it_were_alone():
    lengths = {"num_prompt_tokens": np.array([90, 20]), "num_output_tokens": np.array([9, 1])}
    rows = Rows(**lengths, is_ls=np.array([False, True]))
    alone_rank = staged()
    alone_ns = int(serve(alone_rank, rows.select(np.array([1])), [0]).first_token_ns[0])
    iteration_ns = int(serve(staged(), rows.select(np.array([0])), [0]).first_token_ns[0])
    for arrival_ns in (1, 10_000_000, iteration_ns // 2, iteration_ns - 1):
        ranks = staged(ExpertLevelPreemption(max_wait_ns=None, max_merged=0))
        ttft_ns = serve(ranks, rows, [0, arrival_ns]).first_token_ns[1] - arrival_ns
        # Another serial, so another draw of experts: some calls more or less.
        assert abs(ttft_ns - alone_ns) < 0.1 * alone_ns + qllm().expert_ns(90)
    in_turn = serve(Group(LS_FIRST, OneRank(qllm())), rows, [0, 10_000_000]).first_token_ns[1]
    assert in_turn > iteration_ns, "between iterations it waits for the rest of one"


EVERY_EXPERT_VISITED = replace(MIXTRAL.experts, top_k=8)  # so that a piece costs the same in every batch
EVEN = StagedEngine(replace(QLLM, zipf=0.0), replace(MIXTRAL, experts=EVERY_EXPERT_VISITED))
LONG_AND_URGENT = Rows(  # a best-effort prompt, and then urgent ones
    num_prompt_tokens=np.array([90, *[20] * 30]),
    num_output_tokens=np.ones(31, np.int64),
    is_ls=np.array([False, *[True] * 30]),
)


def served_with(num_urgent: int, max_wait_ns: int | None):
    """How late the best-effort prompt is for urgent ones that come in its step, one after another; and the counts."""
    policy = ExpertLevelPreemption(max_wait_ns=max_wait_ns, max_merged=0)
    alone_ns = int(serve(StagedRank(LS_FIRST, EVEN, policy, passes_decodes=True), ONE_LONG, [0]).first_token_ns[0])
    rank = StagedRank(LS_FIRST, EVEN, policy, passes_decodes=True)
    offsets_ns = [0, *(alone_ns // 2 + np.arange(num_urgent) * 10_000_000).tolist()]
    rows = LONG_AND_URGENT.select(np.arange(1 + num_urgent))
    late_ns = int(serve(rank, rows, offsets_ns).first_token_ns[0]) - alone_ns
    return late_ns, rank.seats[0].rank.stats().pass_counts


ONE_LONG = LONG_AND_URGENT.select(np.array([0]))


@pytest.mark.parametrize("num_urgent", [1, 3, 30])
def test_best_effort_is_late_by_exactly_the_time_for_which_it_was_passed_over(num_urgent):
    late_ns, counts = served_with(num_urgent, None)
    assert late_ns == counts.passed_over_ns > 0
    assert 1 <= counts.num_passes <= num_urgent
    assert counts.num_withdrawals >= 1
    assert (counts.num_parked_tokens, counts.max_parked_tokens) == (0, 90)


def test_best_effort_is_passed_over_for_the_bound_and_a_piece_at_most():
    """Whether several plans pass it or one that lasts for longer; and also where the step had run for longer before."""
    one_ns, all_ns = served_with(1, None)[0], served_with(30, None)[0]
    piece_ns = max(EVEN.expert_ns(90), EVEN.attention_ns(0, Batch(np.array([0]), np.array([90]))))
    for bound_ns in (one_ns // 10, one_ns // 2, one_ns * 3 // 2, all_ns // 2):
        late_ns, counts = served_with(30, bound_ns)
        assert bound_ns <= counts.passed_over_ns <= bound_ns + piece_ns
        # Once the bound is reached, urgent tokens that stand in its queue go on with it, which costs a little.
        assert counts.passed_over_ns <= late_ns <= 1.1 * counts.passed_over_ns


SCENARIO = """
[workload]
prompt_tokens = 30
output_tokens = 4
num_requests = 30
rate = 3.0
ls_share = 0.3

[engines]
gpu = "a100"
network = "mixtral-8x7b"
engine = "qllm"
num_blocks = 500
max_num_seqs = 8

[[policies]]
name = "forward passes"
scheduling_policy = "qllm"

[[policies]]
name = "preemptive"
mode = "preemptive"
scheduling_policy = "qllm"
evict_policy = "least_computed_be_first"

[[policies]]
name = "in order"
mode = "preemptive"
step_policy = "in_order"
"""


def test_a_scenario_compares_the_modes(tmp_path):
    path = tmp_path / "modes.toml"
    path.write_text(SCENARIO)
    report = simulate(read_settings(path), tmp_path).report
    fused, preemptive, _ = report.outcomes
    assert all(outcome.report.num_ok == 30 for outcome in report.outcomes)
    assert preemptive.ls_ttft_ms.mean < fused.ls_ttft_ms.mean
    assert json.loads(json.dumps(report.settings))["policies"][1]["mode"] == "preemptive"


def test_prefill_is_reported_where_steps_have_it_to_themselves_alone(tmp_path):
    path = tmp_path / "modes.toml"
    path.write_text(SCENARIO)
    answer = simulate(read_settings(path), tmp_path)
    runs = answer.first_runs()
    fused, *preemptive = answer.report.outcomes
    assert fused.prefill.most_s > 0
    assert [outcome.prefill for outcome in preemptive] == [None, None]
    assert "prefill.png" in {file.name for file in save_plots(tmp_path, runs)}
    assert "prefill.png" not in {file.name for file in save_plots(tmp_path, runs[1:])}


def test_modes_are_compared_with_equal_places_where_that_is_requested(tmp_path):
    path, found = tmp_path / "places.toml", {}
    for places in (None, 0, 1):
        limit = "" if places is None else f"\nmax_num_urgent_seqs = {places}"
        text = SCENARIO.replace("max_num_seqs = 8", "max_num_seqs = 1")
        path.write_text(text.replace('scheduling_policy = "qllm"', f'scheduling_policy = "qllm"{limit}'))
        report = simulate(read_settings(path), tmp_path).report
        found[places] = [outcome.ls_ttft_ms.mean for outcome in report.outcomes[:2]]
    for without, with_place in zip(found[0], found[1], strict=True):
        assert with_place < 0.9 * without, "who has a place need not wait until another's answer is over"
    assert found[None] == [found[0][0], found[1][1]]


def test_a_roofline_prices_stages_too(tmp_path):
    path = tmp_path / "modes.toml"
    text = SCENARIO.replace('engine = "qllm"\n', "").replace("mixtral-8x7b", "qwen3-30b-a3b")
    path.write_text(text.replace("rate = 3.0", "rate = 60.0"))
    report = simulate(read_settings(path), tmp_path).report
    assert all(outcome.report.num_ok == 30 for outcome in report.outcomes)


@pytest.mark.parametrize("mode", ["fused", "preemptive"])
def test_where_kv_is_scarce_host_memory_saves_what_would_be_computed_again(tmp_path, mode):
    """Blocks for half of what eight sequences come to need: each request has its answer, and the whole ends earlier."""
    path, spans = tmp_path / "scarce.toml", []
    for size in (0, 4):
        text = SCENARIO.replace("num_blocks = 500", f"num_blocks = 20\nkv_offloading_size = {size}")
        text = text.replace("output_tokens = 4", "output_tokens = 40")
        path.write_text(text.replace('mode = "preemptive"', f'mode = "{mode}"'))
        report = simulate(read_settings(path), tmp_path).report
        outcome = report.outcomes[1]
        assert outcome.report.num_ok == 30
        assert outcome.num_preemptions > 0
        spans.append(outcome.report.duration_s)
    assert spans[1] < spans[0]


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("num_blocks = 500\n", "", "engine 'qllm' prices single ranks, and needs num_blocks and ep_ranks 1"),
        ('engine = "qllm"', 'table = "x.json"', "mode = 'preemptive' needs prices of stages"),
        ('engine = "qllm"', "ep_ranks = 2", "mode = 'preemptive' needs prices of stages"),
        ('engine = "qllm"', 'engine = "qllm"\ntable = "x.json"', "a table prices whole steps"),
        ("num_blocks = 500", "kv_offloading_size = -1.0", "kv_offloading_size must be at least 0, got -1"),
        ('mode = "preemptive"', 'mode = "asynchronous"', "asynchronous"),
    ],
)
def test_a_mode_that_cannot_be_priced_is_refused(tmp_path, old, new, words):
    path = tmp_path / "modes.toml"
    path.write_text(SCENARIO.replace(old, new))
    with pytest.raises(ConfigError, match=words):
        read_settings(path)


def test_qllms_engine_wants_a_network_with_experts(tmp_path):
    path = tmp_path / "modes.toml"
    path.write_text(SCENARIO.replace("mixtral-8x7b", "qwen2-7b"))
    with pytest.raises(ConfigError, match="runs networks with experts, and qwen2-7b has none"):
        simulate(read_settings(path), tmp_path)
