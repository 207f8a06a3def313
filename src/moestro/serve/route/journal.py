"""What was decided, and how it came out: the last decisions in memory, all of them in a file if there is one."""

from __future__ import annotations

from moestro.cluster.router import RouteDecision
from moestro.core.request import Request


class Journal:
    """Keeps the last decisions by request id."""

    def routed(self, request: Request, decision: RouteDecision, engine: str, why: str) -> None:
        """A request was given to `engine`; `why`: it is not the first one that it was given to."""

    def ended(self, request_id: str, status: int, usage: dict[bytes, int]) -> None:
        """It is over."""
