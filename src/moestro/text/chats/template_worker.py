"""The process that renders chat templates: `python -m moestro.text.chats.template_worker`. It loads no torch.

A template is a program of the checkpoint. The sandbox of transformers keeps it from files and the interpreter; this
process bounds its time and memory. It reads jobs one after the other from stdin and writes the answers to stdout.
"""

from __future__ import annotations

import contextlib
import signal

import msgspec

from moestro.text.chats.chat_template import (
    MEMORY_LIMIT_BYTES,
    TEXT_LIMIT_BYTES,
    TIME_LIMIT_S,
    LimitExceeded,
    Rendered,
    RenderJob,
    TemplateRefused,
)
from moestro.text.child_process import limit_memory, read_message, write_message
from moestro.text.transformers_part import import_part

_CHAT_TEMPLATES = "transformers.utils.chat_template_utils"
render_jinja_template = import_part(_CHAT_TEMPLATES, ("transformers", "transformers.utils")).render_jinja_template

_ERROR_CHARS = 1000  # for a template's error


_encode = msgspec.msgpack.Encoder().encode
_decode_job = msgspec.json.Decoder(RenderJob).decode


def main() -> None:
    """Render until stdin ends, which happens when the parent process ends."""
    signal.signal(signal.SIGALRM, signal.SIG_DFL)  # the alarm ends the process, whatever it is doing
    limit_memory(MEMORY_LIMIT_BYTES)
    while (body := read_message(0)) is not None:
        signal.setitimer(signal.ITIMER_REAL, TIME_LIMIT_S)
        answer = _answer(body)
        signal.setitimer(signal.ITIMER_REAL, 0)
        write_message(1, answer)


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
        continue_final_message=job.continue_final_message,
        **job.variables,
    )
    return Rendered(texts[0])


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # the server ended during a chat
        main()
