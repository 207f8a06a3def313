"""The operators' paths of `moestro serve`, on a port of their own: workers, loads of experts, explanations."""

from __future__ import annotations

import asyncio
import socket
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
from aiohttp import web
from numpy.typing import NDArray

from moestro.core.clock import NS_PER_S
from moestro.core.experts.expert_load import LayerPairs
from moestro.core.request import ModelInfo
from moestro.errors import shown
from moestro.server.engines.engine_reports import REMEMBERED, ExpertLoads, GroupLoad, RequestLog
from moestro.server.experts.coordinator import Coordinator
from moestro.server.experts.expert_signals import ExpertSignals, NearView, near_views
from moestro.server.experts.live_placement import LivePlacement
from moestro.server.figures.statistics import ServerStatistics
from moestro.server.processes.cluster import ServerCluster
from moestro.server.processes.start_checks import ADMIN_BODY_BYTES
from moestro.server.processes.supervisor import Supervisor
from moestro.web.access import Access, only_programs
from moestro.web.errors import HttpError, Refusals
from moestro.web.figures import limit_in, page_routes
from moestro.web.middleware import HttpMiddleware
from moestro.web.ports.connections import Front
from moestro.web.ports.faults import Faults
from moestro.web.ports.lifecycle import RESPONSE_FLUSH_S
from moestro.workload.experts.expert_profile import ExpertProfile, write_profile


@dataclass(frozen=True, slots=True)
class OperatorsPort:
    """The open port of operators."""

    runner: web.AppRunner
    listener: socket.socket
    front: Front

    async def close(self) -> None:
        """Accept no further connection, and end the open ones."""
        self.front.close()
        await self.runner.cleanup()
        self.listener.close()


async def admin_runner(routes: Iterable[web.RouteDef], api_key: str | None, faults: Faults) -> web.AppRunner:
    """Return an aiohttp runner of the plane, set up to serve. An `api_key` of None means that none is needed."""
    app = web.Application()
    app.middlewares.append(only_programs(lambda host: host == "localhost"))
    app.add_routes(routes)
    middleware = HttpMiddleware(Access.of([api_key] if api_key else []), Refusals(), ADMIN_BODY_BYTES, faults)
    return await middleware.runner(app, shutdown_timeout=RESPONSE_FLUSH_S)


def operators_routes(
    cluster: ServerCluster,
    info: ModelInfo,
    half_life: float,
    placement: LivePlacement,
    statistics: ServerStatistics,
    log: RequestLog | None,
) -> list[web.RouteDef]:
    """Return the routes of all that operators may see and do.

    Args:
        half_life: Half-life of the engines' windows of expert loads, in steps.
        log: Recent requests; None means that they are not recorded.
    """
    routes = ExpertAdmin(cluster.engines.expert_loads, info, half_life, cluster.signals).routes()
    if cluster.coordinator is not None:
        routes += WorkerAdmin(cluster.coordinator, cluster.supervisor).routes()
    routes += [*placement.routes(), *page_routes("serve", "operators", statistics.read)]
    return routes if log is None else [*routes, *ExplainAdmin(log).routes()]


_MAX_DIGITS = 9  # of a worker's number; Python refuses to read thousands


class WorkerAdmin:
    """Handles the operator's requests.

    Args:
        coordinator: Knows the workers.
        supervisor: Owns their processes.
    """

    def __init__(self, coordinator: Coordinator, supervisor: Supervisor) -> None:
        self._coordinator, self._supervisor = coordinator, supervisor

    def routes(self) -> list[web.RouteDef]:
        """Return all routes."""
        return [
            web.get("/admin/workers", self.workers),
            web.post("/admin/workers", self.add),
            web.post("/admin/workers/{number}/drain", self.drain),
            web.post("/admin/workers/{number}/resume", self.resume),
            web.delete("/admin/workers/{number}", self.remove),
        ]

    async def workers(self, _http: web.Request) -> web.Response:
        """Handle GET /admin/workers: return all workers."""
        return _json({"workers": self._coordinator.views()})

    async def add(self, _http: web.Request) -> web.Response:
        """Handle POST /admin/workers: start a worker with the experts that have the fewest copies, and answer 201."""
        worker = await self._supervisor.add_worker()
        return _json(self._coordinator.view(worker), status=201)

    async def drain(self, http: web.Request) -> web.Response:
        """Handle POST /admin/workers/{number}/drain: send the worker no more tokens until it is resumed."""
        worker = self._worker(http)
        self._coordinator.drain(worker, is_draining=True)
        return _json(self._coordinator.view(worker))

    async def resume(self, http: web.Request) -> web.Response:
        """Handle POST /admin/workers/{number}/resume: send the worker tokens again."""
        worker = self._worker(http)
        self._coordinator.drain(worker, is_draining=False)
        return _json(self._coordinator.view(worker))

    async def remove(self, http: web.Request) -> web.Response:
        """Handle DELETE /admin/workers/{number}: drain the worker, and end its process when its tokens have left."""
        self._supervisor.remove_worker(self._worker(http))
        return web.Response(status=204)

    def _worker(self, http: web.Request) -> int:
        """Return the place of the worker with experts of a path's number."""
        number = http.match_info["number"]
        is_number = number.isascii() and number.isdigit() and len(number) <= _MAX_DIGITS
        worker = self._coordinator.expert_worker(int(number)) if is_number else None
        if worker is None:
            raise HttpError(404, f"There is no expert worker {shown(number)}.", "not_found")
        return worker


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")


