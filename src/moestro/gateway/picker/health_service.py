"""Health service of gRPC (grpc.health.v1.Health): the status of each service by name, once or watched."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from google.protobuf.wrappers_pb2 import Int32Value, StringValue

from moestro.gateway.picker.grpc_calls import CallHandler, GrpcCall, GrpcStatus, Methods

_SERVICE = b"/grpc.health.v1.Health/"
_SERVING, _NOT_SERVING, _SERVICE_UNKNOWN = 1, 2, 3


class HealthService:
    """Statuses of services, and the calls that watch them. The empty name is the server itself, which serves."""

    def __init__(self) -> None:
        self._statuses = {"": _SERVING}
        self._watches: dict[str, dict[_StatusWatch, None]] = {}

    @property
    def methods(self) -> Methods:
        """Methods of the service by path."""
        return {_SERVICE + b"Check": self._check, _SERVICE + b"Watch": self._watch}

    def set(self, name: str, *, is_serving: bool) -> None:
        """Change the status of a service, and report it to those who watch it."""
        self._statuses[name] = _SERVING if is_serving else _NOT_SERVING
        for watch in list(self._watches.get(name, ())):
            watch.report(self._statuses[name])

    def close(self) -> None:
        """End the calls that watch."""
        for watches in list(self._watches.values()):
            for watch in list(watches):
                watch.end()

    def status_of(self, name: str) -> int | None:
        """Return the status of a service; None means that the name is unknown."""
        return self._statuses.get(name)

    def watched(self, name: str, watch: _StatusWatch) -> None:
        """Report changes of a service to `watch` from now on."""
        self._watches.setdefault(name, {})[watch] = None
        watch.report(self._statuses.get(name, _SERVICE_UNKNOWN))

    def left(self, name: str, watch: _StatusWatch) -> None:
        """Report no further changes to `watch`."""
        watches = self._watches.get(name, {})
        watches.pop(watch, None)
        if not watches:
            self._watches.pop(name, None)

    def _check(self, call: GrpcCall) -> CallHandler:
        return _StatusCheck(self, call)

    def _watch(self, call: GrpcCall) -> CallHandler:
        return _StatusWatch(self, call)


class _StatusCheck:
    """One question."""

    def __init__(self, service: HealthService, call: GrpcCall) -> None:
        self._service = service
        self._call = call

    def message(self, data: bytes | memoryview) -> None:
        """Answer the question."""
        name = _name_in(data, self._call)
        if name is None:
            return
        status = self._service.status_of(name)
        if status is None:
            self._call.end(GrpcStatus.NOT_FOUND, "the service is unknown")
            return
        self._call.send(_answer(status))
        self._call.end()

    def half_closed(self) -> None:
        """Refuse a call without a question."""
        self._call.end(GrpcStatus.INVALID_ARGUMENT, "the call has no message")

    def closed(self) -> None:
        """Do nothing: a question has no state."""


class _StatusWatch:
    """One client that watches a service."""

    def __init__(self, service: HealthService, call: GrpcCall) -> None:
        self._service = service
        self._call = call
        self._name: str | None = None

    def message(self, data: bytes | memoryview) -> None:
        """Watch the service that the first message names."""
        if self._name is not None:
            self._fail("a watch has one message")
        elif (name := _name_in(data, self._call)) is not None:
            self._name = name
            self._service.watched(name, self)

    def half_closed(self) -> None:
        """Refuse a call without a message; otherwise the client goes on to read."""
        if self._name is None:
            self._fail("the call has no message")

    def closed(self) -> None:
        """Watch no more."""
        if self._name is not None:
            self._service.left(self._name, self)

    def report(self, status: int) -> None:
        """Send the client a status."""
        self._call.send(_answer(status))
        self._call.flush()

    def end(self) -> None:
        """End the call, because the server stops."""
        self.closed()
        self._call.end(GrpcStatus.UNAVAILABLE, "the server stops")
        self._call.flush()

    def _fail(self, text: str) -> None:
        self.closed()
        self._call.end(GrpcStatus.INVALID_ARGUMENT, text)


def _name_in(data: bytes | memoryview, call: GrpcCall) -> str | None:
    """Return the service that a question names; None means that it has none, and that the call has ended."""
    try:
        # HealthCheckRequest has the form of StringValue, and HealthCheckResponse that of Int32Value: one field 1.
        return str(StringValue.FromString(data).value)
    except DecodeError:
        call.end(GrpcStatus.INTERNAL, "the message cannot be read")
        return None


def _answer(status: int) -> bytes:
    data: bytes = Int32Value(value=status).SerializeToString()
    return data
