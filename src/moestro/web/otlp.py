"""Export of spans by OpenTelemetry's SDK, on a thread of its own. Loaded only where traces are wanted."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.sdk.trace.sampling import Decision
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import NonRecordingSpan, SpanContext, Status, StatusCode, TraceFlags, set_span_in_context
from opentelemetry.trace import SpanKind as OtelKind

from moestro import __version__
from moestro.web.tracing import SpanKind, TraceContext, TraceSpan

_KINDS = {SpanKind.SERVER: OtelKind.SERVER, SpanKind.CLIENT: OtelKind.CLIENT, SpanKind.INTERNAL: OtelKind.INTERNAL}
_FLUSH_S = 2.0  # Longest wait for the collector when the server stops.
_LOG_S = 60.0


class OtlpSink:
    """Sends spans to a collector.

    Spans wait in a bounded queue of the SDK for its thread. A collector that is slow or dead costs spans, never time of
    a request.

    Args:
        url: URL of the collector.
        service: Name of the service, unless OTEL_SERVICE_NAME gives another.
    """

    def __init__(self, url: str, service: str) -> None:
        own = {"service.name": service, "service.version": __version__}
        of_environment = OTELResourceDetector().detect().attributes  # They beat those of the program.
        self._resource = Resource.create({**own, **of_environment})
        _limit_log()
        self._provider = TracerProvider(resource=self._resource, shutdown_on_exit=False)
        self._processor = BatchSpanProcessor(OTLPSpanExporter(endpoint=url))
        self._scope = InstrumentationScope("moestro", __version__)

    def samples(self, parent: TraceContext | None, trace_id: int) -> bool:
        """Implement `SpanSink.samples`, by the sampler of the environment: as the parent, else all."""
        context = Context()
        if parent is not None:
            context = set_span_in_context(NonRecordingSpan(_context_of(parent)), context)
        decision = self._provider.sampler.should_sample(context, trace_id, "request").decision
        return decision is Decision.RECORD_AND_SAMPLE

    def put(self, trace_id: int, spans: Sequence[TraceSpan]) -> None:
        """Implement `SpanSink.put`."""
        for span in spans:
            parent = None
            if span.parent_id is not None:
                parent = _context_of(TraceContext(trace_id, span.parent_id, is_sampled=True))
            status = Status(StatusCode.ERROR, span.error) if span.error else Status()
            self._processor.on_end(
                ReadableSpan(
                    name=span.name,
                    context=_context_of(TraceContext(trace_id, span.span_id, is_sampled=True)),
                    parent=parent,
                    resource=self._resource,
                    attributes=span.attributes,
                    kind=_KINDS[span.kind],
                    status=status,
                    start_time=span.begin_ns,
                    end_time=span.end_ns,
                    instrumentation_scope=self._scope,
                )
            )

    def close(self) -> None:
        """Send what waits, for at most two seconds: the process ends even if the collector does not answer."""
        thread = threading.Thread(target=self._processor.shutdown, name="otlp-flush", daemon=True)
        thread.start()
        thread.join(_FLUSH_S)


def _context_of(context: TraceContext) -> SpanContext:
    flags = TraceFlags(TraceFlags.SAMPLED if context.is_sampled else TraceFlags.DEFAULT)
    return SpanContext(context.trace_id, context.span_id, is_remote=True, trace_flags=flags)


class _OncePerMinute(logging.Filter):
    """Passes a text of one place in the code once a minute."""

    def __init__(self) -> None:
        super().__init__()
        self._due_s: dict[tuple[str, int], float] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        place, now_s = (record.pathname, record.lineno), time.monotonic()
        if now_s < self._due_s.get(place, 0.0):
            return False
        self._due_s[place] = now_s + _LOG_S
        record.exc_info = None  # A collector that refuses connections is one line, not a stack.
        return True


def _limit_log() -> None:
    """Keep the log short while a collector does not answer."""
    for name in ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk._shared_internal"):
        logger = logging.getLogger(name)
        if not any(isinstance(each, _OncePerMinute) for each in logger.filters):
            logger.addFilter(_OncePerMinute())