_NOTE = (
    "Steps of different engines count as independent. An engine that made fewer steps than the busiest one counts as"
    " idle in the missing ones."
)


class EngineWindowView(msgspec.Struct, kw_only=True):
    """Window of one engine.

    Attributes:
        num_steps: Steps since the window was cleared, or since the process started.
        num_visits: Visits of the engine's tokens to experts since its process started.
        age_s: Age of the report; None means that the engine has reported nothing.
        error: Why the engine counts no longer; "" means that it does.
    """

    engine: int
    num_steps: int
    num_visits: int
    age_s: float | None
    error: str


class LayerView(msgspec.Struct, kw_only=True):
    """Load of one layer with experts, of all engines.

    Attributes:
        layer: Number of the layer in the network.
        tokens: Visits to experts per step.
        busiest_expert, busiest_tokens: The expert with most tokens, and its tokens per step.
        balance: Mean load of the experts over the largest.
        activated: Mean number of experts that a step uses.
    """

    layer: int
    tokens: float
    busiest_expert: int
    busiest_tokens: float
    balance: float
    activated: float


class ArraysView(msgspec.Struct, kw_only=True):
    """All figures of a window.

    Attributes:
        tokens: Tokens per step, [engines][layers][experts].
        variance, activated: As in `ExpertLoad`, [layers][experts].
        counts: Tokens since each engine's process started, [engines][layers][experts]; [] for an engine without any.
        pairs: (layer, expert, expert of the next layer, tokens per step), layers counted among those with experts.
            None means that none were collected.
    """

    tokens: list[list[list[float]]]
    variance: list[list[float]]
    activated: list[list[float]]
    counts: list[list[list[int]]]
    pairs: list[tuple[int, int, int, float]] | None


class ExpertsView(msgspec.Struct, kw_only=True):
    """Answer of GET /admin/experts.

    Attributes:
        num_experts: Experts of a layer.
        half_life: Steps after which a step counts half; 0 means that all count alike.
        num_steps: Sum of the weights of the window's steps.
        balance: Mean of the layers' balance; None while nothing was counted.
        table_version: Version of the group's table of experts; None means that each engine holds the whole network, or
            that nothing was counted yet.
        near: How near the experts of each engine are by that table.
    """

    num_experts: int
    half_life: float
    num_steps: float
    balance: float | None
    engines: list[EngineWindowView]
    layers: list[LayerView]
    table_version: int | None = None
    near: list[NearView] = []
    arrays: ArraysView | None = None


