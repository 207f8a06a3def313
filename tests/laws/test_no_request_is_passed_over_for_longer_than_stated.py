"""Law: no waiting request sees one enter that arrived later by the order policy's bound or more."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import num_examples
from support.fake_device import KvDevice, make_request
from support.fake_stages import FakeStages, make_shape
from support.policy_text import policy_text

from moestro.core.request import ServiceClass
from moestro.core.views import BE, LS
from moestro.core.work import Forward
from moestro.engine.rank import build_preemptive_rank
from moestro.engine.registry import ORDER_POLICIES
from moestro.engine.scheduler import Scheduler
from moestro.engine.settings import SchedulerSettings
from moestro.flow.policies.qllm import ExpertLevelPreemption

BOUNDED = {
    "fcfs": {},
    "sjf": {"theta_age_s": 20e-9},
    "prefill_aware": {"theta_age_s": 20e-9},
    "edf": {"ls_slo_s": 5e-9, "be_slo_s": 30e-9},
    "qllm": {"theta_age_s": 20e-9},
}


def random_request(rng, i, now_ns):
    length = int(rng.choice([rng.integers(1, 5), rng.integers(1, 25)]))
    tokens = np.arange(length) if rng.random() < 0.5 else rng.integers(0, 50, length)  # prefixes are shared
    request = make_request(f"r{i}", tokens, arrival_ns=now_ns, max_tokens=int(rng.integers(1, 8)))
    return msgspec.structs.replace(
        request, service_class=ServiceClass(rng.choice(["ls", "be"])), priority=int(rng.integers(3))
    )


def waiting_in(scheduler: Scheduler) -> list:
    return [sequence for sequence in scheduler.by_id.values() if sequence.slot is None]


def passed_by_ns(waited: list) -> int:
    """The most by which one of `waited` that has entered since came later than one that has not; -1: none did."""
    longest_ns, entered = -1, [sequence for sequence in waited if sequence.slot is not None]
    for waiting in (sequence for sequence in waited if sequence.slot is None):
        later = [sequence.request.arrival_ns for sequence in entered if sequence.serial > waiting.serial]
        longest_ns = max([longest_ns, *(arrival_ns - waiting.request.arrival_ns for arrival_ns in later)])
    return longest_ns


def longest_passing_ns(scheduler: Scheduler, rng, num_requests: int) -> int:
    """The most by which one that entered had arrived later than one that still waited then; -1: none was passed."""
    device = KvDevice(scheduler.pool.num_blocks, 4)
    longest_ns, added = -1, 0
    for now_ns in range(10_000):
        while added < num_requests and rng.random() < 0.4:
            scheduler.add(random_request(rng, added, now_ns))
            added += 1
        waited = waiting_in(scheduler)
        plan = scheduler.schedule(now_ns)
        longest_ns = max(longest_ns, passed_by_ns(waited))
        if plan is not None:
            device.launch(Forward(plan.units), now_ns)
            for result in device.poll(now_ns):
                scheduler.update(result, now_ns)
        if added == num_requests and not scheduler.has_work:
            return longest_ns
    raise AssertionError("requests were left over")


def scheduler_of(name, order_settings, **more):
    return Scheduler(
        SchedulerSettings(
            block_size=4,
            max_model_len=32,
            max_num_batched_tokens=16,
            scheduling_policy=policy_text(name, order_settings),
            **{"num_blocks": 12, "max_num_seqs": 4, **more},
        )
    )


@settings(max_examples=num_examples(30, thorough=100))
@given(
    name=st.sampled_from(sorted(BOUNDED)),
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(8, 30),
    max_num_seqs=st.integers(1, 8),
    batch_policy=st.sampled_from(["decode_first", "prefill_first", "run_to_completion"]),
)
def test_who_arrives_later_by_the_bound_never_enters_before(name, seed, num_blocks, max_num_seqs, batch_policy):
    more = {"num_blocks": num_blocks, "max_num_seqs": max_num_seqs, "batch_policy": batch_policy}
    scheduler = scheduler_of(name, BOUNDED[name], **more)
    bound_ns = scheduler.waiting.policy.max_passed_over_ns
    assert longest_passing_ns(scheduler, np.random.default_rng(seed), 40) < bound_ns


@settings(max_examples=num_examples(12, thorough=40))
@given(
    name=st.sampled_from(sorted(BOUNDED)),
    seed=st.integers(0, 2**32),
    num_blocks=st.sampled_from([9, 30]),
    passes_decodes=st.booleans(),
)
def test_in_preemptive_mode_the_bound_holds_within_a_class(name, seed, num_blocks, passes_decodes):
    """Latency-sensitive requests pass best-effort ones that wait for a step's end, by design."""
    rng = np.random.default_rng(seed)
    bounds = SchedulerSettings(
        num_blocks=num_blocks,
        block_size=4,
        max_model_len=32,
        max_num_seqs=3,
        max_num_urgent_seqs=3,
        max_num_batched_tokens=16,
        scheduling_policy=policy_text(name, BOUNDED[name]),
        evict_policy="least_computed_be_first" if name == "qllm" else "last_in_order",
    )
    device = FakeStages(make_shape(32), num_blocks, 4)
    device.may_forget = True
    policy = ExpertLevelPreemption(max_wait_ns=50, max_merged=4)
    rank, added = build_preemptive_rank(bounds, device, policy, passes_decodes=passes_decodes), 0
    bound_ns = rank.scheduler.waiting.policy.max_passed_over_ns
    for now_ns in range(10_000):
        if added < 25 and rng.random() < 0.2:
            rank.add(random_request(rng, added, now_ns), now_ns)
            added += 1
        waited = waiting_in(rank.scheduler)
        rank.step(now_ns, lambda _: True)
        for service_class in (LS, BE):
            assert passed_by_ns([s for s in waited if s.service_class == service_class]) < bound_ns
        if added == 25 and not rank.has_work:
            return
    raise AssertionError("requests were left over")


def passing_ns(name, order_settings):
    """In histories that are long and crowded."""
    return max(longest_passing_ns(scheduler_of(name, order_settings), np.random.default_rng(s), 150) for s in range(2))


@pytest.mark.parametrize("name", sorted(set(BOUNDED) - {"fcfs"}))
def test_the_law_is_not_empty_requests_are_passed_over(name):
    assert passing_ns(name, BOUNDED[name]) > 3


@pytest.mark.parametrize("name", ["priority", "qllm"])
def test_what_states_no_bound_passes_for_longer(name):
    assert passing_ns(name, {}) > 30


def test_every_order_is_here_or_states_no_bound_in_time():
    bounds = {name: ORDER_POLICIES.make(name).max_passed_over_ns for name in ORDER_POLICIES.names()}
    assert {name for name, bound_ns in bounds.items() if bound_ns is not None} <= set(BOUNDED)
