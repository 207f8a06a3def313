"""Which policies go by sessions and users, and what is reported where requests have none."""

from __future__ import annotations

import numpy as np
import pytest

from moestro.routing.policy_contract import NAMES, names_read_by, unnamed_note
from moestro.routing.registry import ROUTE_POLICIES, policy_from

READS = {
    "session_affinity": ("session_id",),
    "user_affinity": ("user",),
    "bounded_hash": ("session_id", "user"),
    "gimbal-v1": ("user",),
}


@pytest.mark.parametrize("name", ROUTE_POLICIES.names())
def test_the_names_that_a_policy_goes_by_are_found(name):
    assert names_read_by(policy_from(name)) == READS.get(name, ())


class OfTheSession:
    needs = None

    def decide(self, view, draws):
        return view.request.session_id

    def observe(self, event):
        pass


class Failing(OfTheSession):
    def decide(self, view, draws):
        raise KeyError(view.request.user)


def test_a_policy_of_any_class_is_looked_at_even_if_it_fails():
    assert names_read_by(OfTheSession()) == ("session_id",)
    assert names_read_by(Failing()) == ("user",)


def named(session_id, user):
    return dict(zip(NAMES, (np.array(session_id, np.bool_), np.array(user, np.bool_)), strict=True))


def test_requests_without_the_name_are_counted():
    policy = policy_from("session_affinity")
    assert unnamed_note("sticky", policy, named([1, 1], [0, 0])) is None
    assert "sticky goes by session_id, which no request names" in unnamed_note("sticky", policy, named([0, 0], [1, 1]))
    assert "which 50% of the requests do not name" in unnamed_note("sticky", policy, named([0, 1], [1, 1]))


def test_one_of_two_names_is_enough():
    policy = policy_from("bounded_hash")
    assert unnamed_note("hash", policy, named([0, 1], [1, 0])) is None
    assert "by session_id or user, which 50%" in unnamed_note("hash", policy, named([0, 1], [0, 0]))


def test_other_policies_need_no_names():
    assert unnamed_note("lmetric", policy_from("lmetric"), named([0], [0])) is None
