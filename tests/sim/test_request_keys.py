"""Keys of simulated requests: of the workload's row or the request's id, never of the engine's serial number."""

from __future__ import annotations

import numpy as np

from moestro.core.request import Request, SamplingParams, Script
from moestro.core.work import domains_of, named_request_key, request_key
from moestro.engine.settings import SchedulerSettings
from moestro.sim.groups.group import FusedSeat
from moestro.workload.rows import RequestForm, RequestMaker, Rows

BOUNDS = SchedulerSettings(num_blocks=100, block_size=4, max_model_len=100, max_num_seqs=8, max_num_batched_tokens=100)


def keys_of(jobs: list[tuple[Request, Script]]) -> list[int]:
    seat = FusedSeat(BOUNDS)
    for request, script in jobs:
        seat.add(request, script, 0)
    plan = seat.rank.begin(0)
    return sorted(seat.scripts.request_keys(plan.units).tolist())


def test_a_row_has_the_key_of_its_number_and_domain_on_any_engine():
    maker = RequestMaker(Rows(np.full(6, 5), np.full(6, 3), domain=np.arange(6) % 3), RequestForm(block_size=4))
    first, second = (keys_of([maker.make(row, 0) for row in rows]) for rows in ((0, 1, 2), (5, 2, 4)))
    assert first == sorted(request_key(row, row % 3) for row in (0, 1, 2))
    assert second == sorted(request_key(row, row % 3) for row in (5, 2, 4))
    assert domains_of(np.array(first, np.uint64)).tolist() == [0, 1, 2]


def test_a_request_without_a_row_has_the_key_of_its_id():
    def job(name: str) -> tuple[Request, Script]:
        return Request(request_id=name, num_prompt_tokens=5, sampling=SamplingParams(), arrival_ns=0), Script(3)

    assert keys_of([job("a"), job("b")]) == sorted(map(named_request_key, "ab"))
    assert keys_of([job("b")]) == [named_request_key("b")]
