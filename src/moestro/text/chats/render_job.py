"""Messages between the API server and the processes that render chat templates, and the limits of a rendering."""

from __future__ import annotations

import os
from typing import Any

import msgspec

TIME_LIMIT_S = 5.0  # for one rendering; an ordinary chat takes less than a millisecond
MEMORY_LIMIT_BYTES = 1 << 30  # address space of a rendering process; an idle one has some 150 MB
TEXT_LIMIT_BYTES = 64 << 20  # for a rendered chat; twice the largest body of a request
_LENGTH_BYTES = 4  # before each message, big-endian


class RenderJob(msgspec.Struct, frozen=True):
    """One chat to render."""

    template: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    add_generation_prompt: bool
    continue_final_message: bool
    variables: dict[str, Any]  # by name; the special tokens among them, which templates insert


class Rendered(msgspec.Struct, frozen=True, tag=True):
    """The prompt."""

    text: str


class TemplateRefused(msgspec.Struct, frozen=True, tag=True):
    """The template raised an error."""

    message: str


class LimitExceeded(msgspec.Struct, frozen=True, tag=True):
    """The template exceeded a limit. `limit`: the limit and its unit."""

    limit: str


RenderAnswer = Rendered | TemplateRefused | LimitExceeded


def read_message(file: int) -> bytes | None:
    """Read the next encoded message from a pipe; None if the other side is gone."""
    head = _read(file, _LENGTH_BYTES)
    return None if head is None else _read(file, int.from_bytes(head, "big"))


def write_message(file: int, body: bytes) -> None:
    """Write an encoded message to a pipe.

    Raises:
        BrokenPipeError: the process at its other end is gone.
    """
    rest = memoryview(len(body).to_bytes(_LENGTH_BYTES, "big") + body)
    while rest:
        rest = rest[os.write(file, rest) :]


def _read(file: int, size: int) -> bytes | None:
    """Read exactly `size` bytes; None if the pipe ends before."""
    parts = []
    while size:
        part = os.read(file, min(size, 1 << 20))
        if not part:
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
