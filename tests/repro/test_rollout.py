"""The roll-out of engine twins: equal to the simulated engines where it knows all that they know."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moestro.repro.lmetric.experiment import QUICK, LmetricExperiment
from moestro.repro.lmetric.paper import SCORED_SEED
from moestro.repro.lmetric.rollout import EngineTwin, RolledOutTtft, Watched
from moestro.repro.testbed import run, signals_of

MS = 1_000_000


def price(batch) -> int:
    """10 ms a step and 1 us a token."""
    return 10 * MS + 1000 * int(batch.num_tokens.sum())


def twin(budget=100) -> EngineTwin:
    return EngineTwin(price, budget)


def test_an_idle_engine_computes_a_prompt_in_steps_of_the_budget():
    assert twin().ttft_ns(0, 50, 7) == 10 * MS + 50_000
    assert twin().ttft_ns(0, 250, 7) == 3 * 10 * MS + 250_000
    assert twin().ttft_ns(64, 50, 7) == 10 * MS + 50_000


def test_a_prompt_waits_for_the_step_under_way_and_the_prompts_before_it():
    engine = twin()
    engine.sent("a", 0, 150, 0)
    # Of a, 100 tokens until 10.1 ms, then 50 beside 50 of the new one, whose last 10 are computed beside a's decode.
    assert engine.ttft_ns(0, 60, 2 * MS) == (10_100_000 + 10_100_000 + 10_011_000) - 2 * MS
    assert engine.ttft_ns(0, 60, 2 * MS) == engine.ttft_ns(0, 60, 2 * MS)


def test_a_first_token_or_an_end_says_when_steps_end():
    engine = twin()
    engine.sent("a", 0, 10, 0)
    engine.first_token("a", 12 * MS)  # 2 ms later than the twin thought
    assert engine.ttft_ns(0, 9, 12 * MS) == 10 * MS + 10_000
    assert engine.ttft_ns(0, 9, 15 * MS) == (10_001_000 - 3 * MS) + 10 * MS + 10_000
    engine.ended("a", 22 * MS)
    assert engine.ttft_ns(0, 9, 22 * MS) == 10 * MS + 9_000


def test_decodes_alone_keep_their_steps_until_the_next_prompt():
    engine = twin()
    engine.sent("a", 0, 10, 0)
    engine.first_token("a", 10 * MS)
    later = 10 * MS + 7 * 10_001_000  # seven decode steps
    assert engine.ttft_ns(0, 9, later - 1) == 1 + 10 * MS + 10_000


def test_more_decodes_than_the_budget_still_compute_prompts():
    engine = twin(budget=2)
    for name in "abc":
        engine.sent(name, 0, 1, 0)
        engine.first_token(name, 0)
    assert engine.ttft_ns(0, 2, 0) == 2 * (10 * MS + 4_000)


def test_an_end_before_the_first_token_removes_the_prompt():
    engine = twin()
    engine.sent("a", 0, 1000, 0)
    engine.ended("a", 5 * MS)
    assert engine.ttft_ns(0, 10, 5 * MS) == 10 * MS + 10_000


def test_with_the_simulation_s_prices_most_predictions_are_exact():
    experiment = LmetricExperiment(replace(QUICK, num_requests=400), None)
    chat = experiment.sources["chat"]
    bed = experiment.bed(chat)
    watched = Watched(RolledOutTtft(bed.cost().step_ns, bed.max_num_batched_tokens))
    run(bed, chat.load(20.0, SCORED_SEED), watched, signals_of(watched))
    errors = watched.relative_errors()
    assert len(errors) == 400
    assert np.mean(errors < 0.01) > 0.75
