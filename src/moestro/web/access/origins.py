"""Web pages of other origins: which may read a response, and that none reaches the operators' paths."""

from __future__ import annotations

from collections.abc import Callable

from aiohttp import web
from aiohttp.typedefs import Handler, Middleware

from moestro.web.errors import HttpError
from moestro.web.ports.heads import host_name
from moestro.web.settings import AccessSettings

# Cross-Origin Resource Sharing: decides which web pages may read a response. Has no sockets, for both servers.

_METHODS = "GET, HEAD, POST, PUT, PATCH, DELETE, OPTIONS"
_ALWAYS_ALLOWED = ("accept", "accept-language", "content-language", "content-type")  # Safelisted by the Fetch standard.
# Readable by pages besides the standard headers.
_EXPOSED = "X-Request-Id, Retry-After, Warning, x-moestro-engine, x-moestro-reason, endpoint-load-metrics"
_MAX_AGE_S = 600  # Time for which a browser caches a preflight.


class Cors:
    """Builds CORS headers by the rules in `settings`."""

    def __init__(self, settings: AccessSettings) -> None:
        self._origins = frozenset(settings.allowed_origins)
        self._methods = frozenset(settings.allowed_methods)
        self._headers = frozenset(name.lower() for name in settings.allowed_headers)
        self._named_headers = ", ".join(sorted({*_ALWAYS_ALLOWED, *self._headers}))
        self._has_credentials = settings.allow_credentials

    def answer_headers(self, origin: str | None) -> dict[str, str]:
        """Return the response headers for a page of `origin`; None means a request without an origin."""
        if "*" in self._origins:
            return {"Access-Control-Allow-Origin": "*", "Access-Control-Expose-Headers": _EXPOSED} if origin else {}
        headers = {"Vary": "Origin"}
        if origin in self._origins:
            headers |= {"Access-Control-Allow-Origin": origin, "Access-Control-Expose-Headers": _EXPOSED}
            if self._has_credentials:
                headers["Access-Control-Allow-Credentials"] = "true"
        return headers

    def answer_lines(self, origin: bytes | None) -> bytes:
        """Return `answer_headers` as header lines."""
        headers = self.answer_headers(None if origin is None else origin.decode("latin-1"))
        return _lines(headers)

    def preflight_lines(self, origin: bytes, method: bytes, headers: bytes) -> bytes:
        """Return `preflight_headers` as header lines; HttpError if the rules do not allow the request."""
        return _lines(self.preflight_headers(*(value.decode("latin-1") for value in (origin, method, headers))))

    def preflight_headers(self, origin: str, method: str, headers: str) -> dict[str, str]:
        """Return the headers that only the response to a preflight has.

        Args:
            origin: Value of `Origin`.
            method: Value of `Access-Control-Request-Method`.
            headers: Value of `Access-Control-Request-Headers`.

        Raises:
            HttpError: The rules do not allow the origin, the method or a header.
        """
        if not {origin, "*"} & self._origins:
            raise _not_allowed("origins")
        if not {method, "*"} & self._methods:
            raise _not_allowed("methods")
        allowed = self._named_headers
        if not headers.isascii():  # No name of a header, and the answer would repeat it.
            raise _not_allowed("headers")
        if "*" in self._headers:
            allowed = headers or allowed
        elif not {name.strip().lower() for name in headers.split(",") if name.strip()} <= {
            *_ALWAYS_ALLOWED,
            *self._headers,
        }:
            raise _not_allowed("headers")
        return {
            "Access-Control-Allow-Methods": _METHODS if "*" in self._methods else ", ".join(sorted(self._methods)),
            "Access-Control-Allow-Headers": allowed,
            "Access-Control-Max-Age": str(_MAX_AGE_S),
        }


def _lines(headers: dict[str, str]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode("latin-1")


def _not_allowed(what: str) -> HttpError:
    return HttpError(400, f"The preflight is not allowed by --allowed-{what}.", "cors_not_allowed")


# Keeps foreign web pages away from the planes of operators.


def only_programs(is_allowed: Callable[[str], bool]) -> Middleware:
    """Refuse requests of foreign web pages, even under a host name that resolves to this address (DNS rebinding).

    The plane's own page may ask. A browser names the origin of a page in every request that is not a GET, and in every
    request to another origin, so that a foreign page cannot pass for the own one.

    Args:
        is_allowed: Callable that returns whether a host name may address the plane; literal addresses always may.
    """

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        named = request.headers.get("Host", "")
        host = host_name(named)
        is_own = request.headers.get("Origin", f"http://{named}") == f"http://{named}"
        if not is_own or not (is_allowed(host) or _is_address(host)):
            raise HttpError(403, "The admin plane does not answer requests from other web pages.", "permission_denied")
        return await handler(request)

    return middleware


def _is_address(host: str) -> bool:
    return host.replace(".", "").isdigit() or ":" in host
