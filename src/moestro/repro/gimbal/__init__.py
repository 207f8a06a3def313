"""Gimbal: Qwen3-30B-A3B on two A100 with data and expert parallelism, BurstGPT's lengths in five shapes.

Gimbal v1 whole and in parts, our reconstruction of Gimbal v2, and Moestro against vLLM: latencies at the paper's rates
and near saturation, KV memory until the threshold binds, prefix hits, sources on eight GPUs, and the whole stack.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from cyclopts import Parameter

from moestro.repro import ReproSettings


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class GimbalSettings(ReproSettings):
    """Settings of Gimbal's experiment."""

    trace: Path | None = None
    """File of BurstGPT's request lengths, in any form that moestro bench reads. Unset: generated lengths with the mean
    and the long tail of BurstGPT's."""

    routing: Path | None = None
    """NumPy file of recorded choices of GPT-OSS-20B, uint8 [tokens, layers, top_k], .zst allowed. Unset: the parts with
    recorded routing are left out."""

    routing_index: Path | None = None
    "JSON lines with the answers of --routing: dataset, category, num_tokens, offset, prompt_tokens."

    num_requests: int = 1000
    "Requests of each run of the latency tables; the paper has 1000. A run takes CPU time in proportion."


SETTINGS = GimbalSettings
