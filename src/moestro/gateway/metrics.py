"""Counters of the router: plain numbers updated on the hot path and exposed by `prometheus.py`."""

from __future__ import annotations

import re
from collections import Counter

from moestro.web.errors import Refusals
from moestro.web.prometheus import Histogram

_DECISION_S = (2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)
_FIRST_BYTE_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0),
)
_USAGE = re.compile(
    rb'"(prompt_tokens|completion_tokens|cached_tokens|host_cached_tokens|input_tokens|output_tokens'
    rb'|cache_(?:creation|read)_input_tokens)"'
    rb"\s*:\s*(\d{1,15})"
)


class EngineCounts:
    """Cumulative counts of one engine since the router started.

    Attributes:
        statuses: number of responses by HTTP status.
        first_byte_s: time from a request's arrival to the first byte of its response body, seconds.
        num_predicted_tokens, num_hit_tokens, num_prompt_tokens: predicted cached, actually cached, and all prompt
            tokens of requests whose responses report usage. The prediction is the predicted share times the reported
            prompt tokens.
        num_host_hit_tokens: those of `num_hit_tokens` that engines copied from host memory.
        num_loops: number of requests that came back to this router.
        num_transitions: number of changes of the engine's condition.
    """

    __slots__ = (
        "first_byte_s", "num_broken", "num_decisions", "num_hit_tokens", "num_host_hit_tokens", "num_left", "num_loops",
        "num_predicted_tokens", "num_prompt_tokens", "num_retried_away", "num_transitions", "num_unreachable",
        "statuses",
    )  # fmt: skip

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.first_byte_s = Histogram(_FIRST_BYTE_S)
        self.num_decisions = 0
        self.num_predicted_tokens = 0.0
        self.num_hit_tokens = self.num_host_hit_tokens = 0
        self.num_prompt_tokens = 0
        self.num_retried_away = 0
        self.num_unreachable = 0
        self.num_broken = 0
        self.num_left = 0
        self.num_loops = 0
        self.num_transitions = 0


class Counts:
    """Cumulative counts of all engines together.

    Attributes:
        decision_s: duration of each decision, seconds.
        refusals: number of refused requests by error code.
        retries: number of retries by cause.
        resumed: number of streams that went on elsewhere, by cause.
        not_resumable: number of streams that could not, by the field of the request or another cause.
    """

    def __init__(self) -> None:
        self.decision_s = Histogram(_DECISION_S)
        self.refusals = Refusals()
        self.retries: Counter[str] = Counter()
        self.resumed: Counter[str] = Counter()
        self.not_resumable: Counter[str] = Counter()
        self.num_retries_denied = 0
        self.num_requests = 0


def usage_in(tail: bytes | bytearray) -> dict[bytes, int]:
    """Return the token counts in the last bytes of a response, plain or streamed; empty if it reports none.

    JSON escapes quotation marks inside of strings, so generated text cannot imitate a count.
    """
    at = tail.rfind(b'"usage"')
    found = {name: int(count) for name, count in _USAGE.findall(tail, at)} if at >= 0 else {}
    return _in_words_of_chats(found) if b"output_tokens" in found else found


def _in_words_of_chats(found: dict[bytes, int]) -> dict[bytes, int]:
    """Return the counts of a response or a message. A message's input tokens exclude those of its cache."""
    usage = {b"completion_tokens": found[b"output_tokens"]}
    if b"input_tokens" in found:
        cached = found.get(b"cache_read_input_tokens", 0)
        usage[b"prompt_tokens"] = found[b"input_tokens"] + cached + found.get(b"cache_creation_input_tokens", 0)
        if b"cache_read_input_tokens" in found or b"cached_tokens" in found:
            usage[b"cached_tokens"] = found.get(b"cached_tokens", cached)
        if b"host_cached_tokens" in found:
            usage[b"host_cached_tokens"] = found[b"host_cached_tokens"]
    return usage
