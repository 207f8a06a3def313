"""The name of this machine, for results that depend on it."""

from __future__ import annotations

import platform
from pathlib import Path


def machine_name() -> str:
    """Name the platform and the processor."""
    return f"{platform.platform()}, {_cpu_model()}"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown processor"
