"""Moestro inside vLLM: scheduler classes for `--scheduler-cls`, and a placement of experts for vLLM's load balancer.

Importing this package loads neither vLLM nor torch; a scheduler class loads both at its first use.
"""

from __future__ import annotations

import importlib
from typing import Any

# Names for `--scheduler-cls moestro_vllm.NAME`.
SCHEDULER_CLASSES = ("EDF", "FCFS", "QLLM", "SJF", "PrefillAware", "WeightedFair")


def __getattr__(name: str) -> Any:
    """Return a scheduler class, for vLLM's look-up of `moestro_vllm.NAME`.

    Raises:
        AttributeError: No scheduler class has that name.
        VllmInterfaceError: vLLM is missing, or its interface has moved.
    """
    if name not in SCHEDULER_CLASSES:
        raise AttributeError(f"moestro_vllm has no {name!r}; scheduler classes: {', '.join(SCHEDULER_CLASSES)}")
    from moestro_vllm.interface import check_scheduler_interface  # noqa: PLC0415  loads vLLM

    check_scheduler_interface()
    return getattr(importlib.import_module("moestro_vllm.schedulers"), name)
