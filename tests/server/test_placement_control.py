"""When experts move, and when they do not: a group with a fake migration on a virtual clock."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import replace

import numpy as np
import pytest
from support.placed_group import EVEN, NUM_EXPERTS, NUM_LAYERS, SKEWED, PlacedGroup, run

from moestro.placement.live import control as placement_loop
from moestro.placement.live.control import (
    DRIFT_STEPS,
    DecisionOutcome,
    MigrationOutcome,
    Trigger,
    describe_plan,
)


@pytest.mark.parametrize("steps", [2999, 3000])
def test_the_policy_plans_after_as_many_steps_as_in_vllm(steps):
    @run
    async def found() -> int:
        group = PlacedGroup()
        group.serve(steps)
        await group.check()
        return group.migration.num_started

    assert found() == (steps == 3000)


@run
async def test_a_plan_is_followed_and_the_balance_is_as_predicted():
    group = PlacedGroup()
    group.serve(3000)
    await group.check()
    control = group.control
    assert (group.outcome, control.decision.trigger) == (DecisionOutcome.STARTED, Trigger.INTERVAL)
    assert group.migration.max_bytes_per_step == 64 << 20
    assert control.balance == pytest.approx(52 / 100)
    group.migration.commit_all()
    group.tick()
    assert control.num_migrations == {MigrationOutcome.COMPLETED: 1}
    assert control.moved_bytes == NUM_LAYERS * 1000
    await group.check()
    predicted = control.applied.change
    assert control.balance == pytest.approx(predicted.after.mean_balance)
    assert control.balance > 0.7
    assert control.measured.found_s == pytest.approx(predicted.saved_s), "the load is the same"


@run
async def test_a_step_is_measured_in_the_busiest_time_between_two_readings():
    group = PlacedGroup(placement_interval=0)
    for num_steps in (0, 40, 200, 30):
        group.tick(2.0)
        group.serve(num_steps)
        await group.check()
    assert group.control.step_s == pytest.approx(3.0 / 200), "a check takes another second"


@run
async def test_few_steps_between_two_readings_measure_none():
    group = PlacedGroup(placement_interval=0)
    for num_steps in (0, 3):
        group.tick(0.001)
        group.serve(num_steps)
        await group.check()
    assert group.control.step_s is None


@run
async def test_a_plan_says_whether_a_step_gets_shorter_or_longer():
    group = PlacedGroup()
    group.serve(3000)
    await group.check()
    plan = group.control.plan
    change = plan.change
    micros = f"{change.saved_s * 1e6:.3g}"
    assert f"step {micros} µs shorter, pays in" in describe_plan(plan)
    back = replace(plan, change=replace(change, before=change.after, after=change.before, steps=None))
    assert f"step {micros} µs longer, pays never" in describe_plan(back)


@run
async def test_what_a_plan_is_worth_is_found_under_the_load_that_came():
    group = PlacedGroup()
    group.serve(3000)
    await group.check()
    group.migration.commit_all()
    group.serve(10, EVEN)
    await group.check()
    await group.check()
    assert group.control.measured.found_s == pytest.approx(0, abs=1e-6)
    assert group.control.applied.change.saved_s > 1e-4


@run
async def test_noise_moves_nothing_because_it_does_not_pay():
    """Loads that fluctuate by a few percent: EPLB wants other tables, and none pays within the horizon."""
    rng = np.random.default_rng(1)
    group = PlacedGroup(EVEN, placement_payback_horizon=10.0, placement_least_saving=0.0)
    for _ in range(20):
        group.serve(3000, (13 * (1 + 0.02 * rng.standard_normal(NUM_EXPERTS))).tolist())
        await group.check()
    assert group.migration.num_started == 0
    assert group.control.num_decisions[DecisionOutcome.DOES_NOT_PAY] >= 15
    remembering = PlacedGroup(EVEN)
    for _ in range(3):
        remembering.serve(3000, (13 * (1 + 0.02 * rng.standard_normal(NUM_EXPERTS))).tolist())
        await remembering.check()
    assert remembering.migration.num_started == 0
    assert "eplb keeps the table: " in remembering.control.decision.reason
    free = PlacedGroup(EVEN, placement_payback_horizon=0.0)
    for _ in range(20):
        free.serve(3000, (13 * (1 + 0.02 * rng.standard_normal(NUM_EXPERTS))).tolist())
        await free.check()
        free.migration.commit_all()
        free.tick()
    assert free.migration.num_started >= 15, "without a gate each of them moves experts"


@run
async def test_drift_of_the_balance_makes_the_policy_plan_at_once():
    group = PlacedGroup(EVEN, placement_interval=0, placement_drift=0.1)
    group.serve(DRIFT_STEPS)
    await group.check()
    assert group.control.decision is None, "the load is even"
    group.serve(1, SKEWED)
    await group.check()
    assert (group.outcome, group.control.decision.trigger) == (DecisionOutcome.STARTED, Trigger.DRIFT)
    group.migration.commit_all()
    group.serve(5000)
    for _ in range(3):
        await group.check()
    assert group.migration.num_started == 1, "the load is that of the plan"


@run
async def test_a_plan_that_changed_nothing_is_not_repeated_until_the_balance_falls():
    group = PlacedGroup(policy="static", placement_interval=0, placement_drift=0.1)
    for _ in range(5):
        group.serve(DRIFT_STEPS)
        await group.check()
    assert group.control.num_decisions == {DecisionOutcome.UNCHANGED: 1}


@run
async def test_frozen_placement_stays():
    group = PlacedGroup()
    group.control.freeze(is_frozen=True)
    for _ in range(3):
        group.serve(3000)
        await group.check()
    plan = await group.driver.plan("eplb")
    assert group.driver.apply(plan, Trigger.OPERATOR).outcome is DecisionOutcome.FROZEN
    assert group.migration.num_started == 0
    group.control.freeze(is_frozen=False)
    await group.check()
    group.serve(3000)
    await group.check()
    assert group.migration.num_started == 1


@run
async def test_a_cancelled_migration_keeps_the_layers_that_it_has_committed():
    group = PlacedGroup()
    group.serve(3000)
    await group.check()
    group.migration.commit()
    assert group.driver.cancel()
    group.tick()
    assert group.control.num_migrations == {MigrationOutcome.CANCELLED: 1}
    assert (group.migration.table.version, group.control.applied) == (1, None)
    assert not group.driver.cancel(), "nothing runs"
    group.serve(3000)
    await group.check()
    assert group.migration.num_started == 2


@run
async def test_a_worker_that_dies_ends_the_migration_and_the_next_plan_begins_anew(caplog):
    group = PlacedGroup()
    group.serve(3000)
    await group.check()
    group.migration.commit()
    group.migration.fail("worker 1 ended")
    group.is_complete = False
    group.tick()
    assert group.control.num_migrations == {MigrationOutcome.FAILED: 1}
    assert "worker 1 ended" in caplog.text
    group.serve(3000)
    await group.check()
    assert group.migration.num_started == 1, "the worker is about to return"
    group.is_complete = True
    await group.check()
    assert group.migration.num_started == 2


@run
async def test_a_policy_that_raises_changes_nothing(caplog):
    group = PlacedGroup()

    def broken(view):
        raise ZeroDivisionError("a bug")

    group.driver.loop._decide = broken
    group.serve(3000)
    await group.check()
    assert group.outcome is DecisionOutcome.FAILED
    assert "ZeroDivisionError: a bug" in group.control.decision.reason
    assert "ZeroDivisionError: a bug" in caplog.text
    assert (group.migration.num_started, group.migration.table.version) == (0, 0)
    await group.check()
    assert group.control.num_decisions == {DecisionOutcome.FAILED: 1}, "not again before the next interval"


@run
async def test_an_alarm_comes_within_10_s_of_a_migration_that_stands_still(caplog):
    caplog.set_level(logging.INFO)
    group = PlacedGroup()
    group.serve(3000)
    await group.check()
    group.migration.commit()
    group.tick()
    for _ in range(7):
        group.tick()
        assert not group.control.stall
    group.tick()
    group.tick()
    assert "no progress" in group.control.stall
    assert (group.control.num_stalls, caplog.text.count("stalled: the migration")) == (1, 1)
    group.tick()
    assert group.control.num_stalls == 1, "one alarm for one stall"
    group.migration.commit()
    group.tick()
    assert not group.control.stall
    assert "no longer stalled" in caplog.text


@run
async def test_a_pause_of_the_server_is_no_stall():
    group = PlacedGroup()
    group.serve(3000)
    await group.check()
    group.tick()
    group.tick(60)
    assert not group.control.stall


@run
async def test_an_alarm_comes_for_a_policy_that_never_answers_and_an_operator_gives_it_up():
    group, release = PlacedGroup(), threading.Event()
    group.driver.loop._decide = lambda view: release.wait(300) and view.table
    group.serve(3000)
    checking = asyncio.create_task(group.driver.check())
    while group.driver._planning is None:  # noqa: ASYNC110 the loop has no event for it
        await asyncio.sleep(0.001)
    for _ in range(10):
        group.tick()
    assert "planning" in group.control.stall
    with pytest.raises(placement_loop.PlacementError, match="planning already"):
        await group.driver.plan("eplb")
    assert group.driver.cancel()
    await checking
    group.tick()
    release.set()
    assert (group.outcome, group.control.stall) == (DecisionOutcome.FAILED, "")
    assert (await group.driver.plan("eplb")).changes_anything, "others can plan again"


@run
async def test_a_plan_of_an_older_table_is_refused():
    group = PlacedGroup()
    group.serve(3000)
    old = await _plan(group)
    await group.check()
    group.migration.commit_all()
    group.tick()
    decision = group.driver.apply(old, Trigger.OPERATOR)
    assert decision.outcome is DecisionOutcome.FAILED
    assert "the table changed since the plan" in decision.reason


async def _plan(group: PlacedGroup):
    await group.driver.read()
    return await group.driver.plan("eplb")


@run
async def test_a_migration_that_ended_since_the_last_look_is_counted_when_another_begins():
    group = PlacedGroup(policy="none")
    group.serve(3000)
    for _ in range(2):
        group.driver.apply(await _plan(group), Trigger.OPERATOR)
        group.migration.commit()
        group.migration.fail("engine 1 ended")
    group.tick()
    assert group.control.num_migrations == {MigrationOutcome.FAILED: 2}
    assert group.control.moved_bytes == 2000


@run
async def test_cleared_windows_do_not_undo_steps():
    group = PlacedGroup()
    for num_steps in (2000, 500, 900, 2100):
        group.engines.num_steps = num_steps
        await group.driver.read()
    assert group.control.num_steps == 2000 + 500 + 400 + 1200


@run
async def test_pairs_are_requested_only_where_a_policy_needs_them():
    for policy, needs_pairs in (("eplb", False), ("gimbal_v1", True)):
        group = PlacedGroup(policy=policy)
        group.serve(3000)
        await group.check()
        assert any(question.with_pairs for question in group.engines.questions) is needs_pairs


@run
async def test_without_a_policy_no_engine_is_queried():
    group = PlacedGroup(policy="none")
    group.serve(3000)
    await group.check()
    assert group.engines.questions == []


@run
async def test_the_placement_is_priced_only_when_something_changed(monkeypatch):
    group, calls = PlacedGroup(policy="none"), []
    real = placement_loop.measure
    monkeypatch.setattr(placement_loop, "measure", lambda *given: calls.append(1) or real(*given))
    group.serve(100)
    await group.driver.read()
    for _ in range(3):
        await group.check()
    assert len(calls) == 1
    await group.driver.plan("eplb")
    group.driver.apply(group.control.plan, Trigger.OPERATOR)
    group.migration.commit()
    await group.check()
    assert len(calls) == 2, "a layer was committed, or the load read again"
    assert group.control.balance > 0.52
