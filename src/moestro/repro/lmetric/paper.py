"""LMetric's set-up (arXiv 2603.15202) as a table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from moestro.core.clock import NS_PER_S
from moestro.errors import ConfigError
from moestro.repro.experiment import PaperFigure, SetupRow
from moestro.repro.lmetric.findings import NETWORK, OTHER_NETWORK, RIVALS
from moestro.repro.testbed import TimedLoad
from moestro.sim.results import WINDOW_NS
from moestro.workload.generated.draws import at_rate, replay
from moestro.workload.generated.sessions import PUBLISHED_SHAPES, SHAPES, steady_rows
from moestro.workload.rows import Rows
from moestro.workload.traces.reading import read_trace

# Loads of a testbed: generated sessions, and Mooncake's traces where they are available.

MOONCAKE_BLOCK = 512  # tokens of a block of Mooncake's traces, which name no smaller ones
SESSION_BLOCK = 16  # vLLM's
TUNING_SEED, SCORED_SEED = 0, 101  # parameters are tuned on the requests of one, and everything is scored on the other
_TUNED_ON = 0.25  # first part of a trace that is tuned on; the rest is scored
_NATURAL_RATE = 8.0  # requests a second at which sessions are drawn; a load then scales their times, as the paper does


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """The origin of a load.

    Attributes:
        name: the load's name in tables and on the command line.
        block_size: tokens of the smallest block that its prompts name.
        is_generated: whether it is made of generated sessions rather than of a trace.
        rows_of: returns the requests of a seed with their times. Another seed gives other sessions. Of a trace,
            TUNING_SEED gives the beginning and any other seed the rest.
    """

    name: str
    block_size: int
    is_generated: bool
    rows_of: Callable[[int], Rows]

    def load(self, rate: float, seed: int) -> TimedLoad:
        """The requests of a seed, in time scaled to `rate` requests a second."""
        rows = self.rows_of(seed)
        assert rows.timestamp_ns is not None, "sources have times"
        offsets_ns = replay(rows.timestamp_ns, np.random.default_rng([seed, 1]))
        return TimedLoad(self.name, rows, at_rate(offsets_ns, rate), self.is_generated)


def generated_sources(num_requests: int) -> list[Source]:
    """Sessions like LMetric's chat, API, coder and tool-agent traces; half as many requests for TUNING_SEED."""
    return [
        Source(
            name=name,
            block_size=SESSION_BLOCK,
            is_generated=True,
            rows_of=partial(_steady, name, num_requests),
        )
        for name in PUBLISHED_SHAPES
    ]


def trace_sources(directory: Path, num_requests: int) -> list[Source]:
    """Return Mooncake's traces in `directory`: for TUNING_SEED their first quarter, for others up to `num_requests`.

    Raises:
        ConfigError: the directory has none of them.
    """
    sources, names = [], ("mooncake_conversation", "mooncake_synthetic")
    for name in names:
        for path in (directory / f"{name}.jsonl", directory / f"{name}.jsonl.zst"):
            if path.exists():
                window = partial(_window, read_trace(path), num_requests)
                sources.append(Source(name=name, block_size=MOONCAKE_BLOCK, is_generated=False, rows_of=window))
                break
    if not sources:
        raise ConfigError(f"--traces {directory} has no {names[0]}.jsonl and no {names[1]}.jsonl (or .jsonl.zst)")
    return sources


def _steady(name: str, num_requests: int, seed: int) -> Rows:
    # The middle of a window three times as long, because late turns are missing at the end of a short window.
    wanted = num_requests // 2 if seed == TUNING_SEED else num_requests
    middle = np.arange(wanted, 2 * wanted)
    return steady_rows(SHAPES[name], 3 * wanted, _NATURAL_RATE, seed).select(middle)


def _window(rows: Rows, num_requests: int, seed: int) -> Rows:
    first = int(_TUNED_ON * len(rows))
    window = np.arange(first) if seed == TUNING_SEED else np.arange(first, len(rows))
    return rows.select(window[:num_requests])


def _testbed(experiment: Any) -> tuple[int, str]:
    [bed] = {experiment.bed(source) for source in experiment.sources.values()}
    return bed.num_engines, bed.gpu.name


def _shared_requests(experiment: Any) -> int:
    """Requests, by times and lengths, that both tune parameters and are scored."""
    seeds = (TUNING_SEED, SCORED_SEED)
    pairs = [[_requests(source.rows_of(seed)) for seed in seeds] for source in experiment.sources.values()]
    return sum(len(tuning & scored) for tuning, scored in pairs)


def _requests(rows: Rows) -> set[tuple[int, int, int]]:
    assert rows.timestamp_ns is not None, "sources have times"
    columns = (rows.timestamp_ns, rows.num_prompt_tokens, rows.num_output_tokens)
    return set(zip(*(column.tolist() for column in columns), strict=True))


