"""QLLM's testbed, and the engines that are compared on it.

The engines differ in their policies and in the number of sequences that hold KV. QLLM keeps the KV of the sequences
that it preempts, so its engines hold more; one baseline holds as many.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from moestro.core.views import StepPolicy
from moestro.cost.gpus import A100
from moestro.cost.staged_engines import qllm
from moestro.engine.settings import SchedulerSettings
from moestro.flow.policies.qllm import ExpertLevelPreemption
from moestro.sim.engine import Ranks
from moestro.sim.groups.group import Group
from moestro.sim.groups.staged import StagedRank
from moestro.sim.prices import OneRank

MAX_BATCH = 32  # section 4, "Baseline System"
NUM_PLACES = 2 * MAX_BATCH  # sequences that hold KV in QLLM's engines: a batch, and the preempted ones
SLO_S = 3.0  # section 4, Q1
AGE_S = 10.0  # ours: from then on a best-effort request counts as latency-sensitive
STEP_WAIT_S = 1.0  # ours: longest time that a best-effort step waits inside the network
WEIGHT_BYTES = 22.93e9  # section 4, "Models and Dataset"
_BLOCK_SIZE = 16
_MAX_MODEL_LEN = 16_384
_ALL = 1 << 30  # QLLM runs all tokens that wait at an expert together
_QLLM: Mapping[str, object] = {
    "scheduling_policy": "qllm",
    "batch_policy": "qllm",
    "evict_policy": "least_computed_be_first",
    "max_num_urgent_seqs": NUM_PLACES - MAX_BATCH,  # Algorithm 1's batches are of MAX_BATCH nevertheless
}
_AGED: Mapping[str, object] = {"scheduling_policy": f"qllm:theta_age_s={AGE_S:g}"}


@dataclass(frozen=True, slots=True, kw_only=True)
class QllmEngine:
    """One engine of the comparison.

    Attributes:
        about: its behaviour in a line.
        bounds: settings of its scheduler, besides those of all engines.
        step_policy: policy of the `preemptive` mode. None means the `fused` mode, in which no forward pass stops.
        passes_decodes: whether latency-sensitive tokens pass others also after their request's first token, as in
            QLLM's code.
    """

    about: str
    bounds: Mapping[str, object] = field(default_factory=dict)
    step_policy: StepPolicy | None = None
    passes_decodes: bool = True


RUN_TO_COMPLETION, FCFS, ITERATION, EXPERT = "run_to_completion", "fcfs", "iteration_priority", "expert_level"
ITERATION_AGED, EXPERT_AGED, EXPERT_MIXED = "iteration_priority_aged", "expert_level_aged", "expert_level_mixed"
FCFS_64, ITERATION_MIXED = "fcfs_64_places", "iteration_mixed"  # with as many places as the engines of QLLM
_PREEMPTS = ExpertLevelPreemption(max_wait_ns=None, max_merged=_ALL)
_PREEMPTS_AGED = ExpertLevelPreemption(max_wait_ns=round(STEP_WAIT_S * 1e9), max_merged=_ALL)

ENGINES: dict[str, QllmEngine] = {
    RUN_TO_COMPLETION: QllmEngine(
        about="batches of 32 that run until all have ended: the paper's baseline",
        bounds={"batch_policy": "run_to_completion"},
    ),
    FCFS: QllmEngine(about="continuous batching, first come, first served, prompts and decodes in one step"),
    FCFS_64: QllmEngine(
        about="the same with 64 places, as many as all below have", bounds={"max_num_seqs": NUM_PLACES}
    ),
    ITERATION: QllmEngine(about="QLLM's Algorithm 1, between forward passes", bounds=_QLLM),
    EXPERT: QllmEngine(
        about="QLLM: the same, and it preempts at every expert call", bounds=_QLLM, step_policy=_PREEMPTS
    ),
    ITERATION_AGED: QllmEngine(about="iteration_priority with ageing", bounds={**_QLLM, **_AGED}),
    EXPERT_AGED: QllmEngine(about="expert_level with ageing", bounds={**_QLLM, **_AGED}, step_policy=_PREEMPTS_AGED),
    ITERATION_MIXED: QllmEngine(
        about="LS first between forward passes, batches of up to 64 that mix prompts and decodes of both classes",
        bounds={**_QLLM, "batch_policy": "decode_first"},
    ),
    EXPERT_MIXED: QllmEngine(
        about="ours: iteration_mixed with preemption at every expert call until a request's first token",
        bounds={**_QLLM, "batch_policy": "decode_first"},
        step_policy=_PREEMPTS,
        passes_decodes=False,
    ),
}


def make_engine(name: str) -> Ranks:
    """Make an engine on virtual time with QLLM's cost."""
    engine, cost = ENGINES[name], qllm()
    num_blocks = int((0.9 * A100.memory_bytes - WEIGHT_BYTES) // (cost.network.kv_bytes_per_token * _BLOCK_SIZE))
    given: dict[str, object] = {
        "num_blocks": num_blocks,
        "block_size": _BLOCK_SIZE,
        "max_model_len": _MAX_MODEL_LEN,
        "max_num_seqs": MAX_BATCH,
        "max_num_batched_tokens": MAX_BATCH * 1024,  # prompts are not cut: Hugging Face's engine does not
        "max_num_queued_reqs": 1 << 30,
        "enable_prefix_caching": False,
        **engine.bounds,
    }
    settings = SchedulerSettings(**given)  # type: ignore[arg-type]
    if engine.step_policy is None:
        return Group(settings, OneRank(cost))
    return StagedRank(settings, cost, engine.step_policy, passes_decodes=engine.passes_decodes)
