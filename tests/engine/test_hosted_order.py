"""Orders for other engines: rows of their requests, priorities as levels or as classes, look-ups in their caches."""

from __future__ import annotations

import numpy as np
import pytest

from moestro.core.views import BE, LS
from moestro.engine.hosted_order import HostOrder, bound_in_words, host_order, text_and_class
from moestro.engine.waiting import WAITING_COLUMNS
from moestro.errors import ConfigError

S = 1_000_000_000


def order(policy: str, be_priority: int | None = None, *, reads_priority: bool = False, low_first: bool = True):
    return host_order(policy, be_priority, reads_priority=reads_priority, low_first=low_first)


def indices(found: HostOrder, *requests: tuple[int, int, dict[str, object]], now_ns: int = 0) -> list[int]:
    """Order requests of (length, priority, fields), which arrive in turn, one a second."""
    rows = [
        found.row(i, i * S, (length, length), priority, given) for i, (length, priority, given) in enumerate(requests)
    ]
    return found.order(found.view(np.array(rows, WAITING_COLUMNS), None), now_ns).tolist()


def test_priorities_are_levels_where_the_engine_preempts_by_them():
    requests = (5, 2, {}), (900, 0, {}), (9, 0, {})
    assert indices(order("sjf"), *requests) == [0, 2, 1]
    assert indices(order("sjf", reads_priority=True), *requests) == [2, 1, 0]
    assert indices(order("sjf", reads_priority=True, low_first=False), *requests) == [0, 2, 1]


def test_equal_levels_keep_the_order_of_the_policy():
    requests = [(length, length % 2, {}) for length in range(50, 0, -1)]
    assert indices(order("sjf", reads_priority=True), *requests, now_ns=0) == [*range(48, -1, -2), *range(49, 0, -2)]


def test_with_classes_of_priorities_the_policy_orders_alone():
    found = order("qllm", 3, reads_priority=True)
    assert not found.has_levels
    assert indices(found, (1, 3, {}), (1, 2, {}), (1, 9, {"service_class": "ls"})) == [1, 2, 0]


@pytest.mark.parametrize(
    ("low_first", "priority", "is_be"),
    [(True, 1, False), (True, 2, True), (True, 9, True), (False, 3, False), (False, 2, True), (False, -9, True)],
)
def test_the_class_of_a_priority_follows_the_direction_of_urgency(low_first, priority, is_be):
    row = order("fcfs", 2, low_first=low_first).row(0, 0, (1, 1), priority, {})
    assert row[-1] == (BE if is_be else LS)


@pytest.mark.parametrize("given", [None, "be", ["service_class"], 3])
def test_fields_that_are_no_object_count_as_none(given):
    assert order("fcfs").row(0, 0, (1, 1), 0, given)[-1] == LS


def test_an_unknown_class_is_logged_and_counts_as_latency_sensitive(caplog):
    assert order("fcfs", 0).row(0, 0, (1, 1), 5, {"service_class": "fast"})[-1] == LS
    assert "'fast' is neither 'ls' nor 'be'" in caplog.text


@pytest.mark.parametrize(("priority", "column"), [(2**40, 2**31 - 1), (-(2**40), -(2**31)), (-5, -5)])
def test_a_priority_fits_its_column(priority, column):
    assert order("fcfs").row(0, 0, (1, 1), priority, {})[-2] == column
    flipped = order("fcfs", low_first=False).row(0, 0, (1, 1), -priority, {})[-2]
    assert flipped == column


def test_only_the_oldest_rows_are_looked_up_and_one_token_is_always_left():
    found, looked_up = order("prefill_aware"), []
    rows = np.array([found.row(i, i * S, (100, 100), 0, {}) for i in range(70)][::-1], WAITING_COLUMNS)

    def num_cached(i: int) -> int:
        looked_up.append(i)
        return 500

    view = found.view(rows, num_cached)
    assert sorted(looked_up) == list(range(6, 70))  # the first six rows are the youngest
    assert view.num_uncached.tolist() == [100] * 6 + [1] * 64
    assert order("sjf").view(rows, num_cached).num_uncached is None


def test_settings_and_the_priority_of_the_class_are_parted():
    assert text_and_class("sjf", {"theta_age_s": 2, "be_priority": 1}, "here") == ("sjf:theta_age_s=2", 1)
    assert text_and_class("sjf", {}, "here") == ("sjf", None)
    for settings in ({"be_priority": "low"}, {"be_priority": 1.5}, {"be_priority": True}, {"theta_age_s": [2]}):
        with pytest.raises(ConfigError, match=f"here: {next(iter(settings))} must be"):
            text_and_class("sjf", settings, "here")


def test_the_log_says_what_an_order_promises():
    assert bound_in_words(order("weighted_fair").policy) == "no bound in time on being passed over"
    assert "up to 5 s after it; requests of a more urgent priority come first" in (
        order("sjf", reads_priority=True).in_words()
    )
    assert order("qllm", 1, low_first=False).in_words().endswith("; priority 1 and below is best effort")
