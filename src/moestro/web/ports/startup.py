"""First steps of a server process: sets up the log, and finds out when the process started."""

from __future__ import annotations

import logging
import os
import time
from pathlib import Path


def set_up_logging(level: str) -> None:
    """Log lines of `level` and above to stderr, each with its time.

    Args:
        level: Name of a level of `logging`, in any case.
    """
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S")


def process_age_s() -> float:
    """Return the seconds since this process started, imports included, or its CPU time if the system does not tell."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
        started_s = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # Since boot. The name in field 2 may hold anything.
        return time.clock_gettime(time.CLOCK_BOOTTIME) - started_s
    except (OSError, AttributeError, ValueError, IndexError):
        return time.process_time()
