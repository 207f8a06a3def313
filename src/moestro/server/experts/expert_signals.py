"""What routers learn of the experts of a group: each engine's expert pressure, and how near its experts are."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_pressure import expert_pressures
from moestro.core.experts.expert_table import ExpertTable
from moestro.core.experts.near_experts import DISTANCES, SAME_DEVICE, expert_shares, visit_shares
from moestro.core.load_figures import LoadFigures
from moestro.routing.policy_contract import FRESH_NS
from moestro.routing.router import Router
from moestro.server.engines.expert_loads import EngineReport, ExpertLoads
from moestro.server.engines.metrics import Metrics

logger = logging.getLogger(__name__)

Floats = NDArray[np.float64]

PERIOD_S = 2.0  # between questions: policies drop a figure after 5 s (FRESH_NS), so one late answer costs nothing
# Visits count half after this time. It is long against the period, so that a few tokens do not turn the figures, and as
# short as an answer, so that a change of the load or of the placement shows while it lasts. For sessions of 20 to 180 s
# the error is least at 5 to 10 s (`bench/simulator/pressure_constants.py`).
HALF_LIFE_NS = 10_000_000_000


class ExpertPlaces(Protocol):
    """Where the experts of a group are. Worker r is the device of engine r; later workers have experts alone."""

    def table(self, num_layers: int, num_experts: int) -> ExpertTable | None:
        """Return the table that the group serves by; None means none yet.

        Args:
            num_layers, num_experts: Shape of the engines' counts, with dense layers.
        """
        ...

    def machines(self) -> NDArray[np.int32]:
        """int32[workers], number of each worker's machine."""
        ...

    def oldest_s(self) -> Floats | None:
        """float64[workers], time for which the oldest token waits in each worker's queues, in seconds. None: no queues.

        A worker that reported nothing has 0.
        """
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertSignal:
    """What a router can learn of one engine's experts.

    Attributes:
        pressure: As in `core.expert_pressure`.
        visits: Fractions of the visits of the engine's tokens by distance: device, machine, other machines. None means
            that the engine had none.
        as_of_ns: Time of the engine's report.
    """

    pressure: float
    visits: tuple[float, ...] | None
    as_of_ns: int


