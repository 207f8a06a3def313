"""Tables of the metrics that `moestro serve` and `moestro route` expose, made from the collectors that write them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from types import SimpleNamespace
from unittest.mock import MagicMock

import numpy as np
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from moestro.core.experts.expert_load import SourceLoad
from moestro.core.load_figures import IDLE
from moestro.gateway.discovery.discovery import Discovery
from moestro.gateway.engines.fleet import Counts, EngineCounts
from moestro.gateway.engines.health_checks import SourceReports
from moestro.gateway.figures import KvFigures, RouteCollector
from moestro.gateway.shadow import ShadowObserver
from moestro.placement.live.control import PlacementControl
from moestro.placement.live.ep_migration import MigrationProgress
from moestro.placement.settings import LivePlacementSettings
from moestro.routing.health import BreakerState, Condition
from moestro.routing.policy_contract import Needs
from moestro.server.engines.engine_reports import ExpertLoads
from moestro.server.engines.request_state import Metrics
from moestro.server.experts.expert_signals import ExpertSignal
from moestro.server.figures.prometheus import ServerCollector, Sources
from moestro.web.ports.faults import Fault, Faults, Port
from moestro.wire.messages import report_of


def shared_metrics() -> str:
    """Metrics of the API server that vLLM has too, without their prefix."""
    families = {family.name: family for family in _server().collect()}
    shared = [f for f in families.values() if f.name.startswith("moestro:") and _vllm_name(f) in families]
    return _table(shared, "moestro:")


def own_metrics() -> str:
    """Metrics of the API server that vLLM does not have."""
    families = {family.name: family for family in _server().collect()}
    own = [f for f in families.values() if f.name.startswith("moestro:") and _vllm_name(f) not in families]
    return _table(own)


def route_metrics() -> str:
    """Metrics of `moestro route`."""
    fleet = _fleet()
    fleet.router.needs = Needs(figures=("kv_usage",))
    sources = SourceReports(fleet, "a-policy", 1, lambda engine: False)
    discovery = Discovery([SimpleNamespace(name="file")], MagicMock(), MagicMock())
    return _table([*_route().collect(), *sources.collect(), *discovery.collect()], "moestro:route_")


def shadow_metrics() -> str:
    """Metrics of `moestro route --shadow`."""
    return _table(ShadowObserver(_fleet(), *[MagicMock() for _ in range(4)]).collect(), "moestro:route_shadow_")


def kv_event_metrics() -> str:
    """Metrics of `moestro route --kv-events`."""
    return _table(KvFigures([(SimpleNamespace(name="a"), MagicMock())]).collect(), "moestro:route_")


def _server() -> Collector:
    metrics = Metrics(1)
    metrics.refusals["a_code"] = 1
    experts = ExpertLoads(1, lambda engine, question: False)
    load = SourceLoad(np.ones((1, 1), np.int64), *np.ones((3, 1, 1)), weight=1.0, num_steps=1)
    experts.on_message(0, report_of(0, load), 0)
    engines = SimpleNamespace(loads=[IDLE], is_routable=lambda engine: True, expert_loads=experts)
    signal = ExpertSignal(pressure=1.0, visits=(1.0, 0.0, 0.0), as_of_ns=0)
    signals = SimpleNamespace(
        num_engines=1, of_engine=lambda engine, now_ns: signal, near_experts=np.array([[[1.0], [0.0], [0.0]]])
    )
    counts = (lambda: 0, lambda: 0, lambda: 0)
    sources = Sources("a-model", MagicMock(), engines, metrics, "fused", [0], *counts, _faults())
    return ServerCollector(replace(sources, placement=_placement(), signals=signals))


def _placement() -> PlacementControl:
    """Return the state of a group whose last plan is known."""
    table = SimpleNamespace(version=1)
    progress = MigrationProgress()
    control = PlacementControl(SimpleNamespace(table=table, progress=progress), LivePlacementSettings())
    score = SimpleNamespace(balance_of_sums=1.0, mean_balance=1.0)
    change = SimpleNamespace(after=score, saved_s=1.0)
    control.plan = control.applied = SimpleNamespace(change=change, move_s=1.0)
    control.measured = SimpleNamespace(score=score, found_s=1.0)
    return control


def _route() -> Collector:
    counts = Counts()
    counts.refusals["a_code"] = counts.retries["a_cause"] = 1
    return RouteCollector(_fleet(), counts, None, _faults())


def _faults() -> Faults:
    faults = Faults()
    faults.counts[Port.CLIENTS, Fault.MALFORMED] = 1
    return faults


def _fleet() -> MagicMock:
    address = SimpleNamespace(is_absent=False)
    engine = SimpleNamespace(name="a", row=0, address=address, counts=EngineCounts(), condition=Condition.UP)
    engine.counts.statuses[200] = 1
    fleet = MagicMock()
    fleet.__iter__.return_value = [engine]
    fleet.breaker_state.return_value = BreakerState.CLOSED
    fleet.router.num_in_flight_on.return_value = 0
    return fleet


def _vllm_name(family: Metric) -> str:
    return family.name.replace("moestro:", "vllm:")


def _table(families: Iterable[Metric], without: str = "") -> str:
    """Name and meaning of each family, below a row for each kind and its labels."""
    groups: dict[tuple[str, str], list[str]] = {}
    for family in families:
        name = f"{family.name.removeprefix(without)}{'_total' if family.type == 'counter' else ''}"
        row = f"| `{name}` | {family.documentation} |"
        groups.setdefault((family.type, _labels(family)), []).append(row)
    lines = ["| name | meaning |", "|---|---|"]
    for (kind, labels), rows in groups.items():
        lines += [f"| **{kind}**{f', by {labels}' if labels else ''} | |", *rows]
    return "\n".join(lines)


def _labels(family: Metric) -> str:
    names = dict.fromkeys(name for sample in family.samples for name in sample.labels if name != "le")
    return ", ".join(f"`{name}`" for name in names)
