"""Which waiting request is next: the papers' algorithms on small tables and as plain twins; when an order changes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.policy_text import policy_text

from moestro.core.clock import FOREVER_NS, NS_PER_S
from moestro.core.hashing import name_key
from moestro.core.policy_registry import parse_policy
from moestro.core.views import BE, LS, Admitted, Left, WaitingView
from moestro.engine.policies.ordering import EarliestDeadline, PrefillAware, QllmOrder, Sjf, WeightedFair
from moestro.engine.registry import ORDER_POLICIES
from moestro.errors import ConfigError

FIVE_NS = {"theta_age_s": 5e-9}
SHORT = {  # settings under which much happens within a few nanoseconds
    "sjf": FIVE_NS,
    "prefill_aware": FIVE_NS,
    "qllm": FIVE_NS,
    "edf": {"ls_slo_s": 2e-9, "be_slo_s": 7e-9},
}
ROW = st.tuples(
    st.integers(0, 20),  # arrival
    st.integers(1, 9),  # prompt tokens
    st.integers(1, 9),  # of these, not cached, at most
    st.sampled_from([LS, BE]),
    st.integers(0, 2),  # user
    st.integers(-1, 1),  # priority
)


def view_of(rows) -> WaitingView:
    arrival, prompt, uncached, service_class, user, priority = np.array(rows, np.int64).reshape(-1, 6).T
    return WaitingView(
        arrival_ns=arrival,
        num_prompt_tokens=prompt.astype(np.int32),
        num_uncached=np.minimum(prompt, uncached).astype(np.int32),
        priority=priority.astype(np.int32),
        service_class=service_class.astype(np.uint8),
        serial=np.arange(len(arrival)),
        user=user,
    )


def simple(*rows):
    """Rows of (arrival in seconds, prompt tokens, class)."""
    return view_of([(int(arrival * NS_PER_S), prompt, prompt, kind, 0, 0) for arrival, prompt, kind in rows])


def algorithm_2(queue, now_ns, theta_age_ns):
    """Gimbal v1, Algorithm 2: `queue` of (arrival, prompt), in order of arrival; returns positions in it."""
    priority = {}
    for r, (arrival_ns, prompt) in enumerate(queue):  # 1
        waited_ns = now_ns - arrival_ns  # 2
        if waited_ns >= theta_age_ns:  # 3
            priority[r] = 0  # 4: high, before any length
        else:
            priority[r] = prompt  # 6
    return sorted(range(len(queue)), key=lambda r: priority[r])  # 9: ascending, and as they came where equal


@given(st.lists(ROW, max_size=12), st.integers(20, 40), st.integers(0, 30))
def test_sjf_is_algorithm_2_line_by_line(rows, now_ns, theta_ns):
    rows.sort(key=lambda row: row[0])
    expected = algorithm_2([row[:2] for row in rows], now_ns, theta_ns)
    assert Sjf(theta_age_s=theta_ns * 1e-9).order(view_of(rows), now_ns).tolist() == expected


def test_sjf_serves_the_shortest_until_one_has_waited_five_seconds():
    view = simple((0, 900, LS), (1, 50, LS), (2, 7, LS))
    order = [Sjf().order(view, int(now * NS_PER_S)).tolist() for now in (2, 4.999, 5, 6, 7)]
    assert order == [[2, 1, 0], [2, 1, 0], [0, 2, 1], [0, 1, 2], [0, 1, 2]]


def test_prefill_aware_counts_only_what_is_not_cached():
    view = view_of([(0, 900, 10, LS, 0, 0), (0, 50, 50, LS, 0, 0)])
    assert PrefillAware().order(view, 0).tolist() == [0, 1]
    assert Sjf().order(view, 0).tolist() == [1, 0]


def test_the_earliest_deadline_is_arrival_and_the_objective_of_the_class():
    view = simple((0, 1, BE), (1, 1, LS), (26, 1, LS), (28, 1, LS))  # deadlines 30, 4, 29 and 31 s
    assert EarliestDeadline().order(view, 0).tolist() == [1, 2, 0, 3]
    assert EarliestDeadline().max_passed_over_ns == 27 * NS_PER_S


def test_qllm_takes_latency_sensitive_first_and_each_class_as_it_came():
    view = simple((0, 1, BE), (1, 1, LS), (2, 1, BE), (3, 1, LS))
    assert QllmOrder().order(view, 100 * NS_PER_S).tolist() == [1, 3, 0, 2]
    assert QllmOrder().max_passed_over_ns is None
    assert QllmOrder(theta_age_s=2).order(view, 3 * NS_PER_S).tolist() == [0, 1, 3, 2]


# --- laws of every order ----------------------------------------------------------------------------------------------


@given(st.sampled_from(ORDER_POLICIES.names()), st.lists(ROW, max_size=12), st.integers(20, 60))
def test_every_order_is_total_and_does_not_depend_on_the_order_of_rows(name, rows, now_ns):
    policy, view = ORDER_POLICIES.make(policy_text(name, SHORT.get(name))), view_of(rows)
    order = policy.order(view, now_ns).tolist()
    assert sorted(order) == list(range(len(rows)))
    back = {f: None if (column := getattr(view, f)) is None else column[::-1] for f in view.__slots__}
    assert [len(rows) - 1 - row for row in policy.order(WaitingView(**back), now_ns)] == order


@given(st.sampled_from(ORDER_POLICIES.names()), st.lists(ROW, max_size=8), st.integers(0, 30))
def test_an_order_holds_until_it_says(name, rows, now_ns):
    policy, view = ORDER_POLICIES.make(policy_text(name, SHORT.get(name))), view_of(rows)
    until_ns = policy.next_change_ns(view, now_ns)
    assert until_ns > now_ns
    first = policy.order(view, now_ns).tolist()
    for later_ns in range(now_ns + 1, min(until_ns, now_ns + 40)):
        assert policy.order(view, later_ns).tolist() == first


@pytest.mark.parametrize("policy", [Sjf(theta_age_s=5), PrefillAware(theta_age_s=5), QllmOrder(theta_age_s=5)])
def test_an_ageing_order_changes_when_it_says(policy):
    view = simple((1, 900, BE), (2, 50, LS))
    changes_ns = policy.next_change_ns(view, 2 * NS_PER_S)
    assert changes_ns == 6 * NS_PER_S
    assert policy.order(view, changes_ns - 1).tolist() == [1, 0]
    assert policy.order(view, changes_ns).tolist() == [0, 1]
    assert policy.next_change_ns(view, changes_ns) > changes_ns


@given(st.sampled_from(ORDER_POLICIES.names()), st.lists(ROW, max_size=12), st.integers(20, 60))
def test_who_arrives_later_than_the_bound_never_comes_before(name, rows, now_ns):
    policy, view = ORDER_POLICIES.make(policy_text(name, SHORT.get(name))), view_of(rows)
    bound_ns = policy.max_passed_over_ns
    place = {row: i for i, row in enumerate(policy.order(view, now_ns).tolist())}
    for i, earlier in enumerate(rows):
        for j, later in enumerate(rows):
            if bound_ns is not None and (earlier[0], i) < (later[0], j) and later[0] - earlier[0] >= bound_ns:
                assert place[i] < place[j]


def test_what_has_a_bound_by_default():
    five, twenty_seven = 5 * NS_PER_S, 27 * NS_PER_S
    bounds = {
        "fcfs": 0, "priority": None, "sjf": five, "prefill_aware": five,
        "edf": twenty_seven, "weighted_fair": None, "qllm": None,
    }  # fmt: skip
    assert {name: ORDER_POLICIES.make(name).max_passed_over_ns for name in bounds} == bounds


def test_infinite_patience_is_no_bound_and_never_changes_an_order():
    patient = Sjf(theta_age_s=float("inf"))
    view = simple((0, 900, LS), (1, 50, LS))
    assert patient.max_passed_over_ns is None
    assert patient.next_change_ns(view, 0) == FOREVER_NS
    assert patient.order(view, 10**18).tolist() == [1, 0]


# --- fair shares ------------------------------------------------------------------------------------------------------


def users_view(*rows):
    """Rows of (user, prompt tokens), in order of arrival."""
    return view_of([(i, prompt, prompt, LS, name_key(user), 0) for i, (user, prompt) in enumerate(rows)])


def test_users_take_turns_by_tokens_not_by_requests():
    view = users_view(("ann", 10), ("ann", 10), ("ann", 10), ("bob", 30), ("bob", 30))
    # Start tags: 0, 10, 20 and 0, 30.
    assert WeightedFair().order(view, 0).tolist() == [0, 3, 1, 2, 4]


def test_a_weight_of_two_buys_twice_the_tokens():
    view = users_view(*[("ann", 10)] * 5, *[("bob", 10)] * 3)
    order = WeightedFair(**{"weight:ann": 2}).order(view, 0)
    # Start tags: 0, 5, 10, 15, 20 and 0, 10, 20.
    assert ["ann" if row < 5 else "bob" for row in order] == ["ann", "bob", "ann", "ann", "bob", "ann", "ann", "bob"]


def test_what_a_user_generated_counts_when_its_request_is_over():
    policy, view = WeightedFair(output_cost=2), users_view(("ann", 10), ("bob", 10))
    assert policy.order(view, 0).tolist() == [0, 1]
    policy.observe(Left(name_key("ann"), 1))
    assert policy.order(view, 0).tolist() == [1, 0]
    # Start tags: 2 and 0, 1.
    assert policy.order(users_view(("ann", 10), ("bob", 1), ("bob", 10)), 0).tolist() == [1, 2, 0]


@pytest.mark.parametrize("was_here", [False, True])
def test_no_user_saves_up_while_away(was_here):
    policy = WeightedFair()
    if was_here:
        policy.observe(Admitted(name_key("bob"), 5))
    for _ in range(100):
        policy.observe(Admitted(name_key("ann"), 10))
    # Virtual time is 990, ann's clock 1000: bob starts at 990, not at 0.
    view = users_view(("bob", 10), ("bob", 10), ("ann", 10))
    assert policy.order(view, 0).tolist() == [0, 1, 2]
    assert policy.order(users_view(("bob", 11), ("bob", 10), ("ann", 10)), 0).tolist() == [0, 2, 1]


class FairHistory:
    """Requests of four users that come, are admitted in order and leave at random; a plain recount of what they got."""

    def __init__(self, rng, **settings):
        self.rng, self.policy = rng, WeightedFair(**settings)
        self.weight = {u: settings.get(f"weight:{u}", 1.0) for u in "abcd"}
        self.waiting, self.running, self.num = [], [], 0

    def come(self, user):
        self.waiting.append((self.num, user, int(self.rng.integers(1, 50))))
        self.num += 1

    def admit(self):
        """The first in order."""
        rows = [(number, prompt, prompt, LS, name_key(user), 0) for number, user, prompt in self.waiting]
        first = self.waiting.pop(int(self.policy.order(view_of(rows), 0)[0]))
        self.policy.observe(Admitted(name_key(first[1]), first[2]))
        self.running.append(first)
        return first

    def leave(self, num_generated):
        _, user, _ = self.running.pop(int(self.rng.integers(len(self.running))))
        self.policy.observe(Left(name_key(user), num_generated))


@pytest.mark.parametrize("seed", range(20))
def test_two_users_who_always_wait_get_tokens_by_weight_within_one_request_each(seed):
    """Theorem 1 of Goyal et al.: |W_a / w_a - W_b / w_b| <= l_a / w_a + l_b / w_b, over any interval."""
    rng = np.random.default_rng(seed)
    history = FairHistory(rng, **{"weight:a": float(rng.integers(1, 5)), "weight:b": 1.5})
    lead = [0.0]  # of a over b, after each admission
    for _ in range(300):
        for user in "ab":
            while sum(waiting[1] == user for waiting in history.waiting) < 2:
                history.come(user)
        if rng.random() < 0.3:
            history.come(str(rng.choice(["c", "d"])))
        _, user, prompt = history.admit()
        share = prompt / history.weight[user]
        lead.append(lead[-1] + {"a": share, "b": -share}.get(user, 0.0))
    assert max(lead) - min(lead) <= 49 / history.weight["a"] + 49 / history.weight["b"] + 1e-6


@pytest.mark.parametrize("seed", range(20))
def test_while_one_waits_another_user_gets_no_more_than_the_bound(seed):
    rng = np.random.default_rng(seed)
    history = FairHistory(rng, **{"weight:a": float(rng.integers(1, 5)), "output_cost": float(rng.integers(3))})
    since: dict[int, tuple[float, dict[str, float]]] = {}  # waiting number: virtual time at its coming, cost of each
    for _ in range(400):
        if rng.random() < 0.6:
            history.come(str(rng.choice(list("abcd"))))
            since[history.num - 1] = (history.policy._virtual_time, dict.fromkeys("abcd", 0.0))
        if history.running and rng.random() < 0.4:
            history.leave(int(rng.integers(0, 30)))
        if history.waiting and rng.random() < 0.6:
            number, user, prompt = history.admit()
            came, passed = since.pop(number)
            tag = history.policy._virtual_time  # of the request that has just been admitted
            for other in set("abcd") - {user}:
                assert passed[other] <= history.weight[other] * (tag - came) + 49 + 1e-6
            for _, costs in since.values():
                costs[user] += prompt


def test_clocks_of_users_who_fell_behind_are_forgotten():
    policy = WeightedFair()
    for user in range(10_000):
        policy.observe(Admitted(user, 1))
        policy.observe(Admitted(-1, 1))
    assert len(policy._clocks) < 200


# --- settings ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("lifo", {}, "unknown scheduling_policy 'lifo'; known: .*fcfs, .*priority"),
        ("fcfs", {"theta_age_s": 5.0}, "'fcfs' has no setting 'theta_age_s'; it has none at all"),
        ("sjf", {"theta": 5.0}, "'sjf' has no setting 'theta'; it has theta_age_s"),
        ("sjf", {"theta_age_s": -1.0}, "theta_age_s must be seconds, 0 or more, or inf, got -1"),
        ("qllm", {"theta_age_s": -1.0}, "theta_age_s must be seconds, 0 or more, or inf, got -1"),
        ("edf", {"be_slo_s": float("inf")}, "be_slo_s must be seconds, 0 or more, got inf"),
        ("weighted_fair", {"ann": 2.0}, "accepts output_cost and weight:NAME"),
        ("weighted_fair", {"weight:ann": 0.0}, "weight:NAME, above 0"),
        ("weighted_fair", {"output_cost": -1.0}, "output_cost must be 0 or more, got -1"),
    ],
)
def test_a_setting_that_a_policy_cannot_have_is_refused_with_those_it_has(name, settings, message):
    with pytest.raises(ConfigError, match=message):
        ORDER_POLICIES.make(policy_text(name, settings))


def test_a_policy_and_its_settings_are_one_text():
    text = "weighted_fair:weight:a=b=2, output_cost=0.5"
    assert parse_policy("order", text) == ("weighted_fair", {"weight:a=b": 2, "output_cost": 0.5})
    assert parse_policy("order", "fcfs") == ("fcfs", {})
    assert parse_policy("order", "sjf:theta_age_s=inf")[1]["theta_age_s"] == float("inf")
    assert parse_policy("route", "lmetric:hotspots=off")[1] == {"hotspots": "off"}


@pytest.mark.parametrize("text", ["sjf:5", "sjf:=5", "sjf:theta_age_s="])
def test_what_is_no_setting_is_refused_with_the_form(text):
    with pytest.raises(ConfigError, match="settings are written NAME:SETTING=VALUE"):
        parse_policy("order", text)


@pytest.mark.parametrize(
    "text", ["sjf:theta_age_s=soon", "sjf:theta_age_s=nan", "edf:ls_slo_s=x", "weighted_fair:weight:a=x"]
)
def test_a_word_where_a_number_belongs_is_refused(text):
    with pytest.raises(ConfigError, match=f"scheduling_policy '{text.partition(':')[0]}': "):
        ORDER_POLICIES.make(text)
