"""Contexts of traces (W3C Trace Context) and spans, without a library of traces."""

from __future__ import annotations

import asyncio
import contextlib
import math
import re
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple, Protocol

from moestro.web.settings import TracingSettings

SAMPLED = 1
TRACEPARENT = "traceparent"
_TRACEPARENT = re.compile(rb"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?", re.DOTALL)
_MAX_BYTES = 512

AttributeValue = str | bool | int | float


class TraceContext(NamedTuple):
    """Position in a trace.

    Attributes:
        trace_id: Number of the trace, 128 bits.
        span_id: Number of the span that the next one belongs to, 64 bits.
        is_sampled: Whether spans of the trace are recorded.
    """

    trace_id: int
    span_id: int
    is_sampled: bool

    def header(self) -> str:
        """Return the value of `traceparent`."""
        return f"00-{self.trace_id:032x}-{self.span_id:016x}-{self.is_sampled:02x}"


def parse_traceparent(value: bytes | str) -> TraceContext | None:
    """Return the context in a value of `traceparent`; None for one that is absent or invalid."""
    found = _TRACEPARENT.fullmatch(value.encode("latin-1", "replace") if isinstance(value, str) else value)
    if found is None or len(value) > _MAX_BYTES:
        return None
    version, trace, span, flags, rest = found.groups()
    trace_id, span_id = int(trace, 16), int(span, 16)
    if version == b"ff" or (version == b"00" and rest is not None) or not trace_id or not span_id:
        return None
    return TraceContext(trace_id, span_id, bool(int(flags, 16) & SAMPLED))


def new_span_id() -> int:
    """Return a random number of a span, which is never 0."""
    return secrets.randbits(64) or 1


def new_trace_id() -> int:
    """Return a random number of a trace, which is never 0."""
    return secrets.randbits(128) or 1


class SpanKind(StrEnum):
    """What a span is to its process."""

    SERVER = "server"
    CLIENT = "client"
    INTERNAL = "internal"


@dataclass(slots=True, kw_only=True)
class TraceSpan:
    """One span that has ended.

    Attributes:
        parent_id: Span that it belongs to; None means that it is the first of its trace.
        begin_ns: Its beginning, ns since 1970.
        end_ns: Its end, ns since 1970.
        error: What went wrong; empty if nothing did.
    """

    name: str
    kind: SpanKind = SpanKind.INTERNAL
    span_id: int = field(default_factory=new_span_id)
    parent_id: int | None
    begin_ns: int
    end_ns: int
    attributes: dict[str, AttributeValue] = field(default_factory=dict)
    error: str = ""


class SpanSink(Protocol):
    """Receives the spans of requests."""

    def samples(self, parent: TraceContext | None, trace_id: int) -> bool:
        """Return whether the spans of a request are recorded."""

    def put(self, trace_id: int, spans: Sequence[TraceSpan]) -> None:
        """Take the spans of one request. Never waits; spans that find no place are dropped."""

    def close(self) -> None:
        """Send what waits, within a bounded time."""


def known(attributes: Mapping[str, AttributeValue | None]) -> dict[str, AttributeValue]:
    """Return the attributes with a value: neither None nor a number that is not finite."""
    return {
        name: value
        for name, value in attributes.items()
        if value is not None and not (isinstance(value, float) and not math.isfinite(value))
    }


@contextlib.asynccontextmanager
async def open_sink(settings: TracingSettings, service: str) -> AsyncIterator[SpanSink | None]:
    """Yield what takes spans inside the block, and send what waits afterwards; None without a collector.

    Args:
        service: Name of the service in traces.
    """
    if settings.url is None:
        yield None
        return
    from moestro.web.otlp import OtlpSink  # noqa: PLC0415 - an extra

    sink = OtlpSink(settings.url, service)
    try:
        yield sink
    finally:
        await asyncio.to_thread(sink.close)
