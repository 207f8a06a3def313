import pytest
from support.routers import decide, table

from moestro.routing.policies.load import MostFreeKv, RoundRobin, Vllm027
from moestro.routing.policy_contract import FRESH_NS
from moestro.routing.registry import ROUTE_POLICIES


def test_round_robin_visits_the_routable_engines_in_turn():
    engines = table(routable=[True, False, True], num_in_flight=[9, 0, 9])
    assert [decide(RoundRobin(), engines, i).engine for i in range(4)] == [0, 2, 0, 2]


@pytest.mark.parametrize(
    ("routable", "load", "engines"),
    [([True] * 3, [2, 1, 3], {1}), ([True, False, True], [2, 0, 3], {0}), ([True] * 3, [1, 1, 3], {0, 1})],
)
def test_least_loaded_takes_the_emptiest_routable_engine_and_shares_ties(routable, load, engines):
    known = table(routable=routable, num_in_flight=load)
    assert {decide(ROUTE_POLICIES.make("least_loaded"), known, i).engine for i in range(12)} == engines


def test_power_of_two_never_takes_the_fullest_and_takes_every_other():
    policy, known = ROUTE_POLICIES.make("power_of_two"), table(num_in_flight=[5, 1, 2, 9])
    taken = [decide(policy, known, i).engine for i in range(600)]
    assert set(taken) == {0, 1, 2}
    # The emptiest of 4 is among 2 drawn half of the time, the second a third, the third a sixth.
    assert [round(6 * taken.count(e) / 600) for e in (1, 2, 0)] == [3, 2, 1]
    assert decide(policy, table(num_in_flight=[3])).engine == 0


def test_vllm_026_weighs_waiting_by_four_and_counts_what_it_sent_since_as_waiting():
    policy = ROUTE_POLICIES.make("vllm-0.26")
    known = table(num_waiting=[1, 0, 0], num_running=[0, 5, 3], num_unseen=[0, 0, 1])
    choice = decide(policy, known)
    assert choice.scores.tolist() == [4, 5, 7]
    assert choice.engine == 0


def test_vllm_026_without_figures_takes_those_without_a_first_token_for_waiting():
    known = table(num_in_flight=[6, 3], num_prefilling=[0, 2])
    assert decide(ROUTE_POLICIES.make("vllm-0.26"), known).scores.tolist() == [6, 9]


def test_vllm_027_adds_kv_pressure_where_any_wait_and_never_counts_less_than_its_own():
    known = table(num_waiting=[2, 0, 0], num_running=[2, 4, 0], kv_usage=[0.75, 0.9, 0.2], num_in_flight=[1, 1, 3])
    assert decide(Vllm027(), known).scores.tolist() == [4 + 2 * 6 * 0.25, 4, 3]
    assert decide(Vllm027(num_clients=2), known).scores.tolist() == [4 + 2 * 6 * 0.25, 4, 6]
    half_empty = table(num_waiting=[2, 0], num_running=[1, 4], kv_usage=[0.2, 0.2])
    assert decide(Vllm027(), half_empty).scores.tolist() == [3, 4], "KV use below one half is no pressure"


def test_most_free_kv_counts_tokens_where_capacities_are_known_and_fractions_where_not():
    assert decide(MostFreeKv(), table(kv_usage=[0.5, 0.2], num_kv_tokens=[1000, 400])).engine == 0
    assert decide(MostFreeKv(), table(kv_usage=[0.9, 0.2], num_kv_tokens=[1000, 400])).engine == 1
    assert decide(MostFreeKv(), table(kv_usage=[0.5, 0.2])).engine == 1


def test_most_free_kv_falls_back_to_load_while_the_use_of_one_engine_is_not_known():
    choice = decide(MostFreeKv(), table(kv_usage=[0.9, None], num_in_flight=[1, 2]))
    assert (choice.engine, "not known" in choice.reason) == (0, True)
    old = decide(MostFreeKv(), table(kv_usage=[0.9, 0.1], num_in_flight=[1, 2]), now_ns=FRESH_NS + 1)
    assert (old.engine, "not known" in old.reason) == (0, True)
