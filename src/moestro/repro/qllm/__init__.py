"""QLLM: Mixtral 8x7B in 4 bits on an A100, a fifth of the requests latency-sensitive, 1 to 10 a second.

Run-to-completion batches, continuous batching, priorities between iterations, and preemption at every expert call,
without and with ageing, under five seeds. The loads are ten_tokens and sharegpt_answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter

from moestro.repro.settings import ReproSettings


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class QllmSettings(ReproSettings):
    """Settings of QLLM's experiment."""

    trace: Path | None = None
    """File of request lengths to draw from, in any form that moestro bench reads. Unset: generated lengths with
    ShareGPT's published means."""


SETTINGS = QllmSettings
