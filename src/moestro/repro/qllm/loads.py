"""QLLM's loads: ShareGPT's lengths, Poisson arrivals, one request in five latency-sensitive.

The paper does not state the length of answers. ShareGPT's own have a mean of 338 tokens, and the authors' repository
says that the paper's version ended every sequence after ten. So each load cuts ShareGPT's answers at another length.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from moestro.core.views import StepPolicy
from moestro.cost.gpus import A100
from moestro.cost.tables import qllm
from moestro.engine.settings import SchedulerSettings
from moestro.errors import ConfigError
from moestro.flow.policies.qllm import ExpertLevelPreemption
from moestro.repro.experiment import PlannedLoad
from moestro.sim.groups.group import Group, OneRank, Ranks
from moestro.sim.groups.worker_group import StagedRank
from moestro.workload.generated.draws import poisson
from moestro.workload.rows import Int64s, Rows, labelled
from moestro.workload.traces.reading import read_trace

# QLLM's testbed, and the engines that are compared on it.
#
# The engines differ in their policies and in the number of sequences that hold KV. QLLM keeps the KV of the sequences
# that it preempts, so its engines hold more; one baseline holds as many.

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


LS_SHARE = 0.2  # section 4, "Workload"
# ShareGPT's mean lengths in tokens are published (Kwon et al., SOSP 2023, figure 11: 161.31 and 337.99); its spread is
# not. These log-normal mixes have the means; their spread and the bounds are ours.
LONGEST = 1024
_PROMPT, _ANSWER = (4.531, 1.1), (5.513, 0.9)  # mean and deviation of the logarithm

# Requests a second. The paper states its figures for rates up to 7, "while complying with the SLO"; the points between
# are ours, because its figures are pictures.
PAPER_RATES = (1, 3, 5, 7)
_OVERLOAD = 10

WHOLE_ANSWERS = "sharegpt_answers"
# By load, the tokens after which every answer ends. None means that no answer is cut.
ANSWER_LIMITS: dict[str, int | None] = {
    **{f"answers_{tokens}": tokens for tokens in (10, 20, 40, 60, 80, 120, 240)},
    WHOLE_ANSWERS: None,
}
SHORT, MIDDLE = "answers_10", "answers_60"
_SWEPT = (RUN_TO_COMPLETION, FCFS, FCFS_64, ITERATION, EXPERT)
# Requests of a run; long answers take more CPU time. 200 still have more LS requests than QLLM has places for them.
_NUM_REQUESTS, _NUM_LONG_REQUESTS = 400, 200
_LONG = ("answers_120", "answers_240", WHOLE_ANSWERS)


def planned(name: str, num_requests: int | None = None) -> PlannedLoad:
    """Plan a load. All engines serve the shortest one; those of the sweep serve the others.

    Args:
        num_requests: requests of a run. None means the plan's.
    """
    if num_requests is None:
        num_requests = _NUM_LONG_REQUESTS if name in _LONG else _NUM_REQUESTS
    return PlannedLoad(
        name=name,
        num_requests=num_requests,
        rates=(*PAPER_RATES, _OVERLOAD) if name == SHORT else PAPER_RATES,
        systems=tuple(ENGINES) if name == SHORT else _SWEPT,
    )


def make_rows(load: PlannedLoad, seed: int, trace: Path | None) -> Rows:
    """The requests of a load.

    Args:
        seed: other seeds give other requests of the same mix.
        trace: file whose lengths replace the generated ones. None means generated lengths.

    Raises:
        ConfigError: the trace cannot be read, or has no lengths.
    """
    rng = np.random.default_rng([seed, 0])
    rows = _stand_in(load.num_requests, rng) if trace is None else _drawn(trace, load.num_requests, rng)
    limit = ANSWER_LIMITS[load.name]
    if limit is not None:
        rows = replace(rows, num_output_tokens=np.minimum(rows.num_output_tokens, limit))
    return labelled(rows, LS_SHARE, seed)


def offsets_ns(load: PlannedLoad, rate: float, seed: int) -> Int64s:
    """The arrival times of a load at a rate, int64[n]."""
    return poisson(load.num_requests, rate, np.random.default_rng([seed, 1]))


def _stand_in(num_requests: int, rng: np.random.Generator) -> Rows:
    prompts, answers = (
        np.clip(rng.lognormal(mean, deviation, num_requests).round(), 4, LONGEST).astype(np.int64)
        for mean, deviation in (_PROMPT, _ANSWER)
    )
    return Rows(num_prompt_tokens=prompts, num_output_tokens=answers, is_generated=True)


def _drawn(trace: Path, num_requests: int, rng: np.random.Generator) -> Rows:
    rows = read_trace(trace)
    if rows.texts is not None:
        raise ConfigError(f"--trace {trace} holds texts without token counts: give a file of lengths")
    some = rng.choice(len(rows), num_requests, replace=num_requests > len(rows))
    return Rows(num_prompt_tokens=rows.num_prompt_tokens[some], num_output_tokens=rows.num_output_tokens[some])
