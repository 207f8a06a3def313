"""Error bodies in OpenAI's form, and the `RequestError`s that only HTTP servers raise."""

from __future__ import annotations

import msgspec

from moestro.errors import RequestError, shown


class UnknownModelError(RequestError):
    """The client requested an unknown model. Client libraries look for this wording."""

    http_status = 404

    def __init__(self, model: str) -> None:
        super().__init__(f"The model `{shown(model)}` does not exist.", param="model", code="model_not_found")


class AuthenticationError(RequestError):
    """The API key is missing or wrong."""

    http_status = 401
    error_type = "authentication_error"

    def __init__(self) -> None:
        super().__init__(
            "Incorrect or missing API key. Send it as 'Authorization: Bearer KEY' or as 'x-api-key: KEY'.",
            code="invalid_api_key",
        )


class ConnectionsFullError(RequestError):
    """The server has its maximum number of connections."""

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
    """An accepted request failed without a fault of the client."""

    http_status = 500
    error_type = "server_error"


class InternalError(RequestError):
    """A bug in Moestro. The log has the details, and the client gets the request id to report."""

    http_status = 500
    error_type = "server_error"

    def __init__(self, request_id: str) -> None:
        super().__init__(
            f"Internal server error. The server's log has details under {request_id}.", code="internal_error"
        )


class HttpError(RequestError):
    """Refusal by the HTTP layer: unknown path, wrong method, body too large, wrong media type."""

    def __init__(self, http_status: int, message: str, code: str) -> None:
        super().__init__(message, code=code)
        self.http_status = http_status


def too_large(limit: int) -> HttpError:
    """Return the refusal of a body of more than `limit` bytes."""
    return HttpError(413, f"The request body may have at most {limit} bytes.", "request_too_large")


class _ErrorFields(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str | None


class _ErrorBody(msgspec.Struct):
    error: _ErrorFields


def error_json(error: RequestError) -> bytes:
    """Return the error body `{"error": {"message", "type", "param", "code"}}`, always with all four fields."""
    return msgspec.json.encode(_ErrorBody(_ErrorFields(error.message, error.error_type, error.param, error.code)))
