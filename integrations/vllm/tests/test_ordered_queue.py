"""The waiting queue in an order policy's order, without vLLM: examples, and a law against a plain list."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import numpy as np
import pytest
from moestro_vllm.order_settings import make_order
from moestro_vllm.ordered_queue import OrderedQueue

from moestro.engine.hosted_order import bound_in_words, host_order
from moestro.engine.registry import ORDER_POLICIES
from moestro.errors import ConfigError

S = 1_000_000_000


@dataclass(eq=False)
class FakeRequest:
    request_id: str
    arrival_time: float
    num_prompt_tokens: int
    num_output: int = 0
    priority: int = 0
    sampling_params: object = field(default_factory=lambda: SimpleNamespace(extra_args=None))

    @property
    def num_tokens(self) -> int:
        return self.num_prompt_tokens + self.num_output


class Clock:
    def __init__(self, now_s: float = 0.0) -> None:
        self.now_s = now_s

    def __call__(self) -> int:
        return round(self.now_s * S)


def fake(name: str, arrival_s: float, length: int = 10, **xargs: object) -> FakeRequest:
    return FakeRequest(name, arrival_s, length, sampling_params=SimpleNamespace(extra_args=xargs or None))


def queue_of(policy: str, clock: Clock, *requests: FakeRequest, num_cached=None) -> OrderedQueue:
    queue = OrderedQueue(host_order(policy, None, reads_priority=False), clock, num_cached)
    for request in requests:
        queue.add_request(request)
    return queue


def names(requests) -> str:
    return "".join(request.request_id for request in requests)


def drained(queue: OrderedQueue) -> str:
    return names([queue.pop_request() for _ in range(len(queue))])


def test_sjf_serves_the_shortest_prompt_first_and_an_aged_one_before_all():
    clock = Clock(4.0)
    queue = queue_of("sjf:theta_age_s=5", clock, fake("a", 0, 900), fake("b", 1, 20), fake("c", 2, 10))
    assert names(queue) == "cba"
    clock.now_s = 5.0
    assert queue.peek_request().request_id == "a"
    assert drained(queue) == "acb"
    assert not queue


def test_a_stream_of_short_prompts_passes_a_long_one_only_until_its_age():
    clock, served = Clock(), []
    queue = queue_of("sjf:theta_age_s=3", clock, fake("long", 0, 5000))
    for tick in range(80):  # ten short prompts a second, of which one is served each time
        clock.now_s = tick / 10
        queue.add_request(fake(f"s{tick}", clock.now_s, 5))
        served.append((clock.now_s, queue.pop_request().request_id))
    at_s = next(now_s for now_s, name in served if name == "long")
    assert at_s == 3.0


def test_what_was_shown_is_popped_even_if_time_changes_the_order_in_between():
    clock = Clock(4.9)
    queue = queue_of("sjf:theta_age_s=5", clock, fake("a", 0, 900), fake("b", 1, 20))
    assert queue.peek_request().request_id == "b"
    clock.now_s = 5.1
    assert queue.pop_request().request_id == "b"
    assert queue.pop_request().request_id == "a"


def test_an_arrival_after_a_look_is_shown_by_the_next_look():
    queue = queue_of("sjf", Clock(), fake("a", 0, 900))
    assert queue.peek_request().request_id == "a"
    queue.add_request(fake("b", 0, 20))
    assert queue.pop_request().request_id == "b"


def test_a_request_that_is_put_back_keeps_its_arrival():
    queue = queue_of("fcfs", Clock(9), fake("a", 0), fake("b", 1), fake("c", 2))
    first = [queue.pop_request(), queue.pop_request()]
    queue.prepend_requests(reversed(first))  # as vLLM's scheduler does with requests that it skips
    assert drained(queue) == "abc"


def test_skipped_requests_of_equal_arrival_keep_their_order():
    queue = queue_of("fcfs", Clock(9), *(fake(name, 1.0) for name in "abcd"))
    skipped = [queue.pop_request(), queue.pop_request()]
    queue.prepend_requests(reversed(skipped))
    assert drained(queue) == "abcd"


def test_edf_reads_the_class_and_an_unknown_word_counts_as_latency_sensitive(caplog):
    requests = (
        fake("a", 0, service_class="be"),
        fake("b", 1, service_class="ls"),
        fake("c", 2, service_class="fast"),
    )
    queue = queue_of("edf:ls_slo_s=3,be_slo_s=30", Clock(3), *requests)
    assert names(queue) == "bca"
    assert "'fast' is neither 'ls' nor 'be'" in caplog.text


def test_a_pooling_request_has_no_sampling_parameters():
    request = fake("a", 0)
    request.sampling_params = None
    assert drained(queue_of("edf", Clock(), request)) == "a"


def test_prefill_aware_counts_what_the_cache_lacks_and_asks_again_when_it_changes():
    cached = {"a": 900, "b": 0}
    clock = Clock(1)
    requests = fake("a", 0, 1000), fake("b", 0.5, 200)
    queue = queue_of("prefill_aware", clock, *requests, num_cached=lambda request: cached[request.request_id])
    assert names(queue) == "ab"
    cached["a"] = 0
    assert names(queue) == "ab"
    queue.cache_changed()
    assert names(queue) == "ba"


def test_a_policy_that_reads_the_cache_needs_a_look_up():
    with pytest.raises(ValueError, match="num_cached"):
        queue_of("prefill_aware", Clock())


def test_weighted_fair_serves_the_user_with_the_least_service_for_its_weight():
    ann = [fake(f"a{i}", 0.0, 100, user="ann") for i in range(6)]
    bob = [fake(f"b{i}", 1.0, 100, user="bob") for i in range(3)]
    queue = queue_of("weighted_fair:weight:ann=2", Clock(2), *ann, *bob)
    served = []
    while queue:
        served.append(queue.pop_request())
        queue.admitted(served[-1])
    assert [names(served[:3]).count(user) for user in "ab"] == [2, 1]
    assert [names(served[:6]).count(user) for user in "ab"] == [4, 2]


def test_the_output_of_an_ended_request_is_charged_to_its_user():
    queue = queue_of("weighted_fair:output_cost=2", Clock(2), fake("x", 0, 10, user="ann"))
    ended = queue.pop_request()
    queue.admitted(ended)
    ended.num_output = 1000
    queue.left(ended)
    queue.add_request(fake("a", 1, 10, user="ann"))
    queue.add_request(fake("b", 2, 10, user="bob"))
    assert drained(queue) == "ba"


def test_an_exception_of_a_policy_serves_by_arrival_and_is_logged_once(caplog):
    queue = queue_of("sjf", Clock(4.0), fake("a", 2, 9), fake("b", 1, 20))

    def failing(*_arguments: object) -> None:
        raise ZeroDivisionError("no order")

    queue._ordering = SimpleNamespace(view=failing)
    assert [names(queue) for _ in range(3)] == ["ba"] * 3
    assert drained(queue) == "ba"
    assert [record.message.split(";")[0] for record in caplog.records] == ["Moestro cannot order the waiting requests"]


@pytest.mark.parametrize("policy", ["weighted_fair", "qllm"])
def test_fields_of_any_kind_end_no_engine(policy):
    odd = [fake("a", 0, user="\ud800", service_class=["be"]), fake("b", 1, user=["x"], service_class=np.zeros(2))]
    queue = queue_of(policy, Clock(4.0), *odd)
    queue.admitted(odd[0])
    assert sorted(drained(queue)) == ["a", "b"]
    queue.left(odd[0])


def test_an_empty_queue_and_a_foreign_request_are_refused():
    queue = queue_of("sjf", Clock(), fake("a", 0))
    with pytest.raises(ValueError, match="already"):
        queue.add_request(queue.peek_request())
    with pytest.raises(ValueError, match="b is not in the queue"):
        queue.remove_request(fake("b", 0))
    queue.remove_requests([fake("b", 0), queue.peek_request()])
    assert (len(queue), list(queue)) == (0, [])
    for take in (queue.peek_request, queue.pop_request):
        with pytest.raises(IndexError):
            take()


@pytest.mark.parametrize(
    "policy", ["fcfs", "sjf:theta_age_s=2", "edf:ls_slo_s=1,be_slo_s=4", "priority", "qllm:theta_age_s=2"]
)
def test_every_history_serves_as_a_plain_list_would(policy):
    """Any order of calls gives what sorting all waiting requests at each call gives."""
    rng = np.random.default_rng(7)
    clock, waiting, plain = Clock(), [], ORDER_POLICIES.make(policy)
    queue = queue_of(policy, clock)
    for number in range(600):
        clock.now_s += float(rng.exponential(0.1))
        doing = rng.choice(["add"] * 5 + ["pop", "pop", "back", "remove"])
        if doing == "add":
            request = fake(
                f"{number},", clock.now_s, int(rng.integers(1, 50)), service_class=str(rng.choice(["ls", "be"]))
            )
            request.priority = int(rng.integers(-3, 3))
            queue.add_request(request)
            waiting.append(request)
        elif waiting and doing == "remove":
            gone = [
                waiting.pop(i)
                for i in sorted(rng.choice(len(waiting), min(len(waiting), 2), replace=False).tolist(), reverse=True)
            ]
            queue.remove_requests(gone)
        elif waiting:
            waiting = sorted_by(plain, waiting, clock())
            assert names(queue) == names(waiting)
            if doing == "pop":
                assert queue.peek_request() is waiting[0]
                assert queue.pop_request() is waiting.pop(0)
            else:
                queue.prepend_requests([queue.pop_request()])
        assert len(queue) == len(waiting)
    assert len(waiting) > 20


def sorted_by(policy, waiting: list[FakeRequest], now_ns: int) -> list[FakeRequest]:
    """Order by the key that each policy states in words."""
    name, ages = type(policy).__name__, [now_ns - round(each.arrival_time * S) for each in waiting]
    is_be = [each.sampling_params.extra_args["service_class"] == "be" for each in waiting]
    keys = {
        "Fcfs": lambda i: 0,
        "Sjf": lambda i: -1 if ages[i] >= 2 * S else waiting[i].num_prompt_tokens,
        "EarliestDeadline": lambda i: waiting[i].arrival_time + (4 if is_be[i] else 1),
        "Priority": lambda i: waiting[i].priority,
        "QllmOrder": lambda i: is_be[i] and ages[i] < 2 * S,
    }
    order = sorted(range(len(waiting)), key=lambda i: (keys[name](i), waiting[i].arrival_time))
    return [waiting[i] for i in order]


def test_settings_come_from_the_additional_config_and_its_other_keys_are_left_alone():
    order, text = make_order("sjf", {"moestro": {"theta_age_s": 2}, "gdn_prefill_backend": "x"})
    assert (order.policy.max_passed_over_ns, text) == (2 * S, "sjf:theta_age_s=2")
    assert bound_in_words(order.policy) == "a request is passed over only by those that arrive up to 2 s after it"
    assert make_order("sjf", {})[0].policy.max_passed_over_ns == 5 * S
    fair, _ = make_order("weighted_fair", {"moestro": {"weight:ann": 2.5}})
    assert fair.policy.max_passed_over_ns is None


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"theta_age": 2}, "has no setting 'theta_age'"),
        ({"theta_age_s": -1}, "theta_age_s must be seconds"),
        ({"theta_age_s": [2]}, "theta_age_s must be a number, got \\[2\\]"),
        ({"be_priority": "low"}, "be_priority must be a whole number, got 'low'"),
        ({"be_priority": 1.5}, "be_priority must be a whole number, got 1.5"),
        ("sjf", "must be an object of settings"),
    ],
)
def test_a_wrong_setting_is_refused_by_name(settings, message):
    with pytest.raises(ConfigError, match=message):
        make_order("sjf", {"moestro": settings})


def with_priority(request: FakeRequest, priority: int) -> FakeRequest:
    request.priority = priority
    return request


def test_beside_vllms_priorities_a_policy_orders_requests_of_one_priority():
    order, _ = make_order("sjf", {}, "priority")
    queue = OrderedQueue(order, Clock(9))  # all have aged but the last two
    for request in (
        with_priority(fake("a", 0, 10), 2),
        with_priority(fake("b", 1, 900), -5),
        with_priority(fake("c", 8, 900), 0),
        with_priority(fake("d", 8.5, 10), 0),
    ):
        queue.add_request(request)
    assert drained(queue) == "bdca"
    assert order.in_words().endswith("; requests of a more urgent priority come first")


def test_be_priority_makes_classes_of_priorities_and_a_stated_class_goes_first():
    order, text = make_order("edf", {"moestro": {"be_priority": 3, "ls_slo_s": 1}}, "priority")
    assert (text, order.has_levels) == ("edf:ls_slo_s=1", False)
    queue = OrderedQueue(order, Clock(2))
    for request in (
        with_priority(fake("a", 0), 3),
        with_priority(fake("b", 1), 2),
        with_priority(fake("c", 2, service_class="ls"), 9),
        with_priority(fake("d", 0.5, service_class="be"), -9),
    ):
        queue.add_request(request)
    assert drained(queue) == "bcad"  # by deadline: two of the class ls, then two of be
    assert "priority 3 and above is best effort" in order.in_words()


def test_a_priority_beyond_32_bits_stays_the_last_or_first():
    order, _ = make_order("fcfs", {}, "priority")
    queue = OrderedQueue(order, Clock(2))
    for name, priority in (("a", 2**40), ("b", 0), ("c", -(2**63))):
        queue.add_request(with_priority(fake(name, 0), priority))
    assert drained(queue) == "cba"
