"""The units of a home: which of them entered before others, and for how long they were passed over."""

from __future__ import annotations

import numpy as np
from support.fake_group import IS_SPARSE
from support.random_units import units_of

from moestro.core.stages import StageShape
from moestro.core.views import BE, LS
from moestro.flow.token_pool import TokenPool

SHAPE = StageShape(is_sparse=IS_SPARSE, num_experts=4, num_chosen=2, num_rows=8, num_places=8, num_remote_places=0)


def test_units_that_entered_together_are_not_earlier_than_each_other():
    pool = TokenPool(SHAPE)
    be, ls = pool.enter(3, units_of([(BE, 1), (LS, 2)])).tolist()
    pool.enter(4, units_of([(BE, 2)], first_slot=10))
    assert pool.find_earlier(BE, 3).tolist() == []
    assert pool.find_earlier(BE, 4).tolist() == [be]
    assert pool.find_earlier(LS, 4).tolist() == [ls]


def test_times_of_being_passed_over_add_up_until_the_unit_leaves():
    pool = TokenPool(SHAPE)
    first, second = np.split(pool.enter(0, units_of([(BE, 1), (BE, 2)])), 2)
    pool.pass_over(first, 5)
    pool.pass_over(np.concatenate([first, second]), 7)
    assert (pool.passed_ns[first].tolist(), pool.passed_ns[second].tolist()) == ([12], [7])
    assert pool.num_passed == 2
    pool.leave(first)
    assert (pool.num_passed, pool.passed_ns[first].tolist()) == (1, [0])
