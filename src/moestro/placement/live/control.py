"""Live placement, step by step: when loads are read and policies plan, and when experts move, after steps or on drift.

Experts move only where it pays, one migration at a time. Uses no sockets and no clock: callers pass the time, the steps
and the load.

Nothing here has an effect: a procedure is a generator that yields what it wants done, and takes an `EffectAnswer`.
`moestro serve` drives it with sockets, threads and its clock, and the simulator on virtual time.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum, auto
from typing import Any, Protocol, TypeVar

from moestro.core.clock import NS_PER_S
from moestro.core.experts.expert_load import ExpertLoad
from moestro.errors import MoestroError
from moestro.placement.contract import PLACE_POLICIES, PlacementError, PlacePolicy
from moestro.placement.live.ep_migration import Migration
from moestro.placement.live.plan import (
    GroupView,
    Measured,
    PlacementPlan,
    PlanRequest,
    ask_policy,
    measure,
    plan_of_table,
)
from moestro.placement.settings import NO_POLICY, LivePlacementSettings

logger = logging.getLogger(__name__)


# The progress is looked at every second, so that the alarm comes within 10 s.
STALL_NS = 8 * NS_PER_S
LONGEST_TICK_NS = 2 * NS_PER_S
# Fewer steps are noise: a step of decoding has a token or two for most experts.
DRIFT_STEPS = 100
MEASURED_STEPS = 20  # between two readings, with which their duration is known to a twentieth


class Trigger(StrEnum):
    """Why a placement is decided."""

    START = "start"
    INTERVAL = "interval"
    DRIFT = "drift"
    OPERATOR = "operator"


class DecisionOutcome(StrEnum):
    """What a decision came to."""

    STARTED = "started"
    UNCHANGED = "unchanged"
    DOES_NOT_PAY = "does_not_pay"
    FROZEN = "frozen"
    FAILED = "failed"


class MigrationOutcome(StrEnum):
    """How a migration ended."""

    COMPLETED = "completed"
    CANCELLED = "cancelled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementDecision:
    """One decision about the placement.

    Attributes:
        trigger: Why it was due.
        outcome: What it came to.
        reason: The figures that decided, in words.
        at_ns: Time of the decision.
        num_steps: Steps of the group by then.
    """

    trigger: Trigger
    outcome: DecisionOutcome
    reason: str
    at_ns: int
    num_steps: int


class _StepCount:
    """Counts the steps of a group from its engines' windows, which operators may clear, and measures the shortest.

    Attributes:
        total: Steps.
        least_s: Seconds of a step in the busiest time between two readings; None means not measured. A group that
            waits for requests makes fewer steps, so the least of several readings is nearest to a step.
    """

    def __init__(self) -> None:
        self.total = 0
        self.least_s: float | None = None
        self._last: list[int] = []
        self._last_ns: int | None = None

    def update(self, num_steps: Sequence[int], now_ns: int) -> None:
        """Take in the steps in each engine's window; engines of a group step together."""
        last = self._last or [0] * len(num_steps)
        gained = max((now - old if now >= old else now for now, old in zip(num_steps, last, strict=True)), default=0)
        self.total += gained
        self._last = list(num_steps)
        if self._last_ns is not None and gained >= MEASURED_STEPS and now_ns > self._last_ns:
            each_s = (now_ns - self._last_ns) / NS_PER_S / gained
            self.least_s = each_s if self.least_s is None else min(self.least_s, each_s)
        self._last_ns = now_ns


class _ProgressWatch:
    """Measures for how long something that runs has made no progress."""

    def __init__(self) -> None:
        self._mark: object = None
        self._last_ns = self._stood_ns = 0

    def stood_ns(self, mark: object, now_ns: int) -> int:
        """Return for how long the mark has been the same; a mark of None means that nothing runs.

        While this process is stopped, no progress can be seen; of a long gap between two looks, a tick counts.
        """
        if mark is None or mark != self._mark:
            self._mark, self._stood_ns = mark, 0
        else:
            self._stood_ns += min(now_ns - self._last_ns, LONGEST_TICK_NS)
        self._last_ns = now_ns
        return self._stood_ns


