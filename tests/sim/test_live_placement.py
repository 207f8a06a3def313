"""Placement on virtual time: counted loads, plans by production policies, and weights that move between steps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.plain_stages import PlainStages, network
from support.routers import router

from moestro.core.experts.expert_load import expert_pressures
from moestro.core.experts.expert_table import EMPTY, ExpertTable, spread_evenly
from moestro.core.work import request_key
from moestro.cost.drawn_step import SlotRows
from moestro.cost.gate import AheadGate, PopularityGate
from moestro.cost.links import AllToAll
from moestro.cost.model import PopularityForm
from moestro.engine.settings import SchedulerSettings
from moestro.placement.contract import PlaceLimits, PlacePrices, even_devices
from moestro.placement.live.control import DecisionOutcome, Trigger
from moestro.placement.settings import LivePlacementSettings
from moestro.sim.cluster import AtTimes, Cluster
from moestro.sim.groups.live_placement import (
    _PRESSURE_INTERVAL,
    UNBOUNDED_BYTES,
    PlacementSite,
    SimPlacement,
    SimPlacementSettings,
    with_spare_slots,
)
from moestro.sim.groups.lock_step_group import LOCK_STEP, LockStepGroup, expert_parallel, lock_step, slowed
from moestro.workload.rows import RequestForm, RequestMaker, Rows

LAYERS, EXPERTS, RANKS = 4, 8, 2
STEP_NS = 100_000
BOUNDS = SchedulerSettings(num_blocks=400, block_size=4, max_model_len=100, max_num_seqs=16, max_num_batched_tokens=64)
COST = PlainStages(network(num_layers=LAYERS, top_k=2), attention=(700, 90), expert=(100, 500), sample=(300, 20))
LINK = AllToAll(start_ns=500, bytes_per_s=1e9, row_bytes=40)
PRICES = PlacePrices(
    token_s=500e-9,
    expert_s=100e-9,
    row_s=(0.0, 40e-9, 40e-9),
    expert_bytes=1000,
    move_bytes_per_s=(1e12, 1e9, 1e9),  # a microsecond for each expert
)


def popularity(seed: int = 0):
    return PopularityForm(skew=1.2, hot_ids="permuted", seed=seed).by_layer(LAYERS, EXPERTS)


GATE = PopularityGate(popularity(), 2)


def placement_of(
    policy: str = "eplb", *, num_spares: int = 0, table=None, half_life: float = 1000.0, check_ns: int = 1, **flags
) -> SimPlacement:
    """Live placement that looks at the load before every step, and has no payback gate."""
    site = PlacementSite(
        devices=even_devices(RANKS, EXPERTS // RANKS + num_spares),
        prices=PRICES,
        limits=PlaceLimits(horizon_steps=1e4),
    )
    first = with_spare_slots(spread_evenly(LAYERS, EXPERTS, list(range(RANKS)), RANKS), num_spares)
    first_steps, budget = flags.pop("first_steps", 5), flags.pop("budget", None)
    given = {"placement_interval": 10, "placement_payback_horizon": 0, **flags}
    settings = SimPlacementSettings(
        live=LivePlacementSettings(
            placement_policy=policy, placement_max_bytes_per_step=budget or UNBOUNDED_BYTES, **given
        ),
        first_steps=first_steps,
        half_life_steps=half_life,
        is_synchronous=budget is None,
        check_ns=check_ns,
    )
    return SimPlacement(first if table is None else table, tuple(range(LAYERS)), site, settings)


def counts(seed: int = 0):
    """int64[sources, layers, experts], tokens of a step."""
    rng = np.random.default_rng(seed)
    return rng.poisson(popularity()[0] * 40, (RANKS, LAYERS, EXPERTS))


def drive(placement: SimPlacement, num_steps: int) -> list[tuple[int, ExpertTable]]:
    """Take steps, and return the wait and the table of each."""
    found, now_ns = [], 0
    for step in range(num_steps):
        waits_ns = placement.turn(now_ns)
        found.append((waits_ns, placement.table))
        placement.observe(counts(step))
        now_ns += STEP_NS + waits_ns
    return found


def test_a_synchronous_migration_stalls_one_step_for_all_weights():
    """A check finds 5 steps, and the policy's own question is answered a step later."""
    placement = placement_of(placement_interval=100)
    steps = drive(placement, 10)
    [found] = placement.decisions
    assert (found.decision.trigger, found.decision.outcome) == (Trigger.INTERVAL, DecisionOutcome.STARTED)
    assert found.decision.num_steps == 6
    assert found.num_moves > 0
    per_layer = [np.bincount(found.plan.moves.target[found.plan.moves.layer == layer]) for layer in range(LAYERS)]
    stall_ns = 1000 * sum(int(received.max()) for received in per_layer if len(received))
    assert [waits for waits, _ in steps] == [0] * 6 + [stall_ns, 0, 0, 0]
    assert [steps[5][1].version, steps[6][1].version] == [0, len([each for each in per_layer if len(each)])]
    assert (steps[6][1].logical_of == found.plan.target.logical_of).all()
    assert found.plan.change.after.balance_of_sums > found.balance_found
    assert (placement.stall_ns, placement.moved_bytes) == (stall_ns, found.num_moves * PRICES.expert_bytes)


