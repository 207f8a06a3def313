"""The live signal of experts: from engines' counts to the router's decisions, and their replay."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from support.routers import request

from moestro.core.experts.expert_load import SourceLoad, expert_pressures
from moestro.core.experts.expert_table import spread_evenly
from moestro.routing.decision_record import PolicyText, RecordedRouter, encode_entry, replay
from moestro.routing.policy_contract import FRESH_NS
from moestro.routing.settings import RouterSettings
from moestro.server.engines.engine_reports import ExpertLoads
from moestro.server.experts.expert_signals import HALF_LIFE_NS, ExpertSignals, near_views
from moestro.server.figures.prometheus import signal_metrics
from moestro.wire.messages import report_of

SECOND = 1_000_000_000
LAYERS, EXPERTS = 2, 8


class Places:
    """Two engines that hold half of the experts each."""

    def __init__(self) -> None:
        self.machine_of, self.waits_s, self.is_swapped = np.zeros(2, np.int64), None, False

    def table(self, num_layers, num_experts):
        table = spread_evenly(num_layers, num_experts, [0, 1], 2)
        return replace(table, version=1, logical_of=table.logical_of[::-1]) if self.is_swapped else table

    def machines(self):
        return self.machine_of

    def oldest_s(self):
        return self.waits_s


class Server:
    """The part of an API server that hears engines and routes; `count` is an engine's report after some tokens."""

    def __init__(self, policy: str = "gimbal-v2") -> None:
        self.lines: list[bytes] = []
        self.router = RecordedRouter(
            PolicyText(policy), RouterSettings(), lambda entry: self.lines.append(encode_entry(entry))
        )
        for _ in range(2):
            self.router.set_routable(self.router.add_engine(), routable=True)
        self.loads, self.places = ExpertLoads(2, lambda engine, question: True), Places()
        self.signals = ExpertSignals(self.loads, self.places, self.router)
        self.counts = np.zeros((2, LAYERS, EXPERTS), np.int64)

    def count(self, engine: int, visits: dict[int, int], now_ns: int) -> None:
        for expert, num in visits.items():
            self.counts[engine, :, expert] += num
        counts = self.counts[engine].copy()
        load = SourceLoad(counts, *np.array([counts, counts, counts > 0], float), 1.0, 1)
        self.loads.on_message(engine, report_of(1, load), now_ns)

    def pressures(self, now_ns: int) -> list[float | None]:
        found = (self.signals.of_engine(engine, now_ns) for engine in range(2))
        return [None if signal is None else signal.pressure for signal in found]

    def route(self, name: str, now_ns: int) -> int:
        engine = self.router.submit(request(name, 64), now_ns).engine
        self.router.ended(name, now_ns, 8)
        return engine


def skewed(server: Server, now_ns: int = SECOND, busy: int = 0) -> None:
    """Tokens of engine `busy` go to a worker that has most of the load, those of the other one elsewhere."""
    server.count(busy, {0: 30_000, 1: 20_000}, now_ns)
    server.count(1 - busy, {4: 4_000, 7: 6_000}, now_ns)
    server.signals.update(now_ns)


@pytest.mark.parametrize("policy", ["gimbal-v2", "moestro"])
@pytest.mark.parametrize("busy", [0, 1])
def test_the_pressure_turns_decisions_and_the_replay_agrees(policy, busy):
    """Engines that are equal but for the pressure: with it all requests avoid one, without it both get some."""
    server = Server(policy)
    skewed(server, busy=busy)
    chosen = [server.route(f"r{i}", SECOND + i) for i in range(6)]
    assert server.pressures(SECOND)[busy] > 1.5
    if policy == "gimbal-v2":  # `moestro` also evens out recent work, so the pressed engine gets some requests.
        assert chosen == [1 - busy] * 6
    assert chosen.count(1 - busy) > chosen.count(busy)
    assert all(recorded == again for recorded, again in replay(server.lines))
    without = [line for line in server.lines if b'"Reported"' not in line]
    assert len(without) == len(server.lines) - 2
    decisions = [again.decision.engine for _, again in replay(without)]
    assert decisions != chosen
    assert decisions.count(busy) > chosen.count(busy)


def test_the_record_has_the_pressure_and_its_age():
    server = Server()
    skewed(server)
    server.route("r", 3 * SECOND)
    reported = [json.loads(line) for line in server.lines if b'"Reported"' in line]
    assert [line["figures"]["expert_pressure"] for line in reported] == server.pressures(SECOND)
    decision = json.loads(server.lines[-2])["decision"]
    assert decision["ages_ns"]["expert_pressure"] == 2 * SECOND
    assert [each["expert_pressure"] for each in decision["candidates"]] == server.pressures(SECOND)[::-1]