class PlacementControl:
    """State of live placement, and its decisions.

    Args:
        migration: The group's table, and moves towards another one.
        settings: Flags of live placement.
        steps_before: Steps that count as made before the start. vLLM plans first after a quarter of its interval, as if
            it had made three quarters of it.

    Attributes:
        is_frozen: Whether no migration may start.
        decision: The last decision; None means none yet.
        plan, plan_ns: The last plan, and its time.
        active: Plan whose migration runs.
        applied: Plan whose migration was completed last.
        measured: What the group serves, under the last load.
        stall: What stands still, and for how long; "" means nothing.
        num_decisions, num_migrations: Decisions and ended migrations, by outcome.
        num_stalls: Times at which something began to stand still.
        moved_bytes: Bytes of weights of all migrations.
    """

    def __init__(self, migration: Migration, settings: LivePlacementSettings, steps_before: int = 0) -> None:
        self.migration, self.settings = migration, settings
        self.is_frozen = False
        self.decision: PlacementDecision | None = None
        self.plan: PlacementPlan | None = None
        self.plan_ns = 0
        self.active: PlacementPlan | None = None
        self.applied: PlacementPlan | None = None
        self.measured: Measured | None = None
        self.stall = ""
        self.num_decisions: Counter[DecisionOutcome] = Counter()
        self.num_migrations: Counter[MigrationOutcome] = Counter()
        self.num_stalls = self.moved_bytes = 0
        self._steps = _StepCount()
        self._steps_decided = -steps_before
        self._reference = 1.0  # balance below which drift is counted; an even load is that of the first plan
        self._last_bytes = 0
        self._is_cancelled = False
        self._planning_ns: int | None = None
        self._moving, self._planning = _ProgressWatch(), _ProgressWatch()

    # --- observations -----------------------------------------------------------------------------------------------

    @property
    def num_steps(self) -> int:
        """Steps of the group since the server started."""
        return self._steps.total

    @property
    def balance(self) -> float | None:
        """Balance that drift is about: mean load over largest load, mean of all layers."""
        return None if self.measured is None else self.measured.score.mean_balance

    @property
    def step_s(self) -> float | None:
        """Seconds of a step since the last decision, as measured; None means not measured."""
        return self._steps.least_s

    def counted(self, num_steps: Sequence[int], now_ns: int) -> None:
        """Take in the steps in each engine's window."""
        self._steps.update(num_steps, now_ns)

    def due(self) -> Trigger | None:
        """Return why the policy must plan now; None means that it must not."""
        settings = self.settings
        if not settings.plans_by_itself or self.is_frozen or self.is_busy:
            return None
        steps, balance = self.num_steps - self._steps_decided, self.balance
        if settings.placement_interval and steps >= settings.placement_interval:
            return Trigger.INTERVAL
        if settings.placement_drift and steps >= DRIFT_STEPS and balance is not None:
            return Trigger.DRIFT if self._reference - balance >= settings.placement_drift else None
        return None

    @property
    def is_busy(self) -> bool:
        """Whether a policy plans or experts move."""
        return self.is_planning or self.active is not None or self.migration.progress.is_running

    @property
    def is_planning(self) -> bool:
        """Whether a policy plans."""
        return self._planning_ns is not None

    # --- decisions --------------------------------------------------------------------------------------------------

    def begin_planning(self, now_ns: int) -> None:
        """Note that a policy begins to plan."""
        self._planning_ns = now_ns

    def end_planning(self) -> None:
        """Note that the policy has answered, or that its answer is not awaited any more."""
        self._planning_ns = None

    def planned(self, plan: PlacementPlan, now_ns: int) -> None:
        """Keep a plan, which an operator may apply."""
        self.plan, self.plan_ns = plan, now_ns

    def decide(self, plan: PlacementPlan, trigger: Trigger, now_ns: int) -> PlacementDecision:
        """Begin to move towards a plan if it changes anything, pays, and nothing holds it."""
        self._observe_migration()  # One that has ended since the last look would be forgotten when another begins.
        if self.is_frozen:
            return self._record(trigger, DecisionOutcome.FROZEN, "placement is frozen", now_ns)
        if not plan.changes_anything:
            why = f": {plan.reason}" if plan.reason else ""
            return self._record(trigger, DecisionOutcome.UNCHANGED, f"{plan.policy} keeps the table{why}", now_ns)
        if trigger is not Trigger.OPERATOR and (why := plan.why_not(self.settings.payback_horizon)):
            return self._record(trigger, DecisionOutcome.DOES_NOT_PAY, f"{describe_plan(plan)}; {why}", now_ns)
        version = self.migration.table.version
        if version != plan.base.version:
            why = f"the table changed since the plan (version {plan.base.version}, now {version}): plan again"
            return self.fail(trigger, why, now_ns)
        try:
            self.migration.start(plan.target, self.settings.placement_max_bytes_per_step)
        except ValueError as error:
            return self.fail(trigger, f"the group refused the move: {error}", now_ns)
        self.active, self._is_cancelled, self._last_bytes = plan, False, 0
        return self._record(trigger, DecisionOutcome.STARTED, describe_plan(plan), now_ns)

    def fail(self, trigger: Trigger, why: str, now_ns: int) -> PlacementDecision:
        """Note that there is no plan, or that it cannot be followed. The table stays."""
        return self._record(trigger, DecisionOutcome.FAILED, why, now_ns)

    def _record(self, trigger: Trigger, outcome: DecisionOutcome, reason: str, now_ns: int) -> PlacementDecision:
        decision = PlacementDecision(
            trigger=trigger, outcome=outcome, reason=reason, at_ns=now_ns, num_steps=self.num_steps
        )
        self.decision, self._steps_decided = decision, self.num_steps
        self._steps.least_s = None
        self.num_decisions[outcome] += 1
        self._reference = self.balance if self.balance is not None else self._reference
        level = logging.WARNING if outcome is DecisionOutcome.FAILED else logging.INFO
        logger.log(level, "placement: %s (%s): %s", outcome.value.replace("_", " "), trigger.value, reason)
        return decision

    # --- operators --------------------------------------------------------------------------------------------------

    def freeze(self, *, is_frozen: bool) -> None:
        """Let no migration start, or let them start again. A running one goes on."""
        if self.is_frozen != is_frozen:
            self.is_frozen = is_frozen
            logger.info("placement: %s by an operator", "frozen" if is_frozen else "no longer frozen")

    def cancel(self) -> None:
        """End the running migration after the layer that is being committed."""
        self._is_cancelled = True
        self.migration.cancel()
        logger.info("placement: migration cancelled by an operator")

    # --- migration --------------------------------------------------------------------------------------------------

    def tick(self, now_ns: int) -> None:
        """Look at the migration and at the policy that plans; called every second."""
        self._observe_migration()
        stall = self._find_stall(now_ns)
        if stall and not self.stall:
            self.num_stalls += 1
            logger.warning("placement: stalled: %s; POST /admin/placement/cancel gives it up", stall)
        if self.stall and not stall:
            logger.info("placement: no longer stalled")
        self.stall = stall

    def _observe_migration(self) -> None:
        """Count the bytes that have moved, and note the end of a migration."""
        progress = self.migration.progress
        self.moved_bytes += progress.num_bytes - self._last_bytes
        self._last_bytes = progress.num_bytes
        if self.active is not None and not progress.is_running:
            self._end(self.active)

    def _find_stall(self, now_ns: int) -> str:
        """Return what stands still, and for how long; "" means nothing."""
        progress = self.migration.progress
        mark = (progress.num_committed, progress.num_bytes) if progress.is_running else None
        moving_ns = self._moving.stood_ns(mark, now_ns)
        planning_ns = self._planning.stood_ns(self._planning_ns, now_ns)
        if moving_ns >= STALL_NS:
            return (
                f"the migration has made no progress for {moving_ns / NS_PER_S:.0f} s:"
                f" {progress.num_committed} of {progress.num_layers} layers are committed"
            )
        if planning_ns >= STALL_NS:
            return f"the policy has been planning for {planning_ns / NS_PER_S:.0f} s"
        return ""

    def _end(self, plan: PlacementPlan) -> None:
        progress = self.migration.progress
        self.active = None
        if self._is_cancelled and progress.num_committed < progress.num_layers:
            outcome = MigrationOutcome.CANCELLED
        elif progress.error:
            outcome = MigrationOutcome.FAILED
        else:
            outcome = MigrationOutcome.COMPLETED
            self.applied = plan
            if plan.change is not None:
                self._reference = plan.change.after.mean_balance
        self.num_migrations[outcome] += 1
        level = logging.WARNING if outcome is MigrationOutcome.FAILED else logging.INFO
        logger.log(
            level,
            "placement: migration %s: %d of %d layers, %.3g MB, table version %d%s",
            outcome.value,
            progress.num_committed,
            progress.num_layers,
            progress.num_bytes / 1e6,
            self.migration.table.version,
            f": {progress.error}" if progress.error else "",
        )


def describe_plan(plan: PlacementPlan) -> str:
    """Return what a plan moves, gains and costs, in words."""
    layers = len(set(plan.moves.layer.tolist()))
    moves = f"{plan.policy} moves {len(plan.moves)} experts in {layers} layers ({plan.num_bytes / 1e6:.3g} MB)"
    change = plan.change
    if change is None:
        return moves
    pays = "never" if change.steps is None else f"in {change.steps:,.0f} steps"
    direction = "longer" if change.saved_s < 0 else "shorter"
    return (
        f"{moves}; balance {change.before.mean_balance:.3f} to {change.after.mean_balance:.3f}, step"
        f" {abs(change.saved_s) * 1e6:.3g} µs {direction}, pays {pays} (priced)"
    )


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
