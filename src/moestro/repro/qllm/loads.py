"""QLLM's loads: ShareGPT's lengths, Poisson arrivals, one request in five latency-sensitive.

The paper does not state the length of answers. ShareGPT's own have a mean of 338 tokens, and the authors' repository
says that the paper's version ended every sequence after ten. So each load cuts ShareGPT's answers at another length.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from moestro.errors import ConfigError
from moestro.repro.grid import PlannedLoad
from moestro.repro.qllm.engines import ENGINES, EXPERT, FCFS, FCFS_64, ITERATION, RUN_TO_COMPLETION
from moestro.workload.generated.draws import poisson
from moestro.workload.rows import Int64s, Rows, labelled
from moestro.workload.traces.reading import read_trace

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
