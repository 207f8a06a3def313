"""QLLM's expert-level preemption: which tokens run at a checkpoint, which join them, and when best effort is due."""

from __future__ import annotations

import pytest
from support.queue_tables import of_classes

from moestro.core.views import ATTENTION, BE, EVERY_EXPERT, LS
from moestro.flow.policies.qllm import ExpertLevelPreemption


def test_latency_sensitive_tokens_run_in_their_lowest_layer():
    run = ExpertLevelPreemption()(of_classes({(4, ATTENTION): 9, (1, 2): 1}, {(0, ATTENTION): 9, (5, 1): 9}), 0)
    assert (run.layer, run.group, run.classes) == (1, EVERY_EXPERT, (LS, BE))


def test_best_effort_alone_runs_in_its_deepest_layer():
    run = ExpertLevelPreemption()(of_classes({}, {(0, ATTENTION): 9, (2, 1): 9, (4, ATTENTION): 1}), 0)
    assert (run.layer, run.group, run.classes) == (4, ATTENTION, (BE, LS))


@pytest.mark.parametrize(("num_others", "classes"), [(8, (LS, BE)), (9, (LS,))])
@pytest.mark.parametrize("group", [ATTENTION, 2])
def test_at_most_max_merged_best_effort_tokens_join(group, num_others, classes):
    policy = ExpertLevelPreemption(max_merged=8)
    assert policy(of_classes({(3, group): 1}, {(3, group): num_others}), 0).classes == classes


def test_best_effort_runs_first_from_the_bound_on_and_the_policy_chooses_then():
    policy, queues = ExpertLevelPreemption(max_wait_ns=50), ({(1, 1): 1}, {(4, 1): 9})
    early = policy(of_classes(*queues, passed_ns=49), 1000)
    assert (early.classes[0], early.ask_again_ns) == (LS, 1001)
    due = policy(of_classes(*queues, passed_ns=50), 1000)
    assert (due.layer, due.classes) == (4, (BE, LS))


def test_without_a_bound_best_effort_is_never_due():
    run = ExpertLevelPreemption(max_wait_ns=None)(of_classes({(1, 1): 1}, {(4, 1): 9}, passed_ns=10**18), 0)
    assert (run.classes[0], run.ask_again_ns) == (LS, None)


def test_urgent_tokens_run_on_until_a_layer_in_which_some_could_join():
    policy = ExpertLevelPreemption(max_merged=8)
    assert policy(of_classes({(1, ATTENTION): 1}, {(3, 1): 9, (5, 1): 8}), 0).until == 5
    assert policy(of_classes({(1, ATTENTION): 1, (2, ATTENTION): 1}, {(5, 1): 8}), 0).until == 2
