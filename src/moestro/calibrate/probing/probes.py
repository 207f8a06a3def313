"""The words between the design of an experiment and the server that it probes. Nothing here has effects.

A design yields a `ServerProbe` and receives a `ProbeAnswer`; a client sends the one and times the other.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRequest:
    """One request of a probe.

    Attributes:
        key: names the tokens of the prompt; prompts of equal keys begin alike.
        num_tokens: tokens of the prompt.
        max_tokens: tokens of the answer.
        own_key: names the tokens from `num_shared` on, where the prompt leaves that of `key`. None means that it
            does not.
        num_shared: tokens from the beginning that `key` names, where there is an `own_key`.
        after: deliveries of the probe's first request after which this one is sent; 0: at once.
    """

    key: int
    num_tokens: int
    max_tokens: int
    own_key: int | None = None
    num_shared: int = 0
    after: int = 0


def prompt_tokens(request: ProbeRequest, vocab_size: int, seed: int = 0) -> list[int]:
    """Return the token ids of a request's prompt.

    Args:
        vocab_size: ids are drawn from 0 to this number, exclusive.
        seed: seed of all prompts of an experiment.
    """
    own = request.own_key is not None
    num_shared = request.num_shared if own else request.num_tokens
    tokens: list[int] = np.random.default_rng([seed, request.key]).integers(vocab_size, size=num_shared).tolist()
    if own:
        draw = np.random.default_rng([seed, request.own_key or 0])
        tokens += draw.integers(vocab_size, size=request.num_tokens - num_shared).tolist()
    return tokens


@dataclass(frozen=True, slots=True)
class ServerProbe:
    """Requests that are sent together.

    Attributes:
        kind: stable word for messages.
        requests: at least one.
    """

    kind: str
    requests: tuple[ProbeRequest, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestTimes:
    """What came of one request.

    Attributes:
        sent_ns: time of its sending.
        deliveries: int64[n], times of its tokens; empty for a failure.
        num_prompt_tokens, num_output_tokens, num_cached_tokens: counts that the server reports.
        failure: stable word; None for a complete answer.
        message: the server's words about the failure.
    """

    sent_ns: int
    deliveries: Int64s
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    num_cached_tokens: int = 0
    failure: str | None = None
    message: str = ""

    @property
    def is_refused(self) -> bool:
        """Whether the server refused it for its load: 429 or 503."""
        return self.failure in {"http_429", "http_503"}

    @property
    def ttft_ns(self) -> float:
        """Time to the first token, ns."""
        return float(self.deliveries[0] - self.sent_ns)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFigures:
    """What a server's `/metrics` showed. None means that it shows no such figure.

    Attributes:
        num_running, num_waiting: requests in the engine.
        kv_usage: share of the KV cache in use.
        num_tokens: prompt and generated tokens since the start.
        num_hit_tokens: prompt tokens found in the prefix cache since the start.
        num_kv_tokens: capacity of the KV cache, tokens.
        block_size: tokens of a KV block.
        num_engines: data-parallel engines behind the address.
        is_late: whether requests and KV in use are those of the last logged step, also of an idle server: SGLang
            renews them every 30 s while it has no work.
    """

    num_running: float | None = None
    num_waiting: float | None = None
    kv_usage: float | None = None
    num_tokens: float | None = None
    num_hit_tokens: int | None = None
    num_kv_tokens: int | None = None
    block_size: int | None = None
    num_engines: int = 1
    is_late: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeAnswer:
    """Times of a probe's requests.

    Attributes:
        requests: in the order of the probe.
        elapsed_s: seconds since the experiment began, at the end of the probe.
        before, after: figures of the server when no request of the probe was there. None: it shows none.
        meanwhile: figures that were read while the probe ran.
    """

    requests: tuple[RequestTimes, ...]
    elapsed_s: float
    before: ServerFigures | None = None
    after: ServerFigures | None = None
    meanwhile: tuple[ServerFigures, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedServer:
    """What a client knows of the server before its first probe.

    Attributes:
        model: name of the model.
        max_model_len: tokens of the longest sequence; None: the server does not say it.
        figures: its `/metrics` at the beginning; None: it shows none.
    """

    model: str
    max_model_len: int | None
    figures: ServerFigures | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeLimits:
    """Bounds of the experiment.

    Attributes:
        seconds: duration.
        max_concurrency: most requests at once.
        max_prompt_tokens: tokens of the longest prompt.
        max_added_load: share of the time in which probes may be under way, one request at a time. None: the server
            is idle, and probes fill it.
    """

    seconds: float
    max_concurrency: int
    max_prompt_tokens: int
    max_added_load: float | None = None


class PromptKeys:
    """Names prompts that no earlier probe sent."""

    def __init__(self) -> None:
        self._last = 0

    def new(self) -> int:
        """Return another name."""
        self._last += 1
        return self._last


Probing = Generator[ServerProbe, ProbeAnswer, None]
SendProbe = Callable[[ServerProbe], ProbeAnswer]


@dataclass(slots=True)
class NoteList:
    """Sentences for the operator, each once, in the order in which they came."""

    sentences: list[str] = field(default_factory=list)

    def add(self, sentence: str) -> None:
        """Add a sentence that is not there yet."""
        if sentence not in self.sentences:
            self.sentences.append(sentence)
