"""Laws of the router's queue: each request leaves once, no bound is passed, and the order is the policy's own."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from moestro.core.hashing import name_key
from moestro.core.request import Request, SamplingParams, ServiceClass
from moestro.core.views import BE, LS, OrderPolicy, WaitingView
from moestro.engine.registry import ORDER_POLICIES
from moestro.errors import QueueBoundError
from moestro.routing.route_queue import QueuedRequest, QueueRules, RouteQueue

SECOND = 1_000_000_000
RULES = QueueRules(ttl_ns=20 * SECOND, max_requests=6, max_tokens=3000)
POLICIES = [*ORDER_POLICIES.names(), "sjf:theta_age_s=1", "qllm:theta_age_s=2", "edf:ls_slo_s=1,be_slo_s=3"]


def request(serial: int, now_ns: int, **given) -> Request:
    return Request(request_id=f"r{serial}", sampling=SamplingParams(max_tokens=8), arrival_ns=now_ns, **given)


@dataclass
class History:
    """A queue and what a plain list of the same requests says."""

    policy: OrderPolicy
    oracle_policy: OrderPolicy
    queue: RouteQueue = field(init=False)
    waiting: list[QueuedRequest] = field(default_factory=list)
    sent: list[QueuedRequest] = field(default_factory=list)
    ends: Counter = field(default_factory=Counter)
    refused: int = 0
    now_ns: int = 0

    def __post_init__(self) -> None:
        self.queue = RouteQueue(self.policy, RULES)

    def enter(self, serial: int, tokens: int, traits: int) -> None:
        service_class = ServiceClass.BE if traits & 1 else ServiceClass.LS
        made = request(
            serial, self.now_ns, num_prompt_tokens=tokens, service_class=service_class, priority=traits % 5 - 2,
            user=None if traits % 3 == 0 else f"u{traits % 3}",
        )  # fmt: skip
        client, of_client = traits % 2, [each for each in self.waiting if each.client == traits % 2]
        total = sum(each.request.num_prompt_tokens for each in of_client)
        is_over = len(of_client) >= RULES.max_requests or (of_client and total + tokens > RULES.max_tokens)
        try:
            queued = self.queue.enter(made, self.now_ns, group=traits % 4 // 2, client=client, num_uncached=tokens // 2)
        except QueueBoundError:
            assert is_over
            self.refused += 1
            return
        assert not is_over
        self.waiting.append(queued)

    def next(self, open_groups: set[int]) -> None:
        expected = next((each for each in self.plain_order() if each.group in open_groups), None)
        found = self.queue.next(lambda group: group in open_groups, self.now_ns)
        assert found is expected
        if found is None:
            return
        bound_ns = self.policy.max_passed_over_ns
        for other in self.waiting:
            if bound_ns is not None and other.group in open_groups and other is not found:
                lead_ns = found.request.arrival_ns - other.request.arrival_ns
                assert lead_ns < bound_ns or lead_ns <= 0 or found.num_returns, "passed over for longer than stated"
        self.leave_list(found)
        self.sent.append(found)
        if self.oracle_policy.observes and not found.num_returns:
            from moestro.core.views import Admitted  # noqa: PLC0415

            self.oracle_policy.observe(Admitted(name_key(found.request.user), found.request.num_prompt_tokens))

    def plain_order(self) -> list[QueuedRequest]:
        rows = self.waiting
        if not rows:
            return []
        view = WaitingView(
            arrival_ns=np.array([each.request.arrival_ns for each in rows], np.int64),
            num_prompt_tokens=np.array([each.request.num_prompt_tokens for each in rows], np.int32),
            priority=np.array([each.request.priority for each in rows], np.int32),
            serial=np.array([each.serial for each in rows], np.int64),
            service_class=np.array([BE if each.is_best_effort else LS for each in rows], np.uint8),
            user=np.array([name_key(each.request.user) for each in rows], np.int64),
            num_uncached=np.array([each.num_uncached for each in rows], np.int32),
        )
        return [rows[at] for at in self.oracle_policy.order(view, self.now_ns).tolist()]

    def leave(self, at: int) -> None:
        if self.waiting:
            gone = self.waiting[at % len(self.waiting)]
            self.queue.leave(gone.request.request_id)
            self.queue.leave(gone.request.request_id)  # of no effect
            self.leave_list(gone)
            self.ends[gone.serial] += 1

    def give_back(self, at: int) -> None:
        if self.sent:
            back = self.sent.pop(at % len(self.sent))
            self.queue.give_back(back, self.now_ns)
            self.waiting.append(back)

    def end(self, at: int) -> None:
        if self.sent:
            over = self.sent.pop(at % len(self.sent))
            self.queue.ended(over.request, at)
            if self.oracle_policy.observes:
                from moestro.core.views import Left  # noqa: PLC0415

                self.oracle_policy.observe(Left(name_key(over.request.user), at))
            self.ends[over.serial] += 1

    def expire(self) -> None:
        late = self.queue.expire(self.now_ns)
        assert late == [each for each in self.waiting if each.entered_ns <= self.now_ns - RULES.ttl_ns]
        for each in late:
            self.leave_list(each)
            self.ends[each.serial] += 1

    def leave_list(self, queued: QueuedRequest) -> None:
        self.waiting = [each for each in self.waiting if each is not queued]

    def check(self) -> None:
        assert len(self.queue) == len(self.waiting)
        assert self.queue.num_tokens == sum(each.request.num_prompt_tokens for each in self.waiting)
        assert all(each.request.request_id in self.queue for each in self.waiting)


STEPS = st.lists(
    st.tuples(
        st.sampled_from(["enter", "enter", "enter", "next", "next", "leave", "give_back", "end", "expire", "wait"]),
        st.integers(0, 1200),
        st.integers(0, 59),
    ),
    max_size=120,
)


# Requests age between two looks at a queue that nothing enters or leaves.
AGEING = [("enter", 1000, 0), ("enter", 10, 0), ("next", 0, 0), ("wait", 150, 0), ("next", 0, 1)]
# A user's request is sent twice, another user's longer one once; then both wait again.
SENT_TWICE = [
    ("enter", 99, 4), ("enter", 149, 8), ("next", 0, 3), ("give_back", 0, 0), ("next", 0, 3), ("next", 0, 3),
    *[("enter", 9, traits) for traits in (4, 8, 4, 8)], *[("next", 0, 3)] * 4,
]  # fmt: skip


@pytest.mark.parametrize("text", POLICIES)
@given(steps=STEPS)
@example(steps=AGEING)
@example(steps=SENT_TWICE)
def test_law_the_queue_is_a_list_in_the_policys_order(text, steps):
    history = History(ORDER_POLICIES.make(text), ORDER_POLICIES.make(text))
    num_entered = 0
    for serial, (what, number, traits) in enumerate(steps):
        match what:
            case "enter":
                history.enter(serial, number + 1, traits)
                num_entered += 1
            case "next":
                history.next({group for group in (0, 1) if traits >> group & 1})
            case "leave":
                history.leave(number)
            case "give_back":
                history.give_back(number)
            case "end":
                history.end(number)
            case "expire":
                history.expire()
            case _:
                history.now_ns += number * SECOND // 100
        history.check()
    while history.waiting:
        history.next({0, 1})
    while history.sent:
        history.end(0)
    assert len(history.queue) == history.queue.num_tokens == 0
    assert history.ends.total() + history.refused == num_entered
    assert set(history.ends.values()) <= {1}


def test_the_law_fails_for_a_queue_that_forgets_the_order():
    class Hasty(RouteQueue):
        def _ordered(self, now_ns):
            order = super()._ordered(now_ns)
            order.rotate(1)
            return order

    policy = ORDER_POLICIES.make("fcfs")
    history = History(policy, policy)
    history.queue = Hasty(policy, RULES)
    for serial in range(3):
        history.enter(serial, 10, 0)
    with pytest.raises(AssertionError):
        history.next({0, 1})


def test_a_client_with_one_large_request_waits_and_a_second_one_is_refused():
    queue = RouteQueue(ORDER_POLICIES.make("fcfs"), RULES)
    queue.enter(request(0, 0, num_prompt_tokens=10_000), 0, group=None, client="a")
    with pytest.raises(QueueBoundError, match="prompts of 10000 tokens of this client wait, of 3000 allowed"):
        queue.enter(request(1, 0, num_prompt_tokens=1), 0, group=None, client="a")
    queue.enter(request(2, 0, num_prompt_tokens=1), 0, group=None, client="b")
    assert len(queue) == 2


def test_many_requests_come_and_go_in_memory_for_the_waiting_ones():
    queue = RouteQueue(ORDER_POLICIES.make("sjf"), QueueRules())
    for serial in range(5000):
        queue.enter(request(serial, serial, num_prompt_tokens=1 + serial % 7), serial, group=None, client=serial)
        if serial >= 10:
            assert queue.next(lambda _: True, serial) is not None
    assert len(queue) == 10
    assert len(queue._rows) <= 32
    assert len(queue._num_of_client) == 10


def test_a_refused_client_waits_as_long_as_requests_that_expire():
    queue = RouteQueue(ORDER_POLICIES.make("fcfs"), RULES)
    assert queue.retry_after_s() == 1
    for serial in range(100):
        queue.enter(request(serial, 0, num_prompt_tokens=1), 0, group=None, client=serial)
    assert len(queue.expire(RULES.ttl_ns)) == 100
    assert queue.retry_after_s() == RULES.ttl_ns // SECOND
