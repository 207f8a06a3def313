from collections import Counter

import numpy as np
import pytest
from support.routers import decide, request, router, table

from moestro.errors import ConfigError
from moestro.routing.policies.load import BoundedHash, SessionAffinity, StickyMap, UserAffinity

SECOND = 1_000_000_000


def test_a_session_stays_with_its_engine_and_sessions_spread():
    engines = table(num_in_flight=[0] * 8)
    of = [
        [decide(BoundedHash(), engines, i, req=request(session_id=f"s{s}")).engine for i in range(5)]
        for s in range(400)
    ]
    assert all(len(set(each)) == 1 for each in of)
    assert all(25 < count < 80 for count in Counter(each[0] for each in of).values())


def test_a_prompts_beginning_is_its_key_where_there_is_no_session():
    engines = table(num_in_flight=[0] * 8)
    prompts = [
        request(prompt=np.concatenate([np.arange(256) + 7 * i, np.arange(j)])) for i in range(40) for j in (0, 64)
    ]
    of = [decide(BoundedHash(), engines, req=each).engine for each in prompts]
    assert of[::2] == of[1::2]
    assert len(set(of)) == 8
    assert {decide(BoundedHash(), engines, i).engine for i in range(60)} == set(range(8)), "no key: by load"


def test_only_the_keys_of_an_engine_that_goes_move():
    keys = [request(session_id=f"s{i}") for i in range(200)]
    before = [decide(BoundedHash(), table(num_in_flight=[0] * 8), req=key).engine for key in keys]
    gone = table(routable=[True] * 3 + [False] + [True] * 4)
    after = [decide(BoundedHash(), gone, req=key).engine for key in keys]
    assert all(b == a or b == 3 for b, a in zip(before, after, strict=True))
    assert 3 not in after


def test_one_hot_key_fills_no_engine_beyond_its_bound():
    eight = router(8, BoundedHash(max_load=1.25))
    for i in range(200):
        eight.submit(request(str(i), session_id="hot"), i)
    assert max(eight.table.num_in_flight) <= 1.25 * 200 / 8 + 1


def test_no_more_keys_are_remembered_than_there_is_room_for(monkeypatch):
    monkeypatch.setattr("moestro.routing.policies.load._MAX_KEYS", 3)
    sticky = StickyMap(SECOND)
    for at, key in enumerate(("a", "b", "c", "a", "d", "e")):
        sticky.put(key, at, 0)
        assert len(sticky) <= 3
    assert [sticky.get(key, 0) for key in "abcde"] == [3, None, None, 4, 5]


def test_a_user_is_sent_back_until_the_memory_expires_or_the_engine_goes():
    four = router(4, UserAffinity(expiry_s=10))

    def send(name, at_s, user="u"):
        return four.submit(request(name, user=user), int(at_s * SECOND)).engine

    home = send("a", 0)
    for i in range(20):
        send(f"x{i}", 0, user=None)
    assert [send("b", 9), send("c", 18)] == [home, home]
    assert len({send(f"d{i}", 30 + 11 * i) for i in range(30)}) > 1, "each is forgotten when the next comes"
    home = send("e", 1000)
    four.set_routable(home, routable=False)
    assert send("f", 1001) != home
    four.set_routable(home, routable=True)
    moved = send("g", 1002)
    four.engine_lost(moved, 1003 * SECOND)
    assert send("h", 1004) != moved or four.table.num_in_flight[moved] == four.table.num_in_flight.min() + 1


def test_what_is_remembered_of_keys_expires_from_the_oldest():
    keys = StickyMap(100)
    for i in range(50):
        keys.put(f"k{i}", i % 4, 10 * i)
    assert len(keys) == 11
    assert keys.get("k45", 500) == 1
    assert keys.get("k45", 550) == 1
    assert keys.get("k45", 551) is None
    keys.forget_engine(1)
    assert keys.get("k45", 500) is None


@pytest.mark.parametrize(
    "make", [lambda: BoundedHash(max_load=0.9), lambda: UserAffinity(expiry_s=-1), lambda: SessionAffinity(expiry_s=0)]
)
def test_an_impossible_setting_is_refused(make):
    with pytest.raises(ConfigError):
        make()


@pytest.mark.parametrize("policy", [SessionAffinity, UserAffinity])
def test_every_use_renews_the_memory_and_a_pause_beyond_it_ends_it(policy):
    four = router(4, policy(expiry_s=10))
    mark = {policy.key_of: "x"}
    home = four.submit(request("0", **mark), 0).engine
    for engine in {0, 1, 2, 3} - {home}:
        four.submit(request(f"keeps {engine} busy"), 0, exclude={0, 1, 2, 3} - {engine})
    for use in range(1, 6):  # 8 s apart, so that the first is long forgotten at the last
        found = four.submit(request(str(use), **mark), use * 8 * SECOND)
        assert (found.engine, found.reason) == (home, f"the engine of its {policy.key_of}")
    assert four.submit(request("late", **mark), 51 * SECOND).engine != home, "the home has the largest batch"


@pytest.mark.parametrize("policy", [SessionAffinity, UserAffinity])
def test_a_key_of_a_lost_engine_is_a_new_one(policy):
    four = router(4, policy())
    mark = {policy.key_of: "x"}
    home = four.submit(request("a", **mark), 0).engine
    four.engine_lost(home, 1)
    assert four.submit(request("b", **mark), 2).reason.startswith(f"first of its {policy.key_of}")
