"""A policy, and what somebody beside it notes of what it decides."""

from __future__ import annotations

from moestro.core.rng import Draws
from moestro.routing.policy_contract import Choice, Needs, RouteEvent, RoutePolicy, RouteView


class Watching:
    """Decides as `policy` does. Who notes something extends `decide` or `observe`.

    Args:
        policy: decides.
    """

    def __init__(self, policy: RoutePolicy) -> None:
        self._policy = policy

    @property
    def needs(self) -> Needs:
        """The policy's."""
        return self._policy.needs

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """As the policy does."""
        return self._policy.decide(view, draws)

    def observe(self, event: RouteEvent) -> None:
        """The policy is told."""
        self._policy.observe(event)
