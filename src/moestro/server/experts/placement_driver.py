"""Drives live placement beside a server: reads loads from the engines, and lets policies plan in threads."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from moestro.core.clock import NS_PER_S
from moestro.placement.live.control import PlacementControl, PlacementDecision, Trigger
from moestro.placement.live.group_view import GroupView
from moestro.placement.live.loop import Cancelled, Effect, EffectAnswer, PlacementLoop, Procedure, ReadLoads
from moestro.placement.live.plan import PlacementPlan
from moestro.server.engines.expert_loads import ExpertLoads

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
