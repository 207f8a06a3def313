"""Sources of a policy: refused where they cannot come, and reported once when they are missing and when they return."""

from __future__ import annotations

import pytest
from support.routers import table

from moestro.errors import ConfigError
from moestro.routing.policy_contract import KV_EVENTS, Needs, RouteInputs, SourceChange, SourceNews, SourceWatch
from moestro.routing.registry import ROUTE_POLICIES, policy_from

S = 1_000_000_000
NOTHING = RouteInputs(figures=frozenset(), remedy="Turn them on.")


def watch(**needs) -> SourceWatch:
    return SourceWatch(Needs(**needs), 5 * S)


def test_a_figure_is_missed_once_and_found_again_once():
    it = watch(figures=("kv_usage", "num_waiting"))
    both = {"kv_usage": [0.5], "num_waiting": [1]}
    assert it.look(0, table(as_of_ns=0, **both), 0) == []
    assert it.look(0, table(as_of_ns=0, **both), 5 * S) == []
    late = table(as_of_ns=0, **both)
    assert it.look(0, late, 6 * S) == [SourceNews(SourceChange.STOPPED, ("kv_usage", "num_waiting"))]
    assert it.look(0, late, 60 * S) == []
    assert it.missing(0) == {"kv_usage", "num_waiting"}
    again = table(as_of_ns=60 * S, kv_usage=[0.5])
    assert it.look(0, again, 61 * S) == [SourceNews(SourceChange.AGAIN, ("kv_usage",))]
    assert it.missing(0) == {"num_waiting"}


def test_an_engine_that_never_reports_is_distinguished_after_a_while():
    it = watch(figures=("kv_usage",))
    never = table(1)
    assert it.look(0, never, 100 * S) == []
    assert it.look(0, never, 105 * S) == []
    assert it.look(0, never, 106 * S) == [SourceNews(SourceChange.NEVER, ("kv_usage",))]


def test_an_engine_out_of_rotation_starts_anew_and_a_removed_one_is_forgotten():
    it = watch(figures=("kv_usage",))
    never = table(1)
    it.look(0, never, 0)
    it.forget(0)
    assert it.look(0, never, 60 * S) == []
    assert it.look(0, never, 66 * S) == [SourceNews(SourceChange.NEVER, ("kv_usage",))]
    it.remove(0)
    assert it.missing(0) == frozenset()


def test_events_may_be_late_for_as_long_as_figures_may():
    it = watch(hits=True)
    never = table(1)
    assert it.look(0, never, 0, lacks_events=False) == []
    assert it.look(0, never, 100 * S, lacks_events=True) == []
    assert it.look(0, never, 104 * S, lacks_events=False) == []
    assert it.look(0, never, 105 * S, lacks_events=True) == []
    assert it.look(0, never, 111 * S, lacks_events=True) == [SourceNews(SourceChange.STOPPED, (KV_EVENTS,))]
    assert it.look(0, never, 112 * S, lacks_events=False) == [SourceNews(SourceChange.AGAIN, (KV_EVENTS,))]


@pytest.mark.parametrize("name", ["gimbal-v1", "gimbal-v2", "most_free_kv", "vllm-0.27"])
def test_a_policy_is_refused_where_what_it_requires_cannot_come(name):
    with pytest.raises(ConfigError, match=f"--route-policy {name} requires kv_usage, .* Turn them on."):
        policy_from(name, inputs=NOTHING)


def test_an_expression_requires_what_no_count_replaces():
    with pytest.raises(ConfigError, match="requires expert_pressure and kv_usage"):
        policy_from("moestro", "num_waiting + kv_usage * expert_pressure", NOTHING)
    assert policy_from("moestro", "num_waiting + p_tokens", NOTHING)


def test_every_other_policy_works_on_the_routers_own_counts():
    for name in ROUTE_POLICIES.names():
        policy = policy_from(name)
        assert set(policy.needs.required) <= set(policy.needs.figures)
        if not policy.needs.required:
            assert policy_from(name, inputs=NOTHING)
