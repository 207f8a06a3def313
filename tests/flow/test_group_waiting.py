"""What workers of a group count as waiting, and when they want to choose: faults that no token shows."""

from __future__ import annotations

from collections import deque

import msgspec
import numpy as np
import pytest
from support.fake_device import make_request
from support.fake_group import IS_SPARSE, NUM_EXPERTS, FakeGroup
from support.fake_stages import FakeStages, make_shape

from moestro.core.clock import FOREVER_NS
from moestro.core.experts.expert_table import ExpertTable, spread_evenly
from moestro.core.request import ServiceClass
from moestro.core.stages import StageShape
from moestro.core.views import ATTENTION, BE, EVERY_EXPERT, LS, Run, StepFunction
from moestro.engine.rank import build_preemptive_rank
from moestro.engine.settings import SchedulerSettings
from moestro.flow.dispatcher import Dispatcher, PeerSettings
from moestro.flow.policies.one_queue import in_order
from moestro.flow.token_pool import TokenPool

TABLE = spread_evenly(len(IS_SPARSE), NUM_EXPERTS, [1], 2)


@StepFunction
def deepest(table, now_ns):
    """Run the deepest queue of a class: latency-sensitive ones first, and each class alone."""
    for service_class in (LS, BE):
        found = np.argwhere(table.runnable[service_class])
        if len(found):
            layer, group = found[-1].tolist()
            return Run(layer, group if group == ATTENTION else EVERY_EXPERT, 1 << 20, (service_class,))
    raise AssertionError("nothing can run")


@StepFunction
def one_expert(table, now_ns):
    """Run one queue."""
    layer, group = np.argwhere(table.runnable[BE])[-1].tolist()
    return Run(layer, group, 1 << 20, (BE,))


def request(name: str, service_class: ServiceClass, length: int = 3, first: int = 3):
    made = make_request(name, [first, *[3] * (length - 1)], max_tokens=1)
    return msgspec.structs.replace(made, service_class=service_class)


def make_group(policy=deepest, **settings) -> FakeGroup:
    return FakeGroup(np.random.default_rng(0), 1, TABLE, lambda _: policy, **settings)


def deliver(group: FakeGroup, src: int, dst: int, now_ns: int) -> None:
    """Hand over all messages of a channel."""
    messages, group.channels[src, dst] = group.channels[src, dst], deque()
    for message in messages:
        group.executors[dst].receive(message, now_ns)


def work_until_idle(rank, now_ns: int) -> None:
    while rank.executor.ready_at_ns() != FOREVER_NS:
        rank.step(now_ns, lambda _: True)


def test_a_unit_whose_tokens_are_elsewhere_is_not_passed_over():
    group = make_group()
    rank = group.ranks[0]
    rank.add(request("be", ServiceClass.BE), 0)
    rank.step(0)
    work_until_idle(rank, 0)
    assert group.channels[0, 1], "the best-effort tokens are with the expert worker"
    rank.add(request("ls", ServiceClass.LS), 10)
    rank.step(10)
    core = rank.executor._core
    core._observe()
    rank.step(1_000_010, lambda _: True)
    work_until_idle(rank, 2_000_000)
    assert core.pass_counts.num_passes == 0
    assert not core._pool.passed_ns.any()


def test_an_expert_worker_that_works_when_polled_returns_after_each_item():
    """Otherwise it would ask its policy with the time at which it began, and ageing would come late."""
    group = make_group(one_expert)
    rank, worker = group.ranks[0], group.executors[1]
    rank.add(request("be", ServiceClass.BE, 8), 0)
    rank.step(0)
    work_until_idle(rank, 0)
    deliver(group, 0, 1, 5)
    worker.poll(5)
    assert sum(what == "expert" for what, *_ in group.devices[1].log) == 1


def test_what_a_home_has_given_up_does_not_wait_again_after_a_withdrawal():
    group = make_group(num_credits=40)
    rank, worker = group.ranks[0], group.executors[1]
    rank.add(request("be", ServiceClass.BE, 8), 0)
    rank.step(0)
    work_until_idle(rank, 0)
    deliver(group, 0, 1, 5)
    worker.poll(5, lambda _: True)
    assert worker._core.num_launched == 1, "an item is under way"
    rank.executor.lose(1, 6)
    rank.add(request("ls", ServiceClass.LS), 6)
    work_until_idle(rank, 6)
    rank.step(6)
    work_until_idle(rank, 6)
    num_pairs = sum(len(message.records) for message in group.channels[0, 1])
    deliver(group, 0, 1, 7)  # an urgent one withdraws what runs
    worker.poll(7)
    assert worker._core._queues.num_waiting == num_pairs


def test_a_home_that_lacks_places_sleeps_until_a_message_comes():
    group = make_group(in_order)
    rank, pool = group.ranks[0], group.executors[0]._core._pool
    for first in range(3):
        rank.add(request(f"r{first}", ServiceClass.BE, 16, first), 0)
    for _ in range(200):
        rank.step(0, lambda _: True)
    assert pool.num_free_places == 0
    assert rank.executor._core._queues.num_waiting == 16, "a unit waits for places"
    assert rank.ready_at_ns() == FOREVER_NS


def test_of_two_results_that_a_late_poll_finds_the_second_is_ready_at_once():
    settings = SchedulerSettings(
        num_blocks=64, block_size=4, max_model_len=32, max_num_seqs=4, max_num_urgent_seqs=4,
        max_num_batched_tokens=16, scheduling_policy="qllm",
    )  # fmt: skip
    device = FakeStages(make_shape(32), 64, 4, piece_ns=1)
    rank = build_preemptive_rank(settings, device, deepest, launch_ahead=2)
    rank.add(request("be", ServiceClass.BE), 0)
    rank.step(0)
    rank.add(request("ls", ServiceClass.LS), 1)
    rank.step(1)
    now_ns = 1
    while not all(type(each.item).__name__ == "Sample" for each in rank.executor._core._launched):
        now_ns += 1
        assert not rank.step(now_ns)
    assert rank.executor._core.num_launched == 2
    assert len(rank.step(now_ns + 100)) == 1
    assert rank.ready_at_ns() == now_ns + 100
    assert rank.executor.may_emit
    assert len(rank.step(now_ns + 100)) == 1
    assert rank.ready_at_ns() == FOREVER_NS


@pytest.mark.parametrize(("waiting", "chosen"), [(64, 0), (65, 1)])
def test_a_home_leaves_its_own_copy_when_its_own_backlog_is_longer(waiting, chosen):
    logical_of = np.tile(np.arange(NUM_EXPERTS, dtype=np.int32), (2, len(IS_SPARSE), 1))
    table = ExpertTable(0, logical_of, NUM_EXPERTS, np.ones(2, np.bool_))
    shape = StageShape(is_sparse=IS_SPARSE, num_experts=NUM_EXPERTS, num_chosen=1, num_rows=4, num_places=4)
    pool = TokenPool(shape)
    dispatcher = Dispatcher(PeerSettings(worker=0, num_workers=2, table=table, num_credits=9), pool)
    dispatcher.set_own_backlog(waiting)
    one = np.zeros(1, np.int32)
    own, sends = dispatcher.dispatch(0, np.zeros(1, np.int64), one, one[:, None])
    assert (len(own.places), len(sends)) == ((1, 0), (0, 1))[chosen]
