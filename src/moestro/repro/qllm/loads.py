"""QLLM's loads: ShareGPT's lengths, Poisson arrivals, one request in five latency-sensitive."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from moestro.errors import ConfigError
from moestro.repro.grid import PlannedLoad
from moestro.workload.arrivals import poisson
from moestro.workload.rows import Int64s, Rows, labelled
from moestro.workload.traces import read_trace

LS_SHARE = 0.2  # section 4, "Workload"
# ShareGPT's mean lengths in tokens are published (Kwon et al., SOSP 2023, figure 11: 161.31 and 337.99); its spread is
# not. These log-normal mixes have the means; their spread and the bounds are ours.
LONGEST = 1024
_PROMPT, _ANSWER = (4.531, 1.1), (5.513, 0.9)  # mean and deviation of the logarithm
SHORT_ANSWER = 10  # tokens; the authors' repository says that the paper's version ended every sequence there


# The paper's rates. Its answers' lengths are not published: ten tokens, as its authors' repository tells of the version
# that the paper measured, or ShareGPT's own, at which the engine's cost bears 0.2 requests a second.
SHORT = PlannedLoad(name="ten_tokens", num_requests=400, rates=(1, 3, 5, 7, 10))
LONG = PlannedLoad(name="sharegpt_answers", num_requests=200, rates=(0.1, 0.2, 1, 7))


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
    if load.name == SHORT.name:
        rows = replace(rows, num_output_tokens=np.full(len(rows), SHORT_ANSWER, np.int64))
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
        raise ConfigError(f"--trace {trace} holds texts, whose tokens are not known here: give one of lengths")
    some = rng.choice(len(rows), num_requests, replace=num_requests > len(rows))
    return Rows(num_prompt_tokens=rows.num_prompt_tokens[some], num_output_tokens=rows.num_output_tokens[some])