def test_figures_that_are_not_renewed_are_dropped():
    server = Server()
    skewed(server)
    server.signals.update(3 * SECOND)  # no engine has counted anything since
    assert server.pressures(SECOND + FRESH_NS)[0] > 1
    assert server.pressures(SECOND + FRESH_NS + 1) == [None, None]
    assert {server.route(f"r{i}", 2 * SECOND + FRESH_NS) for i in range(20)} == {0, 1}


def test_an_engine_that_stays_silent_loses_its_figure_and_the_other_one_keeps_its_own():
    server = Server()
    skewed(server)
    for second in (3, 5, 7, 9):
        server.count(1, {4: 400, 7: 600}, second * SECOND)
        server.signals.update(second * SECOND)
    first, second = server.pressures(9 * SECOND)
    assert first is None
    assert second is not None


def test_visits_count_half_after_the_half_life():
    server = Server()
    server.count(0, {0: 10_000}, 0)
    server.signals.update(0)
    server.count(1, {4: 5_000}, HALF_LIFE_NS)
    server.count(0, {}, HALF_LIFE_NS)
    server.signals.update(HALF_LIFE_NS)
    visits = np.zeros((2, LAYERS, EXPERTS))
    visits[0, :, 0] = visits[1, :, 4] = 5_000
    table = spread_evenly(LAYERS, EXPERTS, [0, 1], 2)
    assert server.pressures(HALF_LIFE_NS) == pytest.approx(expert_pressures(visits, table.parts).tolist())
    assert server.pressures(HALF_LIFE_NS) == pytest.approx([1, 1], abs=0.02)


def test_a_successor_of_an_engine_counts_from_0():
    server = Server()
    skewed(server)
    server.loads.ended(0)
    server.signals.update(2 * SECOND)
    server.counts[0] = 0
    server.count(0, {0: 10}, 3 * SECOND)
    server.signals.update(3 * SECOND)
    assert server.signals.of_engine(0, 3 * SECOND).as_of_ns == 3 * SECOND
    assert server.pressures(3 * SECOND)[0] > 1.5, "the visits of its predecessor still count"


def test_waits_in_queues_add_to_the_pressure():
    server, calm = Server(), Server()
    server.places.waits_s = np.array([0.0, 0.2])
    skewed(server)
    skewed(calm)
    gained = [a - b for a, b in zip(server.pressures(SECOND), calm.pressures(SECOND), strict=True)]
    assert gained == pytest.approx([0, 2], abs=0.05)


def test_operators_learn_how_near_the_experts_are():
    server = Server()
    server.places.machine_of = np.array([0, 1])
    assert near_views(server.signals, 0) == []
    skewed(server)
    first, second = near_views(server.signals, SECOND)
    assert first.visits == {"device": 1, "machine": 0, "other": 0}
    assert second.visits == {"device": 1, "machine": 0, "other": 0}
    assert first.experts == {"device": [0.5] * LAYERS, "machine": [0] * LAYERS, "other": [0.5] * LAYERS}
    assert near_views(server.signals, SECOND + FRESH_NS + 1)[0].visits is None
    table = server.router.table
    assert table.expert_local_share.values.tolist() == [1, 1]


def test_figures_follow_the_table_as_experts_move():
    server = Server()
    skewed(server)
    assert server.signals.table_version == 0
    server.places.is_swapped = True
    server.count(0, {0: 1}, 2 * SECOND)
    server.signals.update(2 * SECOND)
    assert server.signals.table_version == 1
    assert [each.visits["machine"] for each in near_views(server.signals, 2 * SECOND)] == [1, 1]
    assert server.router.table.expert_local_share.values.tolist() == [0, 0]


def samples(server: Server, now_ns: int) -> dict[tuple[str, ...], float]:
    families = signal_metrics(server.signals, "m", lambda: now_ns)
    return {(sample.name, *sample.labels.values()): sample.value for family in families for sample in family.samples}


def test_metrics_lack_what_is_unknown_or_old():
    server = Server()
    assert samples(server, SECOND) == {}
    skewed(server)
    found = samples(server, SECOND)
    assert found["moestro:expert_pressure", "m", "0"] == server.pressures(SECOND)[0]
    assert found["moestro:expert_local_share", "m", "1"] == 1
    assert found["moestro:expert_visit_share", "m", "0", "machine"] == 0
    assert found["moestro:expert_near_share", "m", "0", "machine"] == 0.5
    later = samples(server, SECOND + FRESH_NS + 1)
    assert {name for name, *_ in later} == {"moestro:expert_near_share"}
