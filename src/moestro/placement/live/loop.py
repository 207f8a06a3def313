"""Live placement, step by step: when loads are read, when a policy plans, and what is done with its plan.

Nothing here has an effect: a procedure is a generator that yields what it wants done, and takes an `EffectAnswer`.
`moestro serve` drives it with sockets, threads and its clock, and the simulator on virtual time.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any, Protocol, TypeVar

from moestro.core.clock import NS_PER_S
from moestro.core.experts.expert_load import ExpertLoad
from moestro.errors import MoestroError
from moestro.placement.live.control import PlacementControl, PlacementDecision, Trigger
from moestro.placement.live.group_view import GroupView
from moestro.placement.live.plan import Measured, PlacementPlan, PlanRequest, ask_policy, measure, plan_of_table
from moestro.placement.live_settings import NO_POLICY
from moestro.placement.registry import PLACE_POLICIES, PlacementError, PlacePolicy

logger = logging.getLogger(__name__)

WATCH_NS = NS_PER_S  # Between looks at the progress of a migration.
# Between readings of the load. A report costs an engine less than a millisecond, so 2 s cost it less than 0.05 %.
CHECK_NS = 2 * NS_PER_S


@dataclass(frozen=True, slots=True)
class ReadLoads:
    """Ask all engines for the load of their experts. The answer comes when their reports are known, and has no value.

    Attributes:
        with_pairs: Whether to ask for pairs of experts.
    """

    with_pairs: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class Compute:
    """Call a function that has no effects and may take seconds. The answer is its result, or its error.

    Attributes:
        function: The function.
        is_plan: Whether a policy plans in it, which an operator may give up.
    """

    function: Callable[[], Any]
    is_plan: bool = False


Effect = ReadLoads | Compute


@dataclass(frozen=True, slots=True, eq=False)
class EffectAnswer:
    """What came of an effect.

    Attributes:
        now_ns: Time of the answer.
        value: Result.
        error: Error in place of a result; None means that there is none.
    """

    now_ns: int
    value: Any = None
    error: Exception | None = None


T = TypeVar("T")
Procedure = Generator[Effect, EffectAnswer, T]


class KnownLoads(Protocol):
    """What the engines reported last."""

    def num_steps(self) -> Sequence[int]:
        """Steps of each engine since its window was cleared, with those of its former processes."""
        ...

    def load(self) -> ExpertLoad | None:
        """Load of the experts by the tokens of all engines; None means that nothing was counted.

        The result is the same object until a report comes.

        Raises:
            ValueError: The engines counted different experts.
        """
        ...


class Cancelled(Enum):
    """What `PlacementLoop.cancel` has ended."""

    NOTHING = auto()
    PLANNING = auto()
    MIGRATION = auto()


class PlacementLoop:
    """Runs live placement of one group.

    While a worker is missing, no policy plans by itself: it would move the experts of one that is about to return.

    Args:
        control: Decides.
        view: Makes what policies see.
        loads: Reports of the engines.
        now_ns: Time of the start.
        check_ns: Time between two readings of the load.
    """

    def __init__(
        self, control: PlacementControl, view: GroupView, loads: KnownLoads, now_ns: int, check_ns: int = CHECK_NS
    ) -> None:
        self.control, self.view = control, view
        self._loads, self._now_ns = loads, now_ns
        self._policy = control.settings.placement_policy
        self._decide: PlacePolicy | None = None
        if self._policy != NO_POLICY:
            self._decide = control.settings.lasting(PLACE_POLICIES.make(self._policy))
        # What the present figures are of: its identity, and the objects, which therefore live.
        self._priced: tuple[tuple[int, int, int], PlanRequest, PlacementPlan | None] | None = None
        self._is_given_up = False  # Whether an operator wants no plan from the policy that plans.
        self._every_ns = check_ns
        self._watch_ns, self._check_ns = now_ns + WATCH_NS, now_ns + check_ns
        self._is_checking = False

    # --- time -------------------------------------------------------------------------------------------------------

    @property
    def next_ns(self) -> int:
        """Time of the next call of `on_time`; the end of a check may bring it forward."""
        return self._watch_ns if self._is_checking else min(self._watch_ns, self._check_ns)

    @property
    def check_ns(self) -> int:
        """Time of the next reading of the load; that of the last one while it goes on."""
        return self._check_ns

    @property
    def watch_ns(self) -> int:
        """Time of the next look at the progress of a migration."""
        return self._watch_ns

    def on_time(self, now_ns: int) -> Procedure[None] | None:
        """Look at what runs, and return the check if it is due. The caller runs the check to its end."""
        self._now_ns = now_ns
        if now_ns >= self._watch_ns:
            self._watch_ns = now_ns + WATCH_NS
            self.control.tick(now_ns)
        if self._is_checking or now_ns < self._check_ns:
            return None
        self._is_checking = True
        return self._timed_check()

    def _timed_check(self) -> Procedure[None]:
        try:
            yield from self.check()
        finally:
            self._is_checking = False
            self._check_ns = self._now_ns + self._every_ns

    # --- procedures -------------------------------------------------------------------------------------------------

    def check(self) -> Procedure[None]:
        """Read the load, and let the policy plan if that is due.

        Without a policy no load is read, so that an idle group sleeps; a load that others have read is priced.
        """
        if self._decide is None:
            yield from self._measure()
            return
        yield from self.read()
        control = self.control
        if (trigger := control.due()) is None or not self.view.group.is_complete():
            return
        try:
            plan = yield from self._plan(self._policy, self._decide)
        except (MoestroError, ValueError) as error:
            control.fail(trigger, str(error), self._now_ns)
        else:
            control.decide(plan, trigger, self._now_ns)

    def read(self) -> Procedure[None]:
        """Read the load, and price what the group serves under it."""
        yield from self._read_loads()
        yield from self._measure()

    def plan(self, policy: str, now_ns: int) -> Procedure[PlacementPlan]:
        """Let a policy plan, and keep the plan.

        Raises:
            ConfigError: No policy has this name.
            PlacementError: The policy finds no placement, or another one plans.
        """
        if self.control.is_planning:
            raise PlacementError("a policy is planning already")
        self._now_ns = now_ns
        return self._plan(policy, PLACE_POLICIES.make(policy))

    def _plan(self, policy: str, decide: PlacePolicy) -> Procedure[PlacementPlan]:
        control = self.control
        control.begin_planning(self._now_ns)
        self._is_given_up = False
        try:
            yield from self._read_loads(with_pairs=getattr(decide, "needs_pairs", False))
            request = self._request()
            plan: PlacementPlan | None = None
            if not self._is_given_up:
                plan = yield from self._do(Compute(lambda: ask_policy(policy, decide, request), is_plan=True))
            if plan is None or self._is_given_up:
                raise PlacementError("an operator has given up the planning")
        finally:
            control.end_planning()
        control.planned(plan, self._now_ns)
        return plan

    def _read_loads(self, *, with_pairs: bool = False) -> Procedure[None]:
        yield from self._do(ReadLoads(with_pairs))
        self.control.counted(self._loads.num_steps(), self._now_ns)

    def _measure(self) -> Procedure[None]:
        """Price what the group serves, unless neither the load nor a table has changed."""
        control = self.control
        try:
            request, applied = self._request(), control.applied
            facts = (id(request.load), request.table.version, id(applied))
            if self._priced is None or facts != self._priced[0]:
                measured: Measured | None = yield from self._do(Compute(lambda: measure(request, applied)))
                control.measured = measured
                self._priced = (facts, request, applied)
        except (MoestroError, ValueError) as error:  # The group changes at this moment, or does not fit the counts.
            logger.debug("placement: no balance: %s", error)
            control.measured = self._priced = None

    def _do(self, effect: Effect) -> Procedure[Any]:
        """Return the answer to an effect, or raise its error."""
        answer = yield effect
        self._now_ns = answer.now_ns
        if answer.error is not None:
            raise answer.error
        return answer.value

    # --- operators --------------------------------------------------------------------------------------------------

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

    def apply(self, plan: PlacementPlan, trigger: Trigger, now_ns: int) -> PlacementDecision:
        """Begin to move towards a plan."""
        self._now_ns = now_ns
        return self.control.decide(plan, trigger, now_ns)

    def cancel(self) -> Cancelled:
        """End what runs: the migration after its layer, or the wait for a policy.

        Returns:
            What ran. For PLANNING, the caller answers the `Compute` in which the policy plans at once, with None.
        """
        if self.control.is_planning:
            self._is_given_up = True
            return Cancelled.PLANNING
        if self.control.migration.progress.is_running:
            self.control.cancel()
            return Cancelled.MIGRATION
        return Cancelled.NOTHING

    def _request(self) -> PlanRequest:
        control = self.control
        return PlanRequest(self.view, self._loads.load(), control.migration.table, control.step_s)
