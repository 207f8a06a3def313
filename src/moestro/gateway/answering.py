"""What a connection tells whoever answers its request."""

from __future__ import annotations

from typing import Protocol


class Answering(Protocol):
    """What a connection tells whoever answers its request."""

    def client_left(self) -> None:
        """There is nobody to answer any more."""

    def client_is_slow(self) -> None:
        """Write no more for now."""

    def client_is_ready(self) -> None:
        """Write again."""
