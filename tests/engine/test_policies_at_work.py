"""What policies make of a scheduler's plans: who enters, who runs, who gives way."""

import msgspec
import pytest
from support.fake_device import KvDevice, expected_tokens, make_request

from moestro.core.request import ServiceClass
from moestro.engine.rank import build_rank
from moestro.engine.settings import SchedulerSettings

QLLM = {"scheduling_policy": "qllm", "batch_policy": "qllm", "evict_policy": "least_computed_be_first"}


def rank_of(num_blocks=32, **more):
    settings = {"block_size": 4, "max_model_len": 32, "max_num_batched_tokens": 64, "max_num_seqs": 8, **more}
    return build_rank(SchedulerSettings(num_blocks=num_blocks, **settings), KvDevice(num_blocks, 4))


def request(name, num_prompt, max_tokens, service_class="ls", user=None):
    made = make_request(name, range(num_prompt), salt=name, max_tokens=max_tokens)
    return msgspec.structs.replace(made, service_class=ServiceClass(service_class), user=user)


def plans(rank, num_steps):
    """{name: tokens} of each of the next plans."""
    found = []
    for now_ns in range(num_steps):
        plan = rank.scheduler.schedule(now_ns)
        if plan is None:
            break
        names = [rank.scheduler.table.at(slot).request.request_id for slot in plan.units.slot.tolist()]
        found.append(dict(zip(names, plan.units.num_tokens.tolist(), strict=True)))
        rank.executor.submit(plan, now_ns)
        rank.scheduler.update(rank.executor.poll(now_ns), now_ns)
    return found


def test_a_batch_that_runs_to_completion_admits_none_before_its_last_has_ended():
    rank = rank_of(batch_policy="run_to_completion", max_num_seqs=2)
    for name, max_tokens in (("a", 1), ("b", 3), ("c", 2)):
        rank.add(request(name, 5, max_tokens), 0)
    assert plans(rank, 9) == [{"a": 5, "b": 5}, {"b": 1}, {"b": 1}, {"c": 5}, {"c": 1}]


def test_prefill_first_stops_decodes_for_a_newcomer():
    rank = rank_of(batch_policy="prefill_first", max_chunk=8)
    rank.add(request("a", 5, 4), 0)
    assert plans(rank, 2) == [{"a": 5}, {"a": 1}]
    rank.add(request("b", 12, 2), 0)
    assert plans(rank, 9) == [{"b": 8}, {"b": 4}, {"a": 1, "b": 1}, {"a": 1}]


def test_places_beyond_max_num_seqs_are_for_latency_sensitive_requests_alone():
    rank = rank_of(max_num_seqs=1, max_num_urgent_seqs=2)
    for name, service_class in (("be0", "be"), ("be1", "be"), ("ls", "ls")):
        rank.add(request(name, 5, 2, service_class), 0)
    assert plans(rank, 9) == [{"be0": 5, "ls": 5}, {"be0": 1, "ls": 1}, {"be1": 5}, {"be1": 1}]


def test_a_user_with_a_long_queue_does_not_hold_up_another():
    rank = rank_of(scheduling_policy="weighted_fair", max_num_seqs=1)
    for name, user in (("a1", "ann"), ("a2", "ann"), ("a3", "ann"), ("b1", "bob"), ("b2", "bob")):
        rank.add(request(name, 6, 1, user=user), 0)
    assert [name for plan in plans(rank, 9) for name in plan] == ["a1", "b1", "a2", "b2", "a3"]


def test_what_is_generated_counts_against_its_user():
    rank = rank_of(scheduling_policy="weighted_fair", max_num_seqs=1)
    for name, user, max_tokens in (
        ("a1", "ann", 9),
        ("a2", "ann", 1),
        ("b1", "bob", 1),
        ("b2", "bob", 1),
        ("b3", "bob", 1),
    ):
        rank.add(request(name, 6, max_tokens, user=user), 0)
    order = list(dict.fromkeys(name for plan in plans(rank, 20) for name in plan))
    assert order == ["a1", "b1", "b2", "b3", "a2"], "ann's clock stands at 6 + 2 * 9"


def test_best_effort_gives_way_to_a_latency_sensitive_request_least_computed_first():
    rank = rank_of(num_blocks=12, **QLLM)
    for name, num_prompt in (("long", 16), ("short", 8), ("other", 12)):
        rank.add(request(name, num_prompt, 3, "be"), 0)
    assert plans(rank, 1) == [{"long": 16, "short": 8, "other": 12}]
    rank.add(request("now", 11, 2), 1)
    assert plans(rank, 9) == [
        {"now": 11},  # `short` has made way: 3 of 12 blocks were free, and one is kept back for each that runs
        {"now": 1, "long": 1, "other": 1},
        {"long": 1, "other": 1},
        {"short": 9},
        {"short": 1},
    ]
    assert rank.stats().num_preemptions == 1


def test_none_gives_way_for_a_request_that_would_not_fit_though_all_did():
    rank = rank_of(num_blocks=12, **QLLM)
    rank.add(request("old", 20, 3), 0)
    for name in ("be0", "be1"):
        rank.add(request(name, 6, 3, "be"), 0)
    assert plans(rank, 1) == [{"old": 20, "be0": 6, "be1": 6}]
    rank.add(request("big", 25, 2), 1)  # 7 of 12 blocks; `old` has 5, and one is kept back for each that runs
    assert plans(rank, 9) == [{"old": 1, "be0": 1, "be1": 1}, {"old": 1, "be0": 1, "be1": 1}, {"big": 25}, {"big": 1}]
    assert rank.stats().num_preemptions == 0


def test_a_prefix_that_others_hold_too_is_not_counted_as_what_giving_way_would_free():
    rank = rank_of(num_blocks=12, **QLLM | {"batch_policy": "decode_first"})
    same = make_request("be", range(17), salt="same", max_tokens=9)
    rank.add(msgspec.structs.replace(same, request_id="ls"), 0)
    assert plans(rank, 1) == [{"ls": 17}]
    rank.add(msgspec.structs.replace(same, service_class=ServiceClass.BE), 1)
    plans(rank, 1)
    assert rank.scheduler.pool.num_free == 6, "four blocks are held by both"
    rank.add(request("big", 26, 2), 2)  # 7 blocks of 6 free ones, 1 that would become so, less 1 for who runs
    plans(rank, 3)
    assert rank.stats().num_preemptions == 0


def test_best_effort_that_has_aged_gives_way_no_more():
    rank = rank_of(num_blocks=8, **QLLM | {"scheduling_policy": "qllm:theta_age_s=5e-9"})
    rank.add(request("old", 20, 8, "be"), 0)
    assert plans(rank, 2) == [{"old": 20}, {"old": 1}]
    rank.add(request("now", 12, 2), 1)
    plan = rank.scheduler.schedule(6)
    assert plan.units.num_tokens.tolist() == [1]
    assert rank.stats().num_preemptions == 0


@pytest.mark.parametrize("batch_policy", ["decode_first", "qllm", "qllm_mixed"])
def test_who_gave_way_loses_no_token(batch_policy):
    rank = rank_of(num_blocks=12, **QLLM | {"batch_policy": batch_policy})
    requests = [request(f"be{i}", 9, 6, "be") for i in range(3)] + [request(f"ls{i}", 14, 4) for i in range(4)]
    tokens = {}
    for now_ns in range(200):
        if requests[now_ns:]:
            rank.add(requests[now_ns], now_ns)
        for output in rank.step(now_ns):
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
    assert rank.stats().num_preemptions > 0
    assert tokens == {r.request_id: expected_tokens(r) for r in requests}
