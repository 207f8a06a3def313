"""Live placement of a server: reads loads from the engines, lets policies plan in threads, and answers operators."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
from aiohttp import web

from moestro.config.serve_settings import ServeSettings
from moestro.core.clock import NS_PER_S
from moestro.core.request import ModelInfo
from moestro.errors import ConfigError, shown
from moestro.files.text_files import read_text
from moestro.placement.contract import PlacementError
from moestro.placement.live.control import (
    Cancelled,
    DecisionOutcome,
    Effect,
    EffectAnswer,
    PlacementControl,
    PlacementDecision,
    PlacementLoop,
    Procedure,
    ReadLoads,
    Trigger,
)
from moestro.placement.live.plan import GroupView, PlaceableGroup, PlacementPlan
from moestro.placement.settings import NO_POLICY
from moestro.server.engines.engine_reports import ExpertLoads
from moestro.server.experts.placement_views import LivePrices, PlanView, live_prices, placement_view, plan_view
from moestro.server.processes.start_checks import ADMIN_BODY_BYTES
from moestro.web.bodies import Bodies
from moestro.web.errors import HttpError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class PlacementDriver:
    """Gives a `PlacementLoop` its time, and does what its procedures want.

    Args:
        control: Decides.
        view: Makes what policies see.
        loads: Reports of the engines.
        now_ns: Clock.

    Attributes:
        loop: The loop.
    """

    def __init__(
        self,
        control: PlacementControl,
        view: GroupView,
        loads: ExpertLoads,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.control, self.view, self.now_ns = control, view, now_ns
        self.loop = PlacementLoop(control, view, loads, now_ns())
        self._loads = loads
        self._planning: asyncio.Future[Any] | None = None  # Answer of the policy that plans.

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Plan and watch inside the block."""
        tasks: set[asyncio.Task[None]] = set()
        tasks.add(asyncio.create_task(self._run(tasks)))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, tasks: set[asyncio.Task[None]]) -> None:
        """Follow the loop's time. A check goes on beside it, so that a policy that plans for long is noticed."""
        while True:
            await asyncio.sleep(max(self.loop.next_ns - self.now_ns(), 0) / NS_PER_S)
            try:
                procedure = self.loop.on_time(self.now_ns())
            except Exception:
                _log_error()
                continue
            if procedure is not None:
                task = asyncio.create_task(self._check(procedure))
                tasks.add(task)
                task.add_done_callback(tasks.discard)

    async def _check(self, procedure: Procedure[None]) -> None:
        try:
            await self._perform(procedure)
        except Exception:
            _log_error()

    # --- for operators ----------------------------------------------------------------------------------------------

    async def check(self) -> None:
        """Read the load, and let the policy plan if that is due."""
        await self._perform(self.loop.check())

    async def read(self) -> None:
        """Read the load, and price what the group serves under it."""
        await self._perform(self.loop.read())

    async def plan(self, policy: str) -> PlacementPlan:
        """Let a policy plan, and keep the plan.

        Raises:
            ConfigError: No policy has this name.
            PlacementError: The policy finds no placement, or another one plans.
        """
        return await self._perform(self.loop.plan(policy, self.now_ns()))

    def plan_of(self, origin: str, contents: object) -> PlacementPlan:
        """Return the plan that leads to the placement of a file, as `PlacementLoop.plan_of`."""
        return self.loop.plan_of(origin, contents)

    def apply(self, plan: PlacementPlan, trigger: Trigger) -> PlacementDecision:
        """Begin to move towards a plan."""
        return self.loop.apply(plan, trigger, self.now_ns())

    def cancel(self) -> bool:
        """End what runs: the migration after its layer, or the wait for a policy. Returns whether anything ran."""
        ended = self.loop.cancel()
        if ended is Cancelled.PLANNING and self._planning is not None and not self._planning.done():
            self._planning.set_result(None)
        return ended is not Cancelled.NOTHING

    # --- effects ----------------------------------------------------------------------------------------------------

    async def _perform(self, procedure: Procedure[T]) -> T:
        """Run a procedure to its end, and return its result."""
        with contextlib.closing(procedure):  # A cancelled task ends its procedure too.
            try:
                effect = next(procedure)
                while True:
                    effect = procedure.send(await self._answer(effect))
            except StopIteration as end:
                result: T = end.value
                return result

    async def _answer(self, effect: Effect) -> EffectAnswer:
        try:
            value = await self._do(effect)
        except Exception as error:
            return EffectAnswer(self.now_ns(), error=error)
        return EffectAnswer(self.now_ns(), value)

    async def _do(self, effect: Effect) -> Any:
        if isinstance(effect, ReadLoads):
            return await self._loads.read(with_pairs=effect.with_pairs)
        future = _in_thread(effect.function)
        if not effect.is_plan:
            return await future
        self._planning = future
        try:
            return await future
        finally:
            self._planning = None


def _log_error() -> None:
    """Log an error of the server. Requests are served on whatever happens to the placement."""
    logger.exception("placement: an error of the server; it goes on")


