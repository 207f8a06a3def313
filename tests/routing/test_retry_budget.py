"""Retries as a share of the traffic, of all clients and of each; time is a number here."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moestro.routing.retry_budget import RetryBudget, RetryRules

S = 1_000_000_000
RULES = RetryRules(share=0.2, per_s=1.0, burst=40.0)


def granted(budget: RetryBudget, wanted: int, now_ns: int, client: str = "a") -> int:
    return sum(budget.grant(client, now_ns) for _ in range(wanted))


def spent(num_clients: int = 10) -> RetryBudget:
    """A budget of which nothing is left."""
    budget = RetryBudget(RULES, 0)
    for number in range(num_clients):
        granted(budget, 100, 0, f"spender {number}")
    granted(budget, 100, 0)
    return budget


def test_no_more_is_granted_than_was_saved_and_one_client_leaves_a_part():
    budget = RetryBudget(RULES, 0)
    assert granted(budget, 100, 0) == 20 + 10
    assert sum(granted(budget, 100, 0, f"{number}") for number in range(100)) == 10


def test_in_the_long_run_retries_are_a_share_of_the_requests():
    budget, num = spent(), 0
    for _ in range(1000):
        budget.request("a")
        num += budget.grant("a", 0)
    assert 195 <= num <= 200


def test_a_few_a_second_are_free():
    assert granted(spent(), 100, 12 * S, "b") == 10  # The rest of these 12 is left to others.
    assert granted(spent(), 100, 24 * S, "b") == 4 + 10


@pytest.mark.parametrize("is_granted", [True, False])
def test_one_client_never_uses_up_the_retries_of_the_others(is_granted):
    """Its retries may be granted, or charged after their engine is gone."""
    budget = RetryBudget(RULES, 0)
    for step in range(10_000):
        now_ns = step * S // 100
        budget.request("stranger")
        for _ in range(3):
            budget.grant("stranger", now_ns) if is_granted else budget.charge("stranger", now_ns)
        if step % 400 == 0:  # A quarter of the budget's rate, which each client has for itself.
            budget.request("honest")
            assert budget.grant("honest", now_ns)


def test_a_retry_that_needed_no_grant_is_deducted_and_never_owed():
    budget = RetryBudget(RULES, 0)
    for number in range(50):
        budget.charge(f"{number % 10}", 0)
    assert granted(budget, 1, 0) == 0
    assert granted(budget, 2, 1 * S) == 1


def test_a_quiet_hour_saves_no_more_than_the_burst():
    budget = spent()
    assert granted(budget, 100, 3600 * S) == 20 + 10


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 3), st.integers(0, S)), max_size=300))
def test_retries_of_all_clients_never_exceed_the_budget(steps):
    budget, now_ns, num_granted = RetryBudget(RULES, 0), 0, 0
    for num_requests, (client, num_wanted, pause_ns) in enumerate(steps, start=1):
        now_ns += pause_ns
        budget.request(client)
        num_granted += sum(budget.grant(client, now_ns) for _ in range(num_wanted))
        assert num_granted <= RULES.burst + RULES.share * num_requests + RULES.per_s * now_ns / S + 1e-6
