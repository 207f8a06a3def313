"""Counters of the router: plain numbers on the hot path, which `prometheus.py` names."""

from __future__ import annotations

import re
from collections import Counter

from moestro.web.prometheus import Histogram

_DECISION_S = (2e-6, 5e-6, 1e-5, 2e-5, 5e-5, 1e-4, 2e-4, 5e-4, 1e-3, 2e-3, 5e-3, 1e-2)
_FIRST_BYTE_S = (
    *(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
    *(160.0, 640.0),
)
_USAGE = re.compile(rb'"(prompt_tokens|completion_tokens|cached_tokens)"\s*:\s*(\d{1,15})')


class EngineCounts:
    """Totals of one engine since the router started.

    Attributes:
        statuses: answers by HTTP status.
        first_byte_s: from the arrival of a request to the first byte of its answer's body.
        num_predicted_tokens, num_hit_tokens, num_prompt_tokens: of requests whose answers told of their prompt tokens:
            that the engine's cache was thought to hold (as a share of the prompt, times its tokens), that it did hold,
            and all.
        num_transitions: changes of condition.
    """

    __slots__ = (
        "first_byte_s", "num_broken", "num_decisions", "num_hit_tokens", "num_left", "num_predicted_tokens",
        "num_prompt_tokens", "num_retried_away", "num_transitions", "num_unreachable", "statuses",
    )  # fmt: skip

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.first_byte_s = Histogram(_FIRST_BYTE_S)
        self.num_decisions = 0
        self.num_predicted_tokens = 0.0
        self.num_hit_tokens = 0
        self.num_prompt_tokens = 0
        self.num_retried_away = 0
        self.num_unreachable = 0
        self.num_broken = 0
        self.num_left = 0
        self.num_transitions = 0


class Counts:
    """What is counted of all engines together.

    Attributes:
        decision_s: time that each decision took.
        refusals: by the error's code.
        retries: by cause.
    """

    def __init__(self) -> None:
        self.decision_s = Histogram(_DECISION_S)
        self.refusals: Counter[str] = Counter()
        self.retries: Counter[str] = Counter()
        self.num_retries_denied = 0
        self.num_requests = 0


def usage_in(tail: bytes | bytearray) -> dict[bytes, int]:
    """Token counts in the last bytes of an answer, plain or streamed; empty where it tells none.

    A quotation mark inside of a JSON text is spelt with a backslash, so no generated text can pose as one of them.
    """
    at = tail.rfind(b'"usage"')
    return {name: int(count) for name, count in _USAGE.findall(tail, at)} if at >= 0 else {}