def _in_thread(function: Callable[[], Any]) -> asyncio.Future[Any]:
    """Return the future of a function's result, which a thread computes. A thread that never ends delays no exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if future.done():  # Its answer is not awaited any more.
            return
        if error is None:
            future.set_result(result)
        else:
            future.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = function()
        except Exception as raised:
            error = raised
        with contextlib.suppress(RuntimeError):  # The server has ended meanwhile.
            loop.call_soon_threadsafe(settle, result, error)

    threading.Thread(target=run, daemon=True, name="placement").start()
    return future


Handler = Callable[[web.Request], Awaitable[web.Response]]


class PlacementAdmin:
    """Handles the operator's requests.

    Args:
        driver: Controls the placement.
        prices: Prices by which plans are judged.
    """

    def __init__(self, driver: PlacementDriver, prices: LivePrices) -> None:
        self._driver, self._control, self._prices = driver, driver.control, prices
        self._bodies = Bodies(max_body_bytes=ADMIN_BODY_BYTES)

    def routes(self) -> list[web.RouteDef]:
        """Return all routes."""
        return _routes(self.show, self.plan, self.apply, self.freeze, self.unfreeze, self.cancel)

    async def show(self, http: web.Request) -> web.Response:
        """Handle GET /admin/placement: return the table, its balance, and what was decided last."""
        has_arrays = _has_arrays(http)
        await self._driver.read()
        return self._shown(has_arrays=has_arrays)

    async def plan(self, http: web.Request) -> web.Response:
        """Handle POST /admin/placement/plan: return what a policy would do, and change nothing."""
        has_arrays = _has_arrays(http)
        policy = http.query.get("policy", self._control.settings.placement_policy)
        if policy == NO_POLICY:
            text = "The server has no policy: add ?policy=moestro, or start it with --placement-policy."
            raise HttpError(400, text, "no_policy")
        if policy.partition(":")[0].endswith(".py") and policy != self._control.settings.placement_policy:
            # A file is code; only who starts the server may choose it.
            text = "Name a registered policy; a file's policy must be the one of --placement-policy."
            raise HttpError(400, text, "bad_policy")
        if self._control.is_planning:
            raise HttpError(409, "A policy is planning already.", "planning")
        try:
            plan = await self._driver.plan(policy)
        except ConfigError as error:
            raise HttpError(400, f"{error}.", "bad_policy") from None
        except (PlacementError, ValueError) as error:
            raise HttpError(409, f"There is no plan: {error}.", "no_plan") from None
        return _json(self._plan_view(plan, has_arrays=has_arrays))

    async def apply(self, http: web.Request) -> web.Response:
        """Handle POST /admin/placement/apply: move towards the body's placement, or towards the last plan."""
        has_arrays = _has_arrays(http)
        async with self._bodies.holding(http) as body:
            return self._apply(body, has_arrays=has_arrays)

    def _apply(self, body: bytes, *, has_arrays: bool) -> web.Response:
        if self._control.is_frozen:
            raise HttpError(409, "Placement is frozen: POST /admin/placement/unfreeze first.", "frozen")
        if self._control.active is not None or self._control.migration.progress.is_running:
            text = "A migration is running: wait for its end, or POST /admin/placement/cancel."
            raise HttpError(409, text, "migration_running")
        plan = self._control.plan if not body else self._plan_of(body)
        if plan is None:
            text = "There is no plan yet: POST /admin/placement/plan, or send a placement as the body."
            raise HttpError(409, text, "no_plan")
        decision = self._driver.apply(plan, Trigger.OPERATOR)
        if decision.outcome is DecisionOutcome.FAILED:
            raise HttpError(409, f"The placement stays: {decision.reason}.", "refused")
        status = 202 if decision.outcome is DecisionOutcome.STARTED else 200
        return _json(self._plan_view(plan, has_arrays=has_arrays), status=status)

    async def freeze(self, _http: web.Request) -> web.Response:
        """Handle POST /admin/placement/freeze: let no migration start until it is lifted."""
        self._control.freeze(is_frozen=True)
        return self._shown(has_arrays=False)

    async def unfreeze(self, _http: web.Request) -> web.Response:
        """Handle POST /admin/placement/unfreeze: let migrations start again."""
        self._control.freeze(is_frozen=False)
        return self._shown(has_arrays=False)

    async def cancel(self, _http: web.Request) -> web.Response:
        """Handle POST /admin/placement/cancel: end the migration after its layer, or give up a policy that plans."""
        if not self._driver.cancel():
            raise HttpError(409, "Nothing is running: no migration, and no policy plans.", "nothing_running")
        return self._shown(has_arrays=False)

    def _plan_of(self, body: bytes) -> PlacementPlan:
        try:
            contents = msgspec.json.decode(body)
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise HttpError(400, f"The body is no JSON: {shown(str(error))}.", "bad_json") from None
        try:
            return self._driver.plan_of("an operator's file", contents)
        except PlacementError as error:
            raise HttpError(400, f"The placement is refused: {shown(str(error))}.", "bad_placement") from None

    def _plan_view(self, plan: PlacementPlan, *, has_arrays: bool) -> PlanView:
        horizon_steps = self._control.settings.payback_horizon
        layers = self._driver.view.group.layers()
        return plan_view(plan, layers, self._prices, horizon_steps, has_arrays=has_arrays)

    def _shown(self, *, has_arrays: bool) -> web.Response:
        self._control.tick(self._driver.now_ns())  # A migration may have ended since the last look.
        places = self._driver.view.group.places()
        return _json(placement_view(self._control, places, self._prices, self._driver.now_ns(), has_arrays=has_arrays))


