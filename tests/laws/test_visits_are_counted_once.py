"""Law: the record of a request has each of its (token, expert) pairs once, with the worker that computed it."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from laws.test_many_devices_lose_nothing import random_requests
from support.examples import num_examples
from support.fake_group import IS_SPARSE, FakeGroup, random_table
from support.linked_group import serve
from support.step_policies import Random

from moestro.core.scheduling_events import SequenceLeft
from moestro.core.work import range_ends
from moestro.engine.rank import recorder_of
from moestro.model.step import ExpertVisitCounter


@settings(max_examples=num_examples(4, thorough=8))
@given(
    seed=st.integers(0, 2**32),
    num_homes=st.integers(1, 3),
    num_others=st.integers(0, 3),
    num_chosen=st.integers(1, 4),
    moods=st.sampled_from([(0.0, 0.0), (0.3, 0.0), (0.2, 0.02)]),
    num_copies=st.sampled_from([0, 4]),
)
def test_pairs_of_requests_are_those_that_workers_computed(seed, num_homes, num_others, num_chosen, moods, num_copies):
    rng = np.random.default_rng(seed)
    num_workers = num_homes + num_others
    holders = list(range(num_homes, num_workers)) or list(range(num_workers))
    group = FakeGroup(
        rng,
        num_homes,
        random_table(rng, num_workers, holders, num_copies),
        Random,
        num_chosen=num_chosen,
        repeats=moods[0],
        losses=moods[1],
        counts_visits=True,
    )
    for device in group.devices:
        device.may_forget = True
    recorders = [recorder_of(rank) for rank in group.ranks]
    requests = {request.request_id: request for request in random_requests(rng, 8)}
    tokens = serve(group, list(requests.values()))
    left = [event for each in recorders for event in each.take() if isinstance(event, SequenceLeft)]
    assert {event.request_id for event in left} == set(tokens)
    by_worker = np.zeros(num_workers, np.int64)
    for event in left:
        (visits,) = event.visits
        assert visits.ends == range_ends(len(IS_SPARSE))
        by_worker += np.array(visits.num_pairs).sum(0)
        num_new = requests[event.request_id].num_prompt_tokens + len(tokens[event.request_id]) - 1
        per_layer = np.array(visits.num_pairs).sum()
        # The prefix cache may have spared some tokens, and the last token is never computed.
        assert per_layer <= num_new * num_chosen * sum(IS_SPARSE)
        assert per_layer % (num_chosen * sum(IS_SPARSE)) == 0
    merged = [key for device in group.devices[:num_homes] for key in device.executed]  # by home
    assert by_worker.sum() == len(merged)
    if not num_copies:
        expected = np.zeros(num_workers, np.int64)
        for _, _, layer, expert in merged:
            (worker,) = np.flatnonzero((group.table.logical_of[:, layer] == expert).any(axis=1))
            expected[worker] += 1
        assert by_worker.tolist() == expected.tolist()


@pytest.mark.parametrize("num_chosen", [1, 3])
def test_the_counter_of_ep_equals_a_recount(num_chosen):
    rng = np.random.default_rng(5)
    lengths, num_layers, num_workers = [4, 1, 7], 6, 3

    class Step:
        units = lengths
        num_tokens_of = np.array(lengths)
        upload = staticmethod(torch.from_numpy)

    counter = ExpertVisitCounter(num_layers, num_workers)
    counter.begin(Step)
    ends = range_ends(num_layers)
    expected = np.zeros((3, len(ends), num_workers), np.int64)
    unit_of = np.repeat(np.arange(3), lengths)
    for layer in range(num_layers):
        workers = rng.integers(0, num_workers, (sum(lengths), num_chosen))
        counter.add(layer, torch.from_numpy(workers.reshape(-1)), 7)
        for token, chosen in enumerate(workers.tolist()):
            for worker in chosen:
                expected[unit_of[token], sum(layer >= end for end in ends), worker] += 1
    read = counter.read()
    assert (read.version, read.ends) == (7, ends)
    assert (read.num_pairs.numpy() == expected).all()


def test_ranges_are_even_and_end_with_the_last_layer():
    assert range_ends(2) == (1, 2)
    assert range_ends(24) == (6, 12, 18, 24)
    assert range_ends(0) == ()
