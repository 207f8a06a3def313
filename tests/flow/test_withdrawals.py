"""When an expert worker takes back what it has not begun: for urgent guests that would wait for best effort alone."""

from __future__ import annotations

import numpy as np
import pytest
from support.fake_group import IS_SPARSE, NUM_EXPERTS

from moestro.core.expert_table import spread_evenly
from moestro.core.hops import DISPATCH, HOP_RECORD, Hop, HopMessage
from moestro.core.stages import Experts, StageShape
from moestro.core.views import BE, LS
from moestro.flow.core import FlowCore
from moestro.flow.dispatcher import PeerSettings
from moestro.flow.events import Arrived, Launch, Tick, Withdraw
from moestro.flow.policies.basic import in_order

SHAPE = StageShape(is_sparse=IS_SPARSE, num_experts=NUM_EXPERTS, num_chosen=1, num_rows=0, num_places=0, num_guests=64)


class Worker:
    """An expert worker with all experts, to which the homes 0 and 2 send."""

    def __init__(self) -> None:
        table = spread_evenly(len(IS_SPARSE), NUM_EXPERTS, [1], 3)
        peers = PeerSettings(worker=1, num_workers=3, table=table, num_credits=32)
        self.core, self.now_ns, self.num_sent = FlowCore(SHAPE, in_order, peers=peers), 0, [0, 0, 0]

    def arrive(self, *tokens: tuple[int, int], home: int = 0) -> list:
        """A dispatch of tokens of (class, slot) arrives; the commands."""
        records = np.zeros(len(tokens), HOP_RECORD)
        records["row"] = records["place"] = np.arange(len(tokens))
        records["service_class"] = [service_class for service_class, _ in tokens]
        records["slot"] = [slot for _, slot in tokens]
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
def test_urgent_guests_withdraw_only_what_has_batches_of_best_effort_alone(running, withdraws):
    worker = Worker()
    worker.arrive(*running)
    worker.launch()
    commands = worker.arrive((LS, 2))
    assert any(isinstance(each, Withdraw) for each in commands) is withdraws
    assert worker.core.pass_counts.num_withdrawals == withdraws


def test_a_stream_of_urgent_guests_withdraws_a_mixed_batch_not_even_once():
    worker = Worker()
    worker.arrive((BE, 0), (LS, 0), (BE, 4), home=2)
    worker.arrive((LS, 4))
    worker.launch()
    for _ in range(10):
        worker.arrive((LS, 5))
    assert worker.core.pass_counts.num_withdrawals == 0


def test_best_effort_guests_withdraw_nothing():
    worker = Worker()
    worker.arrive((BE, 0), (LS, 1))
    worker.launch()
    worker.arrive((BE, 2))
    assert worker.core.pass_counts.num_withdrawals == 0
