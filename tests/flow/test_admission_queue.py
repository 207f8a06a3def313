"""Plans that wait before a home: which of them enter, and when."""

from __future__ import annotations

from support.fake_group import IS_SPARSE
from support.random_units import units_of

from moestro.core.stages import StageShape
from moestro.core.views import BE, LS
from moestro.core.work import Plan
from moestro.flow.admission import AdmissionQueue
from moestro.flow.token_pool import TokenPool

SHAPE = StageShape(is_sparse=IS_SPARSE, num_experts=4, num_chosen=2, num_rows=8, num_places=8, num_remote_places=0)


def plan(step: int, *units: tuple[int, int]) -> Plan:
    return Plan(step, units_of(units, first_slot=10 * step))


def slots(pool: TokenPool, admitted: list) -> list[list[int]]:
    return [pool.columns.slot[ids].tolist() for ids in admitted]


def test_a_plan_with_a_latency_sensitive_unit_enters_before_those_that_came_earlier():
    pool = TokenPool(SHAPE)
    queue = AdmissionQueue(pool)
    queue.append(plan(1, (BE, 6)))
    (inside,) = queue.admit()
    queue.append(plan(2, (BE, 5)))
    queue.append(plan(3, (BE, 1), (LS, 2)))
    assert queue.admit() == [], "two rows are free"
    pool.leave(inside)
    assert slots(pool, queue.admit()) == [[30, 31], [20]]


def test_a_plan_that_just_fits_enters_and_a_smaller_one_does_not_pass_one_that_does_not():
    pool = TokenPool(SHAPE)
    queue = AdmissionQueue(pool)
    for each in (plan(1, (LS, 5)), plan(2, (LS, 4)), plan(3, (LS, 3))):
        queue.append(each)
    (inside,) = queue.admit()
    pool.leave(inside)
    assert slots(pool, queue.admit()) == [[20], [30]]
    assert queue.num_tokens == 0
    queue.append(plan(4, (LS, 1)))
    assert slots(pool, queue.admit()) == [[40]], "the last free row"
