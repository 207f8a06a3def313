"""A watch of a group's expert table tells which copies moved between which workers."""

from __future__ import annotations

import numpy as np

from moestro.core.experts.expert_table import EMPTY, ExpertTable
from moestro.core.scheduling_events import ExpertMove
from moestro.server.experts.expert_signals import MOST_MOVES, NO_WORKER, ServedTable, TableWatch, describe_change


def table(version: int, workers: list[list[list[int]]], alive: list[bool] | None = None) -> ExpertTable:
    """Of one layer after another: workers[worker][layer] are its slots."""
    is_alive = np.ones(len(workers), np.bool_) if alive is None else np.array(alive)
    return ExpertTable(version, np.array(workers, np.int32), 4, is_alive)


S = 10**9
EVEN = [[[0, 1, EMPTY], [0, 1, EMPTY]], [[2, 3, EMPTY], [2, 3, EMPTY]]]


def test_a_swap_a_copy_and_a_dropped_copy_name_the_networks_layers():
    swapped = [[[0, 2, EMPTY], [0, 1, 3]], [[1, 3, EMPTY], [2, 3, EMPTY]]]
    change = describe_change(table(3, EVEN), ServedTable(table(5, swapped), (1, 2)), 7)
    assert (change.now_ns, change.version, change.layers, change.num_moves, change.dead) == (7, 5, (1, 2), 3, ())
    assert change.moves == ((1, ExpertMove(1, 0, 1)), (1, ExpertMove(2, 1, 0)), (2, ExpertMove(3, NO_WORKER, 0)))
    back = describe_change(table(5, swapped), ServedTable(table(6, EVEN), (1, 2), first=4), 8)
    assert (2, ExpertMove(3, 4, NO_WORKER)) in back.moves


def test_slots_of_one_worker_may_change_places_unnoticed():
    other = [[[1, EMPTY, 0], [0, 1, EMPTY]], EVEN[1]]
    assert describe_change(table(0, EVEN), ServedTable(table(1, other), (0, 1)), 0).num_moves == 0


def test_many_moves_are_counted_and_some_are_named():
    rng = np.random.default_rng(0)
    num_layers = 40
    tables = []
    for version in range(2):
        orders = [rng.permutation(4) for _ in range(num_layers)]
        tables.append(table(version, [[list(o[:2]) for o in orders], [list(o[2:]) for o in orders]]))
    change = describe_change(tables[0], ServedTable(tables[1], range(num_layers)), 0)
    assert change.num_moves > MOST_MOVES
    assert len(change.moves) == MOST_MOVES


def test_the_watch_reports_each_change_once_and_an_error_ends_nothing():
    now, reported = [ServedTable(table(0, EVEN), (0, 1))], []
    watch = TableWatch(lambda: now[0], reported.append)
    watch.look(1 * S)
    watch.look(2 * S)
    assert not reported
    copied = [[[0, 1, 2], [0, 1, EMPTY]], EVEN[1]]
    now[0] = ServedTable(table(1, copied), (0, 1))
    watch.look(3 * S)
    watch.look(4 * S)
    now[0] = ServedTable(table(2, EVEN), (0, 1))
    watch.look(4 * S + 1)  # too soon
    now[0] = ServedTable(table(1, copied), (0, 1))
    now[0] = None
    watch.look(5 * S)
    broken = TableWatch(lambda: 1 / 0, reported.append)
    broken.look(6 * S)
    dead = table(2, [[[0, 1, 2], [0, 1, 2]], [[2, 3, EMPTY], [3, 2, EMPTY]], [[2, 3, 0], [3, 0, 1]]])
    assert [(each.now_ns, each.version) for each in reported] == [(3 * S, 1)]
    alive = ExpertTable(3, dead.logical_of, 4, np.array([True, False, True]))
    assert describe_change(dead, ServedTable(alive, (0, 1)), 0).dead == (1,)
