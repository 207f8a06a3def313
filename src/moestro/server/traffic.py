"""What the front door has in hand, and how it comes to an end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from moestro.errors import DrainingError


class Traffic:
    """Counts generation requests and drains them.

    Attributes:
        num_answering: requests that have no complete answer yet.
        is_draining: nothing new is taken.
    """

    def __init__(self) -> None:
        self.num_answering = 0
        self.is_draining = False
        self._nothing_left = asyncio.Event()

    def check_open(self) -> None:
        """Raise DrainingError once nothing new is taken."""
        if self.is_draining:
            raise DrainingError

    @contextlib.contextmanager
    def answering(self) -> Iterator[None]:
        """One request more, while the block lasts; DrainingError if none is taken."""
        self.check_open()
        self.num_answering += 1
        try:
            yield
        finally:
            self.num_answering -= 1
            if self.is_draining and not self.num_answering:
                self._nothing_left.set()

    async def drain(self, patience_s: float) -> None:
        """Refuse what comes from now on; return once everything is answered, or after `patience_s`."""
        self.is_draining = True
        if self.num_answering:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await self._nothing_left.wait()
