"""Log lines that tell an operator what a server did in the last ten seconds."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable

logger = logging.getLogger(__name__)

INTERVAL_S = 10.0


async def log_forever(lines: Callable[[float], Iterable[str]]) -> None:
    """Log what the server did, again at every interval.

    Args:
        lines: Callable that returns the lines about the last given seconds; none while there is no traffic.
    """
    then = time.monotonic()
    while True:
        await asyncio.sleep(INTERVAL_S)
        now = time.monotonic()
        for line in lines(now - then):
            logger.info("%s", line)
        then = now