class NoPlacementAdmin:
    """Answers the same requests where nothing can be placed.

    Args:
        why: The reason, as a sentence.
    """

    def __init__(self, why: str) -> None:
        self._why = why

    def routes(self) -> list[web.RouteDef]:
        """Return all routes."""
        return _routes(*[self.refuse] * 6)

    async def refuse(self, _http: web.Request) -> web.Response:
        """Handle every request: say why there is no placement."""
        raise HttpError(404, self._why, "no_placement")


def _routes(
    show: Handler, plan: Handler, apply: Handler, freeze: Handler, unfreeze: Handler, cancel: Handler
) -> list[web.RouteDef]:
    return [
        web.get("/admin/placement", show),
        web.post("/admin/placement/plan", plan),
        web.post("/admin/placement/apply", apply),
        web.post("/admin/placement/freeze", freeze),
        web.post("/admin/placement/unfreeze", unfreeze),
        web.post("/admin/placement/cancel", cancel),
    ]


def _has_arrays(http: web.Request) -> bool:
    arrays = http.query.get("arrays", "false")
    if arrays not in {"true", "false"}:
        raise HttpError(400, "arrays must be true or false.", "bad_request")
    return arrays == "true"


def _json(value: object, status: int = 200) -> web.Response:
    return web.Response(status=status, body=msgspec.json.encode(value), content_type="application/json")


@dataclass(frozen=True, slots=True)
class LivePlacement:
    """Live placement of a server.

    Attributes:
        driver: Controls the placement; None where nothing can be placed.
        prices: Prices by which its plans are judged.
        why_not: Why nothing can be placed, as a sentence.
    """

    driver: PlacementDriver | None
    prices: LivePrices | None = None
    why_not: str = ""

    @property
    def control(self) -> PlacementControl | None:
        """State of live placement; None where nothing can be placed."""
        return None if self.driver is None else self.driver.control

    def routes(self) -> list[web.RouteDef]:
        """Return the operators' routes, which say why where nothing can be placed."""
        if self.driver is None or self.prices is None:
            return NoPlacementAdmin(self.why_not).routes()
        return PlacementAdmin(self.driver, self.prices).routes()

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Control the placement inside the block."""
        if self.driver is None:
            yield
            return
        async with self.driver.running():
            yield


def open_placement(
    settings: ServeSettings, info: ModelInfo, loads: ExpertLoads, group: PlaceableGroup | None
) -> LivePlacement:
    """Return what controls the placement of a group, or why nothing can be placed.

    Args:
        settings: Settings of the server.
        info: The loaded model.
        loads: Reports of the engines.
        group: The group, ready to serve; None in modes in which each engine has all experts.

    Raises:
        ConfigError: Flags ask for what this model or group cannot do.
    """
    live = settings.placement
    try:
        if not info.num_experts:
            raise ConfigError("The model is dense: it has no experts.")
        if group is None:
            raise ConfigError(_why_fixed(settings))
        if len(group.places().holders) < 2:
            raise ConfigError("One worker holds all experts, so there is nothing to place: start more workers.")
        prices = live_prices(settings, info.dtype)
        view = GroupView(group, prices.prices, live.limits)
    except ConfigError as error:
        if live.plans_by_itself or live.init_expert_location is not None:
            raise ConfigError(f"--placement-policy and --init-expert-location: {error}") from None
        return LivePlacement(None, why_not=str(error))
    driver = PlacementDriver(PlacementControl(group.migration, live), view, loads)
    if live.init_expert_location is not None:
        _move_to_file(driver, live.init_expert_location)
    return LivePlacement(driver, prices)


def _why_fixed(settings: ServeSettings) -> str:
    mode = settings.stepping.mode
    if mode in ("ep", "async"):
        return f"The experts of a paced group in --mode {mode} have no weights to move: serve a model without pacing."
    return f"In --mode {mode} each engine has all experts: start the server in --mode ep or async."


def _move_to_file(driver: PlacementDriver, path: Path) -> None:
    """Begin to move towards the placement of a file.

    Raises:
        ConfigError: The file cannot be read, or does not fit the group.
    """
    try:
        contents = json.loads(read_text(path))
        decision = driver.apply(driver.plan_of(path.name, contents), Trigger.START)
    except (OSError, ValueError, PlacementError) as error:
        raise ConfigError(f"--init-expert-location {path}: {error}") from None
    if decision.outcome is DecisionOutcome.FAILED:
        raise ConfigError(f"--init-expert-location {path}: {decision.reason}")
