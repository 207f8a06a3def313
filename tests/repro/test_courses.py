"""The course of a run: distributions, hits by window, and the two engines that the paper would select."""

from __future__ import annotations

import numpy as np
import pytest

from moestro.core.clock import NS_PER_S
from moestro.repro.lmetric.findings import PERCENTILES, course_of
from moestro.sim.results import ANSWERED, WINDOW_NS, Results


@pytest.fixture
def results():
    """Four requests on three engines: one of the lead-in, then two in a window and one in the next."""
    made = Results(4, 3)
    made.arrival_ns[:] = np.array([0, 21, 25, 31]) * NS_PER_S
    made.first_token_ns[:] = made.arrival_ns + np.array([9000, 100, 300, 500]) * 1_000_000
    made.last_token_ns[:] = made.first_token_ns + np.array([0, 40, 0, 20]) * 1_000_000
    made.num_tokens[:] = [1, 5, 1, 2]
    made.num_prompt_tokens[:], made.num_hit_tokens[:] = [100, 100, 300, 50], [99, 0, 100, 25]
    made.engine[:], made.status[:] = [0, 0, 1, 2], ANSWERED
    for engine, seconds in enumerate(((1, 9), (4, 4), (8, 2))):
        made.prefilled(engine, 0, 5 * NS_PER_S)  # of the lead-in
        for window, each in enumerate(seconds, 2):
            made.prefilled(engine, window * WINDOW_NS, each * NS_PER_S)
    return made


def test_only_counted_requests_are_in_a_course(results):
    course = course_of("chat", "lmetric", results, 1)
    assert course.hit_ratio == (0.25, 0.5)
    assert course.ttft_ms[0] == 100
    assert course.ttft_ms[PERCENTILES.index(50)] == 300
    assert course.ttft_ms[-1] == 500
    assert (course.tpot_ms[0], course.tpot_ms[-1]) == (10, 20)  # an answer of one token has none


def test_the_two_engines_whose_prefill_varies_most_are_shown(results):
    course = course_of("chat", "lmetric", results, 1)
    assert course.prefill_s == ((1, 9), (8, 2))
    assert course.mean_prefill_s == (5, 5)
    work = np.array([[1, 4, 8], [9, 4, 2]])
    assert course.prefill_spread == pytest.approx((work.std(1) / work.mean(1)).mean())
