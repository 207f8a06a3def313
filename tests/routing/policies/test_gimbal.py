import pytest
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
            said = LoadFigures(kv_usage=usage if engine else 0.1, num_tokens=0)
            three.report(engine, said, int(at_s * SECOND), int(at_s * SECOND))
        return three.submit(request(name, user=user), int(at_s * SECOND)).engine

    assert send("a", 0) == 0  # in turn, and remembered
    assert [send("b", 1, user=None), send("c", 2)] == [1, 0]
    assert send("d", 3, usage=0.95) == 0, "saturated: the least KV"
    assert send("e", 64) == 4 % 3, "its memory has expired"
    assert dict(policy.counts) == {"new user": 2, "no user": 1, "user": 1, "least KV": 1}


def test_an_engine_that_is_not_routable_is_neither_compared_nor_chosen():
    known = table(kv_usage=[0.99, 0.2, 0.3], num_tokens=[0, 0, 0], routable=[False, True, True])
    assert decide(GimbalV1(), known).reason == "no user"


def test_gimbal_v2_adds_four_pressures_each_over_its_greatest():
    known = table(
        kv_usage=[0.8, 0.4], said_prefill_tokens=[100, 200], prefill_tokens=[100, 200], num_waiting=[0, 4],
        expert_pressure=[1.5, 1.0],
    )  # fmt: skip
    assert decide(GimbalV2(), known).scores.tolist() == pytest.approx([1 + 0.5 + 0 + 1, 0.5 + 1 + 1 + 0])


def test_gimbal_v2_without_figures_compares_what_the_router_knows():
    known = table(prefill_tokens=[100, 50], num_prefilling=[1, 2], num_in_flight=[2, 2])
    assert decide(GimbalV2(), known).scores.tolist() == [1.5, 1.5]
