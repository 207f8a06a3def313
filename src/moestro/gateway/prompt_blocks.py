"""How a prompt becomes the names of its blocks. Without a tokenizer here; `exact.py` has one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from moestro.core.request import Request
from moestro.gateway.http_headers import Incoming
from moestro.gateway.request_body import BYTES_PER_TOKEN, RequestBody, request_from_text
from moestro.text.thread_pool import PrepareThreads

MAX_INLINE_BYTES = 256 << 10  # read and hashed in about a millisecond
Prepare = Callable[[RequestBody, Incoming, int], Request]  # what is asked, the whole request, now_ns


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReader:
    """How prompts are read.

    Attributes:
        prepare: makes the request that the router decides by.
        block_tokens: tokens of one block, or about as many.
        words: how prompts are compared, for the operator.
        max_inline_bytes: the largest body that is read on the event loop; larger ones are read on threads.
        threads: started when first needed.
    """

    prepare: Prepare
    block_tokens: int
    words: str
    max_inline_bytes: int = MAX_INLINE_BYTES
    threads: PrepareThreads = field(default_factory=PrepareThreads)


def text_prompt_reader(block_bytes: int) -> PromptReader:
    """Prompts as text, in blocks of `block_bytes`."""
    return PromptReader(
        prepare=partial(request_from_text, block_bytes=block_bytes),
        block_tokens=max(1, block_bytes // BYTES_PER_TOKEN),
        words=f"as text, in blocks of {block_bytes} bytes",
    )