class ExpertAdmin:
    """Handles the operator's requests about experts.

    Args:
        loads: Reports of the engines.
        info: The model.
        half_life: Half-life of the engines' windows, in steps.
        signals: Figures of the experts of a group. None means that each engine holds the whole network.
    """

    def __init__(
        self,
        loads: ExpertLoads,
        info: ModelInfo,
        half_life: float,
        signals: ExpertSignals | None = None,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self._loads, self._info, self._half_life, self._now_ns = loads, info, half_life, now_ns
        self._signals = signals

    def routes(self) -> list[web.RouteDef]:
        """Return all routes."""
        return [
            web.get("/admin/experts", self.experts),
            web.get("/admin/experts/profile", self.profile),
            web.post("/admin/experts/reset", self.reset),
        ]

    async def experts(self, http: web.Request) -> web.Response:
        """Handle GET /admin/experts: return a summary, with ?arrays=true all figures."""
        self._check_experts()
        arrays = http.query.get("arrays", "false")
        if arrays not in {"true", "false"}:
            raise HttpError(400, "arrays must be true or false.", "bad_request")
        has_arrays = arrays == "true"
        await self._loads.read(with_pairs=has_arrays)
        return _view_json(self._view(has_arrays=has_arrays))

    async def profile(self, _http: web.Request) -> web.Response:
        """Handle GET /admin/experts/profile: return the file that `moestro place` reads."""
        self._check_experts()
        await self._loads.read(with_pairs=True)
        merged = self._loads.merged()
        if merged is None:
            raise HttpError(409, "No engine has counted any token yet.", "nothing_counted")
        # The file is compressed, which takes a while in a large network.
        body = await asyncio.to_thread(_file_of, _profile_of(merged, self._info))
        headers = {"Content-Disposition": 'attachment; filename="experts.npz"'}
        return web.Response(body=body, headers=headers, content_type="application/octet-stream")

    async def reset(self, _http: web.Request) -> web.Response:
        """Handle POST /admin/experts/reset: empty the window of every engine."""
        self._check_experts()
        await self._loads.read(clear=True)
        return _view_json(self._view(has_arrays=False))

    def _check_experts(self) -> None:
        if not self._info.num_experts:
            raise HttpError(404, "The model is dense: it has no experts.", "no_experts")

    def _view(self, *, has_arrays: bool) -> ExpertsView:
        merged, now_ns = self._loads.merged(), self._now_ns()
        engines = [
            EngineWindowView(
                engine=engine,
                num_steps=report.num_steps,
                num_visits=report.num_visits,
                age_s=None if report.at_ns is None else (now_ns - report.at_ns) / NS_PER_S,
                error=report.error,
            )
            for engine, report in enumerate(self._loads.engines)
        ]
        return ExpertsView(
            num_experts=self._info.num_experts if merged is None else merged.load.tokens.shape[2],
            half_life=self._half_life,
            num_steps=0.0 if merged is None else merged.load.num_steps,
            balance=None if merged is None else float(merged.balance.mean()),
            engines=engines,
            layers=[] if merged is None else _layers(merged),
            table_version=None if self._signals is None else self._signals.table_version,
            near=[] if self._signals is None else near_views(self._signals, now_ns),
            arrays=self._arrays(merged) if has_arrays and merged is not None else None,
        )

    def _arrays(self, merged: GroupLoad) -> ArraysView:
        load = merged.load
        counts = [None if report.load is None else report.load.counts[merged.layers] for report in self._loads.engines]
        return ArraysView(
            tokens=load.tokens.tolist(),
            variance=load.variance.tolist(),
            activated=load.activated.tolist(),
            counts=[[] if own is None else own.tolist() for own in counts],
            pairs=None if load.pairs is None else _rows(load.pairs),
        )


def _layers(merged: GroupLoad) -> list[LayerView]:
    total, busiest = merged.load.total, merged.load.total.argmax(axis=1)
    return [
        LayerView(
            layer=layer,
            tokens=float(total[at].sum()),
            busiest_expert=expert,
            busiest_tokens=float(total[at, expert]),
            balance=float(merged.balance[at]),
            activated=float(merged.load.activated[at].sum()),
        )
        for at, (layer, expert) in enumerate(zip(merged.layers.tolist(), busiest.tolist(), strict=True))
    ]


def _rows(pairs: LayerPairs) -> list[tuple[int, int, int, float]]:
    columns: list[NDArray[np.generic]] = [pairs.layer, pairs.expert, pairs.next_expert, pairs.count]
    return list(zip(*(column.tolist() for column in columns), strict=True))


def _profile_of(merged: GroupLoad, info: ModelInfo) -> ExpertProfile:
    return ExpertProfile(
        load=merged.load,
        layers=tuple(merged.layers.tolist()),
        num_model_layers=max(info.num_layers, int(merged.layers.max()) + 1),  # A paced engine counts another network's.
        model=info.model_id,
        origin="window of a running server (/admin/experts/profile)",
        notes=(_NOTE,) if len(merged.load.tokens) > 1 else (),
    )


def _file_of(profile: ExpertProfile) -> bytes:
    with tempfile.TemporaryDirectory(prefix="moestro-") as directory:
        path = Path(directory) / "experts.npz"
        write_profile(path, profile)
        return path.read_bytes()


def _view_json(value: object) -> web.Response:
    return web.Response(body=msgspec.json.encode(value), content_type="application/json")


class ExplainAdmin:
    """Handles the operator's requests.

    Args:
        log: Knows recent requests.
    """

    def __init__(self, log: RequestLog) -> None:
        self._log = log

    def routes(self) -> list[web.RouteDef]:
        """Return all routes."""
        return [web.get("/admin/explain/{request_id}", self.explain), web.get("/admin/decisions", self.decisions)]

    async def decisions(self, http: web.Request) -> web.Response:
        """Handle GET /admin/decisions?limit=N: return the decisions for the newest requests."""
        limit = limit_in(http.query)
        self._check()
        return web.Response(
            body=msgspec.json.encode({"decisions": self._log.recent(limit)}), content_type="application/json"
        )

    async def explain(self, http: web.Request) -> web.Response:
        """Handle GET /admin/explain/REQUEST_ID: return the trace of a request."""
        request_id = http.match_info["request_id"]
        self._check()
        trace = self._log.trace(request_id)
        if trace is None:
            text = f"Request {shown(request_id)} is unknown: it never arrived, or {REMEMBERED} newer ones have ended."
            raise HttpError(404, text, "not_found")
        return web.Response(body=msgspec.json.encode(trace), content_type="application/json")

    def _check(self) -> None:
        if self._log.has_failed:
            raise HttpError(500, "Requests are no longer explained because of an error; the log has it.", "no_traces")
