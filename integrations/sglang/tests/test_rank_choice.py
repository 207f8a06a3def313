"""The choice of data-parallel ranks from what SGLang's ranks report, without SGLang."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import numpy as np
import pytest
from moestro_sglang import rank_hooks
from moestro_sglang.rank_choice import RankChoice

from moestro.errors import ConfigError, NoEngineError

S = 1_000_000_000


def load(rank: int, at_s: float, running: int = 0, waiting: int = 0, **figures: float) -> SimpleNamespace:
    given = {
        "num_waiting_uncached_tokens": 0,
        "num_total_tokens": 0,
        "max_total_num_tokens": 64_000,
        "token_usage": 0.0,
    }
    return SimpleNamespace(
        timestamp=at_s, dp_rank=rank, num_running_reqs=running, num_waiting_reqs=waiting, **(given | figures)
    )


def prompt(seed: int, length: int = 640) -> list[int]:
    return np.random.default_rng(seed).integers(0, 1000, length).tolist()


def test_samples_of_one_prompt_meet_its_cache_and_other_prompts_spread():
    choice = RankChoice("lmetric", 4)
    choice.report([load(rank, 1.0) for rank in range(4)], 1 * S)
    first = choice.choose(prompt(0, 6400), 2 * S)
    others = {choice.choose(prompt(seed, 6400), 2 * S) for seed in (1, 2, 3)}
    assert others == {0, 1, 2, 3} - {first}
    assert choice.choose(prompt(0, 6400), 2 * S) == first


def test_another_adapter_does_not_share_the_cache():
    choice = RankChoice("lmetric", 2)
    first = choice.choose(prompt(0, 6400), 1 * S, cache="a|")
    assert choice.choose(prompt(0, 6400), 1 * S, cache="b|") != first


def test_reports_end_requests_oldest_first():
    choice = RankChoice("least_loaded", 2)
    ranks = [choice.choose(prompt(seed), seed * S) for seed in range(1, 9)]
    assert ranks.count(0) == 4
    choice.report([load(0, 20.0, running=1, waiting=1)], 20 * S)
    on_first = [str(number) for number, rank in enumerate(ranks) if rank == 0]
    assert choice._router.in_flight_on(0) == tuple(on_first[2:])
    assert choice.num_in_flight(1) == 4
    # So the next two go to rank 0.
    assert [choice.choose(prompt(seed), 21 * S) for seed in (20, 21)] == [0, 0]


def test_a_report_ends_nothing_that_was_sent_after_the_report_before():
    choice = RankChoice("least_loaded", 1)
    choice.report([load(0, 1.0)], 1 * S)
    for _ in range(3):
        choice.choose(prompt(0), 2 * S)  # while the rank computes a step, which a report of 3 s ends
    choice.report([load(0, 3.0, running=0)], 3 * S)
    assert choice.num_in_flight(0) == 3
    choice.report([load(0, 4.0, running=2)], 4 * S)
    assert choice.num_in_flight(0) == 2


def test_a_report_that_was_seen_counts_again_only_while_the_rank_is_idle():
    choice = RankChoice("gimbal-v1", 2)
    reports = [load(0, 1.0, token_usage=0.95), load(1, 1.0, token_usage=0.1)]
    choice.report(reports, 1 * S)
    assert choice.choose(prompt(0), 500 * S) in (0, 1)  # too old to be compared
    choice.report(reports, 1000 * S)
    idle_since_then = [choice.choose(prompt(seed), 1001 * S) for seed in range(1, 5)]
    assert set(idle_since_then) <= {0, 1}


def test_gimbals_first_algorithm_compares_kv_use_then_tokens_then_users():
    choice = RankChoice("gimbal-v1", 3)
    uses = [0.95, 0.5, 0.7]
    choice.report([load(rank, 1.0, running=1, token_usage=use) for rank, use in enumerate(uses)], 1 * S)
    assert [choice.choose(prompt(seed), 1 * S) for seed in range(3)] == [1, 1, 1]
    choice.report(
        [load(rank, 2.0, running=1, token_usage=0.95, num_total_tokens=9000 - 4000 * (rank == 2)) for rank in range(3)],
        2 * S,
    )
    assert choice.choose(prompt(9), 2 * S) == 2
    choice.report([load(rank, 3.0, running=1, token_usage=0.1) for rank in range(3)], 3 * S)
    first = choice.choose(prompt(10), 3 * S, user="ann")
    assert [choice.choose(prompt(seed), 3 * S, user="ann") for seed in (11, 12, 13)] == [first] * 3


def test_ranks_that_failed_get_nothing_and_none_at_all_is_an_error():
    choice = RankChoice("moestro", 3)
    choice.set_available([True, False, True, False])  # a fourth slot of SGLang has no rank yet
    assert {choice.choose(prompt(seed), S) for seed in range(8)} == {0, 2}
    choice.set_available([False, False, False])
    with pytest.raises(NoEngineError):
        choice.choose(prompt(0), S)


def test_a_prompt_without_tokens_and_reports_of_unknown_ranks_are_taken():
    choice = RankChoice("moestro", 2)
    choice.report([load(7, 1.0), load(-1, 1.0), load(0, 0.0)], S)
    assert choice.choose(None, S) in (0, 1)
    assert choice.choose([], S) in (0, 1)
    assert choice.choose([2**40 + 3] * 100, S) in (0, 1)


@pytest.mark.parametrize(
    ("policy", "message"),
    [("best", "unknown"), ("lmetric:speed=2", "has no setting 'speed'"), ("gimbal-v1:kv_gap=-1", "must be in 0")],
)
def test_a_wrong_policy_is_refused(policy, message):
    with pytest.raises(ConfigError, match=message):
        RankChoice(policy, 2)


@pytest.mark.parametrize("policy", ["moestro", "lmetric", "gimbal-v1", "gimbal-v2", "least_loaded"])
@pytest.mark.parametrize("seed", range(2))
def test_on_every_history_known_requests_are_those_that_were_sent_less_those_that_ended(policy, seed):
    """Ranks serve in turn and report after each step; what the choice knows never leaves [running, sent]."""
    rng, choice = np.random.default_rng(seed), RankChoice(policy, 3)
    on_rank: list[list[int]] = [[], [], []]
    unread: list[list[int]] = [[], [], []]
    now_ns = S
    for number in range(250):
        now_ns += int(rng.exponential(0.02) * S)
        rank = choice.choose(prompt(int(rng.integers(0, 20)), 200), now_ns)
        unread[rank].append(number)
        if rng.random() < 0.4:
            at = int(rng.integers(0, 3))
            on_rank[at] = on_rank[at][int(rng.integers(0, 4)) :]  # those that ended in the step
            num_running = min(4, len(on_rank[at]))
            report = load(at, now_ns / S, num_running, len(on_rank[at]) - num_running)
            choice.report([report], now_ns)
            on_rank[at] += unread[at]
            unread[at] = []
        for each in range(3):
            assert choice.num_in_flight(each) <= number + 1
    for _ in range(2):  # twice, because a report includes what was sent by the report before
        now_ns += S
        choice.report([load(rank, now_ns / S) for rank in range(3)], now_ns)
    assert [choice.num_in_flight(rank) for rank in range(3)] == [0, 0, 0]


@pytest.mark.parametrize("given", ["ann", ["user"], 5, {"user": "\ud800"}, None])
@pytest.mark.parametrize("tokens", [[2**70], [[1, 2], [3]], ["a"], None, [1]])
def test_a_request_of_any_kind_ends_no_controller(monkeypatch, given, tokens):
    sent: list[object] = []
    module = SimpleNamespace(sock_send=lambda worker, _req: sent.append(worker))
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.data_parallel_controller", module)
    controller = SimpleNamespace(
        maybe_external_dp_rank_routing=lambda _req: False,
        dp_budget=SimpleNamespace(moestro_choice=RankChoice("moestro", 2)),
        workers=["first", "second"],
        status=[True, True],
    )
    request = SimpleNamespace(input_ids=tokens, lora_id="\ud800", sampling_params=SimpleNamespace(custom_params=given))
    rank_hooks._choose(lambda *_arguments: sent.append("by SGLang"), controller, request)
    assert len(sent) == 1
    assert (sent[0] == "by SGLang") == (tokens not in (None, [1]))
