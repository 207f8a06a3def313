"""Pauses that an engine asks for: each concerns the refused client, until others are refused as well."""

from __future__ import annotations

from collections.abc import Hashable

from moestro.core.client_table import MAX_CLIENTS, ClientTable
from moestro.routing.health.evidence import Evidence, Origin

_NUM_WITNESSES = 2  # Refused clients, with no success between them, that make an engine busy.


class Pauses:
    """Pauses of one engine by client.

    A refusal may concern its client alone: a rate limit of a key, a quota, an oversized request. The engine itself is
    busy if different clients are refused and none is served for `silence_ns`.
    """

    def __init__(self, silence_ns: int, max_clients: int = MAX_CLIENTS) -> None:
        self._silence_ns = silence_ns
        self._until_ns = ClientTable(int, max_clients)  # A forgotten client is refused once more.
        self._last_ns = 0  # End of the longest pause.
        self._evidence = Evidence(_NUM_WITNESSES)

    def __len__(self) -> int:
        return len(self._until_ns)

    def refused(self, client: Hashable, until_ns: int) -> None:
        """Record that the engine refused a request of `client`, which leaves it alone until `until_ns`."""
        self._until_ns[client] = max(self._until_ns[client], until_ns)
        self._last_ns = max(self._last_ns, until_ns)

    def overloaded(self, client: Hashable, now_ns: int) -> bool:
        """Record that a refusal of `client` named the engine's own load.

        Returns:
            Whether the engine is busy for all clients.
        """
        self._evidence.failed(Origin(client, client), now_ns)  # Bodies do not matter to an overloaded engine.
        return self._evidence.num_witnesses >= _NUM_WITNESSES and self._evidence.age_ns(now_ns) >= self._silence_ns

    def succeeded(self) -> None:
        """Record that the engine has answered a request, so it is not busy for all clients."""
        self._evidence.clear()

    def concern(self, client: Hashable, now_ns: int) -> bool:
        """Return whether `client` should leave the engine alone now."""
        return (self._until_ns.get(client) or 0) > now_ns

    def last(self, now_ns: int) -> bool:
        """Return whether any client should leave the engine alone now; forgets all pauses once none does."""
        if now_ns < self._last_ns:
            return True
        self._until_ns.clear()
        return False
