"""Refusals as HTTP says them: OpenAI's error body, and the `RequestError`s that only servers raise."""

from __future__ import annotations

import msgspec

from moestro.errors import RequestError, shown


class UnknownModelError(RequestError):
    """The client asked for a model that is not served here; the words are those that client libraries look for."""

    http_status = 404

    def __init__(self, model: str) -> None:
        super().__init__(f"The model `{shown(model)}` does not exist.", param="model", code="model_not_found")


class AuthenticationError(RequestError):
    """No API key, or a wrong one."""

    http_status = 401
    error_type = "authentication_error"

    def __init__(self) -> None:
        super().__init__(
            "Incorrect or missing API key. Send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'.",
            code="invalid_api_key",
        )


class ConnectionsFullError(RequestError):
    """As many clients are connected as may be."""

    http_status = 503
    error_type = "service_unavailable"
    retry_after_s = 1

    def __init__(self) -> None:
        super().__init__("Too many connections. Retry later.", code="too_many_connections")


class BodyTimeoutError(RequestError):
    """The request's body did not arrive in time."""

    http_status = 408

    def __init__(self, seconds: float) -> None:
        super().__init__(f"The request body did not arrive within {seconds:g} s.", code="request_timeout")


class GenerationError(RequestError):
    """A request that had been accepted came to a bad end; the client is not at fault."""

    http_status = 500
    error_type = "server_error"


class InternalError(RequestError):
    """A bug of ours: the log has the details, the client gets the id to ask for."""

    http_status = 500
    error_type = "server_error"

    def __init__(self, request_id: str) -> None:
        super().__init__(f"Internal server error. The server's log has it under {request_id}.", code="internal_error")


class HttpError(RequestError):
    """What the HTTP layer itself refuses: unknown path, wrong method, body too large, wrong media type."""

    def __init__(self, http_status: int, message: str, code: str) -> None:
        super().__init__(message, code=code)
        self.http_status = http_status


def too_large(limit: int) -> HttpError:
    """The refusal of a body of more than `limit` bytes."""
    return HttpError(413, f"The request body may have {limit} bytes.", "request_too_large")


class _ErrorFields(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class _ErrorBody(msgspec.Struct):
    error: _ErrorFields


def error_json(error: RequestError) -> bytes:
    """`{"error": {"message", "type", "param", "code"}}`, all four always there, as OpenAI specifies."""
    return msgspec.json.encode(_ErrorBody(_ErrorFields(error.message, error.error_type, error.param, error.code)))
