"""The OpenAPI document of `moestro route`: the paths that it answers, and those that it passes to engines."""

from __future__ import annotations

from typing import Any

from moestro.gateway.clients.paths import MODELS, OWN_PATHS, Routes
from moestro.web.errors import AnthropicErrorBody, ErrorBody
from moestro.web.openapi import EMPTY, ApiPath, document_of
from moestro.web.page import HEALTH_PATHS, PAGE_PATHS, PUBLIC, READY_PATHS
from moestro.web.statistics import LiveStatistics

_PROBES = frozenset({*HEALTH_PATHS, *READY_PATHS})
_TEXTS = {"/metrics": "text/plain", "/docs": "text/html", "/": "text/html"}
_MESSAGES = "/v1/messages"


def router_document(routes: Routes) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of a router with `routes`. Engines decide the fields of bodies."""
    own = [_own(path) for path in OWN_PATHS if path not in PAGE_PATHS or path == "/"]
    own += [
        ApiPath(path=f"{MODELS}{{name}}", summary="Describe one model.", says="The model, as an engine describes it."),
        ApiPath(path="/page/{name}", summary="A file of the page.", says="The file.", media_type="*/*", is_public=True),
    ]
    passed = [
        ApiPath(
            path=path,
            method=method,
            summary="Answered by an engine.",
            says="The engine's answer.",
            has_any_body=method in ("post", "put"),
            is_streamed=method == "post",
            error=AnthropicErrorBody if path.startswith(_MESSAGES) else ErrorBody,
        )
        for path, methods in routes.passed()
        for method in sorted({name.decode().lower() for name in methods} - {"head", "options"})
    ]
    return document_of([*own, *passed])


def _own(path: str) -> ApiPath:
    return ApiPath(
        path=path,
        summary="Answered by the router.",
        says=EMPTY if path in _PROBES else "The router's answer.",
        answer=LiveStatistics if path == "/statistics" else None,
        media_type=_TEXTS.get(path, "application/json"),
        is_public=path in PUBLIC,
    )
