"""Request of a resumable stream: its body for the first engine, and for those that continue it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from moestro.gateway.clients.paths import CHAT_PATH
from moestro.gateway.resume.fields import Values, copied, obstacle

COMPLETION_PATH = "/v1/completions"
DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's default of completions, which engines keep. That of a chat is the context.
_MAX_FIELDS = 256

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


class _CountedFields(msgspec.Struct):
    """Fields that count tokens, and those that say what the client reads."""

    model: str | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    min_tokens: int | None = None
    return_token_ids: bool | None = None
    stream_options: dict[str, bool | None] | None = None


class _StreamField(msgspec.Struct):
    stream: bool | None = None


_decode_streamed = msgspec.json.Decoder(_StreamField).decode
_decode_limits = msgspec.json.Decoder(_CountedFields).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class ResumableRequest:
    """A request whose stream another engine can continue exactly.

    Attributes:
        path: Path of the request.
        body: Body for an engine that begins the answer; it asks for token ids.
        model: Model that the body names.
        wants_ids: Whether the client wants the token ids.
        wants_usage: Whether the client wants a last chunk with the usage.
    """

    path: str
    body: bytes
    model: str | None
    wants_ids: bool
    wants_usage: bool
    _fields: Values
    _max_tokens: int | None
    _min_tokens: int
    _context: int | None

    @property
    def is_chat(self) -> bool:
        """Whether the stream has the chunks of a chat."""
        return self.path == CHAT_PATH

    def num_left(self, num_prompt_tokens: int, num_tokens: int) -> int:
        """Return how many tokens may follow the first `num_tokens` of the answer."""
        room = [self._max_tokens, None if self._context is None else self._context - num_prompt_tokens]
        return min(each for each in room if each is not None) - num_tokens

    def continuation(self, prompt_ids: Sequence[int], answer_ids: Sequence[int]) -> bytes:
        """Return the body of the completion that continues the answer behind `answer_ids`."""
        num_tokens = len(answer_ids)
        counted: dict[str, object] = {
            "prompt": [*prompt_ids, *answer_ids],
            "max_tokens": self.num_left(len(prompt_ids), num_tokens),
            "return_token_ids": True,
        }
        if self._min_tokens > num_tokens:
            counted["min_tokens"] = self._min_tokens - num_tokens
        return msgspec.json.encode(copied(self._fields) | counted)


def resumable(path: str, body: bytes, context_of: Callable[[str | None], int | None]) -> ResumableRequest | str | None:
    """Return the request in resumable form, or the obstacle to that; None for a request without a stream.

    An unreadable body counts as one without a stream: the engine refuses it.

    Args:
        path: Path of the request.
        body: Body, unpacked.
        context_of: Returns the longest sequence of a model, tokens; None means unknown.
    """
    try:
        if _decode_streamed(body).stream is not True:
            return None
        fields, limits = _decode(body), _decode_limits(body)
        found = _obstacle(path, fields)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    context, most = context_of(limits.model), limits.max_completion_tokens
    if most is None:
        most = limits.max_tokens
    if most is None and path == COMPLETION_PATH:
        most = DEFAULT_COMPLETION_TOKENS
    if most is None and context is None:
        found = found or "max_tokens"
    options = limits.stream_options or {}
    return found or ResumableRequest(
        path=path,
        body=msgspec.json.encode(fields | {"return_token_ids": True}),
        model=limits.model,
        wants_ids=bool(limits.return_token_ids),
        wants_usage=bool(options.get("include_usage")),
        _fields=fields,
        _max_tokens=most,
        _min_tokens=limits.min_tokens or 0,
        _context=context,
    )


def _obstacle(path: str, fields: Values) -> str:
    if path not in (COMPLETION_PATH, CHAT_PATH):
        return "path"
    return "number of fields" if len(fields) > _MAX_FIELDS else obstacle(fields)
