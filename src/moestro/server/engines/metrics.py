"""Counters of the API server: plain numbers for the hot path; `prometheus.py` exports them."""

from __future__ import annotations

from collections.abc import Sequence

from moestro.core.request import FinishReason, ServiceClass
from moestro.web.errors import Refusals
from moestro.web.prometheus import Histogram

# vLLM's bounds, so that the heat maps of its dashboards fit. The gaps begin lower, for small models.
_FIRST_TOKEN_S = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
_GAP_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0),
    *(20.0, 40.0, 80.0),
)
_WHOLE_S = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0),
    *(1920.0, 7680.0),
)
_TOKENS = tuple(float(digit * 10**power) for power in range(6) for digit in (1, 2, 5))
_CHOICES = (1.0, 2.0, 5.0, 10.0, 20.0)
_PREEMPTIONS = (1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 20.0)  # vLLM's buckets
_STEP_TOKENS = (1.0, *(float(2**power) for power in range(3, 15)))

ByClass = dict[ServiceClass, Histogram]


def _by_class(bounds: Sequence[float]) -> ByClass:
    return {service_class: Histogram(bounds) for service_class in ServiceClass}


class EngineMetrics:
    """Totals of one engine since the start of the API server, across the engine's restarts.

    Attributes:
        first_token_s, mean_gap_s: TTFT and TPOT by service class, in seconds, measured in the API server.
        gap_s, whole_s: ITL and E2E latency, in seconds.
        queue_s: Time from arrival to admission by service class, in seconds.
        prefill_s, decode_s: Time from admission to the first output, and from the first to the last token, in seconds.
        inference_s: Time from admission to the last token, in seconds.
        prompt_tokens, generation_tokens: Number of tokens of each finished request.
        computed_tokens: Number of prompt tokens of each finished request that no cache had.
        max_tokens: Limit of generated tokens of each finished request.
        step_tokens: Number of tokens of each step with an output: generated ones, and the prompts that it completed.
        num_preemptions: Number of preemptions of each finished request.
        num_choices, longest_choice: Number of choices of each finished prompt, and tokens of the longest of them.
        num_cached_tokens: Number of prompt tokens that came from a cache.
        num_host_tokens: Number of those that were copied from host memory.
        num_prompt_tokens: Number of prompt tokens of requests with a first output.
        num_generated_tokens: Number of tokens received from the engine, shown or not.
        ended: Number of ended requests by finish reason.
        num_restarts, num_stalls: Number of restarts and of stalls.
        num_moved: Number of requests moved away when the engine's process ended.
        num_streams_resumed: Number of moved requests of which the client had a part already.
    """

    __slots__ = (
        "computed_tokens", "decode_s", "ended", "first_token_s", "gap_s", "generation_tokens", "inference_s",
        "longest_choice", "max_tokens", "mean_gap_s", "num_cached_tokens", "num_choices", "num_generated_tokens",
        "num_host_tokens",
        "num_moved", "num_preemptions", "num_prompt_tokens", "num_restarts", "num_stalls", "num_streams_resumed",
        "prefill_s", "prompt_tokens", "queue_s", "step_tokens", "whole_s",
    )  # fmt: skip

    def __init__(self) -> None:
        self.first_token_s = _by_class(_FIRST_TOKEN_S)
        self.gap_s = Histogram(_GAP_S)
        self.mean_gap_s = _by_class(_GAP_S)
        self.whole_s = Histogram(_WHOLE_S)
        self.queue_s = _by_class(_WHOLE_S)
        self.prefill_s = Histogram(_WHOLE_S)
        self.decode_s = Histogram(_WHOLE_S)
        self.inference_s = Histogram(_WHOLE_S)
        self.prompt_tokens = Histogram(_TOKENS)
        self.generation_tokens = Histogram(_TOKENS)
        self.computed_tokens = Histogram(_TOKENS)
        self.max_tokens = Histogram(_TOKENS)
        self.step_tokens = Histogram(_STEP_TOKENS)
        self.num_preemptions = Histogram(_PREEMPTIONS)
        self.num_choices = Histogram(_CHOICES)
        self.longest_choice = Histogram(_TOKENS)
        self.num_cached_tokens = self.num_host_tokens = 0
        self.num_prompt_tokens = 0
        self.num_generated_tokens = 0
        self.ended = dict.fromkeys(FinishReason, 0)
        self.num_restarts = 0
        self.num_stalls = 0
        self.num_moved = 0
        self.num_streams_resumed = 0


class Metrics:
    """Counters of the API server.

    Attributes:
        engines: Counters of each engine, by number.
        refusals: Number of refusals by error code.
        num_delivery_errors: Number of messages of ranks, or outputs in them, that the API server failed to process.
    """

    def __init__(self, num_engines: int) -> None:
        self.engines = [EngineMetrics() for _ in range(num_engines)]
        self.refusals = Refusals()
        self.num_delivery_errors = 0
