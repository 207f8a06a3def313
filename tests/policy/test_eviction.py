import numpy as np

from moestro.core.views import BE, LS, EvictView
from moestro.policy.eviction import last_in_order, least_computed_be_first


def view_of(ranks, computed, classes):
    return EvictView(np.array(ranks), np.array(computed, np.int32), np.array(classes, np.uint8))


def test_the_last_in_the_order_of_admission_is_evicted():
    assert last_in_order(view_of([1, 3, 0, 2], [0] * 4, [LS] * 4)) == 1


def test_best_effort_yields_first_and_of_it_who_loses_least():
    assert least_computed_be_first(view_of([3, 0, 1, 2], [1, 50, 20, 30], [LS, BE, BE, LS])) == 2


def test_among_equals_of_best_effort_the_last_in_order_yields():
    assert least_computed_be_first(view_of([0, 1, 2], [7, 7, 7], [BE, BE, LS])) == 1


def test_without_best_effort_the_last_in_order_yields():
    assert least_computed_be_first(view_of([0, 2, 1], [9, 8, 7], [LS, LS, LS])) == 1
