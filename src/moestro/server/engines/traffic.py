"""The generation requests that the API server is answering."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from moestro.errors import DrainingError


class Traffic:
    """Counts generation requests, and refuses new ones while the server drains.

    Attributes:
        num_answering: Number of requests without a complete response.
        is_draining: Whether new requests are refused; writable.
    """

    def __init__(self) -> None:
        self.num_answering = 0
        self.is_draining = False

    def check_open(self) -> None:
        """Raise DrainingError while the server drains."""
        if self.is_draining:
            raise DrainingError

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """Count one more request inside the block; raise DrainingError while the server drains."""
        self.check_open()
        self.num_answering += 1
        try:
            yield
        finally:
            self.num_answering -= 1
