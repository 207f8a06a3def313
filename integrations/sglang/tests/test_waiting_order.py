"""The order of SGLang's waiting list, without SGLang: examples, laws, and what ranks of one group have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from moestro_sglang.waiting_order import ARRIVAL, WaitingOrder

from moestro.engine.hosted_order import host_order
from moestro.engine.registry import ORDER_POLICIES

S = 1_000_000_000


@dataclass(eq=False)
class FakeRequest:
    rid: str
    origin_input_ids: list[int]
    priority: int | None = None
    output_ids: list[int] = field(default_factory=list)
    extend_batch_idx: int = 0
    is_over: bool = False
    sampling_params: object = None
    time_stats: object = None

    def finished(self) -> bool:
        return self.is_over


def fake(name: str, arrival_s: float, length: int = 10, priority: int | None = None, **params: object) -> FakeRequest:
    stats = SimpleNamespace(**{ARRIVAL: round(arrival_s * S)})
    return FakeRequest(
        name,
        [1] * length,
        priority,
        sampling_params=SimpleNamespace(custom_params=params or None),
        time_stats=stats,
    )


def order_of(policy: str, num_cached=None, be_priority: int | None = None, **kwargs: bool) -> WaitingOrder:
    kwargs = {"reads_priority": False} | kwargs
    return WaitingOrder(host_order(policy, be_priority, **kwargs), num_cached)


def sorted_names(order: WaitingOrder, requests: list[FakeRequest]) -> str:
    order.sort(requests)
    return "".join(request.rid for request in requests)


def test_sjf_sorts_in_place_and_an_arrival_that_is_younger_by_the_age_cannot_pass():
    order, waiting = order_of("sjf:theta_age_s=5"), [fake("a", 1, 900), fake("b", 2, 20), fake("c", 3, 10)]
    assert sorted_names(order, waiting) == "cba"
    waiting.append(fake("d", 5.9, 5))
    assert sorted_names(order, waiting) == "dcba"
    waiting.append(fake("e", 6, 5))  # 5 s after a
    assert sorted_names(order, waiting) == "adecb"


@pytest.mark.parametrize("policy", ["sjf:theta_age_s=2", "prefill_aware:theta_age_s=2", "edf", "weighted_fair", "qllm"])
@pytest.mark.parametrize("seed", range(3))
def test_ranks_with_other_clocks_sort_alike_on_every_history(policy, seed):
    """Ranks see the same requests, each in objects of its own, with nothing in common but what the requests carry."""
    rng = np.random.default_rng(seed)
    ranks = [order_of(policy, num_cached=lambda request: len(request.rid) % 3 * 4) for _ in range(2)]
    lists: list[list[FakeRequest]] = [[], []]
    running: list[list[FakeRequest]] = [[], []]
    arrival_s = 1.0
    for number in range(100):
        arrival_s += float(rng.exponential(0.3))
        length, user = int(rng.integers(1, 50)), str(rng.choice(["ann", "bob"]))
        kind = str(rng.choice(["ls", "be"]))
        num_admitted, num_ended = int(rng.integers(0, 2)), int(rng.integers(0, 3))
        for waiting, active, rank in zip(lists, running, ranks, strict=True):
            waiting.append(fake(f"{number}-", arrival_s, length, user=user, service_class=kind))
            rank.sort(waiting)
            for _ in range(num_admitted):
                request = waiting.pop(0)
                request.extend_batch_idx = 1
                active.append(request)
            for request in active[:num_ended]:
                request.is_over, request.output_ids = True, [1] * 20
            if len(active) > 3 and number % 7 == 0:  # one is preempted and waits again
                again = active.pop()
                again.output_ids = [1] * 3
                waiting.append(again)
            del active[:num_ended]
        assert [r.rid for r in lists[0]] == [r.rid for r in lists[1]]
    assert len(lists[0]) > 20


@pytest.mark.parametrize("name", ORDER_POLICIES.names())
def test_no_policy_is_passed_over_beyond_its_bound_on_the_clock_of_arrivals(name):
    """A request that arrives later by the bound never comes before, also where no clock is read."""
    order = order_of(name, num_cached=lambda _request: 0)
    bound_ns = ORDER_POLICIES.make(name).max_passed_over_ns
    if bound_ns is None:
        pytest.skip("the policy states no bound in time")
    rng, waiting = np.random.default_rng(3), []
    for number, arrival_s in enumerate(np.cumsum(rng.exponential(0.5, 200)).tolist()):
        kind = str(rng.choice(["ls", "be"]))
        waiting.append(fake(str(number), arrival_s + 1, int(rng.integers(1, 999)), service_class=kind))
        order.sort(waiting)
        arrivals = np.array([getattr(each.time_stats, ARRIVAL) for each in waiting])
        latest_before = np.maximum.accumulate(arrivals)
        assert (latest_before - arrivals < max(bound_ns, 1)).all()
        if number % 2:
            waiting.pop(0)


def test_requests_without_an_arrival_keep_their_order_and_do_not_age():
    order, waiting = order_of("sjf:theta_age_s=5"), [fake("a", 0, 900), fake("b", 0, 20)]
    assert sorted_names(order, waiting) == "ba"
    assert sorted_names(order_of("fcfs"), [fake("a", 0), fake("b", 0)]) == "ab"
    without = fake("c", 0, 30)
    without.time_stats = SimpleNamespace()
    assert sorted_names(order, [*waiting, without]) == "bca"


def test_a_preempted_request_keeps_its_arrival_and_counts_its_answer():
    order = order_of("fcfs")
    first, second, third = fake("a", 1), fake("b", 2), fake("c", 3)
    assert sorted_names(order, [first, second, third]) == "abc"
    first.output_ids = [1, 2, 3]
    assert sorted_names(order, [second, third, first]) == "abc"
    assert first.moestro_row[1][5] == 13


def test_sglangs_priorities_are_levels_and_higher_is_more_urgent_by_default():
    requests = [fake("a", 1, 9, 0), fake("b", 2, 5, 0), fake("c", 3, 900, 7), fake("d", 4, 1)]
    high_first = order_of("sjf", reads_priority=True, low_first=False)
    assert sorted_names(high_first, list(requests)) == "cdba"  # without a priority: 0
    low_first = order_of("sjf", reads_priority=True, low_first=True)
    assert sorted_names(low_first, [fake("a", 1, 9, 3), fake("b", 2, 90, -1)]) == "ba"


def test_be_priority_makes_classes_of_priorities_in_the_direction_of_sglangs_flag():
    for low_first, number in ((True, 5), (False, -5)):
        order = order_of("qllm", be_priority=number, reads_priority=True, low_first=low_first)
        requests = [fake("a", 1, priority=number), fake("b", 2, priority=0), fake("c", 3, priority=number * 2)]
        assert sorted_names(order, requests) == "bac"


def test_the_class_and_the_user_come_from_custom_params():
    requests = [fake("a", 1, service_class="be"), fake("b", 2, service_class="ls"), fake("c", 3)]
    assert sorted_names(order_of("qllm"), requests) == "bca"
    alone = fake("d", 4)
    alone.sampling_params = None  # an embedding request
    assert sorted_names(order_of("qllm"), [*requests, alone]) == "bcda"


def test_weighted_fair_charges_what_was_admitted_and_not_what_was_aborted():
    order = order_of("weighted_fair:output_cost=2")
    charged, aborted = fake("x", 1, 500, user="ann"), fake("y", 2, 500, user="bob")
    order.sort([charged, aborted])
    charged.extend_batch_idx = 1  # y has left the list without a batch
    ann, bob = fake("a", 3, user="ann"), fake("b", 4, user="bob")
    assert sorted_names(order, [ann, bob]) == "ba"
    assert not order_of("sjf")._waiting


def test_prefill_aware_looks_up_the_cache_of_the_oldest_requests_alone():
    looked_up: list[str] = []

    def num_cached(request: FakeRequest) -> int:
        looked_up.append(request.rid)
        return 890 if request.rid == "0" else 0

    requests = [fake(str(i), 1 + i / 1000, 900 - 10 * (i > 0)) for i in range(100)]
    order = order_of("prefill_aware", num_cached)
    order.sort(requests)
    assert requests[0].rid == "0"
    assert len(looked_up) == 64


@pytest.mark.parametrize("given", ["be", ["user"], 5, {"user": "\ud800"}, {"service_class": {"a": 1}}])
def test_custom_params_of_any_kind_end_no_scheduler(given):
    order, requests = order_of("weighted_fair"), [fake("a", 1), fake("b", 2)]
    requests[0].sampling_params = SimpleNamespace(custom_params=given)
    assert sorted(sorted_names(order, requests)) == ["a", "b"]
    requests[0].extend_batch_idx, requests[0].is_over = 1, True
    assert sorted_names(order, [fake("c", 3)]) == "c"
