"""Groups of workers: replicas, replies that no token waits for any more, and workers that die."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from support.fake_device import make_request
from support.fake_group import IS_SPARSE, NUM_EXPERTS, FakeGroup
from support.fake_stages import expected_tokens, make_shape

from moestro.core.experts.expert_table import ExpertTable, spread_evenly
from moestro.core.request import ServiceClass
from moestro.core.stages import REPLY, Hop, HopMessage, StageShape
from moestro.flow.admission import ReceiveSide
from moestro.flow.dispatcher import Dispatcher, PeerSettings
from moestro.flow.micro_queues import MicroQueues
from moestro.flow.policies.one_queue import in_order
from moestro.flow.remote_tokens import RemoteTokens
from moestro.flow.token_pool import TokenPool

SHAPE = make_shape(8, num_chosen=3)


def everything_twice(version: int = 0, dead: tuple[int, ...] = ()) -> ExpertTable:
    """Worker 0 is a home; workers 1 and 2 have all experts."""
    logical_of = np.full((3, len(IS_SPARSE), NUM_EXPERTS), -1, np.int32)
    logical_of[1:] = np.arange(NUM_EXPERTS)
    return ExpertTable(version, logical_of, NUM_EXPERTS, np.array([worker not in dead for worker in range(3)]))


def make_group(table: ExpertTable, seed: int = 0, **settings) -> FakeGroup:
    group = FakeGroup(np.random.default_rng(seed), 1, table, lambda _: in_order, **settings)
    for device in group.devices:
        device.may_forget = True
    return group


def run(group: FakeGroup, requests: list, when=lambda now_ns: None) -> dict[str, list[int]]:
    for request in requests:
        group.ranks[0].add(request, 0)
    tokens: dict[str, list[int]] = {}
    for now_ns in range(100_000):
        when(now_ns)
        for _, output in group.turn(now_ns):
            tokens.setdefault(output.request_id, []).extend(output.token_ids)
        if group.is_idle:
            return tokens
    raise AssertionError("a token was forgotten")


REQUESTS = [make_request(f"r{i}", [7 + i, 2, 3 + i, 5][: 2 + i % 3], max_tokens=4) for i in range(6)]
EXPECTED = {request.request_id: expected_tokens(request, SHAPE) for request in REQUESTS}


@pytest.mark.parametrize("at_ns", [1, 40, 120, 333])
def test_what_a_dead_worker_owed_comes_from_the_other_copy_and_no_token_differs(at_ns):
    group = make_group(everything_twice(), seed=at_ns)

    def kill(now_ns: int) -> None:
        if now_ns == at_ns:
            for channel in [each for each in group.channels if 1 in each]:
                group.channels[channel].clear()
            group.executors[0].change_table(everything_twice(1, dead=(1,)), now_ns)
            group.executors[0].lose(1, now_ns)

    assert run(group, REQUESTS, kill) == EXPECTED
    assert not any(group.channels[0, 1])


@pytest.mark.parametrize("at_ns", [5, 50, 155])
def test_a_loss_may_be_noticed_before_the_table_says_that_the_worker_is_dead(at_ns):
    group = make_group(everything_twice(), seed=0)

    def kill(now_ns: int) -> None:
        if now_ns == at_ns:
            group.executors[0].lose(1, now_ns)
            for channel in [each for each in group.channels if 1 in each]:
                group.channels[channel].clear()
            group.executors[0].change_table(everything_twice(1, dead=(1,)), now_ns)

    assert run(group, REQUESTS, kill) == EXPECTED


def test_a_worker_that_comes_back_with_nothing_gets_everything_again():
    group = make_group(spread_evenly(len(IS_SPARSE), NUM_EXPERTS, [1, 2], 3))

    def restart(now_ns: int) -> None:
        if now_ns in (30, 90):
            group.channels[0, 1].clear()
            group.channels[1, 0].clear()
            group.executors[0].lose(1, now_ns)

    assert run(group, REQUESTS, restart) == EXPECTED


def test_a_table_can_change_while_tokens_are_under_way():
    """Both workers have all experts, and the home goes from one to the other and back."""
    only_2, only_1 = everything_twice(dead=(1,)), everything_twice(dead=(2,))
    group = make_group(everything_twice(), num_credits=2)

    def change(now_ns: int) -> None:
        if now_ns % 50 == 25:
            table = (only_1, only_2)[now_ns // 50 % 2]
            group.executors[0].change_table(table, now_ns)

    assert run(group, REQUESTS, change) == EXPECTED


def test_replies_to_an_aborted_request_are_dropped_and_counted():
    aborted = msgspec.structs.replace(make_request("r0", [1] * 12, max_tokens=4), service_class=ServiceClass.BE)
    others = {name: tokens for name, tokens in EXPECTED.items() if name != "r0"}
    num_dropped = 0
    for at_ns in range(10, 130, 10):
        group = make_group(spread_evenly(len(IS_SPARSE), NUM_EXPERTS, [1, 2], 3), seed=at_ns)

        def abort(now_ns: int, group=group, at_ns=at_ns) -> None:
            if now_ns == at_ns:
                group.ranks[0].abort("r0", now_ns)

        tokens = run(group, [aborted, *REQUESTS[1:]], abort)
        assert {name: found for name, found in tokens.items() if name != "r0"} == others
        num_dropped += group.executors[0].num_dropped
    assert num_dropped > 0


def make_dispatcher(switch_gap: int) -> Dispatcher:
    shape = StageShape(is_sparse=IS_SPARSE, num_experts=0, num_chosen=1, num_rows=4, num_places=4)
    return Dispatcher(peers(0, switch_gap=switch_gap), TokenPool(shape))


def peers(worker: int, **settings) -> PeerSettings:
    return PeerSettings(worker=worker, num_workers=3, table=everything_twice(), num_credits=99, **settings)


def test_messages_of_a_home_that_started_again_are_accepted():
    """Its messages are numbered from 0 again, so without a larger epoch they would count as repeated."""
    shape = StageShape(
        is_sparse=IS_SPARSE, num_experts=NUM_EXPERTS, num_chosen=1, num_rows=4, num_places=4, num_remote_places=4
    )
    pool, remote = TokenPool(shape), RemoteTokens(4, 4, 3)
    receiver = ReceiveSide(peers(1), remote, MicroQueues(shape, pool, remote))
    one = np.zeros(1, np.int32)
    for incarnation in (0, 1):
        home = Dispatcher(peers(0, incarnation=incarnation), TokenPool(shape))
        _, sends = home.dispatch(0, np.zeros(1, np.int64), one, one[:, None])
        receiver.take(sends[0].message, 0)
    assert receiver.num_dropped == 0
    receiver.take(sends[0].message, 0)
    assert receiver.num_dropped == 1, "it was repeated"


def receive_side(num_remote_places: int) -> ReceiveSide:
    shape = StageShape(
        is_sparse=IS_SPARSE,
        num_experts=NUM_EXPERTS,
        num_chosen=1,
        num_rows=4,
        num_places=4,
        num_remote_places=num_remote_places,
    )
    pool, remote = TokenPool(shape), RemoteTokens(4, num_remote_places, 3)
    return ReceiveSide(peers(1), remote, MicroQueues(shape, pool, remote))


def dispatch_of(incarnation: int, num_tokens: int = 1) -> HopMessage:
    """The first message of a home that started for the nth time."""
    home = Dispatcher(peers(0, incarnation=incarnation), TokenPool(SHAPE_OF_ONE))
    places = np.arange(num_tokens, dtype=np.int32)
    _, sends = home.dispatch(0, places.astype(np.int64), places, np.zeros((num_tokens, 1), np.int32))
    return sends[0].message


SHAPE_OF_ONE = StageShape(is_sparse=IS_SPARSE, num_experts=NUM_EXPERTS, num_chosen=1, num_rows=4, num_places=4)


def entries(count: int) -> int:
    del count
    return 0


def test_a_dispatch_of_a_home_s_former_life_is_dropped():
    """It was under way when the home started again; its home waits for none of its tokens."""
    receiver = receive_side(num_remote_places=4)
    receiver.take(dispatch_of(1), 0)
    assert len(receiver.admit(entries)) == 1
    receiver.take(dispatch_of(0), 0)
    assert receiver.num_dropped == 1
    assert receiver.admit(entries) == []


def test_a_dispatch_that_waits_for_places_goes_when_its_home_starts_again():
    receiver = receive_side(num_remote_places=3)
    receiver.take(dispatch_of(0, num_tokens=2), 0)
    assert len(receiver.admit(entries)) == 1
    receiver.take(with_hop(dispatch_of(0, num_tokens=2), seq=1), 0)
    assert receiver.admit(entries) == [], "two places are missing"
    receiver.take(dispatch_of(1), 0)
    [store] = receiver.admit(entries)
    assert len(store.places) == 1, "the message of the former life would take two"


def with_hop(message: HopMessage, **hop) -> HopMessage:
    return msgspec.structs.replace(message, hop=msgspec.structs.replace(message.hop, **hop))


def test_a_contribution_of_a_worker_that_a_pair_is_not_with_is_dropped():
    """A pair that was sent again to another copy has one contribution, no matter which answers first."""
    home, one = make_dispatcher(switch_gap=1 << 40), np.zeros(1, np.int32)
    _, [send] = home.dispatch(0, np.zeros(1, np.int64), one, one[:, None])
    records, owner = send.message.records, send.message.hop.dst
    assert home.owed(records, np.array([3 - owner], np.int16)).tolist() == []
    assert home.num_dropped == 1
    assert home.owed(records, np.array([owner], np.int16)).tolist() == [0]


def reply_of(worker: int, depth: int) -> Hop:
    return Hop(kind=REPLY, src=worker, dst=0, epoch=0, seq=0, layer=0, num_rows=0, depths=(depth,))


def test_copies_get_experts_in_turn_at_first():
    """Else one worker would idle until the backlog of the other exceeds the gap, which few credits never allow."""
    assert make_dispatcher(switch_gap=1 << 40)._worker_of[0].tolist() == [1, 2] * (NUM_EXPERTS // 2)


@pytest.mark.parametrize(("gap", "depth", "changes"), [(10, 10, False), (10, 11, True), (0, 1, True)])
def test_a_home_changes_to_the_other_copy_when_its_backlog_is_less_by_more_than_the_gap(gap, depth, changes):
    dispatcher = make_dispatcher(gap)
    on_busy_worker = dispatcher._worker_of[0] == 1
    dispatcher.accept(reply_of(1, depth))
    dispatcher._choose_copies(0)
    assert (dispatcher._worker_of[0][on_busy_worker] == (2 if changes else 1)).all()
    assert (dispatcher._worker_of[0][~on_busy_worker] == 2).all()
    assert dispatcher.num_switches == (NUM_EXPERTS // 2 if changes else 0)


def near(*workers: int) -> tuple[bool, ...]:
    return tuple(worker in workers for worker in range(3))


def test_copies_of_the_home_s_machine_get_the_tokens_while_backlogs_differ_little():
    pool = TokenPool(StageShape(is_sparse=IS_SPARSE, num_experts=0, num_chosen=1, num_rows=4, num_places=4))
    dispatcher = Dispatcher(peers(0, switch_gap=10, is_near=near(0, 2)), pool)
    assert (dispatcher._worker_of == 2).all()
    dispatcher.accept(reply_of(2, 20))
    dispatcher._choose_copies(0)
    assert (dispatcher._worker_of[0] == 2).all(), "as far as a copy elsewhere counts more, and the gap"
    dispatcher._backlog[2] = 21
    dispatcher._choose_copies(0)
    assert (dispatcher._worker_of[0] == 1).all()
    dispatcher._backlog[:] = 5, 5, 5
    dispatcher._choose_copies(0)
    assert (dispatcher._worker_of[0] == 1).all()
    dispatcher._backlog[1] = 6
    dispatcher._choose_copies(0)
    assert (dispatcher._worker_of[0] == 2).all()


def test_a_machine_without_a_copy_sends_to_all_others_in_turn():
    pool = TokenPool(StageShape(is_sparse=IS_SPARSE, num_experts=0, num_chosen=1, num_rows=4, num_places=4))
    dispatcher = Dispatcher(peers(0, is_near=near(0)), pool)
    assert dispatcher._worker_of[0].tolist() == [1, 2] * (NUM_EXPERTS // 2)


def test_an_expert_whose_copies_are_the_same_stays_when_the_table_changes():
    dispatcher = make_dispatcher(switch_gap=0)
    dispatcher.accept(reply_of(1, 5))
    dispatcher._choose_copies(0)
    table = everything_twice(1)
    table.logical_of[1, 0, 3] = -1
    dispatcher.change_table(table)
    assert (dispatcher._worker_of[0] == 2).all()
    assert dispatcher._worker_of[2].tolist() == [1, 2] * (NUM_EXPERTS // 2)


def test_a_home_is_settled_when_it_waits_for_no_slot_that_the_table_gave_up():
    dispatcher, one = make_dispatcher(switch_gap=0), np.zeros(1, np.int32)
    dispatcher.dispatch(0, np.zeros(1, np.int64), one, one[:, None])  # expert 0, on worker 1
    assert dispatcher.is_settled
    table = everything_twice(1)
    table.logical_of[1, 0, 0] = -1
    assert dispatcher.change_table(table) == []
    assert not dispatcher.is_settled
    table = everything_twice(2)
    table.logical_of[1, 2, 0] = -1  # of another layer
    dispatcher.change_table(table)
    assert dispatcher.is_settled


def test_a_table_in_which_an_expert_lives_nowhere_is_refused():
    with pytest.raises(ValueError, match="expert 0 of layer 0 has no copy on a live worker"):
        everything_twice(dead=(1, 2))


def test_a_table_with_two_copies_on_one_worker_is_refused():
    logical_of = np.zeros((1, 1, 2), np.int32)
    with pytest.raises(ValueError, match="worker 0 has two copies of expert 0 in layer 0"):
        ExpertTable(0, logical_of, 1, np.ones(1, np.bool_))
