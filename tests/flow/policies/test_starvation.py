"""How long tokens are passed over while others keep arriving: stated bounds hold, and what has no bound starves."""

from __future__ import annotations

import pytest
from support.queue_simulator import RUN_NS, QueueSimulator, run_with_arrivals

from moestro.core.views import ATTENTION, BE, LS
from moestro.flow.registry import make_step_policy

NUM_LAYERS, NUM_EXPERTS, RUNS = 4, 3, 4000
NUM_QUEUES = NUM_LAYERS * (1 + NUM_EXPERTS) + 1
MAX_WAIT_NS = 20 * RUN_NS


def flood(text: str, *, every_ns: int = RUN_NS // 2, classes: tuple[int, ...] = (LS, BE), seed: int = 0):
    """Two tokens arrive during each run, so that the first layer is never empty."""
    simulator = QueueSimulator(NUM_LAYERS, NUM_EXPERTS, make_step_policy(text, 1), seed)
    run_with_arrivals(simulator, RUNS, every_ns=every_ns, classes=classes)
    return simulator


def test_first_layer_first_never_runs_the_deepest_layer_while_tokens_arrive():
    simulator = flood("flfs")
    assert (NUM_LAYERS, ATTENTION) not in simulator.runs
    assert simulator.num_done == 0
    assert simulator.longest_wait_ns > simulator.now_ns / 2  # and it goes on for as long as they come


@pytest.mark.parametrize("text", ["fifo", "urgent:inner=flfs", "urgent:inner=mtfs", "urgent:inner=defrag"])
def test_fifo_and_urgent_serve_every_layer_under_the_same_flood(text):
    settings = "" if text == "fifo" else f",max_wait={MAX_WAIT_NS / 1e9}"
    simulator = flood(text + settings)
    assert simulator.runs.count((NUM_LAYERS, ATTENTION)) > RUNS / NUM_QUEUES / 4
    assert simulator.num_done > 0.8 * (simulator.num_done + simulator.num_waiting)


@pytest.mark.parametrize("text", ["mtfs", "defrag"])
def test_most_tokens_first_and_defrag_serve_the_flood_but_leave_small_rests_behind(text):
    free, bounded = flood(text), flood(f"urgent:inner={text},max_wait={MAX_WAIT_NS / 1e9}")
    assert free.num_done > 0
    assert free.longest_wait_ns > bounded.longest_wait_ns


@pytest.mark.parametrize("every_ns", [RUN_NS // 4, RUN_NS, 4 * RUN_NS])
@pytest.mark.parametrize("inner", ["flfs", "mtfs", "defrag", "priority+defrag"])
def test_law_urgent_bounds_the_wait_in_each_queue(inner, every_ns):
    """A token that is due waits for the run under way, and for at most one run of each other queue with older ones."""
    for seed in range(2):
        simulator = flood(f"urgent:inner={inner},max_wait={MAX_WAIT_NS / 1e9}", every_ns=every_ns, seed=seed)
        assert simulator.longest_wait_ns <= MAX_WAIT_NS + NUM_QUEUES * simulator.longest_run_ns


@pytest.mark.parametrize("text", ["flfs", "mtfs"])
def test_the_law_is_not_empty_without_urgent_the_bound_breaks(text):
    simulator = flood(text)
    assert simulator.longest_wait_ns > MAX_WAIT_NS + NUM_QUEUES * simulator.longest_run_ns
