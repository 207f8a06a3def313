"""Every order policy by name."""

from __future__ import annotations

from typing import Literal

from moestro.core.policy_registry import PolicyEntry
from moestro.engine.policies.ordering.ageing import PrefillAware, Qllm, Sjf
from moestro.engine.policies.ordering.basic import EarliestDeadline, Fcfs, Priority
from moestro.engine.policies.ordering.contract import OrderPolicy
from moestro.engine.policies.ordering.weighted_fair import WeightedFair

OrderName = Literal["fcfs", "priority", "sjf", "prefill_aware", "edf", "weighted_fair", "qllm"]

ORDERING: dict[str, PolicyEntry[OrderPolicy]] = {
    "fcfs": PolicyEntry(Fcfs, "First come, first served."),
    "priority": PolicyEntry(Priority, "The lowest `priority` first."),
    "sjf": PolicyEntry(
        Sjf, "The shortest prompt first; a request that has waited theta_age_s=5 goes ahead (Gimbal v1)."
    ),
    "prefill_aware": PolicyEntry(
        PrefillAware, "As sjf, by the uncached part of the prompt (Gimbal v2, our reconstruction)."
    ),
    "edf": PolicyEntry(
        EarliestDeadline, "The earliest deadline first: arrival and ls_slo_s=3 or be_slo_s=30, by class."
    ),
    "weighted_fair": PolicyEntry(WeightedFair, "Fair shares between users; output_cost=2, weight:NAME=1."),
    "qllm": PolicyEntry(Qllm, "Latency-sensitive before best-effort, which is promoted after theta_age_s=inf (QLLM)."),
}
