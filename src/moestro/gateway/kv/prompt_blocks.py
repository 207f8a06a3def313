"""Readers of prompts: turn a prompt into block hashes. `tokenized_blocks.py` contains the reader with a tokenizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from moestro.core.request import Request
from moestro.gateway.clients.http_headers import Incoming
from moestro.gateway.clients.request_body import BYTES_PER_TOKEN, RequestBody, request_from_text
from moestro.text.thread_pool import PrepareThreads

MAX_INLINE_BYTES = 256 << 10  # parsed and hashed in about a millisecond
Prepare = Callable[[RequestBody, Incoming, int], Request]  # (parsed body, complete request, now_ns) -> routed request


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptReader:
    """Method of reading prompts.

    Attributes:
        prepare: makes the request by which the router decides.
        block_tokens: tokens per block, exact or estimated.
        words: method of comparing prompts, in words for the operator.
        count: makes the same request without names of blocks. None means that it takes as long.
        max_inline_bytes: largest body read on the event loop, bytes; larger bodies are read on threads.
        threads: thread pool, started at first use.
    """

    prepare: Prepare
    block_tokens: int
    words: str
    count: Prepare | None = None
    max_inline_bytes: int = MAX_INLINE_BYTES
    threads: PrepareThreads = field(default_factory=PrepareThreads)

    def without_names(self) -> PromptReader:
        """Return a reader of the same prompts that makes no names of blocks, where that saves time."""
        return self if self.count is None else replace(self, prepare=self.count)


def text_prompt_reader(block_bytes: int) -> PromptReader:
    """Make a reader that compares prompts as text, in blocks of `block_bytes`."""
    return PromptReader(
        prepare=partial(request_from_text, block_bytes=block_bytes),
        block_tokens=max(1, block_bytes // BYTES_PER_TOKEN),
        words=f"as text, in blocks of {block_bytes} bytes",
        count=partial(request_from_text, block_bytes=None),
    )