@pytest.mark.parametrize("budget", [400, 1000, 2500])
def test_a_budget_spreads_the_same_weights_over_steps_and_commits_layer_by_layer(budget):
    placement = placement_of(budget=budget, placement_interval=1000)
    steps = drive(placement, 60)
    at_once = placement_of(placement_interval=1000)
    drive(at_once, 10)
    waits = np.array([waits for waits, _ in steps])
    assert waits.max() <= 1000 * max(budget // PRICES.expert_bytes, 1), "one expert is the least"
    assert (waits > 0).sum() > 1
    assert steps[-1][1].version > 1
    assert (steps[-1][1].num_copies == at_once.table.num_copies).all()
    assert placement.moved_bytes == at_once.moved_bytes
    first = steps[0][1].num_copies
    for _, table in steps:
        is_old = (table.num_copies == first).all(axis=(0, 2))
        is_new = (table.num_copies == steps[-1][1].num_copies).all(axis=(0, 2))
        assert (is_old | is_new).all(), "a layer is never between two placements"


def test_a_policy_that_moves_nothing_and_a_window_without_tokens_change_nothing():
    static = placement_of("static")
    assert all(waits == 0 and table.version == 0 for waits, table in drive(static, 32))
    assert [each.num_moves for each in static.decisions] == [0, 0, 0]
    idle = placement_of()
    for step in range(12):
        assert idle.turn(step * STEP_NS) == 0
        idle.observe(np.zeros((RANKS, LAYERS, EXPERTS), np.int64))
    assert [each.decision.outcome for each in idle.decisions] == [DecisionOutcome.FAILED]
    assert "no engine has counted any token yet" in idle.decisions[0].decision.reason


def test_a_plan_that_does_not_pay_is_dropped():
    placement = placement_of(placement_payback_horizon=1e-3)
    drive(placement, 20)
    assert {each.decision.outcome for each in placement.decisions} == {DecisionOutcome.DOES_NOT_PAY}
    assert placement.table.version == 0


def test_drift_is_a_trigger_of_the_simulator_too():
    placement = placement_of(placement_interval=0, placement_drift=0.01, first_steps=0, half_life=20.0)
    drive(placement, 130)
    assert placement.decisions[0].decision.trigger is Trigger.DRIFT
    assert placement.decisions[0].decision.num_steps >= 100


def test_a_plan_sees_only_the_steps_before_it():
    one, other = placement_of(), placement_of()
    for placement, later in ((one, 100), (other, 200)):
        for step in range(8):
            placement.turn(step * STEP_NS)
            placement.observe(counts(step if step < 6 else later))
    assert (one.table.logical_of == other.table.logical_of).all()
    assert one.table.version > 0


def test_expert_pressure_is_that_of_the_decayed_visits_in_each_window():
    half_life = 4.0
    placement = placement_of("static", half_life=half_life)
    steps = [counts(number) for number in range(_PRESSURE_INTERVAL + 1)]  # the last of them measures
    for number, tokens in enumerate(steps):
        placement.turn(number * STEP_NS)
        placement.observe(tokens)
    visits = sum(tokens * 0.5 ** (age / half_life) for age, tokens in enumerate(reversed(steps)))
    assert placement.expert_pressure == pytest.approx(expert_pressures(visits, placement.table.parts))
    assert not np.allclose(placement.expert_pressure, 1.0)


# --- in a group -------------------------------------------------------------------------------------------------------


def serve(group: LockStepGroup, seed: int = 0):
    rng = np.random.default_rng(seed)
    rows = Rows(num_prompt_tokens=rng.integers(1, 30, 60), num_output_tokens=rng.integers(1, 30, 60))
    offsets = np.sort(rng.integers(0, 2_000_000, 60))
    return Cluster([group], router(RANKS, "round_robin")).run(
        RequestMaker(rows, RequestForm(block_size=4)), AtTimes(offsets)
    )


def deployment(gate=GATE, num_spares: int = 0):
    found = expert_parallel(COST, gate, RANKS, LINK)
    return replace(found, table=with_spare_slots(found.table, num_spares))


def test_a_static_placement_leaves_the_record_of_a_group_without_control():
    plain = LockStepGroup(BOUNDS, deployment())
    some = deployment(num_spares=2)
    controlled = LockStepGroup(BOUNDS, some, placement=placement_of("static", num_spares=2, table=some.table))
    one, other = serve(plain), serve(controlled)
    assert (one.first_token_ns == other.first_token_ns).all()
    assert (one.last_token_ns == other.last_token_ns).all()
    assert controlled.seats[0].expert_pressure is not None
    assert plain.seats[0].expert_pressure is None


@pytest.mark.parametrize("policy", ["eplb", "moestro"])
def test_planned_placements_shorten_the_steps_of_skewed_experts(policy):
    some = deployment(num_spares=2)
    group = LockStepGroup(BOUNDS, some, placement=placement_of(policy, num_spares=2, table=some.table, first_steps=20))
    plain = LockStepGroup(BOUNDS, deployment())
    serve(group)
    serve(plain)
    assert (group.expert_counts == plain.expert_counts).all(), "each token visits the same experts wherever they are"
    stalls = group.placement.stall_ns
    assert (group.stepping_ns - stalls) / group.num_steps < plain.stepping_ns / plain.num_steps


def test_a_slowed_engine_takes_the_factor_on_every_step():
    plain = LockStepGroup(BOUNDS, deployment())
    slow = LockStepGroup(BOUNDS, deployment(), slowed(3.0, LOCK_STEP))
    for group in (plain, slow):
        group.add(0, *RequestMaker(Rows(np.array([8]), np.array([5])), RequestForm(block_size=4)).make(0, 0), 0)
        while group.next_ns is not None:
            group.turn(group.next_ns)
    assert slow.stepping_ns == pytest.approx(3 * plain.stepping_ns, abs=5)
    assert lock_step is LOCK_STEP.price


def test_experts_move_while_a_group_has_no_tokens():
    """The group looks at the load after its last step, and turns without tokens until the last layer is committed."""
    some = deployment(num_spares=2)
    placement = placement_of(
        "eplb", num_spares=2, table=some.table, budget=1000, first_steps=1, placement_interval=100, check_ns=10**6
    )
    group = LockStepGroup(BOUNDS, some, placement=placement)
    group.add(0, *RequestMaker(Rows(np.array([30]), np.array([5])), RequestForm(block_size=4)).make(0, 0), 0)
    ends = []
    while group.next_ns is not None:
        ends.append(group.next_ns)
        group.turn(group.next_ns)
    assert group.num_steps == 5
    [found] = placement.decisions
    assert found.decision.outcome is DecisionOutcome.STARTED
    assert (placement.table.logical_of == found.plan.target.logical_of).all()
    assert not placement.control.is_busy
    assert group.stepping_ns <= ends[5] < ends[-1]


# --- gates and shares -------------------------------------------------------------------------------------------------


@settings(max_examples=20)
@given(st.integers(0, 2**32 - 1))
def test_drawing_ahead_counts_what_the_gate_counts(seed):
    rng = np.random.default_rng(seed)
    ahead = AheadGate(GATE, LAYERS, EXPERTS)
    position = rng.integers(0, 1000, 6)
    for _ in range(80):
        some = rng.random(6) < 0.7
        keys = np.array([request_key(number) + int(position[number]) for number in np.flatnonzero(some)], np.uint64)
        position += some
        if len(keys):
            assert (ahead.count(keys, range(LAYERS)) == GATE.count(keys, range(LAYERS))).all()
    many = request_key(9) + np.arange(300).astype(np.uint64)
    assert (ahead.count(many, range(LAYERS)) == GATE.count(many, range(LAYERS))).all()
    assert (ahead.count(keys, range(1, 3)) == GATE.count(keys, range(1, 3))).all()


@settings(max_examples=60)
@given(st.integers(0, 2**32 - 1))
def test_shares_divide_every_token_once_and_by_the_shares(seed):
    rng = np.random.default_rng(seed)
    workers, experts = int(rng.integers(1, 5)), int(rng.integers(1, 7))
    holds = rng.random((workers, 2, experts)) < 0.6
    holds[rng.integers(workers), :] = True
    logical_of = np.where(holds, np.arange(experts), EMPTY).astype(np.int32)
    parts = np.where(holds, rng.random(holds.shape) + 0.01, 0.0)
    table = ExpertTable(0, logical_of, experts, np.ones(workers, np.bool_), parts / parts.sum(axis=0))
    tokens = rng.integers(0, 50, (1, 3, 2, experts))
    rows = SlotRows(table).rows(tokens)
    assert (rows.sum(axis=2) == tokens).all(), "slot e holds expert e here"
    assert (np.abs(rows - tokens[:, :, None] * table.shares) <= 1).all()
    assert (rows[:, :, ~holds] == 0).all()


def test_a_row_for_each_expert_crosses_as_often_as_its_token_has_experts_there():
    sent = np.array([[[6], [6]], [[0], [4]]])  # rank 0 has 3 tokens with two experts on each worker
    once, each = (AllToAll(start_ns=0, bytes_per_s=1e9, row_bytes=10, row_per_expert=flag) for flag in (False, True))
    assert once.exchange_ns(sent, np.array([3, 1])).tolist() == [30]
    assert each.exchange_ns(sent, np.array([3, 1])).tolist() == [60]
