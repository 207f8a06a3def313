"""The collection of expert load beside a rank: an error in it ends nothing else."""

from __future__ import annotations

import numpy as np

from moestro.core.work import StepResult
from moestro.placement.settings import ExpertLoadSettings
from moestro.wire.messages import ExpertReport, ReadExperts, load_of
from moestro.worker.rank_builder import ExpertCollection

SLOT = np.zeros(1, np.int64)


def result(counts: list[list[int]], choices: list | None = None) -> StepResult:
    kept = None if choices is None else np.array(choices, np.int32)
    return StepResult(SLOT, expert_counts=np.array(counts, np.int64), expert_choices=kept)


def collection(half_life: float = 0) -> ExpertCollection:
    return ExpertCollection(ExpertLoadSettings(expert_load_half_life=half_life))


def test_a_report_has_the_window_and_on_request_its_pairs():
    found = collection()
    found.skip(3)
    found.observe(result([[2, 0], [1, 1]], [[[0], [0]], [[0], [1]]]))
    plain, full = (load_of(found.report(ReadExperts(7, with_pairs=pairs))) for pairs in (False, True))
    assert plain.counts.tolist() == [[2, 0], [1, 1]]
    assert plain.mean.tolist() == [[0.5, 0], [0.25, 0.25]]
    assert (plain.num_steps, plain.weight, plain.pairs) == (4, 4, None)
    pairs = full.pairs
    assert [pairs.layer.tolist(), pairs.expert.tolist(), pairs.next_expert.tolist()] == [[0, 0], [0, 0], [0, 1]]
    assert pairs.count.tolist() == [0.25, 0.25]


def test_a_rank_that_has_counted_nothing_says_so():
    assert collection().report(ReadExperts(3)) == ExpertReport(3)


def test_a_question_may_clear_the_window_first():
    found = collection()
    found.observe(result([[2, 0]]))
    load = load_of(found.report(ReadExperts(1, clear=True)))
    assert (load.num_steps, load.mean.tolist(), load.counts.tolist()) == (0, [[0, 0]], [[2, 0]])


def test_an_error_ends_the_collection_alone(caplog):
    found = collection()
    found.observe(result([[2, 0]]))
    for _ in range(3):
        found.observe(result([[2, 0, 1]]))
        found.skip(1)
    assert len(caplog.records) == 1
    report = found.report(ReadExperts(1, clear=True))
    assert load_of(report) is None
    assert "shape" in report.error
