"""What holds for every routing policy, under random histories; and that a record replays to the same decisions."""

from __future__ import annotations

import random

import pytest
from support.examples import num_examples
from support.routers import BLOCK_SIZE, request

from moestro.core.hashing import HASH_BYTES
from moestro.core.load_figures import LoadFigures
from moestro.core.rng import Draws
from moestro.errors import NoEngineError, QueueFullError, RequestError
from moestro.routing.decision_record import PolicyText, RecordedRouter, encode_entry, replay
from moestro.routing.in_flight import PeerRequest
from moestro.routing.registry import ROUTE_POLICIES
from moestro.routing.router import Router
from moestro.routing.settings import EngineSpec, RouterSettings

POLICIES = [PolicyText(name) for name in ROUTE_POLICIES.names()] + [
    PolicyText("", "p_tokens * batch_size / (1 - kv_usage)")
]
MS = 1_000_000


def prompt(rng: random.Random, name: str):
    """One of a few chains of blocks, of some length and user."""
    chain, depth = rng.randrange(6), rng.randrange(0, 9)
    hashes = b"".join(f"{chain:08d}{i:08d}".encode() for i in range(depth))
    return request(
        name,
        num_prompt_tokens=depth * BLOCK_SIZE + rng.randrange(1, BLOCK_SIZE),
        block_hashes=hashes,
        user=rng.choice([None, "u1", "u2", "u3"]),
        session_id=rng.choice([None, "s1", "s2"]),
    )


def figures(rng: random.Random) -> LoadFigures:
    """Any part of what an engine may say."""
    columns = {
        "num_waiting": rng.randrange(5),
        "num_running": rng.randrange(9),
        "kv_usage": rng.choice([0.0, 0.5, 0.95, 1.0]),
        "queued_prefill_tokens": rng.randrange(3000),
        "num_tokens": rng.randrange(9000),
        "expert_pressure": 1 + rng.random(),
    }
    return LoadFigures(**{name: value for name, value in columns.items() if rng.random() < 0.7})


class History:
    """Random calls of one router; what is in flight is known here too."""

    def __init__(self, router: Router, seed: int) -> None:
        self.router, self.rng, self.now_ns = router, random.Random(seed), 0
        self.up: dict[int, bool] = {}
        self.flights: dict[str, int] = {}
        self.elsewhere: dict[str, int] = {}
        self.num_refused = 0
        for _ in range(5):
            self.add_engine()

    def add_engine(self) -> None:
        engine = self.router.add_engine(
            EngineSpec(num_blocks=self.rng.choice([None, 40]), speed=self.rng.choice([1, 2]))
        )
        assert engine not in self.up
        self.up[engine] = False
        self.turn(engine, on=True)

    def turn(self, engine: int, *, on: bool) -> None:
        self.up[engine] = on
        self.router.set_routable(engine, routable=on)

    def submit(self, name: str) -> None:
        exclude = {each for each in self.up if self.rng.random() < 0.3} if self.rng.random() < 0.2 else set()
        try:
            engine = self.router.submit(prompt(self.rng, name), self.now_ns, exclude).engine
        except NoEngineError:
            assert not any(is_up for each, is_up in self.up.items() if each not in exclude), "an engine is up"
            self.num_refused += 1
        except QueueFullError:
            self.num_refused += 1
        else:
            assert self.up[engine], f"engine {engine} is not routable"
            assert engine not in exclude
            self.flights[name] = engine

    def step(self, number: int) -> None:
        rng = self.rng
        self.now_ns += rng.choice([0, MS, 50 * MS, 7000 * MS])
        kinds = [self.add_or_end, self.hear_figures, self.hear_events, self.change_engine, self.hear_peer]
        (kind,) = rng.choices(kinds, [75, 15, 12, 6, 20])
        kind(number, rng.choice(list(self.up)))
        rows = range(self.router.num_engines)
        own, others = ([list(each.values()).count(row) for row in rows] for each in (self.flights, self.elsewhere))
        assert self.router.table.num_in_flight.tolist() == [sum(both) for both in zip(own, others, strict=True)]
        assert [self.router.num_in_flight_on(row) for row in rows] == own
        assert (self.router.table.prefill_tokens >= 0).all()
        assert (self.router.table.num_unseen >= 0).all()
        assert (self.router.table.num_unseen <= self.router.table.num_in_flight).all()

    def hear_peer(self, number: int, engine: int) -> None:
        """A request of another router begins, gets its first token or ends; each may be repeated."""
        rng, router = self.rng, self.router
        what = rng.random()
        if what < 0.5 or not self.elsewhere:
            prompt_ = prompt(rng, f"p{number}")
            num_tokens = prompt_.num_prompt_tokens
            age_ns = rng.choice([-MS, 0, MS, 100 * MS])
            peers = PeerRequest(self.now_ns - age_ns, num_tokens, rng.randrange(num_tokens), prompt_.block_hashes, "s1")
            for _ in range(rng.choice([1, 2])):
                router.began_elsewhere(f"peer/1/{number}", engine, peers, self.now_ns)
            self.elsewhere[f"peer/1/{number}"] = engine
            return
        key = rng.choice(list(self.elsewhere))
        if what < 0.7:
            router.first_token_elsewhere(key, self.now_ns)
        else:
            del self.elsewhere[key]
            for _ in range(rng.choice([1, 2])):
                router.ended_elsewhere(key, self.now_ns)

    def add_or_end(self, number: int, engine: int) -> None:
        what = self.rng.random()
        if what < 0.55 or not self.flights:
            self.submit(f"r{number}")
        elif what < 0.7:
            self.router.first_token(self.rng.choice(list(self.flights)), self.now_ns)
        else:
            name = self.rng.choice(list(self.flights))
            del self.flights[name]
            shares = self.rng.choice([(None, None), (0.5, None), (0.75, 0.25)])
            self.router.ended(name, self.now_ns, self.rng.choice([None, 0, 100]), *shares)

    def hear_figures(self, number: int, engine: int) -> None:
        age_ns = self.rng.choice([0, MS, 9000 * MS])
        self.router.report(engine, figures(self.rng), self.now_ns - age_ns, self.now_ns)

    def hear_events(self, number: int, engine: int) -> None:
        blocks = prompt(self.rng, "").block_hashes
        what = self.rng.random()
        if what < 0.2:
            self.router.sent_elsewhere(engine, blocks, self.now_ns)
        elif what < 0.6:
            self.router.kv_stored(engine, blocks, self.now_ns)
        elif what < 0.75:
            self.router.kv_hosted(engine, blocks[2 * HASH_BYTES :], self.now_ns)
        else:
            self.router.kv_removed(engine, blocks[-2 * HASH_BYTES :], self.now_ns)

    def change_engine(self, number: int, engine: int) -> None:
        router, what = self.router, self.rng.random()
        if what < 0.6:
            self.turn(engine, on=self.rng.random() < 0.6)
        elif what < 0.8:
            self.rng.choice([router.kv_cleared, router.kv_incomplete, router.kv_lost, router.engine_lost])(
                engine, self.now_ns
            )
        else:
            router.remove_engine(engine, self.now_ns)
            for name in [name for name, at in self.flights.items() if at == engine]:
                del self.flights[name]
                router.ended(name, self.now_ns)
            self.elsewhere = {key: at for key, at in self.elsewhere.items() if at != engine}
            del self.up[engine]
            self.add_engine()


