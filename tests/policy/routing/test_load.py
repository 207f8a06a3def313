import pytest
from routers import decide, table

from moestro.policy.routing.load import RoundRobin
from moestro.policy.routing.registry import make_policy


def test_round_robin_visits_the_routable_engines_in_turn():
    engines = table(routable=[True, False, True], num_in_flight=[9, 0, 9])
    assert [decide(RoundRobin(), engines, i).engine for i in range(4)] == [0, 2, 0, 2]


@pytest.mark.parametrize(
    ("routable", "load", "engines"),
    [([True] * 3, [2, 1, 3], {1}), ([True, False, True], [2, 0, 3], {0}), ([True] * 3, [1, 1, 3], {0, 1})],
)
def test_least_loaded_takes_the_emptiest_routable_engine_and_shares_ties(routable, load, engines):
    known = table(routable=routable, num_in_flight=load)
    assert {decide(make_policy("least_loaded"), known, i).engine for i in range(12)} == engines
