"""Law: routers that exchange their requests converge, whatever a network does to their messages."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import num_examples
from support.routers import BLOCK_SIZE, request

from moestro.core.load_figures import LoadFigures
from moestro.routing.decision_record import PolicyText, RecordedRouter, encode_entry, replay
from moestro.routing.replication import journal as journals
from moestro.routing.replication.journal import Journal, Outlet, RouterRun, Want, decode_message, encode_message
from moestro.routing.replication.replica import Replica, ReplicaRules
from moestro.routing.settings import RouterSettings

MS = 1_000_000
URLS = [f"http://engine-{i}:8000" for i in range(4)]
RULES = ReplicaRules(silent_ns=2000 * MS, beat_ns=250 * MS)


class Process:
    """One run of a router with its links to all others."""

    def __init__(self, name: str, incarnation: int, clock_ns: int, rng: random.Random) -> None:
        self.name, self.clock_ns, self.rng = name, clock_ns, rng
        self.lines: list[bytes] = []
        settings = RouterSettings(block_size=BLOCK_SIZE, seed=incarnation)
        write = lambda entry: self.lines.append(encode_entry(entry))  # noqa: E731
        self.router = RecordedRouter(PolicyText("moestro"), settings, write)
        self.urls = rng.sample(URLS, len(URLS))  # each router numbers the engines in its own order
        for _ in self.urls:
            self.router.set_routable(self.router.add_engine(), routable=True)
        self.origin = RouterRun(name, incarnation)
        self.journal = self.router.journal = Journal(self.origin, lambda row: self.urls[row])
        self.replica = Replica(self.origin, self.router, self.urls.index, rules=RULES)
        self.outlets: dict[str, Outlet] = {}
        self.flights: dict[str, str] = {}
        self.num_sent = 0

    def act(self, now_ns: int) -> None:
        rng, local_ns = self.rng, now_ns + self.clock_ns
        what = rng.random()
        if what < 0.5 or not self.flights:
            name = f"r{self.num_sent}"  # the same names at every router
            self.num_sent += 1
            hashes = b"".join(f"{rng.randrange(3):08d}{i:08d}".encode() for i in range(rng.randrange(6)))
            prompt = request(name, num_prompt_tokens=rng.randrange(1, 200), block_hashes=hashes)
            self.flights[name] = self.urls[self.router.submit(prompt, local_ns).engine]
        elif what < 0.65:
            self.router.first_token(rng.choice(list(self.flights)), local_ns)
        elif what < 0.72:
            figures = LoadFigures(num_waiting=rng.randrange(4), num_running=rng.randrange(8), queued_prefill_tokens=50)
            self.router.report(rng.randrange(4), figures, local_ns - rng.choice([0, 300 * MS]), local_ns)
        else:
            self.end(rng.choice(list(self.flights)), local_ns)

    def end(self, name: str, local_ns: int) -> None:
        del self.flights[name]
        self.router.ended(name, local_ns)

    def counts(self) -> dict[str, int]:
        return dict(zip(self.urls, self.router.table.num_in_flight.tolist(), strict=True))


class Network:
    """Routers, and messages that a network loses, repeats, delays and reorders."""

    def __init__(self, num_routers: int, seed: int, *, loss: float, partitions: bool) -> None:
        self.rng = random.Random(seed)
        self.now_ns = 10**12
        self.loss, self.has_partitions, self.most_delay_ms = loss, partitions, 60 if loss else 5
        self.num_runs = 0
        self.routers: dict[str, Process] = {}
        self.travelling: list[tuple[int, int, str, str, bytes]] = []
        self.cut: set[tuple[str, str]] = set()
        self.num_messages = 0
        for i in range(num_routers):
            self.start(f"router-{i}")

    def start(self, name: str) -> None:
        self.num_runs += 1
        clock_ns = self.rng.randrange(-(10**15), 10**15)
        self.routers[name] = Process(name, self.num_runs, clock_ns, random.Random(self.rng.random()))
        for other in self.routers.values():
            other.outlets.pop(name, None)  # a new connection

    def send(self, source: str, target: str, data: bytes) -> None:
        decode_message(data)
        for _ in range(self.rng.choice([1, 1, 1, 2])):
            if self.rng.random() >= self.loss:
                self.num_messages += 1
                delay_ns = self.rng.randrange(self.most_delay_ms) * MS
                self.travelling.append((self.now_ns + delay_ns, self.num_messages, source, target, data))

    def pass_time(self, ns: int) -> None:
        self.now_ns += ns
        for process in self.routers.values():
            local_ns = self.now_ns + process.clock_ns
            process.replica.tick(local_ns)
            for target in self.routers:
                if target != process.name:
                    outlet = process.outlets.setdefault(target, Outlet(process.journal, RULES.beat_ns))
                    for message in outlet.due(local_ns):
                        self.send(process.name, target, encode_message(message))
        arrived = sorted(each for each in self.travelling if each[0] <= self.now_ns)
        self.travelling = [each for each in self.travelling if each[0] > self.now_ns]
        for _, _, source, target, data in arrived:
            if target in self.routers and (source, target) not in self.cut:
                self.arrive(self.routers[target], source, data)

    def arrive(self, process: Process, source: str, data: bytes) -> None:
        message = decode_message(data)
        if isinstance(message, Want):
            if source in process.outlets:
                process.outlets[source].wanted(message)
            return
        want = process.replica.receive(message, self.now_ns + process.clock_ns)
        if want is not None:
            self.send(process.name, source, encode_message(want))

    def step(self) -> None:
        rng = self.rng
        self.pass_time(rng.choice([0, MS, 10 * MS, 60 * MS]))
        for process in self.routers.values():
            if rng.random() < 0.7:
                process.act(self.now_ns)
        what = rng.random()
        if what < 0.02:
            self.start(rng.choice(list(self.routers)))  # killed, and started again
        elif self.has_partitions and what < 0.05:
            names = list(self.routers)
            self.cut ^= {(rng.choice(names), rng.choice(names))}
        elif self.has_partitions and what < 0.06:
            self.pass_time(3000 * MS)  # long enough to be silent

    def heal(self) -> None:
        self.loss, self.cut, self.most_delay_ms = 0.0, set(), 1
        for _ in range(12):
            self.pass_time(100 * MS)

    def truth(self) -> dict[str, int]:
        found = Counter(url for process in self.routers.values() for url in process.flights.values())
        return {url: found[url] for url in URLS}

    def check(self) -> None:
        truth = self.truth()
        for process in self.routers.values():
            assert process.counts() == truth, process.name
            table = process.router.table
            for column in (table.num_prefilling, table.prefill_tokens, table.context_tokens, table.num_unseen):
                assert (column >= 0).all()
            assert (table.num_unseen <= table.num_in_flight).all()
            assert (table.num_prefilling <= table.num_in_flight).all()


@settings(max_examples=num_examples(40, thorough=400), deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_routers=st.integers(2, 5),
    loss=st.sampled_from([0.0, 0.1, 0.5]),
    partitions=st.booleans(),
    num_kept=st.sampled_from([4, 64, 1 << 14]),
)
def test_law_routers_converge_and_counts_return_to_zero(seed, num_routers, loss, partitions, num_kept):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journals, "_MAX_KEPT", num_kept)
        patch.setattr(journals, "MAX_OPERATIONS", 7)
        network = Network(num_routers, seed, loss=loss, partitions=partitions)
        for _ in range(60):
            network.step()
        network.heal()
        network.check()
        for process in network.routers.values():
            for name in list(process.flights):
                process.end(name, network.now_ns + process.clock_ns)
        network.heal()
        assert not any(network.truth().values())
        network.check()
        for process in network.routers.values():
            table = process.router.table
            assert not table.prefill_tokens.any()
            assert not table.context_tokens.any()
            assert not table.num_unseen.any()
            for recorded, again in replay(process.lines):
                assert encode_entry(recorded) == encode_entry(again)


def test_law_a_dead_routers_requests_stop_counting():
    for seed in range(10):
        network = Network(3, seed, loss=0.1, partitions=False)
        for _ in range(40):
            network.step()
        del network.routers["router-0"]
        for _ in range(30):
            network.pass_time(100 * MS)
        network.heal()
        network.check()


def test_law_without_loss_a_request_is_known_after_one_message():
    network = Network(3, 1, loss=0.0, partitions=False)
    for _ in range(50):
        network.step()
    for _ in range(5):
        network.pass_time(10 * MS)  # no beat is due
    network.check()


def test_a_router_whose_clock_was_set_back_counts_once_its_earlier_run_is_silent():
    network = Network(2, 3, loss=0.0, partitions=False)
    for _ in range(20):
        network.step()
    network.num_runs = -1
    network.start("router-0")
    assert network.routers["router-0"].origin.incarnation == 0
    for _ in range(30):
        network.pass_time(100 * MS)
    network.routers["router-0"].act(network.now_ns)
    network.heal()
    network.check()
