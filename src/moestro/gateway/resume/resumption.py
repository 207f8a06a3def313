"""Resumption: decides which streams can go on elsewhere, and keeps what streams have shown of each model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from moestro.gateway.clients.http_headers import Incoming, RequestHead
from moestro.gateway.resume.request import ResumableRequest, resumable
from moestro.gateway.resume.stream import Continuation, ResumableStream
from moestro.gateway.resume.tokens import ModelTraits

_MAX_MODELS = 64  # Of which traits are kept, the latest ones.


class Resumption:
    """Makes resumable streams of requests.

    Args:
        context_of: Returns the longest sequence of a model, tokens; None means unknown.
    """

    def __init__(self, context_of: Callable[[str | None], int | None]) -> None:
        self._context_of = context_of
        self._traits: OrderedDict[str | None, ModelTraits] = OrderedDict()

    def request_for(self, incoming: Incoming) -> ResumableRequest | str | None:
        """Return the request in resumable form, or the obstacle to that; None for a request without a stream."""
        if b"content-encoding" in incoming.head.named:
            return "packed body"
        found = resumable(incoming.head.path, incoming.body, self._context_of)
        if not isinstance(found, ResumableRequest):
            return found
        traits = self._traits.get(found.model)
        return "reasoning parser" if found.is_chat and traits is not None and traits.parses_reasoning else found

    def stream_of(self, request: ResumableRequest) -> ResumableStream:
        """Return the stream of a request's answer."""
        traits = self._traits.get(request.model)
        if traits is None:
            traits = self._traits[request.model] = ModelTraits()
            if len(self._traits) > _MAX_MODELS:
                self._traits.popitem(last=False)
        self._traits.move_to_end(request.model)
        return ResumableStream(request, traits)


def continued(incoming: Incoming, continuation: Continuation) -> Incoming:
    """Return the request that continues the answer to `incoming`, with its headers."""
    head = incoming.head
    if continuation.path != head.path:
        head = RequestHead(head.method, continuation.path.encode(), head.headers, head.named)
    return replace(incoming, head=head, body=continuation.body)
