"""What waits for credits: latency-sensitive tokens leave first, and each class keeps its order."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from support.fake_group import IS_SPARSE, NUM_EXPERTS
from support.random_units import units_of

from moestro.core.experts.expert_table import spread_evenly
from moestro.core.stages import HOP_RECORD, REPLY, Hop, StageShape
from moestro.core.views import BE, LS
from moestro.flow.dispatcher import Dispatcher, Outbox, PeerSettings, make_parcel
from moestro.flow.token_pool import TokenPool

NUM_PLACES = 64
SHAPE = StageShape(
    is_sparse=IS_SPARSE, num_experts=0, num_chosen=2, num_rows=NUM_PLACES, num_places=NUM_PLACES, num_remote_places=0
)
TABLE = spread_evenly(len(IS_SPARSE), NUM_EXPERTS, [1], 2)


class Home:
    """A home whose units go to the experts of worker 1."""

    def __init__(self, num_credits: int, **settings) -> None:
        self.pool, self.num_entries, self.num_replies = TokenPool(SHAPE), 0, 0
        peers = PeerSettings(worker=0, num_workers=2, table=TABLE, num_credits=num_credits, **settings)
        self.dispatcher = Dispatcher(peers, self.pool)

    def send(self, *units: tuple[int, int]) -> list:
        """Units of (class, tokens) leave the gate of layer 0; what is sent at once."""
        ids = self.pool.enter(self.num_entries, units_of(units, first_slot=10 * self.num_entries))
        self.num_entries += 1
        wave = self.pool.wave(ids)
        places = self.pool.take_places(wave, self.pool.merges(wave))
        return self.dispatcher.dispatch(0, ids, places, np.tile(np.array([0, 1], np.int32), (len(places), 1)))[1]

    def give_credits(self, num: int, **header) -> list:
        reply = Hop(kind=REPLY, src=1, dst=0, epoch=0, seq=self.num_replies, layer=0, num_rows=0, credits=num, **header)
        self.num_replies += 1
        return self.dispatcher.accept(reply)[1]


def shape_of(sends: list) -> list[tuple[int, list[int]]]:
    """Number and classes of the rows of each message."""
    found = []
    for send in sends:
        records, first = send.message.records, {}
        for row, service_class in zip(records["row"].tolist(), records["service_class"].tolist(), strict=True):
            first.setdefault(row, service_class)
        assert list(first) == list(range(send.message.hop.num_rows)) == list(range(len(send.places)))
        found.append((send.message.hop.seq, list(first.values())))
    return found


def test_tokens_of_both_classes_leave_in_one_message_while_there_are_credits():
    assert shape_of(Home(5).send((BE, 2), (LS, 3))) == [(0, [BE, BE, LS, LS, LS])]


def test_latency_sensitive_tokens_leave_before_best_effort_ones_that_waited_before():
    home = Home(2)
    assert shape_of(home.send((BE, 4))) == [(0, [BE, BE])]
    assert home.send((LS, 3)) == []
    assert shape_of(home.give_credits(2)) == [(1, [LS, LS])]
    assert shape_of(home.give_credits(2)) == [(2, [LS]), (3, [BE])]
    assert shape_of(home.give_credits(2)) == [(4, [BE])]


def test_of_a_mixed_message_that_does_not_fit_the_latency_sensitive_part_goes_first():
    home = Home(2)
    assert shape_of(home.send((BE, 3), (LS, 2))) == [(0, [LS, LS])]
    assert shape_of(home.give_credits(9)) == [(1, [BE, BE, BE])]


def test_new_tokens_do_not_overtake_those_of_their_class_that_wait():
    home = Home(1)
    home.send((LS, 2))
    home.send((LS, 1))
    (first,), (second,) = home.give_credits(1), home.give_credits(1)
    assert (first.places.tolist(), second.places.tolist()) == ([1], [2])


def test_tokens_that_were_given_up_are_not_sent():
    home = Home(1)
    home.send((BE, 1))
    home.send((BE, 2))
    home.send((LS, 1))
    home.pool.leave(home.pool.find(np.array([10])))
    assert shape_of(home.give_credits(9)) == [(1, [LS])]


def test_a_repeated_reply_gives_no_credits():
    home = Home(1)
    home.send((LS, 3))
    assert shape_of(home.give_credits(1)) == [(1, [LS])]
    home.num_replies = 0
    assert home.give_credits(1) == []
    assert home.dispatcher.num_dropped == 1


def test_a_worker_that_was_lost_has_all_its_places_again():
    home = Home(2)
    home.send((LS, 2))
    home.dispatcher.lose(1)
    assert shape_of(home.send((LS, 2))) == [(0, [LS, LS])]


@pytest.mark.parametrize("seed", range(20))
def test_law_everything_leaves_once_latency_sensitive_first_and_each_class_in_order(seed):
    rng = np.random.default_rng(seed)
    outbox, waiting, taken = Outbox(TokenPool(replace(SHAPE, num_places=1000))), {LS: [], BE: []}, []
    place = 0
    for _ in range(60):
        if rng.random() < 0.5:
            num_tokens = int(rng.integers(1, 6))
            at = np.repeat(np.arange(place, place + num_tokens, dtype=np.int32), rng.integers(1, 3, num_tokens))
            classes = rng.integers(0, 2, num_tokens)
            records = np.zeros(len(at), HOP_RECORD)
            records["place"], records["service_class"] = at, classes[at - place]
            outbox.add(make_parcel(0, records, at))
            for service_class in (LS, BE):
                waiting[service_class] += (place + np.flatnonzero(classes == service_class)).tolist()
            place += num_tokens
        else:
            num_rows = int(rng.integers(1, 8))
            parcel = outbox.take(num_rows)
            assert (parcel is None) == (not waiting[LS] and not waiting[BE])
            if parcel is not None:
                own = waiting[LS] or waiting[BE]
                got = parcel.places.tolist()
                assert 0 < len(got) <= num_rows
                assert got == own[: len(got)]
                assert parcel.places[parcel.records["row"]].tolist() == parcel.records["place"].tolist()
                del own[: len(got)]
                taken += got
    taken += [place for parcel in outbox.empty() for place in parcel.places.tolist()]
    assert sorted(taken) == list(range(place))
    assert not outbox


def test_the_backlog_of_a_worker_is_what_it_reported_and_had_not_taken_in():
    home = Home(60)
    for num_tokens in (3, 5, 7):  # two choices each
        home.send((LS, num_tokens))
    assert home.dispatcher._backlog[1] == 30
    home.give_credits(1, depths=(2, 1), num_taken=1)
    assert home.dispatcher._backlog[1] == 3 + 10 + 14
    home.send((LS, 1))
    home.give_credits(1, depths=(4,), num_taken=1)
    assert home.dispatcher._backlog[1] == 4 + 10 + 14 + 2
    home.give_credits(1, depths=(6,), num_taken=4)
    assert home.dispatcher._backlog[1] == 6
    home.send((LS, 1))
    home.dispatcher.lose(1)
    assert home.dispatcher._backlog[1] == 0
    home.send((LS, 2))
    assert home.dispatcher._backlog[1] == 4
