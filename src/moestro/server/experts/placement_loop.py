"""Runs live placement beside a server: reads loads, lets policies plan in threads, and watches migrations."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

from moestro.errors import MoestroError
from moestro.placement.live_settings import NO_POLICY
from moestro.placement.registry import PLACE_POLICIES, PlacementError, PlacePolicy
from moestro.server.engines.expert_loads import ExpertLoads
from moestro.server.experts.placement_control import PlacementControl, PlacementDecision, Trigger
from moestro.server.experts.placement_plan import PlacementPlan, PlanRequest, ask_policy, measure, plan_of_table
from moestro.server.experts.placement_view import GroupView

logger = logging.getLogger(__name__)

WATCH_S = 1.0  # Between looks at the progress of a migration.
# Between readings of the load. A report costs an engine less than a millisecond, so 2 s cost it less than 0.05 %.
CHECK_S = 2.0


class PlacementLoop:
    """Controls the placement of a running group.

    While a worker is missing, no policy is asked by itself: it would move the experts of one that is about to return.

    Args:
        control: Decides.
        view: Makes what policies see.
        loads: Reports of the engines.
        now_ns: Clock.
    """

    def __init__(
        self,
        control: PlacementControl,
        view: GroupView,
        loads: ExpertLoads,
        now_ns: Callable[[], int] = time.monotonic_ns,
    ) -> None:
        self.control, self.view, self.now_ns = control, view, now_ns
        self._loads = loads
        self._policy = control.settings.placement_policy
        self._decide = None if self._policy == NO_POLICY else PLACE_POLICIES.make(self._policy)
        # What the present figures are of: its identity, and the objects, which therefore live.
        self._priced: tuple[tuple[int, int, int], PlanRequest, PlacementPlan | None] | None = None
        self._answer: asyncio.Future[Any] | None = None  # of the policy that plans

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Plan and watch inside the block."""
        tasks = [asyncio.create_task(self._forever(WATCH_S, self._watch))]
        tasks.append(asyncio.create_task(self._forever(CHECK_S, self.check)))
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _forever(self, seconds: float, action: Callable[[], Any]) -> None:
        while True:
            await asyncio.sleep(seconds)
            try:
                await action()
            except Exception:  # Requests are served on whatever happens to the placement.
                logger.exception("placement: an error of the server; it goes on")

    async def _watch(self) -> None:
        self.control.tick(self.now_ns())

    async def check(self) -> None:
        """Read the load, and let the policy plan if that is due.

        Without a policy the engines are not asked, so that an idle group sleeps; what others asked for is priced.
        """
        control = self.control
        if self._decide is None:
            await self._measure()
            return
        await self.read()
        if (trigger := control.due()) is None or not self.view.group.is_complete():
            return
        try:
            plan = await self._plan(self._policy, self._decide)
        except (MoestroError, ValueError) as error:
            control.fail(trigger, str(error), self.now_ns())
        else:
            control.decide(plan, trigger, self.now_ns())

    async def read(self) -> None:
        """Read the load, and price what the group serves under it."""
        await self._ask_engines()
        await self._measure()

    async def _ask_engines(self, *, with_pairs: bool = False) -> None:
        await self._loads.read(with_pairs=with_pairs)
        self.control.counted([report.num_steps + report.earlier_steps for report in self._loads.engines])

    async def _measure(self) -> None:
        """Price what the group serves, unless neither the load nor a table has changed."""
        control = self.control
        try:
            request, applied = self._request(), control.applied
            facts = (id(request.load), request.table.version, id(applied))
            if self._priced is None or facts != self._priced[0]:
                control.measured = await _in_thread(lambda: measure(request, applied))
                self._priced = (facts, request, applied)
        except (MoestroError, ValueError) as error:  # The group changes at this moment, or does not fit the counts.
            logger.debug("placement: no balance: %s", error)
            control.measured = self._priced = None

    async def plan(self, policy: str) -> PlacementPlan:
        """Let a policy plan, and keep the plan.

        Raises:
            ConfigError: No policy has this name.
            PlacementError: The policy finds no placement, or another one plans.
        """
        if self.control.is_planning:
            raise PlacementError("a policy is planning already")
        return await self._plan(policy, PLACE_POLICIES.make(policy))

    def plan_of(self, origin: str, contents: object) -> PlacementPlan:
        """Return the plan that leads to the placement of a file.

        Args:
            origin: Where the contents came from.
            contents: JSON object of `moestro place --out`, or SGLang's map.

        Raises:
            PlacementError: The contents do not fit the group.
        """
        request = self._request()
        try:
            return plan_of_table(origin, self.view.table_of(contents, request.table), request)
        except ValueError as error:
            raise PlacementError(f"{origin}: {error}") from None

    def apply(self, plan: PlacementPlan, trigger: Trigger) -> PlacementDecision:
        """Begin to move towards a plan."""
        return self.control.decide(plan, trigger, self.now_ns())

    def cancel(self) -> bool:
        """End what runs: the migration after its layer, and the wait for a policy. Returns whether anything ran."""
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(PlacementError("an operator has given up the planning"))
            return True
        if self.control.migration.progress.is_running:
            self.control.cancel()
            return True
        return False

    async def _plan(self, policy: str, decide: PlacePolicy) -> PlacementPlan:
        control = self.control
        control.begin_planning(self.now_ns())
        try:
            await self._ask_engines(with_pairs=getattr(decide, "needs_pairs", False))
            request = self._request()
            self._answer = _in_thread(lambda: ask_policy(policy, decide, request))
            plan: PlacementPlan = await self._answer
        finally:
            self._answer = None
            control.end_planning()
        control.planned(plan, self.now_ns())
        return plan

    def _request(self) -> PlanRequest:
        merged = self._loads.merged()
        return PlanRequest(self.view, None if merged is None else merged.load, self.control.migration.table)


def _in_thread(function: Callable[[], Any]) -> asyncio.Future[Any]:
    """Return the future of a function's result, which a thread computes. A thread that never ends delays no exit."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Any] = loop.create_future()

    def settle(result: Any, error: Exception | None) -> None:
        if future.done():  # Nobody waits any more.
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
