"""QLLM: Mixtral 8x7B in 4 bits on an A100, a fifth of the requests latency-sensitive, 1 to 10 a second.

Run-to-completion batches, continuous batching, priorities between iterations, and preemption at every expert call,
without and with ageing. The paper does not state the length of answers, so it is swept: ShareGPT's answers, cut after
10 tokens (answers_10), 20, 40, 60, 80, 120 or 240, and whole (sharegpt_answers).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from moestro.core.setting_checks import at_least
from moestro.repro import ReproSettings


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class QllmSettings(ReproSettings):
    """Settings of QLLM's experiment."""

    trace: Path | None = None
    """File of request lengths to draw from, in any form that moestro bench reads. Unset: generated lengths with
    ShareGPT's published means."""
    num_requests: Annotated[int | None, at_least(1)] = None
    """Requests of each run. More watch an overload for longer, which raises the latencies of what is overloaded. Unset:
    the plan's."""


SETTINGS = QllmSettings
