"""The coordinator of a group: its messages when workers join, end, are added, drained and removed."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from moestro.core.clock import NS_PER_S
from moestro.core.experts.expert_table import EMPTY, ExpertLayers
from moestro.errors import ConfigError, EngineDiedError, NoEngineError
from moestro.flow.settings import GroupOptions
from moestro.server.experts.coordinator import CONNECT_S, START_S, Coordinator
from moestro.server.figures.prometheus import GroupLines, group_metrics
from moestro.web.errors import HttpError
from moestro.wire.messages import Failed, Heartbeat, Joined, Members, Ready, WorkerFigures

LOAD_S = 50.0
LAYERS = ExpertLayers(num_layers=3, layers=(0, 2), num_experts=6)


class Group:
    """A coordinator, and what it sent to each worker. All launches are numbered from 0."""

    def __init__(self, *, num_redundant: int = 0, **options) -> None:
        self.sent: dict[int, list] = {}
        self.unreachable: set[int] = set()
        self.launches: dict[int, int] = {}
        self.now_ns = 0
        self.num_shares = GroupOptions(**options).num_shares
        self.coordinator = Coordinator(GroupOptions(**options), LOAD_S, self._send, num_redundant)

    def _send(self, worker, message) -> None:
        if worker in self.unreachable:
            raise NoEngineError
        self.sent.setdefault(worker, []).append(message)

    def launch(self, *workers) -> None:
        for worker in workers:
            self.launches[worker] = self.launches.get(worker, -1) + 1
            self.coordinator.launched(worker, self.launches[worker], self.now_ns)

    def hear(self, message, *workers) -> None:
        for worker in workers:
            self.coordinator.on_message(worker, message, self.now_ns)

    def join(self, *workers) -> None:
        for worker in workers:
            self.hear(Joined(f"tcp://node-{worker}:{self.launches[worker]}", LAYERS), worker)

    def serve(self, *workers) -> None:
        self.launch(*workers)
        self.join(*workers)
        self.hear(Ready(None), *workers)

    def end(self, worker, how="killed") -> Exception:
        return self.coordinator.ended(worker, how, self.now_ns)

    def check(self, after_s: float) -> BaseException | None:
        self.now_ns += int(after_s * NS_PER_S)
        self.coordinator.check_start(self.now_ns)
        done = self.coordinator.all_serve
        return done.exception() if done.done() else None

    @property
    def members(self) -> Members:
        return self.coordinator.members()

    @property
    def used(self) -> list:
        return self.used_in(self.members)[:5]

    def used_in(self, members: Members) -> list[tuple[int, ...]]:
        """Shares of the experts whose tokens each worker gets, which are the same in both layers."""
        logical_of = members.table.whole_table().logical_of
        assert (logical_of[:, 0] == logical_of[:, 2]).all()
        parts = np.array_split(np.arange(LAYERS.num_experts), self.num_shares)
        share_of = {expert: share for share, part in enumerate(parts) for expert in part.tolist()}
        used = [tuple(share_of[slot] for slot in slots if slot != EMPTY) for slots in logical_of[:, 0].tolist()]
        assert all(own.count(share) == len(parts[share]) for own in used for share in own)
        return [tuple(dict.fromkeys(own)) for own in used]


def in_loop(test):
    """Run a test inside an event loop."""

    def run():
        async def inside():
            test()

        asyncio.run(inside())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@in_loop
def test_the_group_is_described_when_all_have_joined_and_is_ready_when_all_serve():
    group = Group(attention=2, experts=2)
    group.launch(0, 1, 2, 3)
    group.join(0, 1, 2)
    assert group.sent == {}
    group.join(3)
    assert sorted(group.sent) == [0, 1, 2, 3]
    (members,) = group.sent[0]
    assert members.addresses[:5] == (*(f"tcp://node-{worker}:0" for worker in range(4)), "")
    assert group.used_in(members)[:4] == [(), (), (0,), (1,)]
    group.hear(Ready(None), 0, 1, 2)
    assert not group.coordinator.all_serve.done()
    group.hear(Ready(None), 3)
    assert group.coordinator.all_serve.done()


@in_loop
def test_a_worker_without_copies_keeps_its_shares_while_it_restarts():
    group = Group(attention=1, experts=2)
    group.serve(0, 1, 2)
    group.sent.clear()
    assert "expert worker 1: killed" in str(group.end(2))
    assert sorted(group.sent) == [0, 1]
    assert group.sent[0][-1].addresses[2] == ""
    assert group.used[:3] == [(), (0,), (1,)]
    assert not group.coordinator.is_covered(2)
    group.launch(2)
    group.join(2)
    assert group.sent[0][-1].launches[2] == 1
    assert group.sent[0][-1].addresses[2] == "tcp://node-2:1"
    assert group.sent[0][-1].version > group.sent[0][-2].version


@in_loop
def test_tokens_of_a_worker_with_copies_go_to_these_until_it_is_back():
    group = Group(attention=1, experts=3, expert_copies=2)
    group.serve(0, 1, 2, 3)
    assert group.used[:4] == [(), (0, 1), (1, 2), (2, 0)]
    group.end(2)
    assert group.used[:4] == [(), (0, 1), (), (2, 0)]
    assert group.coordinator.is_covered(2)
    group.end(3)  # share 2 is nowhere now; both wait for it, and the other shares stay where they are
    assert group.used[:4] == [(), (0, 1), (2,), (2,)]
    group.launch(2)
    group.join(2)
    assert group.used[:4] == [(), (0, 1), (1, 2), ()]


@in_loop
def test_copies_take_over_from_a_silent_worker_and_give_back_when_it_speaks():
    group = Group(attention=1, experts=2, expert_copies=2)
    group.serve(0, 1, 2)
    group.sent.clear()
    for _ in range(3):
        group.coordinator.doubt(1, is_silent=True)
    (members,) = group.sent[0]
    assert group.used_in(members)[:3] == [(), (), (1, 0)]
    assert members.table.alive[:3] == (True, False, True)  # homes send what it owes to the copies
    assert members.addresses[1], "it may speak again"
    group.coordinator.doubt(1, is_silent=False)
    assert group.used_in(group.sent[0][-1])[:3] == [(), (0, 1), (1, 0)]
    assert all(group.sent[0][-1].table.alive)
    assert group.coordinator.view(1).num_doubts == 1


@in_loop
def test_the_only_worker_with_experts_is_waited_for_although_it_is_silent():
    group = Group(attention=1, experts=2, expert_copies=2)
    group.serve(0, 1, 2)
    group.coordinator.doubt(1, is_silent=True)
    group.coordinator.doubt(2, is_silent=True)
    members = group.coordinator.members()
    assert group.used_in(members)[:3] == [(), (0, 1), (1, 0)]
    assert all(members.table.alive)
    single = Group(attention=1, experts=1)
    single.serve(0, 1)
    single.sent.clear()
    single.coordinator.doubt(1, is_silent=True)
    assert single.sent == {}
    assert single.coordinator.view(1).num_doubts == 0


@in_loop
def test_the_doubt_ends_with_the_process():
    group = Group(attention=1, experts=2, expert_copies=2)
    group.serve(0, 1, 2)
    group.coordinator.doubt(1, is_silent=True)
    group.end(1)
    assert all(group.members.table.alive)
    group.launch(1)
    group.hear(Joined("ipc://1", LAYERS), 1)
    assert group.used[:3] == [(), (0, 1), (1, 0)]


@in_loop
def test_a_worker_is_given_up_only_if_another_one_has_its_experts_now_or_after_its_restart():
    group = Group(attention=1, experts=2, expert_copies=2)
    group.serve(0, 1, 2)
    group.end(1)
    group.end(2)  # it will be started again
    assert group.coordinator.give_up(1)
    assert group.coordinator.is_given_up(1)
    assert group.used[:3] == [(), (), (1, 0)]
    assert not group.coordinator.give_up(2)


@in_loop
def test_a_drained_worker_is_used_again_when_the_last_other_copy_is_given_up():
    group = Group(attention=1, experts=2, expert_copies=2)
    group.serve(0, 1, 2)
    group.coordinator.drain(2, is_draining=True)
    group.end(1)
    assert group.coordinator.give_up(1)
    assert group.used[:3] == [(), (), (1, 0)]


@in_loop
def test_an_unreachable_worker_does_not_keep_the_others_from_hearing():
    group = Group(attention=1, experts=2)
    group.serve(0, 1, 2)
    group.sent.clear()
    group.unreachable.add(0)
    group.end(2)
    assert list(group.sent) == [1]


@pytest.mark.parametrize(
    ("bring", "limit_s", "text"),
    [
        (lambda group: None, START_S, "expert worker 0 was still starting after 300 s"),
        (lambda group: group.hear(Heartbeat(0), 1), LOAD_S, "expert worker 0 was still loading after 50 s"),
        (lambda group: group.join(0, 1), CONNECT_S, "expert worker 0 was still connecting after 20 s"),
    ],
)
def test_the_start_fails_with_the_worker_that_takes_too_long(bring, limit_s, text):
    def test():
        group = Group(attention=1, experts=1)
        group.launch(0, 1)
        group.join(0)
        bring(group)
        group.hear(Ready(None), 0)
        assert group.check(limit_s - 1) is None
        error = group.check(2)
        assert isinstance(error, EngineDiedError)
        assert str(error) == text

    in_loop(test)()


@in_loop
def test_the_start_fails_with_the_cause_of_the_first_worker_that_ends():
    group = Group(attention=1, experts=2)
    group.launch(0, 1, 2)
    group.hear(Failed("no memory"), 2)
    group.end(2)
    group.end(1)
    assert str(group.check(0)) == "expert worker 1: no memory"


@in_loop
def test_a_worker_that_refuses_its_checkpoint_is_an_error_of_the_settings():
    group = Group(attention=1, experts=2)
    group.launch(0, 1, 2)
    group.hear(Failed("NaN", is_config=True), 0)
    group.end(0)
    assert isinstance(group.check(0), ConfigError)


def loads(group: Group, worker: int) -> list[int]:
    """Experts of a layer that a worker loads which starts now."""
    slots = group.coordinator.spec(worker).expert_table(LAYERS.num_layers, LAYERS.num_experts).logical_of[worker, 2]
    return slots[slots != EMPTY].tolist()


@in_loop
def test_a_worker_that_is_added_holds_the_experts_with_the_fewest_copies():
    group = Group(attention=1, experts=2)
    group.serve(0, 1, 2)
    worker = group.coordinator.add()
    assert worker == 3
    assert loads(group, 3) == [0, 1, 2]
    group.launch(3)
    assert group.used[3] == ()  # share 0 has a worker that runs
    group.join(3)
    assert group.used == [(), (0,), (1,), (0,), ()]
    assert group.coordinator.add() == 4
    assert loads(group, 4) == [3, 4, 5]
    while len(group.coordinator.present) < group.coordinator.num_places:
        group.coordinator.add()
    with pytest.raises(HttpError, match="no place"):
        group.coordinator.add()


@in_loop
def test_only_a_worker_whose_experts_another_one_serves_can_be_drained():
    group = Group(attention=1, experts=2)
    group.serve(0, 1, 2)
    with pytest.raises(HttpError, match="expert 0 of layer 0: add a worker"):
        group.coordinator.drain(1, is_draining=True)
    group.coordinator.add()
    group.launch(3)
    with pytest.raises(HttpError, match="expert 0 of layer 0: add a worker"):  # it does not serve yet
        group.coordinator.drain(1, is_draining=True)
    group.join(3)
    group.hear(Ready(None), 3)
    group.coordinator.drain(1, is_draining=True)
    assert group.used[:4] == [(), (), (1,), (0,)]
    with pytest.raises(HttpError, match="expert 0 of layer 0: add a worker"):
        group.coordinator.drain(3, is_draining=True)
    group.coordinator.drain(1, is_draining=False)
    assert group.used[:4] == [(), (0,), (1,), (0,)]


@in_loop
def test_a_removed_worker_leaves_its_place_to_another():
    group = Group(attention=1, experts=2, expert_copies=2)
    group.serve(0, 1, 2)
    group.coordinator.drain(1, is_draining=True)
    group.coordinator.remove(1)
    assert group.coordinator.is_given_up(1)
    assert group.coordinator.expert_worker(0) is None
    group.end(1)
    assert [view.number for view in group.coordinator.views()] == [0, 1]
    assert group.used[:3] == [(), (), (1, 0)]
    assert group.coordinator.add() == 1
    group.launch(1)
    assert group.launches[1] == 1  # the others know its process from the one before
    group.join(1)
    assert group.used[:3] == [(), (0,), (1, 0)]


@in_loop
def test_a_dismissed_worker_gets_no_message_and_keeps_its_place_until_it_ends():
    group = Group(attention=1, experts=3, expert_copies=3)
    group.serve(0, 1, 2, 3)
    for worker in (1, 2):
        group.coordinator.drain(worker, is_draining=True)
        group.coordinator.remove(worker)
    num_before = {worker: len(group.sent[worker]) for worker in (1, 2, 3)}
    group.coordinator.dismissed(1, group.now_ns)
    group.coordinator.dismissed(2, group.now_ns)
    group.end(1)
    assert [len(group.sent[worker]) - num_before[worker] for worker in (1, 2, 3)] == [0, 0, 1]
    assert group.sent[3][-1].addresses[1:3] == ("", "")
    assert group.coordinator.add() == 1
    assert group.coordinator.add() == 4  # not 2, whose process still runs


@in_loop
def test_a_worker_that_is_removed_while_it_does_not_run_holds_nothing():
    group = Group(attention=1, experts=2, expert_copies=2)
    group.serve(0, 1, 2)
    group.end(1)
    group.coordinator.drain(1, is_draining=True)
    group.coordinator.remove(1)
    assert loads(group, 1) == []


def figures(idle_ns: int, num_sent: int, waiting: int = 0) -> WorkerFigures:
    return WorkerFigures(
        num_waiting=(0, waiting),
        oldest_ns=(0, 2_500_000 if waiting else 0),
        idle_ns=idle_ns,
        lived_ns=2 * idle_ns,
        num_sent=(num_sent, 0),
        sent_bytes=(num_sent * 1000, 0),
        num_dropped=3,
        num_two_phase=(2, 0),
        two_phase_bytes=(1500, 0),
    )


@in_loop
def test_log_lines_tell_queues_stalls_and_links_of_workers_that_did_anything():
    group = Group(attention=1, experts=1)
    group.serve(0, 1)
    lines = GroupLines(group.coordinator)
    assert lines.lines(10) == []
    group.hear(figures(4 * NS_PER_S, 2000, waiting=7), 1)
    reported = "queued 7, the oldest for 2.5 ms in layer 1; stalled 50%; sent 200 messages/s, 0.20 MB/s"
    assert lines.lines(10) == [f"expert worker 0: {reported}"]
    assert lines.lines(10) == []
    group.hear(figures(5 * NS_PER_S, 2100), 1)
    assert lines.lines(10) == ["expert worker 0: queued 0; stalled 50%; sent 10 messages/s, 0.01 MB/s"]
    group.end(1)
    group.serve(1)
    group.hear(figures(NS_PER_S, 50), 1)  # the totals of another process
    assert lines.lines(10) == ["expert worker 0: queued 0; stalled 50%; sent 5 messages/s, 0.01 MB/s"]


@in_loop
def test_metrics_have_a_series_for_each_worker_layer_and_link():
    group = Group(attention=1, experts=1)
    group.serve(0, 1)
    group.hear(figures(NS_PER_S, 5, waiting=7), 1)
    samples = [sample for metric in group_metrics(group.coordinator) for sample in metric.samples]
    values = {(sample.name, *sample.labels.values()): sample.value for sample in samples}
    assert values["moestro:worker_serving", "engine 0"] == 1
    assert values["moestro:worker_queue_tokens", "expert worker 0", "1"] == 7
    assert values["moestro:worker_queue_age_seconds", "expert worker 0", "1"] == 0.0025
    assert values["moestro:worker_idle_seconds_total", "expert worker 0"] == 1
    assert values["moestro:worker_messages_dropped_total", "expert worker 0"] == 3
    assert values["moestro:link_messages_total", "expert worker 0", "engine 0"] == 5
    assert values["moestro:link_two_phase_messages_total", "expert worker 0", "engine 0"] == 2
    assert values["moestro:link_two_phase_bytes_total", "expert worker 0", "engine 0"] == 1500
    assert values["moestro:link_bytes_total", "expert worker 0", "engine 0"] == 5000