class ExpertSignals:
    """Keeps the recent visits of each engine's tokens, and reports the figures that follow from them.

    Args:
        loads: Reports of the engines.
        places: Where the experts are.
        router: Gets the figures.

    Attributes:
        num_engines: Number of engines.
        table_version: Version of the table of the last figures; None means that there are none.
        near_experts: float64[engines, 3, layers], fraction of each layer's experts by distance; None means unknown.
        layers: int64[layers], the network's layer of each layer of `near_experts`.
    """

    def __init__(self, loads: ExpertLoads, places: ExpertPlaces, router: Router) -> None:
        self._loads, self._places, self._router = loads, places, router
        self.num_engines = num_engines = len(loads.engines)
        self._visits: Floats | None = None  # [engines, layers, experts]
        self._counts: list[NDArray[np.int64] | None] = [None] * num_engines  # of each engine's last report
        self._signals: list[ExpertSignal | None] = [None] * num_engines
        self._updated_ns = 0
        self.table_version: int | None = None
        self.near_experts: Floats | None = None
        self.layers: NDArray[np.int64] = np.empty(0, np.int64)

    def of_engine(self, engine: int, now_ns: int) -> ExpertSignal | None:
        """Return an engine's figures; None means that there are none, or that they are older than `FRESH_NS`."""
        signal = self._signals[engine]
        return None if signal is None or now_ns - signal.as_of_ns > FRESH_NS else signal

    async def follow(self, metrics: Metrics, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        """Ask the engines from time to time, until cancelled. An idle server asks nothing.

        Args:
            metrics: Counts the tokens of each engine.
        """
        seen = 0
        while True:
            await asyncio.sleep(PERIOD_S)
            num_tokens = sum(each.num_prompt_tokens + each.num_generated_tokens for each in metrics.engines)
            if num_tokens == seen:
                continue
            seen = num_tokens
            await self._loads.read()
            try:
                self.update(now_ns())
            except Exception:  # Figures that routers lack must not end a server.
                logger.exception("the pressure of experts could not be computed")

    def update(self, now_ns: int) -> None:
        """Take in the last reports of all engines, and report the figures of those that answered lately.

        Visits count half after `HALF_LIFE_NS`. If no engine counted a token since the last update, nothing is reported,
        and the figures that routers have expire.
        """
        if not self._take_in(now_ns):
            return
        assert self._visits is not None, "some engine has counted"
        layers = np.flatnonzero(self._visits.sum(axis=(0, 2)) > 0)
        table = self._places.table(*self._visits.shape[1:])
        if table is None or not len(layers):
            return
        parts = table.parts if table.logical_of.shape[1] == len(layers) else table.parts[:, layers]
        visits, machines = self._visits[:, layers], self._places.machines()
        pressures = expert_pressures(visits, parts, self._places.oldest_s())
        travels = visit_shares(visits, parts, machines)
        if table.version != self.table_version or self.near_experts is None:
            self.near_experts = expert_shares(parts, machines, len(visits))
            self.table_version, self.layers = table.version, layers
        for engine, (pressure, shares) in enumerate(zip(pressures.tolist(), travels.tolist(), strict=True)):
            as_of_ns = self._loads.engines[engine].at_ns
            if as_of_ns is None or now_ns - as_of_ns > FRESH_NS:
                continue
            visited = None if np.isnan(shares[0]) else tuple(shares)
            self._signals[engine] = ExpertSignal(pressure=pressure, visits=visited, as_of_ns=as_of_ns)
            local = None if visited is None else visited[SAME_DEVICE]
            figures = LoadFigures(expert_pressure=pressure, expert_local_share=local)
            self._router.report(engine, figures, as_of_ns, now_ns)

    def _take_in(self, now_ns: int) -> bool:
        """Add what the engines counted since the last update, and return whether it is anything."""
        if self._visits is not None:
            self._visits *= 0.5 ** ((now_ns - self._updated_ns) / HALF_LIFE_NS)
        self._updated_ns, has_news = now_ns, False
        for engine, report in enumerate(self._loads.engines):
            fresh = self._counted(engine, report)
            if fresh is not None and fresh.any():
                if self._visits is None or self._visits.shape[1:] != fresh.shape:
                    self._visits = np.zeros((len(self._counts), *fresh.shape))
                self._visits[engine] += fresh
                has_news = True
        return has_news

    def _counted(self, engine: int, report: EngineReport) -> NDArray[np.int64] | None:
        """int64[layers, experts], visits that an engine counted since its last report; None means unknown."""
        if report.load is None or not report.load.num_steps:  # Nothing yet, or the report of an ended process.
            return None
        before, self._counts[engine] = self._counts[engine], report.load.counts
        if before is None or before.shape != report.load.counts.shape or (report.load.counts < before).any():
            return report.load.counts  # The first report of a process, whose counts begin at 0.
        return report.load.counts - before


@dataclass(frozen=True, slots=True, kw_only=True)
class NearView:
    """How near the experts of one engine are, as operators see it.

    Attributes:
        engine: Number of the engine.
        pressure: Its expert pressure; None means unknown or old.
        visits: Fraction of the visits of its tokens by distance; None means unknown or old.
        experts: Fraction of each layer's experts by distance.
    """

    engine: int
    pressure: float | None
    visits: dict[str, float] | None
    experts: dict[str, list[float]]


def near_views(signals: ExpertSignals, now_ns: int) -> list[NearView]:
    """Return how near the experts of each engine are; [] while no engine has counted a token."""
    if signals.near_experts is None:
        return []
    views = []
    for engine, experts in enumerate(signals.near_experts.tolist()):
        signal = signals.of_engine(engine, now_ns)
        visits = None if signal is None else signal.visits
        views.append(
            NearView(
                engine=engine,
                pressure=None if signal is None else signal.pressure,
                visits=None if visits is None else dict(zip(DISTANCES, visits, strict=True)),
                experts=dict(zip(DISTANCES, experts, strict=True)),
            )
        )
    return views