SETUP = (
    SetupRow(
        what="engines and GPU",
        where="section 4.1",
        quote="a testbed containing 16 NVIDIA H20 GPUs",
        value=(16, "h20-96g"),
        ours=_testbed,
    ),
    SetupRow(
        what="networks",
        where="section 4.1",
        quote="dense (Qwen2-7B) and mixture-of-experts (MoE) models (Qwen3-30B)",
        value=("qwen3-30b-a3b", "qwen2-7b"),
        ours=lambda experiment: (NETWORK, OTHER_NETWORK),
    ),
    SetupRow(
        what="rate, as a share of the capacity",
        where="section 4.1",
        quote="we scale the average request arrival rate to half of the maximum rate of our testbed",
        value=0.5,
        ours=lambda experiment: experiment.plan.shares[0],
    ),
    SetupRow(
        what="further rates",
        where="Fig. 25",
        quote="End-to-end performance under different request rates",
        value=(0.9, 1.2),
        ours=lambda experiment: experiment.plan.shares[1:],
        differs="the paper prints no rates; ours are near the capacity and beyond it",
    ),
    SetupRow(
        what="rivals",
        where="section 6",
        quote="Bailian is the production scheduler used in Bailian's LLM serving system",
        value=("vllm-0.26", "bailian", "dynamo", "llm-d"),
        ours=lambda experiment: tuple(name for name in RIVALS if name in experiment.plan.policies),
    ),
    SetupRow(
        what="policies with tuned parameters",
        where="section 6",
        quote="Similar to Bailian, we also tune its hyperparameters for each workload for optimal performance",
        value=("bailian", "dynamo", "aibrix"),
        ours=lambda experiment: tuple(experiment.tuned),
    ),
    SetupRow(
        what="requests that both tune and are scored",
        where="section 6",
        quote="We have carefully tuned its hyperparameters for each workload to achieve the best performance",
        value=0,
        ours=_shared_requests,
        differs="the paper does not state on which requests it tunes; ours are other sessions of the same kind",
    ),
    SetupRow(
        what="loads",
        where="section 4.1",
        quote="cover common LLM applications",
        value=("chat", "api_agent", "coder", "tool_agent"),
        ours=lambda experiment: tuple(experiment.sources),
        differs="generated sessions with the traces' published means; Mooncake's traces join with --traces",
    ),
    SetupRow(
        what="window of prefill seconds, s",
        where="Fig. 27",
        quote="the absolute served prefill time in each 10-second window",
        value=10.0,
        ours=lambda experiment: WINDOW_NS / NS_PER_S,
    ),
)

EQUAL = 0.02  # figures that differ by less count as equal


def _change(what: str, where: str, quote: str, value: float, least: float = 0) -> PaperFigure:
    """A change, which intervals over the batches of a run judge where `least` is 0."""
    return PaperFigure(what=what, where=where, quote=quote, value=value, least=least)


_TO_VLLM = "it reduces the mean TTFT by 92% and the mean TPOT by 24% compared to vLLM"
_TO_BAILIAN = "can reduce TTFT by 92% and 52%, and TPOT by 21% and 20%"
_EXCEPTED = "exhibits a slightly higher (10%) mean TTFT than llm-d but achieves a 30% lower TPOT"
_AWARE = "improves the average TTFT by 84% and the average TPOT by 17%"
_RANGE = "increasing the threshold from 4 to 16 improves the P50 TTFT and TPOT by 44% and 15%"
_PREDICTOR = "the TTFT and TPOT tail latency improve by 75.6% and 79.7%"
# Of LMetric against each rival, by one of `findings.FIGURES`.
TO_VLLM = {
    "TTFT mean": _change("mean TTFT against vLLM, chat", "section 6, Fig. 22", _TO_VLLM, -0.92),
    "TPOT mean": _change("mean TPOT against vLLM, chat", "section 6, Fig. 22", _TO_VLLM, -0.24),
}
TO_BAILIAN = {
    "TTFT mean": _change("mean TTFT against Bailian", "abstract", _TO_BAILIAN, -0.52),
    "TPOT mean": _change("mean TPOT against Bailian", "abstract", _TO_BAILIAN, -0.20),
}
TO_LLM_D = {
    "TPOT P99": _change(
        "P99 TPOT against llm-d, chat", "section 6", "it reduces the P99 TPOT by 13% compared to llm-d", -0.13
    ),
}
EXCEPTION = {
    "TTFT mean": _change("mean TTFT against llm-d, ToolAgent", "section 6", _EXCEPTED, 0.10),
    "TPOT mean": _change("mean TPOT against llm-d, ToolAgent", "section 6", _EXCEPTED, -0.30),
}
AWARENESS = {
    "TTFT mean": _change("mean TTFT of a score that follows the cache", "Fig. 7", _AWARE, -0.84),
    "TPOT mean": _change("mean TPOT of a score that follows the cache", "Fig. 7", _AWARE, -0.17),
}
PREDICTOR_TAIL = {
    "TPOT P99": _change(
        "P99 TPOT of the tuned predictor against the best sum, ToolAgent",
        "section 4.6, Fig. 15",
        "the TPOT tail latency is 71.1% slower than that of the best linear-combination-based method",
        0.711,
    ),
}
TUNED_TTFT = _change("tail TTFT of a tuned predictor against another network's", "Fig. 16", _PREDICTOR, -0.756, EQUAL)
TUNED_TPOT = _change("tail TPOT of a tuned predictor against another network's", "Fig. 16", _PREDICTOR, -0.797, EQUAL)
RANGE_TTFT = _change("P50 TTFT of range 16 against 4, Coder", "Fig. 12", _RANGE, -0.44, EQUAL)
RANGE_TPOT = _change("TPOT of range 16 against 4, Coder", "Fig. 12", _RANGE, -0.15, EQUAL)
TOKENS_TTFT = _change(
    "P50 TTFT with P-token against the miss ratio", "Fig. 18", "results in a 14.4% lower P50 TTFT", -0.144, EQUAL
)
FIGURES = (
    *(figure for group in (TO_VLLM, TO_BAILIAN, TO_LLM_D, EXCEPTION, AWARENESS, PREDICTOR_TAIL) for figure in
      group.values()),
    TUNED_TTFT, TUNED_TPOT, RANGE_TTFT, RANGE_TPOT, TOKENS_TTFT,
)  # fmt: skip
