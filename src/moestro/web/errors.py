"""Error bodies in OpenAI's and Anthropic's forms, and the `RequestError`s that only HTTP servers raise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from types import MappingProxyType

import msgspec

from moestro.errors import RequestError, shown


class UnknownModelError(RequestError):
    """The client requested an unknown model. Client libraries look for this wording."""

    http_status = 404

    def __init__(self, model: str) -> None:
        super().__init__(f"The model `{shown(model)}` does not exist.", param="model", code="model_not_found")


def base_url_hint(path: str, is_known: Callable[[str], bool]) -> str:
    """Return what to do about the base URL of a client that sends an unknown path; empty if that is not its cause."""
    if is_known(f"/v1{path}"):
        return " The client's base URL lacks /v1: add it at the end."
    if path.startswith("/v1/v1/") and is_known(path.removeprefix("/v1")):
        return " The client adds /v1 itself: leave it out of the base URL."
    return ""


class AuthenticationError(RequestError):
    """The API key is missing or wrong."""

    http_status = 401
    error_type = "authentication_error"
    headers = MappingProxyType({"WWW-Authenticate": "Bearer"})

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
        super().__init__(
            f"The request body did not arrive within {seconds:g} s, or came too slowly. Send it faster, or send less.",
            code="request_timeout",
        )


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


class ContentEncodingError(RequestError):
    """The body is packed in a way that this server does not unpack."""

    http_status = 415
    headers = MappingProxyType({"Accept-Encoding": "gzip, deflate"})  # Source: RFC 9110, 15.5.16.

    def __init__(self, content_encoding: str) -> None:
        super().__init__(
            f"Content-Encoding must be gzip, deflate or identity, and one of them, got {shown(content_encoding)}.",
            code="unsupported_content_encoding",
        )


def too_large(limit: int) -> HttpError:
    """Return the refusal of a body of more than `limit` bytes."""
    return HttpError(413, f"The request body may have at most {limit} bytes.", "request_too_large")


class ErrorFields(msgspec.Struct):
    """Cause of a refusal."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    """Body of a refusal in OpenAI's form."""

    error: ErrorFields


def error_json(error: RequestError) -> bytes:
    """Return the error body `{"error": {"message", "type", "param", "code"}}`, always with all four fields."""
    return msgspec.json.encode(ErrorBody(ErrorFields(error.message, error.error_type, error.param, error.code)))


# Types of Anthropic's API by status; every other status of 400 or more is a request's or a server's fault.
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class AnthropicErrorFields(msgspec.Struct):
    """Cause of a refusal in Anthropic's words."""

    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, kw_only=True):
    """Body of a refusal in Anthropic's form."""

    type: str = "error"
    error: AnthropicErrorFields
    request_id: str | None


def anthropic_error_json(error: RequestError, request_id: str | None = None) -> bytes:
    """Return the error body `{"type": "error", "error": {"type", "message"}, "request_id"}` of Anthropic's API."""
    default = "invalid_request_error" if error.http_status < 500 else "api_error"
    fields = AnthropicErrorFields(_ANTHROPIC_TYPES.get(error.http_status, default), error.message)
    return msgspec.json.encode(AnthropicErrorBody(error=fields, request_id=request_id))


def error_body(path: str, error: RequestError, request_id: str | None = None) -> bytes:
    """Return the error body in the form of the API to which `path` belongs."""
    is_anthropic = path == "/v1/messages" or path.startswith("/v1/messages/")
    return anthropic_error_json(error, request_id) if is_anthropic else error_json(error)


# Counts of refused requests: by error code, and by who has to act.

_OVERLOAD = frozenset({429, 503})
_OWN_LIMIT = "rate_limit_exceeded"  # 429 that concerns one client, however much room there is
_CLIENT_LEFT = 499


class Refusals(Counter[str]):
    """Number of refused requests by error code.

    Attributes:
        num_client_errors: Refusals that the client must change its request for, statuses 400 to 499 but 429.
        num_overload: Refusals for want of room, statuses 429 and 503, without rate limits of single clients.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_client_errors = 0
        self.num_overload = 0

    def add(self, error: RequestError) -> None:
        """Count a request that is refused with `error`."""
        code = error.code or error.error_type
        self[code] += 1
        if code == _OWN_LIMIT:
            self.num_client_errors += 1
        else:
            self.num_client_errors += is_client_error(error.http_status)
            self.num_overload += is_overload(error.http_status)


def is_client_error(status: int) -> bool:
    """Return whether a status says that the client must change its request."""
    return 400 <= status < 500 and status not in _OVERLOAD and status != _CLIENT_LEFT


def is_overload(status: int) -> bool:
    """Return whether a status says that there is no room now."""
    return status in _OVERLOAD
