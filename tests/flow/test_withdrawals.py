"""Classes on an expert worker: what urgent remote tokens take back, and which ones they pass over."""

from __future__ import annotations

import numpy as np
import pytest
from support.fake_group import IS_SPARSE, NUM_EXPERTS

from moestro.core.experts.expert_table import spread_evenly
from moestro.core.stages import DISPATCH, HOP_RECORD, Experts, ExpertsDone, Hop, HopMessage, StageShape
from moestro.core.views import BE, LS, Run, StepFunction
from moestro.flow.core import FlowCore
from moestro.flow.dispatcher import PeerSettings
from moestro.flow.events import Arrived, Done, Launch, Tick, Withdraw
from moestro.flow.policies.one_queue import in_order

SHAPE = StageShape(
    is_sparse=IS_SPARSE, num_experts=NUM_EXPERTS, num_chosen=1, num_rows=0, num_places=0, num_remote_places=64
)


class Worker:
    """An expert worker with all experts, to which the homes 0 and 2 send."""

    def __init__(self) -> None:
        table = spread_evenly(len(IS_SPARSE), NUM_EXPERTS, [1], 3)
        peers = PeerSettings(worker=1, num_workers=3, table=table, num_credits=32)
        self.core, self.now_ns, self.num_sent = FlowCore(SHAPE, in_order, peers=peers), 0, [0, 0, 0]

    def arrive(self, *tokens: tuple[int, int], home: int = 0, waited_us: int = 0) -> list:
        """A dispatch of tokens of (class, slot) arrives; the commands."""
        records = np.zeros(len(tokens), HOP_RECORD)
        records["row"] = records["place"] = np.arange(len(tokens))
        records["service_class"] = [service_class for service_class, _ in tokens]
        records["slot"] = [slot for _, slot in tokens]
        records["waited_us"] = waited_us
        seq = self.num_sent[home]
        self.num_sent[home] += 1
        hop = Hop(kind=DISPATCH, src=home, dst=1, epoch=0, seq=seq, layer=0, num_rows=len(tokens))
        self.now_ns += 1
        return self.core.on_event(self.now_ns, Arrived(HopMessage(hop, records)))

    def launch(self) -> Experts:
        (launch,) = (each for each in self.core.on_event(self.now_ns, Tick()) if isinstance(each, Launch))
        return launch.item


@pytest.mark.parametrize(
    ("running", "withdraws"),
    [
        ([(BE, 0), (BE, 1)], True),
        ([(LS, 0), (BE, 0), (LS, 1), (BE, 1)], False),
        ([(LS, 0), (BE, 0), (BE, 1)], True),
        ([(LS, 0), (LS, 3)], False),
    ],
)
def test_urgent_remote_tokens_withdraw_only_what_has_batches_of_best_effort_alone(running, withdraws):
    worker = Worker()
    worker.arrive(*running)
    worker.launch()
    commands = worker.arrive((LS, 2))
    assert any(isinstance(each, Withdraw) for each in commands) is withdraws
    assert worker.core.pass_counts.num_withdrawals == withdraws


def test_a_stream_of_urgent_remote_tokens_withdraws_a_mixed_batch_not_even_once():
    worker = Worker()
    worker.arrive((BE, 0), (LS, 0), (BE, 4), home=2)
    worker.arrive((LS, 4))
    worker.launch()
    for _ in range(10):
        worker.arrive((LS, 5))
    assert worker.core.pass_counts.num_withdrawals == 0


def test_best_effort_remote_tokens_withdraw_nothing():
    worker = Worker()
    worker.arrive((BE, 0), (LS, 1))
    worker.launch()
    worker.arrive((BE, 2))
    assert worker.core.pass_counts.num_withdrawals == 0


@pytest.mark.parametrize(("be_first", "home", "passed_us"), [(True, 2, 70), (True, 0, 70), (False, 2, 0)])
def test_a_remote_token_is_passed_over_by_what_arrives_after_it_from_whatever_home(be_first, home, passed_us):
    """The order of arrival at this worker decides, because entries into the network are dated by other clocks."""
    worker = Worker()
    dispatches = [(BE, home), (LS, 0)] if be_first else [(LS, 0), (BE, home)]
    for service_class, src in dispatches:
        worker.arrive((service_class, service_class), home=src)
    worker.core._policy = StepFunction(lambda view, now_ns: Run(0, 1, 99, (LS,)))
    item = worker.launch()
    assert item.places.tolist() == [worker.core._remote.entries_at(np.array([0, 1])).argsort()[int(be_first)]]
    worker.core.on_event(worker.now_ns + 70_000, Done(ExpertsDone(1)))
    assert worker.core._queues.table().passed_ns.max() == passed_us * 1000


def test_the_time_that_other_workers_counted_goes_on_counting():
    worker = Worker()
    worker.arrive((BE, 1), waited_us=500)
    worker.arrive((LS, 0))
    worker.core._policy = StepFunction(lambda view, now_ns: Run(0, 1, 99, (LS,)))
    worker.launch()
    worker.core.on_event(worker.now_ns + 70_000, Done(ExpertsDone(1)))
    assert worker.core._queues.table().passed_ns.max() == 570_000
