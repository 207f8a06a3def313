"""The process that renders chat templates: `python -m moestro.text.template_worker`. It loads no torch.

A template is a program of the checkpoint. The sandbox of transformers keeps it from files and the interpreter; this
process bounds its time and memory. It reads jobs one after the other from stdin and writes the answers to stdout.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
from typing import Any

import msgspec
from transformers.utils.chat_template_utils import render_jinja_template

TIME_LIMIT_S = 5.0  # for one rendering; an ordinary chat takes less than a millisecond
MEMORY_LIMIT_BYTES = 1 << 30  # address space of this process; an idle one has some 150 MB
TEXT_LIMIT_BYTES = 64 << 20  # for a rendered chat; twice the largest body of a request
_ERROR_CHARS = 1000  # for a template's error
_LENGTH_BYTES = 4  # before each message, big-endian


class RenderJob(msgspec.Struct, frozen=True):
    """One chat to render."""

    template: str
    messages: list[dict[str, Any]]
    tools: list[Any] | None
    add_generation_prompt: bool
    special_tokens: dict[str, Any]  # by name; templates insert them


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

_encode = msgspec.msgpack.Encoder().encode
_decode_job = msgspec.msgpack.Decoder(RenderJob).decode


def write_job(file: int, job: RenderJob) -> None:
    """Write `job` to a pipe.

    Raises:
        BrokenPipeError: the process at its other end is gone.
    """
    _write(file, _encode(job))


def read_message(file: int) -> bytes | None:
    """Read the next encoded message from a pipe; None if the other side is gone."""
    head = _read(file, _LENGTH_BYTES)
    return None if head is None else _read(file, int.from_bytes(head, "big"))


def main() -> None:
    """Render until stdin ends, which happens when the parent process ends."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the alarm ends the process, whatever it is doing
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while (body := read_message(0)) is not None:
        signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_S)
        answer = _answer(body)
        signal.setitimer(signal.ITIMER_REAL, 0)
        _write(1, answer)


def _answer(body: bytes) -> bytes:
    """Return the encoded answer to an encoded job."""
    try:
        answer = _encode(_render(_decode_job(body)))
    except MemoryError:
        return _encode(LimitExceeded(f"{MEMORY_LIMIT_BYTES >> 20} MiB of memory"))
    except Exception as error:  # a template is a foreign program
        text = str(error)[:_ERROR_CHARS]
        return _encode(TemplateRefused(text.encode(errors="replace").decode()))
    if len(answer) > TEXT_LIMIT_BYTES:
        return _encode(LimitExceeded(f"{TEXT_LIMIT_BYTES >> 20} MiB of text"))
    return answer


def _render(job: RenderJob) -> Rendered:
    texts, _ = render_jinja_template(
        conversations=[job.messages],
        tools=job.tools,
        chat_template=job.template,
        add_generation_prompt=job.add_generation_prompt,
        **job.special_tokens,
    )
    return Rendered(texts[0])


def _write(file: int, body: bytes) -> None:
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


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # the server ended during a chat
        main()
