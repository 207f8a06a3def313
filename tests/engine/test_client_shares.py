"""Places, KV blocks and tokens of steps are shared by client; with one client nothing is."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.fake_device import KvDevice, expected_tokens, make_request
from support.policy_text import policy_text

from moestro.core.request import ServiceClass
from moestro.core.scheduling_events import SequencePreempted
from moestro.core.views import BatchLimits, BatchView, ShareView
from moestro.engine.rank import Rank, build_rank, recorder_of
from moestro.engine.registry import BATCH_POLICIES, ORDER_POLICIES, SHARE_POLICIES
from moestro.engine.settings import SchedulerSettings

STRANGER, HONEST = "127.0.0.2", "127.0.0.1"
NUM_PLACES = 8
ORDERS = [name for name in ORDER_POLICIES.names() if name != "weighted_fair"]


def rank_of(num_blocks: int = 800, delay: int = 0, **more) -> Rank:
    sizes = {"block_size": 4, "max_model_len": 400, "max_num_seqs": NUM_PLACES, "max_num_batched_tokens": 64}
    return build_rank(SchedulerSettings(num_blocks=num_blocks, **(sizes | more)), KvDevice(num_blocks, 4, delay))


def send(rank: Rank, client: str | None, name: str, num_tokens: int = 3, max_tokens: int = 300, **fields) -> None:
    tokens = np.random.default_rng(list(name.encode())).integers(0, 50, num_tokens)  # no common prefixes
    request = make_request(name, tokens, arrival_ns=rank.scheduler.num_steps, max_tokens=max_tokens)
    rank.add(msgspec.structs.replace(request, client=client, **fields), 0)


def steps_until_end(rank: Rank, name: str, most: int = 400) -> int:
    """Steps until the request has ended."""
    for num_steps in range(most):
        if any(output.request_id == name and output.finish_reason for output in rank.step(rank.scheduler.num_steps)):
            return num_steps
    raise AssertionError(f"{name} has not ended after {most} steps")


def flood(rank: Rank, num: int = 40, **fields) -> None:
    """Let the stranger take all places, with many more requests behind."""
    for number in range(num):
        send(rank, STRANGER, f"stranger {number}", **fields)
    for _ in range(4):
        rank.step(rank.scheduler.num_steps)


def running_of(rank: Rank, client: str) -> int:
    table = rank.scheduler.table
    return sum(sequence.request.client == client for sequence in table.at_all(table.running))


@pytest.mark.parametrize("batch", BATCH_POLICIES.names())
@pytest.mark.parametrize("order", ORDERS)
def test_a_request_waits_for_no_choice_of_another_client(order, batch):
    if batch == "run_to_completion":
        pytest.skip("a batch ends before another begins, by definition")
    small = {"max_batch": 4} if "qllm" in batch else {}
    rank = rank_of(scheduling_policy=order, batch_policy=policy_text(batch, small))
    flood(rank, 40)
    assert running_of(rank, STRANGER) >= NUM_PLACES // 2
    send(rank, HONEST, "honest", num_tokens=30, max_tokens=4)
    alone = rank_of(scheduling_policy=order, batch_policy=policy_text(batch, small))
    send(alone, HONEST, "honest", num_tokens=30, max_tokens=4)
    # Where prompts and decodes do not share steps, decodes wait for prompts that come back after a preemption.
    assert steps_until_end(rank, "honest") <= 2 * steps_until_end(alone, "honest") + 2


def test_without_shares_it_waits_for_the_end_of_an_answer():
    rank = rank_of(share_policy="none")
    flood(rank, max_tokens=30)
    send(rank, HONEST, "honest", max_tokens=4)
    assert steps_until_end(rank, "honest") > 4 * 30


@pytest.mark.parametrize(("share", "is_needed"), [("none", False), ("equal", True)])
def test_a_step_looks_at_shares_only_where_a_client_may_not_have_all(share, is_needed):
    rank = rank_of(share_policy=share)
    flood(rank)
    send(rank, HONEST, "honest")
    assert rank.scheduler.state.shares.are_needed == is_needed
    assert bool(rank.scheduler.admission.claimants(rank.scheduler.limits, 0)) == is_needed


def test_one_client_has_all_places_and_is_never_preempted():
    rank = rank_of()
    flood(rank)
    for _ in range(50):
        rank.step(0)
    assert running_of(rank, STRANGER) == NUM_PLACES
    assert rank.stats().num_preemptions == 0


def test_a_client_gets_its_part_of_the_places_and_no_more():
    rank = rank_of()
    flood(rank)
    for number in range(20):
        send(rank, HONEST, f"honest {number}", max_tokens=300)
    for _ in range(10):
        rank.step(rank.scheduler.num_steps)
    assert (running_of(rank, HONEST), running_of(rank, STRANGER)) == (NUM_PLACES // 2, NUM_PLACES // 2)
    assert rank.stats().num_preemptions == NUM_PLACES // 2


def test_weights_of_the_order_policy_are_those_of_the_parts():
    rank = rank_of(scheduling_policy=f"weighted_fair:weight:{HONEST}=3")
    flood(rank)
    for number in range(20):
        send(rank, HONEST, f"honest {number}", max_tokens=300, user=HONEST)
    for _ in range(10):
        rank.step(rank.scheduler.num_steps)
    assert (running_of(rank, HONEST), running_of(rank, STRANGER)) == (6, 2)


def test_kv_blocks_are_shared_as_places_are():
    """Two long sequences hold all blocks, and six places are free."""
    rank = rank_of(num_blocks=100)
    flood(rank, num=4, num_tokens=150, max_tokens=40)
    assert running_of(rank, STRANGER) == 2
    send(rank, HONEST, "honest", num_tokens=80, max_tokens=4)
    assert steps_until_end(rank, "honest") <= 10
    assert running_of(rank, STRANGER) >= 1


def test_the_only_running_sequence_of_a_client_goes_on_however_large():
    rank = rank_of(num_blocks=100)
    flood(rank, num=1, num_tokens=260, max_tokens=20)
    send(rank, HONEST, "honest", num_tokens=200, max_tokens=4)
    assert steps_until_end(rank, "honest") > 10
    assert rank.stats().num_preemptions == 0


def test_the_client_over_its_part_gives_blocks_back_where_they_run_out():
    rank = rank_of(num_blocks=24, max_model_len=90)
    send(rank, HONEST, "honest", num_tokens=20, max_tokens=40)
    rank.step(0)
    flood(rank, num=3, num_tokens=12, max_tokens=60)
    steps_until_end(rank, "honest")
    assert rank.scheduler.by_id["stranger 2"].num_preemptions >= 1
    assert not any(output.request_id == "honest" for output in rank.step(0))


def test_a_prompt_gets_its_part_of_the_tokens_of_each_step():
    rank = rank_of(num_blocks=2_000, max_model_len=2_000)
    flood(rank, num=NUM_PLACES - 1, num_tokens=900)
    send(rank, HONEST, "honest", num_tokens=96, max_tokens=1)
    assert steps_until_end(rank, "honest") == 3, "96 tokens are three halves of a step"


def test_best_effort_claims_nothing_of_latency_sensitive_requests():
    rank = rank_of()
    flood(rank, num=20, max_tokens=100)
    send(rank, HONEST, "honest", max_tokens=4, service_class=ServiceClass.BE)
    for _ in range(50):
        rank.step(rank.scheduler.num_steps)
    assert running_of(rank, HONEST) == 0
    assert rank.stats().num_preemptions == 0


def test_a_record_says_for_whom_a_sequence_gave_way():
    rank = rank_of()
    recorder = recorder_of(rank)
    flood(rank)
    send(rank, HONEST, "honest", max_tokens=4)
    rank.step(rank.scheduler.num_steps)
    (event,) = [each for each in recorder.take() if isinstance(each, SequencePreempted)]
    assert (event.request_id, event.by, event.is_for_client) == (f"stranger {NUM_PLACES - 1}", "honest", True)


def test_each_of_more_clients_than_places_gets_one_in_turn():
    rank = rank_of()
    flood(rank)
    names = [f"honest {number}" for number in range(3 * NUM_PLACES)]
    for name in names:
        send(rank, name, name, max_tokens=4)
    left = set(names)
    for _ in range(60):
        left -= {output.request_id for output in rank.step(rank.scheduler.num_steps) if output.finish_reason}
    assert not left
    assert running_of(rank, STRANGER) >= 1


@settings(max_examples=40)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(10, 60),
    num_places=st.integers(1, 6),
    order=st.sampled_from(ORDERS),
    batch=st.sampled_from(BATCH_POLICIES.names()),
    delay=st.integers(0, 2),
    runs_ahead=st.booleans(),
)
def test_every_request_of_every_client_ends_with_its_tokens(
    seed, num_blocks, num_places, order, batch, delay, runs_ahead
):
    """Clients of all sizes: no two of them preempt each other for ever, and no token changes."""
    rng = np.random.default_rng(seed)
    sizes = {"num_blocks": num_blocks, "block_size": 4, "max_model_len": 40, "max_num_batched_tokens": 16}
    policies = {"scheduling_policy": order, "batch_policy": batch}
    rank = build_rank(
        SchedulerSettings(**sizes, max_num_seqs=num_places, **policies),
        KvDevice(num_blocks, 4, delay),
        runs_ahead=runs_ahead,
    )
    requests = []
    for number in range(14):
        tokens = rng.integers(0, 3, rng.integers(1, 30))
        request = make_request(f"{number}", tokens, arrival_ns=number, max_tokens=int(rng.integers(1, 10)))
        classes = ServiceClass("be" if rng.random() < 0.2 else "ls")
        client = str(rng.choice(4, p=[0.7, 0.1, 0.1, 0.1]))
        requests.append(msgspec.structs.replace(request, client=client, service_class=classes))
    waiting, found = list(requests), {}
    for now_ns in range(5_000):
        while waiting and rng.random() < 0.4:
            rank.add(waiting.pop(0), now_ns)
        for output in rank.step(now_ns):
            found.setdefault(output.request_id, []).extend(output.token_ids)
        rank.scheduler.check()
        if not waiting and not rank.has_work:
            break
    assert found == {request.request_id: expected_tokens(request) for request in requests}
    assert not rank.scheduler.state.shares.are_needed


@settings(max_examples=200)
@given(
    name=st.sampled_from(BATCH_POLICIES.names()),
    seed=st.integers(0, 2**32),
    budget=st.integers(12, 60),
    num_clients=st.integers(1, 4),
)
def test_plans_spend_as_many_tokens_as_without_shares(name, seed, budget, num_clients):
    """What a client leaves of its part goes to others; a plan of one client is the same."""
    rng = np.random.default_rng(seed)
    num = int(rng.integers(1, 12))
    left = np.where(rng.random(num) < 0.5, 1, rng.integers(1, 80, num)).astype(np.int32)
    classes, none = (rng.random(num) < 0.2).astype(np.uint8), np.zeros(num, np.bool_)
    policy, limits = BATCH_POLICIES.make(name), BatchLimits(token_budget=budget, max_chunk=int(rng.integers(1, 80)))
    plain = policy.plan(BatchView(left, none, classes), limits)
    part = SHARE_POLICIES.make("equal")(ShareView(np.ones(num_clients)))
    shared = policy.plan(BatchView(left, none, classes, 0, rng.integers(0, num_clients, num), part), limits)
    assert shared.sum() <= budget
    assert np.all(shared <= left)
    if "qllm" not in name:
        assert shared.sum() == plain.sum()
        assert np.all((shared > 0) | (left > 1) | (plain == 0)), "a decode was cut"
    if num_clients == 1:
        assert shared.tolist() == plain.tolist()
