"""The interface through which a client's connection notifies the object that answers its request."""

from __future__ import annotations

from typing import Protocol


class Answering(Protocol):
    """Answers a request; a client's connection calls it."""

    def client_left(self) -> None:
        """Stop, because the client is gone."""

    def client_is_slow(self) -> None:
        """Write nothing more to the client until it reads again."""

    def client_is_ready(self) -> None:
        """Write to the client again, which has read what it was sent."""
