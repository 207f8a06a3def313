"""LMetric: 16 H20 engines with Qwen3-30B-A3B, thirteen routing policies, rates of 50, 90 and 120 % of the capacity.

The loads are chat, api_agent, coder and tool_agent (generated sessions), and with --traces mooncake_conversation and
mooncake_synthetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter

from moestro.repro import ReproSettings


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class LmetricSettings(ReproSettings):
    """Settings of LMetric's experiment."""

    num_requests: int | None = None
    "Scored requests of each load; more give steadier figures and take longer. Unset: the plan's."
    traces: Path | None = None
    """Directory with mooncake_conversation.jsonl and mooncake_synthetic.jsonl (or .jsonl.zst), which Mooncake's authors
    publish. Unset: generated sessions alone."""


SETTINGS = LmetricSettings
