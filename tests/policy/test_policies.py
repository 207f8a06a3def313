import numpy as np
import pytest

from moestro.core.request import Request, SamplingParams
from moestro.core.views import EngineTable
from moestro.policy.routing.basic import least_loaded, round_robin

REQUEST = Request(request_id="r", num_prompt_tokens=1, sampling=SamplingParams(), arrival_ns=0)


def table(routable, load):
    return EngineTable(np.array(routable, np.bool_), np.array(load, np.int32))


def test_round_robin_visits_the_routable_engines_in_turn():
    engines = table([True, False, True], [9, 0, 9])
    assert [round_robin(REQUEST, engines, i).engine for i in range(4)] == [0, 2, 0, 2]


@pytest.mark.parametrize(
    ("routable", "load", "engines"),
    [([True] * 3, [2, 1, 3], {1}), ([True, False, True], [2, 0, 3], {0}), ([True] * 3, [1, 1, 3], {0, 1})],
)
def test_least_loaded_takes_the_emptiest_routable_engine_and_shares_ties(routable, load, engines):
    assert {least_loaded(REQUEST, table(routable, load), i).engine for i in range(6)} == engines
