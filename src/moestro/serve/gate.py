"""What every request passes: its id, the key, and the one place where errors become answers."""

from __future__ import annotations

import logging
import re
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable

from aiohttp import web

from moestro.errors import RequestError
from moestro.serve.keys import ApiKeys
from moestro.serve.refusals import AuthenticationError, HttpError, InternalError, error_json, shown

logger = logging.getLogger(__name__)

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

REQUEST_ID = web.RequestKey("request_id", str)
OPEN_PATHS = frozenset({"/health", "/ping", "/ready", "/readyz"})  # probes have no key
_REQUEST_ID = re.compile(r"[\x21-\x7e]{1,128}")
_CODES = {404: "not_found", 405: "method_not_allowed", 413: "request_too_large"}


def gate(app: web.Application, api_keys: tuple[str, ...], refusals: Counter[str]) -> None:
    """Put the gate before every path of `app`; without `api_keys` everyone may enter. `refusals` counts, by code."""
    keys = ApiKeys(api_keys)

    @web.middleware
    async def middleware(request: web.Request, handler: Handler) -> web.StreamResponse:
        request[REQUEST_ID] = _request_id(request)
        try:
            if keys and request.path not in OPEN_PATHS and not keys.admit(request.headers.get("Authorization", "")):
                raise AuthenticationError
            return await handler(request)
        except RequestError as error:
            if error.http_status != 500:
                refusals[error.code or error.error_type] += 1
            return _refusal(error)
        except web.HTTPException as error:
            return _translated(request, error)
        except Exception:
            logger.exception("%s: %s %s failed", request[REQUEST_ID], request.method, shown(request.path))
            return _refusal(InternalError(request[REQUEST_ID]))

    app.middlewares.append(middleware)
    app.on_response_prepare.append(_add_headers)


def _request_id(http: web.Request) -> str:
    """The client's own, if it is short and plain; otherwise a new one."""
    given = http.headers.get("X-Request-Id", "")
    return given if _REQUEST_ID.fullmatch(given) else uuid.uuid4().hex


async def _add_headers(http: web.Request, response: web.StreamResponse) -> None:
    response.headers["X-Request-Id"] = http[REQUEST_ID]
    response.headers["Server"] = "moestro"


def _refusal(error: RequestError) -> web.Response:
    headers = {}
    if error.retry_after_s is not None:
        headers["Retry-After"] = str(error.retry_after_s)
    if isinstance(error, AuthenticationError):
        headers["WWW-Authenticate"] = "Bearer"
    return web.Response(
        status=error.http_status, body=error_json(error), content_type="application/json", headers=headers
    )


def _translated(http: web.Request, error: web.HTTPException) -> web.Response:
    """What aiohttp refuses by itself, in OpenAI's form."""
    what = f"{http.method} {shown(http.path)}: {error.reason}"
    response = _refusal(HttpError(error.status, f"{what}.", _CODES.get(error.status, "http_error")))
    if "Allow" in error.headers:
        response.headers["Allow"] = error.headers["Allow"]
    return response
