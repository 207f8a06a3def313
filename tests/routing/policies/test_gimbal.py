import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.routers import decide, request, router, table

from moestro.core.load_figures import LoadFigures
from moestro.routing.policies.gimbal import GimbalV1, GimbalV2

SECOND = 1_000_000_000


@pytest.mark.parametrize(
    ("kv", "load", "branch", "engine"),
    [
        ([0.95, 0.84, 0.9], [0, 9999, 0], "least KV", 1),  # saturated, and 0.1 apart
        ([0.95, 0.86, 0.9], [5000, 1000, 4001], "least load", 1),  # saturated, even, loads 3000 apart and more
        ([0.95, 0.86, 0.9], [4000, 1000, 3000], "saturated and even", 2),
        ([0.89, 0.1, 0.2], [9999, 0, 0], "no user", 2),
        ([0.95, None, 0.1], [0, 0, 0], "no metrics", 2),
    ],
)
def test_each_branch_of_algorithm_1(kv, load, branch, engine):
    choice = decide(GimbalV1(), table(kv_usage=kv, num_tokens=load), decision_id=2)
    assert (choice.reason, choice.engine) == (branch, engine)


def test_a_user_goes_back_to_the_engine_of_the_last_request_unless_kv_is_saturated():
    policy = GimbalV1(user_expiry_s=60)
    three = router(3, policy)

    def send(name, at_s, usage=0.2, user="u"):
        for engine in range(3):
            reported = LoadFigures(kv_usage=usage if engine else 0.1, num_tokens=0)
            three.report(engine, reported, int(at_s * SECOND), int(at_s * SECOND))
        return three.submit(request(name, user=user), int(at_s * SECOND)).engine

    assert send("a", 0) == 0  # in turn, and remembered
    assert [send("b", 1, user=None), send("c", 2)] == [1, 0]
    assert send("d", 3, usage=0.95) == 0, "saturated: the least KV"
    assert send("e", 64) == 4 % 3, "its memory has expired"
    assert dict(policy.counts) == {"new user": 2, "no user": 1, "user": 1, "least KV": 1}


class Algorithm1:
    """Algorithm 1 of Gimbal v1 line by line, with theta_kv 7/8, theta_diff 1/8 and theta_load 40."""

    def __init__(self, expiry_s: int) -> None:
        self.expiry_s = expiry_s
        self.users: dict[str, tuple[int, int]] = {}

    def choose(self, at_s, kv, load, user, decision) -> int:
        engines = range(len(kv))
        chosen = decision % len(kv)
        most, least = max(engines, key=kv.__getitem__), min(engines, key=kv.__getitem__)
        if kv[most] >= 7 / 8:
            if kv[most] - kv[least] >= 1 / 8:
                chosen = least
            elif max(load) - min(load) > 40:
                chosen = min(engines, key=load.__getitem__)
        elif user in self.users and at_s - self.users[user][1] <= self.expiry_s:
            chosen = self.users[user][0]
        if user is not None:
            self.users[user] = chosen, at_s
        return chosen


eighths = st.lists(st.integers(4, 8).map(lambda n: n / 8), min_size=3, max_size=3)
loads = st.lists(st.sampled_from([0, 1, 40, 41, 100]), min_size=3, max_size=3)


@given(st.lists(st.tuples(st.integers(0, 6), eighths, loads, st.sampled_from([None, "u", "v"])), max_size=30))
def test_law_decisions_are_those_of_algorithm_1(requests):
    twin = Algorithm1(expiry_s=10)
    three = router(3, GimbalV1(kv_threshold=7 / 8, kv_gap=1 / 8, load_gap=40, user_expiry_s=10))
    at_s = 0
    for number, (pause_s, kv, load, user) in enumerate(requests):
        at_s += pause_s
        for engine in range(3):
            three.report(
                engine, LoadFigures(kv_usage=kv[engine], num_tokens=load[engine]), at_s * SECOND, at_s * SECOND
            )
        name = str(number)
        chosen = three.submit(request(name, user=user), at_s * SECOND).engine
        three.ended(name, at_s * SECOND)
        assert chosen == twin.choose(at_s, kv, load, user, number)


def test_the_default_thresholds_are_the_papers():
    for kv, branch in (([0.9, 0.7], "least KV"), ([0.89, 0.7], "no user"), ([0.9, 0.81], "saturated and even")):
        assert decide(GimbalV1(), table(kv_usage=kv, num_tokens=[0, 3000])).reason == branch
    assert decide(GimbalV1(), table(kv_usage=[0.9, 0.85], num_tokens=[0, 3001])).reason == "least load"


def test_tokens_in_hand_are_counted_by_the_router_where_engines_do_not_tell():
    """vLLM and SGLang report KV use, and no tokens."""
    known = table(kv_usage=[0.95, 0.9, 0.9], context_tokens=[9000, 4000, 5000])
    assert (decide(GimbalV1(), known).reason, decide(GimbalV1(), known).engine) == ("least load", 1)


def test_an_engine_that_is_not_routable_is_neither_compared_nor_chosen():
    known = table(kv_usage=[0.99, 0.2, 0.3], num_tokens=[0, 0, 0], routable=[False, True, True])
    assert decide(GimbalV1(), known).reason == "no user"
    assert [decide(GimbalV1(), known, turn).engine for turn in range(4)] == [1, 2, 1, 2]


def test_gimbal_v2_adds_four_pressures_each_over_its_greatest():
    known = table(
        kv_usage=[0.8, 0.4], reported_prefill_tokens=[100, 200], prefill_tokens=[100, 200], num_waiting=[0, 4],
        expert_pressure=[1.5, 1.0],
    )  # fmt: skip
    assert decide(GimbalV2(), known).scores.tolist() == pytest.approx([1 + 0.5 + 0 + 1, 0.5 + 1 + 1 + 0])


def test_gimbal_v2_without_figures_compares_what_the_router_knows():
    known = table(prefill_tokens=[100, 50], num_prefilling=[1, 2], num_in_flight=[2, 2])
    assert decide(GimbalV2(), known).scores.tolist() == [1.5, 1.5]


@pytest.mark.parametrize(
    ("kv", "load", "branch"),
    [
        ([0.875, 0.75], [0, 0], "least KV"),  # theta_kv and theta_diff at equality: both comparisons are "at least"
        ([0.8749, 0.5], [0, 0], "no user"),
        ([0.875, 0.7501], [0, 0], "saturated and even"),
        ([0.875, 0.875], [40, 0], "saturated and even"),  # theta_load at equality: the comparison is "above"
        ([0.875, 0.875], [41, 0], "least load"),
    ],
)
def test_each_threshold_at_equality(kv, load, branch):
    policy = GimbalV1(kv_threshold=0.875, kv_gap=0.125, load_gap=40)
    assert decide(policy, table(kv_usage=kv, num_tokens=load)).reason == branch


def test_an_engine_between_the_papers_threshold_and_a_higher_one_is_saturated():
    for usage in (0.9, 0.92, 0.94):
        assert decide(GimbalV1(), table(kv_usage=[usage, 0.1], num_tokens=[0, 0])).reason == "least KV"


def test_a_user_who_comes_back_in_time_is_never_forgotten():
    three = router(3, GimbalV1(user_expiry_s=10))
    engines = []
    for number in range(6):
        at_ns = number * 8 * SECOND
        for engine in range(3):
            three.report(engine, LoadFigures(kv_usage=0.1, num_tokens=0), at_ns, at_ns)
        engines.append(three.submit(request(str(number), user="u"), at_ns).engine)
    assert set(engines) == {0}
