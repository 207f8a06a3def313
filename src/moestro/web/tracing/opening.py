"""Opens the export of traces, whose libraries are an extra and are loaded only where traces are wanted."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from moestro.web.tracing.spans import SpanSink
from moestro.web.tracing.tracing_settings import TracingSettings


@contextlib.asynccontextmanager
async def open_sink(settings: TracingSettings, service: str) -> AsyncIterator[SpanSink | None]:
    """Yield what takes spans inside the block, and send what waits afterwards; None without a collector.

    Args:
        service: Name of the service in traces.
    """
    if settings.url is None:
        yield None
        return
    from moestro.web.tracing.otlp import OtlpSink  # noqa: PLC0415 - an extra

    sink = OtlpSink(settings.url, service)
    try:
        yield sink
    finally:
        await asyncio.to_thread(sink.close)
