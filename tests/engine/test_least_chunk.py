"""Prompts are not cut into small chunks because the executor has few rows just now."""

from __future__ import annotations

import numpy as np
import pytest
from support.fake_device import make_request

from moestro.core.work import StepResult
from moestro.engine.scheduler import LEAST_CHUNK_SHARE, Scheduler
from moestro.engine.settings import SchedulerSettings

BUDGET, LEAST = 64, round(LEAST_CHUNK_SHARE * 64)
BOUNDS = SchedulerSettings(
    num_blocks=400, block_size=4, max_model_len=200, max_num_seqs=8, max_num_batched_tokens=BUDGET
)


def add(scheduler: Scheduler, name: str, num_tokens: int) -> None:
    scheduler.add(make_request(name, (np.arange(num_tokens) * 7 + len(scheduler.by_id)) % 50, max_tokens=20))


def plan(scheduler: Scheduler, max_tokens: int | None = None) -> dict[str, int]:
    """Tokens of each request in the next plan."""
    made = scheduler.schedule(0, None, max_tokens)
    if made is None:
        return {}
    names = [scheduler.table.at(slot).request.request_id for slot in made.units.slot.tolist()]
    return dict(zip(names, made.units.num_tokens.tolist(), strict=True))


def end(scheduler: Scheduler, name: str) -> None:
    slots = np.array([scheduler.by_id[name].slot])
    scheduler.update(StepResult(slots, np.array([3], np.int32)), 0)


@pytest.fixture
def busy() -> Scheduler:
    """A chunk of `long` and a decode are in flight, and a prompt waits."""
    scheduler = Scheduler(BOUNDS)
    add(scheduler, "decode", 3)
    assert plan(scheduler) == {"decode": 3}
    end(scheduler, "decode")
    add(scheduler, "long", 150)
    assert plan(scheduler) == {"decode": 1, "long": BUDGET - 1}
    add(scheduler, "next", 100)
    return scheduler


@pytest.mark.parametrize(("num_rows", "chunk"), [(1, 0), (LEAST - 1, 0), (LEAST, LEAST), (40, 40)])
def test_a_prompt_waits_for_rows_rather_than_get_a_small_chunk(busy, num_rows, chunk):
    assert plan(busy, num_rows) == ({"next": chunk} if chunk else {})


def test_decodes_and_small_rests_take_any_number_of_rows(busy):
    end(busy, "decode")
    assert plan(busy, 1) == {"decode": 1}
    add(busy, "short", 5)
    busy.abort("next", 0)
    assert plan(busy, 6) == {"short": 5}


def test_the_rows_that_a_small_chunk_leaves_go_to_a_prompt_that_fits():
    scheduler = Scheduler(BOUNDS)
    add(scheduler, "long", 150)
    plan(scheduler)
    add(scheduler, "next", 100)
    assert plan(scheduler, 5) == {}
    end(scheduler, "long")
    assert plan(scheduler, 5 + BUDGET)["long"] == BUDGET


def test_where_decodes_alone_hold_the_rows_a_prompt_takes_what_is_left():
    """Their rows do not come back, so that waiting could last for ever."""
    scheduler = Scheduler(BOUNDS)
    add(scheduler, "decode", 3)
    plan(scheduler)
    end(scheduler, "decode")
    assert plan(scheduler) == {"decode": 1}
    add(scheduler, "next", 100)
    assert plan(scheduler, 2) == {"next": 2}


def test_the_last_chunk_of_a_full_budget_may_be_small(busy):
    """It is the budget that cuts it, as in any mode, and not a lack of rows."""
    end(busy, "decode")
    end(busy, "long")
    add(busy, "third", 30)
    assert sum(plan(busy).values()) == BUDGET
