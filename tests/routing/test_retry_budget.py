"""Retries as a share of the traffic; time is a number here."""

from __future__ import annotations

from moestro.routing.retry_budget import RetryBudget, RetryRules

S = 1_000_000_000
RULES = RetryRules(share=0.2, per_s=1.0, burst=10.0)


def granted(budget: RetryBudget, wanted: int, now_ns: int) -> int:
    return sum(budget.grant(now_ns) for _ in range(wanted))


def test_what_was_saved_up_is_granted_and_no_more():
    assert granted(RetryBudget(RULES, 0), 100, 0) == 10


def test_in_the_long_run_retries_are_a_share_of_the_requests():
    budget = RetryBudget(RULES, 0)
    granted(budget, 100, 0)
    num = 0
    for _ in range(1000):
        budget.request()
        num += budget.grant(0)
    assert 195 <= num <= 200


def test_a_few_a_second_are_free():
    budget = RetryBudget(RULES, 0)
    granted(budget, 100, 0)
    assert granted(budget, 100, 3 * S) == 3


def test_what_nobody_asked_about_is_paid_for_and_never_owed():
    budget = RetryBudget(RULES, 0)
    for _ in range(50):
        budget.charge(0)
    assert granted(budget, 1, 0) == 0
    assert granted(budget, 2, 1 * S) == 1


def test_a_quiet_hour_saves_no_more_than_the_burst():
    budget = RetryBudget(RULES, 0)
    granted(budget, 100, 0)
    assert granted(budget, 100, 3600 * S) == 10
