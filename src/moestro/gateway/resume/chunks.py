"""Chunks of streamed completions and chats: what the router reads of them, and how it writes its own."""

from __future__ import annotations

import re
from typing import Any

import msgspec

from moestro.gateway.resume.tokens import AnswerTokens

# Strings in JSON have no bare quotation mark, so generated text cannot contain these.
_IDS = re.compile(rb'("(?:prompt_)?token_ids": ?)\[[-0-9, ]*\]')
_LINE = re.compile(rb"(?:\A|\n)data: ?([^\r\n]*)")
_ERROR = re.compile(rb'\{\s*"(?:error"|object": ?"error")')
_DONE = b"[DONE]"
END = b"data: [DONE]\n\n"
# Fields by which the stream of each engine names itself.
_HEADING = ("id", "created", "model", "system_fingerprint")
_FIRST_FAULT_OF_SERVERS = 500
_ENGINES_ENDS = frozenset({"abort", "error"})  # vLLM's finish reasons of requests that it gave up.
_FAULTS_OF_CLIENTS = frozenset({"invalid_request_error", "BadRequestError"})


class ReceivedDelta(msgspec.Struct):
    """Addition of a chat's chunk to its message."""

    role: str | None = None
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: list[Any] | None = None
    function_call: Any = None

    @property
    def is_parsed(self) -> bool:
        """Whether a parser of the engine has found more than content."""
        return bool(self.reasoning or self.reasoning_content or self.tool_calls or self.function_call)


class ReceivedChoice(msgspec.Struct):
    """One choice of a chunk."""

    text: str | None = None
    delta: ReceivedDelta | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None

    @property
    def new_text(self) -> str:
        """Text that the chunk adds; may be empty."""
        return (self.text if self.delta is None else self.delta.content) or ""

    @property
    def is_broken_off(self) -> bool:
        """Whether the engine has given the answer up, as vLLM does at its end."""
        return self.finish_reason in _ENGINES_ENDS

    @property
    def is_role_alone(self) -> bool:
        """Whether the chunk only opens a message."""
        delta = self.delta
        return delta is not None and delta.role is not None and not (self.new_text or self.finish_reason)


class ReceivedChunk(msgspec.Struct):
    """One chunk of a stream."""

    choices: list[ReceivedChoice]
    prompt_token_ids: list[int] | None = None
    usage: dict[str, Any] | None = None


class _ErrorFields(msgspec.Struct):
    code: int | str | None = None
    type: str | None = None


class _ErrorData(msgspec.Struct):
    error: _ErrorFields


_decode_chunk = msgspec.json.Decoder(ReceivedChunk).decode
_decode_failure = msgspec.json.Decoder(_ErrorData).decode
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def data_of(event: bytes) -> bytes:
    """Return the data of an event; empty for a comment."""
    found = _LINE.search(event)
    return b"" if found is None else found[1].strip()


def is_end(data: bytes) -> bool:
    """Return whether `data` is the mark after the last chunk."""
    return data == _DONE


def is_error(event: bytes, data: bytes) -> bool:
    """Return whether an event ends its stream with an error."""
    return event.startswith(b"event: error") or _ERROR.match(data) is not None


def is_engines_fault(data: bytes) -> bool:
    """Return whether an error is about the engine, so that another one may do better."""
    try:
        fault = _decode_failure(data).error
    except _UNREADABLE:
        return True
    if isinstance(fault.code, int):
        return fault.code >= _FIRST_FAULT_OF_SERVERS
    return fault.type not in _FAULTS_OF_CLIENTS


def read_chunk(data: bytes) -> ReceivedChunk | None:
    """Return a chunk; None for data in another form."""
    try:
        return _decode_chunk(data)
    except _UNREADABLE:
        return None


def without_ids(event: bytes) -> bytes:
    """Return an event whose token ids are null."""
    return _IDS.sub(rb"\1null", event)


class ClientChunks:
    """Writes the chunks of later engines in the form of the first engine's.

    Attributes:
        is_empty: Whether no chunk has been kept yet.
    """

    __slots__ = ("_has_text", "_sample", "_wants_ids")

    def __init__(self, *, wants_ids: bool) -> None:
        self._wants_ids = wants_ids
        self._sample = b""  # The first chunk with text, or else the first one.
        self._has_text = False

    @property
    def has_text(self) -> bool:
        """Whether a chunk with text has been kept, whose form others can have."""
        return self._has_text

    def keep(self, event: bytes, *, has_text: bool) -> None:
        """Keep a chunk as a sample, if it is better than the one before."""
        if event and (not self._sample or (has_text and not self._has_text)):
            self._sample, self._has_text = data_of(event), has_text

    def forget(self) -> None:
        """Drop the sample, because the client has no chunk."""
        self._sample, self._has_text = b"", False

    def text(self, text: str, finish: str | None, choice: dict[str, Any], usage: dict[str, Any] | None) -> bytes:
        """Return the event of a chunk with `text`, whose other values are those of `choice`.

        Args:
            usage: Usage so far; None for a chunk without one.
        """
        fields = self._heading()
        made = dict(fields["choices"][0])
        if "delta" in made:
            made["delta"] = {name: value for name, value in made["delta"].items() if name != "role"} | {"content": text}
            if finish is not None and not text:
                del made["delta"]["content"]
        else:
            made["text"] = text
        made["finish_reason"] = finish
        for name in ("stop_reason", "matched_stop"):
            if name in made or choice.get(name) is not None:
                made[name] = choice.get(name)
        fields["choices"] = [self._trimmed(made | {"token_ids": choice.get("token_ids")}, has_ids="token_ids" in made)]
        if usage is not None:
            fields["usage"] = usage
        elif fields.get("usage") is not None:
            del fields["usage"]  # Of another chunk.
        return _event(fields)

    def again(self, choice: ReceivedChoice, fields: dict[str, Any]) -> bytes:
        """Return the event of a chunk whose answer begins again; empty if the client has the chunk already."""
        if choice.is_role_alone:
            return b""
        fields |= {name: value for name, value in self._heading().items() if name in _HEADING}
        fields.pop("prompt_token_ids", None)
        made = self._trimmed(fields["choices"][0], has_ids=True)
        if choice.delta is not None:
            made["delta"].pop("role", None)
        return _event(fields)

    def closing(self, usage: dict[str, Any] | None) -> bytes:
        """Return the event of a chunk without choices."""
        return _event(self._heading() | {"choices": [], "usage": usage})

    def _heading(self) -> dict[str, Any]:
        fields: dict[str, Any] = msgspec.json.decode(self._sample)
        fields.pop("prompt_token_ids", None)
        return fields

    def _trimmed(self, made: dict[str, Any], *, has_ids: bool) -> dict[str, Any]:
        """Remove the ids that the client does not want, and those of the prompt, which it has already."""
        if not has_ids:
            made.pop("token_ids", None)
        elif not self._wants_ids and "token_ids" in made:
            made["token_ids"] = None
        if "prompt_token_ids" in made:
            made["prompt_token_ids"] = None
        return made


def added_up(fields: dict[str, Any], tokens: AnswerTokens) -> dict[str, Any] | None:
    """Return the usage of a continuation's chunk, added to that of earlier engines; None without one."""
    usage = fields.get("usage")
    if not isinstance(usage, dict):
        return None
    tokens.add_up(usage)
    return usage


def _event(fields: dict[str, Any]) -> bytes:
    return b"data: %b\n\n" % msgspec.json.encode(fields)
