"""A wrapper of a policy that notes its decisions."""

from __future__ import annotations

from moestro.core.rng import Draws
from moestro.routing.policy_contract import Choice, Needs, RouteEvent, RoutePolicy, RouteView


class Watching:
    """Forwards to a policy. A subclass notes decisions in `decide` or events in `observe`.

    Args:
        policy: the policy that decides.
    """

    def __init__(self, policy: RoutePolicy) -> None:
        self._policy = policy

    @property
    def needs(self) -> Needs:
        """The needs of the policy."""
        return self._policy.needs

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """The choice of the policy."""
        return self._policy.decide(view, draws)

    def observe(self, event: RouteEvent) -> None:
        """Forward an event to the policy."""
        self._policy.observe(event)
