"""Every exception Moestro raises on purpose.

MoestroError
├── ConfigError                 the settings are impossible or contradict each other; the text says what to do
│   └── UnsupportedModelError   this checkpoint cannot run here, and why
├── RequestError                one request is refused; the others go on
│   ├── PromptTooLongError
│   ├── QueueFullError
│   ├── GaveWayError
│   ├── NoEngineError
│   ├── DrainingError
│   ├── BusyError
│   └── GrammarTimeoutError
├── CopyError                   KV could not be copied to or from host memory; it is computed again
├── EngineDiedError             a rank process ended; its requests end with an error
├── GroupLostError              a rank of a group ended, so the others cannot go on
└── InvariantError              a bug of ours: stop the rank, keep the report

A `RequestError` is what a client sees: `http_status`, OpenAI's `type` and `code`, and the `param` at fault.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from types import MappingProxyType

_SHOWN_CHARS = 200


class MoestroError(Exception):
    """Base class. Catch it at a process boundary, nowhere else."""


class ConfigError(MoestroError):
    """The configuration cannot be honoured: raised before anything is served."""


class UnsupportedModelError(ConfigError):
    """The checkpoint's architecture or weight format cannot run here: raised at load with the reason."""


class CopyError(MoestroError):
    """KV blocks could not be copied between a device and its host; what they were to hold is computed again."""


class RequestError(MoestroError):
    """One request is refused.

    Args:
        message: what was given, what is allowed, what to do. The client reads it.
        param: the request's field at fault.
        code: a stable word that programs compare.
    """

    http_status = 400
    error_type = "invalid_request_error"
    retry_after_s: int | None = None
    headers: Mapping[str, str] = MappingProxyType({})  # further headers of the answer

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class PromptTooLongError(RequestError):
    """The prompt and the requested tokens can never fit; the words are those that client libraries look for."""

    def __init__(self, num_prompt_tokens: int, max_tokens: int, max_model_len: int) -> None:
        super().__init__(
            f"This model's maximum context length is {max_model_len} tokens. However, your prompt contains"
            f" {num_prompt_tokens} input tokens and {max_tokens} output tokens were requested."
            " Shorten the prompt or lower max_tokens.",
            param="prompt",
            code="context_length_exceeded",
        )


class QueueFullError(RequestError):
    """The engine's waiting queue is at its bound; later is better than longer."""

    http_status = 503
    error_type = "service_unavailable"
    retry_after_s = 1

    def __init__(self, num_waiting: int) -> None:
        super().__init__(
            f"The request queue is full ({num_waiting} waiting). Retry later, or raise --max-num-queued-reqs.",
            code="queue_full",
        )


class QueueBoundError(RequestError):
    """A client has as many requests in the router's queue as it may have."""

    http_status = 429
    error_type = "rate_limit_error"
    retry_after_s = 1

    def __init__(self, problem: str) -> None:
        text = f"All engines are full, and {problem}. Retry later, or send fewer at a time."
        super().__init__(text, code="queue_full")


class QueueTimeoutError(RequestError):
    """A request has waited in the router's queue for as long as it may."""

    http_status = 429
    error_type = "rate_limit_error"
    retry_after_s = 1

    def __init__(self, ttl_s: float) -> None:
        super().__init__(f"No engine had room for the request within {ttl_s:g} s. Retry later.", code="queue_timeout")


class GaveWayError(RequestError):
    """A waiting request gave its place in a full queue to a client that has fewer."""

    http_status = 503
    error_type = "service_unavailable"
    retry_after_s = 1

    def __init__(self) -> None:
        super().__init__(
            "The request queue is full, and this client has most of its places: its newest request gave way to another"
            " client's. Retry later, or raise --max-num-queued-reqs.",
            code="queue_full",
        )


class NoEngineError(RequestError):
    """No engine can take a request now."""

    http_status = 503
    error_type = "service_unavailable"
    retry_after_s = 1

    def __init__(self) -> None:
        super().__init__("No engine is ready to take requests. Retry later.", code="no_engine")


class DrainingError(RequestError):
    """The server is about to stop and takes nothing new."""

    http_status = 503
    error_type = "service_unavailable"
    retry_after_s = 1

    def __init__(self) -> None:
        super().__init__("The server is shutting down. Retry later.", code="shutting_down")


class BusyError(RequestError):
    """More bodies or new grammars are here than the API server can bear."""

    http_status = 503
    error_type = "service_unavailable"
    retry_after_s = 1

    def __init__(self, num_preparing: int) -> None:
        super().__init__(f"Too many requests are in preparation ({num_preparing}). Retry later.", code="overloaded")


class GrammarTimeoutError(RequestError):
    """A new grammar was not checked in time, because the machine or other grammars kept its check from the processor.

    Args:
        param: field with the grammar.
        waited_s: time after which the server gave up.
    """

    http_status = 503
    error_type = "service_unavailable"
    retry_after_s = 5

    def __init__(self, param: str, waited_s: float) -> None:
        text = f"{param} was not checked within {waited_s:g} s. The check goes on. Retry later."
        super().__init__(text, param=param, code="grammar_timeout")


class EngineDiedError(MoestroError):
    """A rank process ended while requests were on it, or before it was ready; the text carries its cause."""


class GroupLostError(MoestroError):
    """Another rank of the group ended or stopped answering; all ranks of the group start again."""


class InvariantError(MoestroError):
    """Something that cannot happen, happened. Never caught to go on."""


def shown(value: object) -> str:
    """What the client sent, fit to be repeated to it: printable, short, and without surrogates, which UTF-8 lacks."""
    return _fit_to_show(str, value)


def shown_literal(value: object) -> str:
    """As `shown`, with the quotes and brackets of a literal: `'1'` for a text, `1` for a number."""
    return _fit_to_show(repr, value)


def _fit_to_show(spell: Callable[[object], str], value: object) -> str:
    try:
        text = spell(value)
    except ValueError:  # Python spells no integers of more than 4,300 digits, because that takes long.
        text = "a value with too many digits to show"
    except RecursionError:
        text = "a value with too many levels to show"
    printable = re.sub(r"[^\x20-\x7e\xa0-\ud7ff\ue000-\uffff]", "?", text[:_SHOWN_CHARS])
    return printable if len(text) <= _SHOWN_CHARS else printable + "..."
