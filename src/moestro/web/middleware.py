"""Middleware of all requests: request id, API key, limits, and the conversion of errors to responses."""

from __future__ import annotations

import re
import time
import uuid
from collections.abc import Awaitable, Callable, Hashable
from functools import partial
from typing import Any

from aiohttp import web
from yarl import URL

from moestro.errors import RequestError, shown
from moestro.web.access import UNLIMITED, Access, Cors
from moestro.web.bodies import ACCESS
from moestro.web.errors import HttpError, InternalError, Refusals, base_url_hint, error_body, too_large
from moestro.web.page import PUBLIC
from moestro.web.ports.faults import Faults
from moestro.web.ports.heads import HeadError, check_head

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

REQUEST_ID = web.RequestKey("request_id", str)
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_UNFRAMED = frozenset({413})  # Statuses for requests whose end was not looked for.
_CODES = {404: "not_found", 405: "method_not_allowed", 417: "expectation_failed"}


class HttpMiddleware:
    """Runs before every handler of an application, and also for unknown paths.

    Args:
        access: Access checks; public paths need no key.
        refusals: Counts of refusals.
        max_body_bytes: Most bytes of a body; a longer one is refused unread.
        faults: Log of bugs.
    """

    def __init__(self, access: Access, refusals: Refusals, max_body_bytes: int, faults: Faults) -> None:
        self._access = access
        self._limits, self._cors = access.limits, access.cors
        self._refusals = refusals
        self._max_body_bytes = max_body_bytes
        self._faults = faults
        self._paths: frozenset[str] = frozenset()

    async def runner(self, app: web.Application, *, shutdown_timeout: float, root_path: str = "") -> web.AppRunner:
        """Return a runner of `app` that is set up, with this middleware in front.

        Args:
            root_path: Prefix that a proxy leaves in front of every path; empty means none.
        """
        app.on_response_prepare.append(self._add_headers)
        # The disconnect of a client cancels its handler, which frees its sequence.
        # aiohttp would unpack every body, on the event loop and before this middleware; `Bodies` does it instead.
        self._paths = frozenset(resource.canonical for resource in app.router.resources())
        runner = web.AppRunner(
            app,
            handler_cancellation=True,
            access_log=None,
            shutdown_timeout=shutdown_timeout,
            auto_decompress=False,
        )
        await runner.setup()
        server = runner.server
        assert server is not None, "the runner is set up"
        # Wraps the whole application, because aiohttp answers `Expect` before its middlewares run.
        server.request_handler = partial(self._handle, server.request_handler)
        if root_path:
            server.request_factory = partial(_below_root, server.request_factory, root_path)
        return runner

    async def _handle(self, handler: Handler, http: web.BaseRequest) -> web.StreamResponse:
        http[REQUEST_ID] = _request_id(http)
        http[ACCESS] = self._access
        try:
            check_head(http)
            if self._cors is not None and _is_preflight(http):
                return await self._preflight(http, self._cors)
            key = self._key_of(http)
            if (http.content_length or 0) > self._max_body_bytes:
                raise too_large(self._max_body_bytes)
            if not self._limits.is_on or http.path in UNLIMITED:
                return await handler(http)
            self._limits.take(key, http.remote or "", time.monotonic())
            with self._limits.answering(key):
                return await handler(http)
        except RequestError as error:
            response = self._refused(http, error)
        except web.HTTPException as error:
            response = self._translated(http, error)
        except Exception as error:
            if isinstance(error, ConnectionError) and _has_left(http):
                raise  # No client is left to answer; the connection counts it.
            self._faults.bug(f"{http[REQUEST_ID]}: {http.method} {_route_of(http)} failed", error)
            response = _refusal(http, InternalError(http[REQUEST_ID]))
        content = http.content
        if response.status in _UNFRAMED or not content.is_eof() or content.exception() is not None:
            response.force_close()  # The rest of the body is unwanted, or may be taken for the next request.
        await self._add_headers(http, response)
        return response

    def _refused(self, http: web.BaseRequest, error: RequestError) -> web.Response:
        """Count a refusal, and return its response."""
        if error.http_status != 500:
            self._refusals.add(error)
        response = _refusal(http, error)
        if isinstance(error, HeadError):
            response.force_close()
        return response

    def _translated(self, http: web.BaseRequest, error: web.HTTPException) -> web.Response:
        """Return a refusal of aiohttp in OpenAI's form."""
        what = f"{http.method} {shown(http.path)}: {error.reason}."
        if error.status == 404:
            what += base_url_hint(http.path, self._paths.__contains__)
        response = _refusal(http, HttpError(error.status, what, _CODES.get(error.status, "http_error")))
        if "Allow" in error.headers:
            response.headers["Allow"] = error.headers["Allow"]
        return response

    def _key_of(self, http: web.BaseRequest) -> Hashable | None:
        """Return the name of the request's key, None if none is needed; AuthenticationError if the key is missing."""
        if http.path in PUBLIC:
            return None
        return self._access.key_of(http.headers.get("Authorization", ""), http.headers.get("X-Api-Key", ""))

    async def _preflight(self, http: web.BaseRequest, cors: Cors) -> web.Response:
        headers = http.headers
        requested = headers["Origin"], headers["Access-Control-Request-Method"]
        response = web.Response(
            headers=cors.preflight_headers(*requested, headers.get("Access-Control-Request-Headers", "")),
        )
        await self._add_headers(http, response)
        return response

    async def _add_headers(self, http: web.BaseRequest, response: web.StreamResponse) -> None:
        response.headers["X-Request-Id"] = http[REQUEST_ID]
        response.headers["Server"] = "moestro"
        if self._cors is not None:
            response.headers.update(self._cors.answer_headers(http.headers.get("Origin")))


def _below_root(
    make: Callable[..., web.BaseRequest], root_path: str, message: Any, *rest: Any, **others: Any
) -> web.BaseRequest:
    """Return the request without the prefix of its path, so that no check or handler sees it."""
    path = message.path
    if path.startswith(root_path) and path[len(root_path) :][:1] in ("", "/", "?"):
        below = path[len(root_path) :]
        below = below if below.startswith("/") else f"/{below}"
        plain, _, query = below.partition("?")
        message = message._replace(path=below, url=URL.build(path=plain, query_string=query, encoded=True))
    return make(message, *rest, **others)


def _has_left(http: web.BaseRequest) -> bool:
    return http.transport is None or http.transport.is_closing()


def _route_of(http: web.BaseRequest) -> str:
    """Return the pattern of the request's path. The path itself is the client's text, which no log repeats."""
    match = getattr(http, "match_info", None)
    resource = None if match is None else match.route.resource
    return "an unknown path" if resource is None else resource.canonical


def _is_preflight(http: web.BaseRequest) -> bool:
    """Return whether a request is a CORS preflight."""
    return http.method == "OPTIONS" and "Origin" in http.headers and "Access-Control-Request-Method" in http.headers


def _request_id(http: web.BaseRequest) -> str:
    """Return the client's request id if it is short and printable, otherwise a new one."""
    given = http.headers.get("X-Request-Id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


def _refusal(http: web.BaseRequest, error: RequestError) -> web.Response:
    headers = dict(error.headers)
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    body = error_body(http.path, error, http[REQUEST_ID])
    return web.Response(status=error.http_status, body=body, content_type="application/json", headers=headers)
