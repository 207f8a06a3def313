"""Law: no client with less than an equal share of a full queue is refused, and the client with most gives way."""

from __future__ import annotations

from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.fake_device import KvDevice, make_request

from moestro.engine.rank import Rank, build_rank
from moestro.engine.registry import ORDER_POLICIES, SHARE_POLICIES
from moestro.engine.settings import SchedulerSettings
from moestro.errors import QueueFullError
from moestro.server.engines.engine_client import WaitingClients

NUM_PLACES, NUM_BLOCKS = 6, 12
CLIENTS = [None, "a", "b", "c", "d", "e", "f", "g", "h"]
ACTIONS = st.lists(st.one_of(st.integers(0, 8), st.just("step"), st.just("abort")), max_size=120)


def small_rank(order: str, share: str) -> Rank:
    sizes = {"block_size": 4, "max_model_len": 40, "max_num_seqs": 3, "max_num_batched_tokens": 16}
    settings = SchedulerSettings(
        num_blocks=NUM_BLOCKS, scheduling_policy=order, share_policy=share, max_num_queued_reqs=NUM_PLACES, **sizes
    )
    return build_rank(settings, KvDevice(NUM_BLOCKS, 4, 0))


def held(rank: Rank) -> Counter:
    waiting = [sequence for sequence in rank.scheduler.by_id.values() if sequence.slot is None]
    return Counter(sequence.request.client for sequence in waiting)


def newest_of(rank: Rank, client: str | None) -> str:
    """Newest request of a client that waits and was never admitted."""
    waiting = [sequence for sequence in rank.scheduler.by_id.values() if sequence.slot is None and sequence.is_new]
    return max((each.serial, each.request.request_id) for each in waiting if each.request.client == client)[1]


def arrive(rank: Rank, client: str | None, number: int, max_tokens: int) -> None:
    before, given_way = held(rank), rank.scheduler.take_given_way()
    assert not given_way
    newest = {each: newest_of(rank, each) for each in before if any_new(rank, each)}
    request = msgspec.structs.replace(make_request(f"{number}", [number % 50, 7], max_tokens=max_tokens), client=client)
    clients = {*before, client}
    try:
        rank.add(request, number)
    except QueueFullError:
        assert held(rank) == before, "a refusal changes nothing"
        assert before.total() >= NUM_PLACES
        is_all_new = all(sequence.is_new for sequence in rank.scheduler.by_id.values() if sequence.slot is None)
        if is_all_new:
            assert before[client] >= NUM_PLACES // len(clients), "refused with less than an equal share"
            assert max(before.values()) <= before[client] + 1, "refused while another client has more"
        return
    after, given_way = held(rank), rank.take_given_way()
    if before.total() < NUM_PLACES:
        assert not given_way, "none gives way while there is room"
        return
    (left,) = given_way
    assert after.total() == before.total()
    (giver,) = [each for each in before if after[each] < before[each]]
    assert giver != client
    assert left == newest[giver]
    assert left not in rank.scheduler.by_id
    assert after[giver] >= after[client]


def any_new(rank: Rank, client: str | None) -> bool:
    waiting = [sequence for sequence in rank.scheduler.by_id.values() if sequence.slot is None]
    return any(sequence.is_new for sequence in waiting if sequence.request.client == client)


@pytest.mark.parametrize("share", SHARE_POLICIES.names())
@pytest.mark.parametrize("order", ORDER_POLICIES.names())
@given(actions=ACTIONS, max_tokens=st.sampled_from([1, 8, 30]))
def test_no_client_with_less_than_its_share_is_refused(order, share, actions, max_tokens):
    rank = small_rank(order, share)
    for number, action in enumerate(actions):
        if action == "step":
            rank.step(number)
            rank.scheduler.check()
        elif action == "abort":
            for request_id in list(rank.scheduler.by_id)[:1]:
                rank.abort(request_id, number)
        else:
            arrive(rank, CLIENTS[action], number, max_tokens)


@given(actions=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 1), st.booleans()), max_size=80))
def test_the_api_server_counts_as_it_would_anew(actions):
    """It sends a request to a full queue exactly if the client has less than a share, and another one has more."""
    clients, held_on = WaitingClients(2, NUM_PLACES), [{}, {}]
    for number, (client, engine, is_end) in enumerate(actions):
        mine = held_on[engine]
        if is_end and mine:
            clients.discard(mine_id := next(iter(mine)))
            clients.discard(mine_id)
            del mine[mine_id]
        else:
            clients.add(engine, client, str(number))
            mine[str(number)] = client
    for client in range(6):
        expected = []
        for engine, mine in enumerate(held_on):
            counts = Counter(mine.values())
            num_own = counts.pop(client, 0)
            share = max(1, NUM_PLACES // (len(counts) + 1))
            if num_own < share and any(count > num_own + 1 for count in counts.values()):
                expected.append(engine)
        assert clients.makes_room_for(client) == expected


def test_an_order_that_forgets_clients_is_caught(monkeypatch):
    monkeypatch.setattr("moestro.engine.waiting.client_giving_way", lambda *_: None)
    rank = small_rank("fcfs", "equal")
    for number in range(NUM_PLACES):
        arrive(rank, "a", number, 30)
    with pytest.raises(AssertionError, match="refused with less than an equal share"):
        arrive(rank, "b", NUM_PLACES, 30)
