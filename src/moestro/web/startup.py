"""What a server process does first: it sets up the log and knows when it was started."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path


def set_up_logging(level: str) -> None:
    """Log lines of `level` and above to stderr, each with its time.

    Args:
        level: A name that `logging` knows, in any case.
    """
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")


def process_age_s() -> float:
    """Return the seconds since this process started, imports included; its CPU time where the system does not say."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # Since boot; the name before may hold anything.
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, AttributeError, ValueError, IndexError):
        return time.process_time()
