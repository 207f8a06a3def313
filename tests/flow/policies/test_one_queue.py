"""Policies that run one whole queue: which one, and what they never do."""

from __future__ import annotations

import numpy as np
import pytest
from msgspec.structs import replace
from support.queue_tables import COLOCATED, KINDS, NUM_EXPERTS, NUM_LAYERS, queues, random_table, table_of

from moestro.core.views import ATTENTION, BE, EMPTY_QUEUE_NS, LS
from moestro.errors import ConfigError
from moestro.flow.policies.one_queue import ALL
from moestro.flow.registry import make_step_policy

NAMES = [
    "mtfs",
    "flfs",
    "fifo",
    "defrag",
    "defrag:lookback=3",
    "urgent:max_wait=1e-8",
    "priority",
    "priority:inner=mtfs",
]
ROUNDS = 200


def policy(text):
    return make_step_policy(text, 1)


def test_the_queue_with_the_most_tokens_of_both_classes_runs_first():
    view = queues({(0, ATTENTION): 5, (2, 1): 3})
    n = view.n.copy()
    n[BE, 2, 1] = 3
    run = policy("mtfs")(table_of(n), 0)
    assert (run.layer, run.group, run.classes) == (2, 1, (LS, BE))


def test_the_lowest_layer_runs_first_and_in_a_layer_the_attention():
    run = policy("flfs")(queues({(3, ATTENTION): 9, (1, 2): 1, (1, ATTENTION): 1}), 0)
    assert (run.layer, run.group) == (1, ATTENTION)


def test_the_queue_with_the_oldest_token_runs_first():
    run = policy("fifo")(queues({(0, ATTENTION): 9, (4, 3): 1}, since={(0, ATTENTION): 8, (4, 3): 7}), 10)
    assert (run.layer, run.group) == (4, 3)


def test_the_class_of_the_oldest_token_runs_first():
    view = queues({(1, 1): 2})
    n, oldest_ns = view.n.copy(), view.oldest_ns.copy()
    n[BE, 1, 1], oldest_ns[LS, 1, 1], oldest_ns[BE, 1, 1] = 2, 6, 5
    assert policy("fifo")(table_of(n, oldest_ns), 9).classes == (BE, LS)
    oldest_ns[BE, 1, 1] = 6
    assert policy("fifo")(table_of(n, oldest_ns), 9).classes == (LS, BE), "of tokens that came together"


def test_limits_bound_the_tokens_of_a_run():
    limited = policy("mtfs:max_attention_rows=7,max_expert_rows=3")
    assert limited(queues({(0, ATTENTION): 9}), 0).max_rows == 7
    assert limited(queues({(0, 2): 9}), 0).max_rows == 3
    assert policy("mtfs")(queues({(0, 2): 9}), 0).max_rows == ALL


@pytest.mark.parametrize("setting", ["max_attention_rows=0", "max_expert_rows=-1"])
def test_a_limit_below_one_token_is_refused(setting):
    with pytest.raises(ConfigError, match="must be at least 1"):
        policy(f"mtfs:{setting}")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", NAMES)
def test_no_policy_chooses_a_queue_that_cannot_run(name, kind):
    rng, chooses = np.random.default_rng(1), policy(name)
    for _ in range(ROUNDS):
        view = random_table(rng, kind, NUM_LAYERS, NUM_EXPERTS)
        run = chooses(view, 25)
        assert view.runnable[list(run.classes), run.layer, run.group].any()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("name", "best"),
    [
        ("mtfs", lambda view: view.n.sum(axis=0)),
        ("flfs", lambda view: np.zeros(view.n.shape[1:])),
        ("fifo", lambda view: -np.where(view.runnable, view.oldest_ns, EMPTY_QUEUE_NS).min(axis=0)),
    ],
)
def test_of_equal_queues_the_first_runs(name, best, kind):
    rng, chooses = np.random.default_rng(2), policy(name)
    for _ in range(ROUNDS):
        view = random_table(rng, kind)
        score, run = best(view), chooses(view, 25)
        runnable = [tuple(at) for at in np.argwhere(view.runnable.any(axis=0)).tolist()]
        if name == "flfs":
            assert (run.layer, run.group) == runnable[0]
        else:
            assert (run.layer, run.group) == next(at for at in runnable if score[at] == max(score[x] for x in runnable))


@pytest.mark.parametrize("name", ["mtfs", "fifo", "defrag", "flfs", "urgent:max_wait=1e-8", "priority"])
def test_other_numbers_of_the_experts_change_the_choice_in_the_same_way(name):
    rng = np.random.default_rng(3)
    for _ in range(ROUNDS):
        view = random_table(rng, COLOCATED)
        distinct = rng.permutation(view.n.size).reshape(view.n.shape) + 1
        distinct[BE] *= view.n.size + 1  # sums over both classes are distinct too, so there are no ties
        view = table_of(distinct * (view.n > 0), rng.permutation(view.n.size).reshape(view.n.shape))
        order = np.concatenate([[0], 1 + rng.permutation(view.n.shape[2] - 1)])
        permuted = replace(view, **{each: getattr(view, each)[:, :, order] for each in ("n", "oldest_ns", "runnable")})
        before, after = policy(name)(view, 25), policy(name)(permuted, 25)
        assert before.layer == after.layer
        if name == "flfs":  # experts of one layer are equal to it, so the first one runs
            assert (before.group == ATTENTION) == (after.group == ATTENTION)
        else:
            assert before.group == order[after.group]
