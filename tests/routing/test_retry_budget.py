"""Retries as a share of the traffic, of all clients and of each; time is a number here."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.routing.health import RetryBudget, RetryRules

S = 1_000_000_000
RULES = RetryRules(share=0.2, per_s=1.0, burst=40.0)


def granted(budget: RetryBudget, wanted: int, now_ns: int, client: str = "a") -> int:
    return sum(budget.grant(client, now_ns) for _ in range(wanted))


def spent(num_clients: int = 50) -> RetryBudget:
    """A budget of which nothing is left."""
    budget = RetryBudget(RULES, 0)
    for number in range(num_clients):
        granted(budget, 100, 0, f"spender {number}")
    granted(budget, 100, 0)
    return budget


def test_no_more_is_granted_than_was_saved_and_a_client_leaves_as_many_as_it_uses():
    budget = RetryBudget(RULES, 0)
    assert granted(budget, 100, 0) == 20
    assert granted(budget, 100, 0, "b") == 10
    assert sum(granted(budget, 100, 0, f"{number}") for number in range(100)) == 10


def test_in_the_long_run_retries_are_a_share_of_the_requests():
    budget, num = spent(), 0
    for _ in range(1000):
        budget.request("a")
        num += budget.grant("a", 0)
    assert 195 <= num <= 200


def test_a_few_a_second_are_free():
    assert granted(spent(), 100, 12 * S, "b") == 6  # As many are left to others.
    assert granted(spent(), 100, 24 * S, "b") == 12


@pytest.mark.parametrize("is_granted", [True, False])
def test_one_client_never_uses_up_the_retries_of_the_others(is_granted):
    """Its retries may be granted, or charged after their engine is gone."""
    budget = RetryBudget(RULES, 0)
    for step in range(10_000):
        now_ns = step * S // 100
        budget.request("stranger")
        for _ in range(3):
            budget.grant("stranger", now_ns) if is_granted else budget.charge("stranger", now_ns)
        if step % 400 == 0:
            budget.request("honest")
            assert budget.grant("honest", now_ns)


@pytest.mark.parametrize("num_strangers", [1, 4, 8, 16])
def test_many_clients_together_never_use_up_the_retries_of_the_others(num_strangers):
    budget = RetryBudget(RULES, 0)
    num_granted = 0
    for step in range(10_000):
        now_ns = step * S // 100
        num_granted += sum(budget.grant(f"stranger {number}", now_ns) for number in range(num_strangers))
        if step % (100 * (num_strangers + 2)) == 0:  # its part of the rate, and a little less
            assert budget.grant("honest", now_ns), step
    assert num_granted >= RULES.per_s * 100 - 100 // (num_strangers + 2) - 1, "what it leaves is for the others"


def test_a_retry_that_needed_no_grant_is_deducted_and_never_owed():
    budget = RetryBudget(RULES, 0)
    for number in range(200):
        budget.charge(f"{number}", 0)
    assert granted(budget, 1, 0) == 0
    assert granted(budget, 2, 1 * S, "b") == 1


def test_a_quiet_hour_saves_no_more_than_the_burst():
    budget = spent()
    assert granted(budget, 100, 3600 * S) == 20


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, S)), max_size=300))
def test_retries_of_all_clients_never_exceed_the_budget(steps):
    budget, now_ns, num_granted = RetryBudget(RULES, 0), 0, 0
    for num_requests, (client, num_wanted, pause_ns) in enumerate(steps, start=1):
        now_ns += pause_ns
        budget.request(client)
        num_granted += sum(budget.grant(client, now_ns) for _ in range(num_wanted))
        assert num_granted <= RULES.burst + RULES.share * num_requests + RULES.per_s * now_ns / S + 1e-6
