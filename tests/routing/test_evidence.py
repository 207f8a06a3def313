"""Witnesses against an engine: failures that differ in client and in body."""

from __future__ import annotations

import random

import numpy as np
from scipy.sparse import csr_matrix
from scipy.sparse.csgraph import maximum_bipartite_matching

from moestro.routing.health import Evidence, Origin


def most_witnesses(origins: list[Origin]) -> int:
    """Size of the largest set of failures that differ pairwise in client and in body."""
    clients, bodies = ({name: i for i, name in enumerate({origin[k] for origin in origins})} for k in (0, 1))
    rows, columns = [clients[each.client] for each in origins], [bodies[each.body] for each in origins]
    graph = csr_matrix((np.ones(len(origins)), (rows, columns)), shape=(len(clients), len(bodies)))
    return int((maximum_bipartite_matching(graph) >= 0).sum())


def test_law_witnesses_are_real_and_at_least_half_of_those_there_are():
    rng = random.Random(1)
    for _ in range(300):
        evidence, most = Evidence(1000), rng.choice([1, 2, 5, 20])
        origins = [
            Origin(rng.randrange(most), rng.randrange(rng.choice([1, 5, 20]))) for _ in range(rng.randint(1, 50))
        ]
        for now, origin in enumerate(origins):
            evidence.failed(origin, now)
        there_are = most_witnesses(origins)
        assert there_are / 2 <= evidence.num_witnesses <= there_are
        assert evidence.num_failures == len(origins)


def test_memory_is_bounded_however_many_fail():
    evidence = Evidence(7)
    for i in range(100_000):
        evidence.failed(Origin(i, i), i)
    assert evidence.num_witnesses == len(evidence._clients) == len(evidence._bodies) == 7
    evidence.clear()
    assert (evidence.num_witnesses, evidence.num_failures, evidence.age_ns(10)) == (0, 0, 0)