def history_of(policy: PolicyText, seed: int, **settings) -> tuple[History, list[bytes]]:
    """A history not begun, and the record that it will make."""
    lines: list[bytes] = []
    settings = RouterSettings(block_size=BLOCK_SIZE, seed=seed, **settings)
    return History(RecordedRouter(policy, settings, lambda entry: lines.append(encode_entry(entry))), seed), lines


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.policy or p.score)
def test_law_nothing_goes_to_an_engine_that_is_not_routable_and_a_record_replays(policy):
    for seed, max_num_queued in enumerate([None, 20]):
        history, lines = history_of(policy, seed, max_num_queued=max_num_queued)
        for number in range(400):
            history.step(number)
        pairs = list(replay(lines))
        assert len(pairs) > 100
        for recorded, again in pairs:
            assert encode_entry(recorded) == encode_entry(again)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.policy or p.score)
def test_law_excluding_engines_decides_as_if_they_were_out_of_rotation(policy):
    num_steps = num_examples(100, thorough=200)
    for seed, max_num_queued in enumerate([None, 20]):
        one, other = (history_of(policy, seed, max_num_queued=max_num_queued)[0] for _ in range(2))
        rng = random.Random(seed)
        for number in range(num_steps):
            one.step(number)
            other.step(number)
            exclude = [engine for engine, is_up in other.up.items() if is_up and rng.random() < 0.4]
            probe = prompt(rng, f"probe {number}")
            for engine in exclude:
                other.router.set_routable(engine, routable=False)
            answers = []
            for router, excluded in ((one.router, exclude), (other.router, [])):
                try:
                    answers.append(router.submit(probe, one.now_ns, excluded).engine)
                    router.ended(probe.request_id, one.now_ns)
                except RequestError as error:
                    answers.append(str(error))
            for engine in exclude:
                other.router.set_routable(engine, routable=True)
            assert answers[0] == answers[1]


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.policy or p.score)
def test_law_deciding_changes_nothing_and_equal_views_get_equal_answers(policy):
    history, _ = history_of(policy, 7)
    for number in range(300):
        history.step(number)
        if not any(history.up.values()):
            continue
        router = history.router
        view = router._view(prompt(history.rng, "probe"), history.now_ns)
        first, second = (router._policy.decide(view, Draws(1, number)) for _ in range(2))
        assert (first.engine, first.reason, first.detail) == (second.engine, second.reason, second.detail)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda p: p.policy or p.score)
def test_law_engines_that_look_alike_share_requests(policy):
    """Of requests that have nothing in common and end at once."""
    router = RecordedRouter(policy, RouterSettings(block_size=BLOCK_SIZE), lambda entry: None)
    for _ in range(6):
        router.set_routable(router.add_engine(), routable=True)
    sent = [0] * 6
    for i in range(600):
        own = request(
            str(i), num_prompt_tokens=100, block_hashes=f"{i:016d}".encode(), session_id=f"s{i}", user=f"u{i}"
        )
        sent[router.submit(own, i * MS).engine] += 1
        router.ended(str(i), i * MS)
    assert min(sent) > 60, sent


def test_a_record_that_was_tampered_with_does_not_replay_to_the_same():
    history, lines = history_of(PolicyText("least_loaded"), 3)
    for number in range(200):
        history.step(number)
    del lines[next(i for i, line in enumerate(lines) if b'"RequestEnded"' in line)]
    assert any(recorded.decision != again.decision for recorded, again in replay(lines))
