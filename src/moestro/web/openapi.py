"""OpenAPI documents, made from a table of paths and the structs that decode bodies and encode answers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

import msgspec

from moestro import __version__
from moestro.web.errors import ErrorBody

EMPTY = "Empty; the status says it."  # What probes answer.

# Headers of the page at /docs, which loads nothing but the document.
DOCS_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; connect-src 'self'; style-src 'unsafe-inline';"
    " script-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
}


@cache
def docs_page() -> bytes:
    """Return the page at /docs, which shows the document of its own port."""
    return (files("moestro") / "assets" / "api_docs.html").read_bytes()


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiPath:
    """One path of the API.

    Attributes:
        bodies: Structs of the body, of which each request has one; empty without a body, or with one of any fields.
        has_any_body: Whether the body is an object whose fields another server decides.
        answer: Struct of the answer; None means that `says` describes it.
        says: The answer in words.
        is_streamed: Whether the answer can be a stream of events.
        is_public: Whether no key is needed.
        error: Struct of a refusal.
    """

    path: str
    summary: str
    says: str
    method: str = "get"
    bodies: tuple[type, ...] = ()
    has_any_body: bool = False
    answer: type | None = None
    media_type: str = "application/json"
    is_streamed: bool = False
    is_public: bool = False
    error: type = ErrorBody


def document_of(
    endpoints: Sequence[ApiPath], amend: Callable[[dict[str, Any]], None] = lambda components: None
) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of `endpoints`.

    Args:
        amend: Adds to the schemas of structs, by name, what their types do not say.
    """
    structs = list(
        dict.fromkeys(
            struct for each in endpoints for struct in (*each.bodies, each.answer, each.error) if struct is not None
        )
    )
    schemas, components = msgspec.json.schema_components(structs, ref_template="#/components/schemas/{name}")
    amend(components)
    schema_of = dict(zip(structs, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for each in endpoints:
        paths.setdefault(each.path, {})[each.method] = _operation(each, schema_of)
    return {
        "openapi": "3.1.0",
        "info": {"title": "Moestro", "version": __version__},
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
        },
    }


def _operation(endpoint: ApiPath, schema_of: dict[type, dict[str, Any]]) -> dict[str, Any]:
    answer = {"schema": {"type": "object"} if endpoint.answer is None else schema_of[endpoint.answer]}
    if endpoint.media_type != "application/json":
        answer = {"schema": {"type": "string"}}
    content = {} if endpoint.says == EMPTY else {endpoint.media_type: answer}
    if endpoint.is_streamed:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    refusal = {"application/json": {"schema": schema_of[endpoint.error]}}
    operation: dict[str, Any] = {
        "operationId": endpoint.method + endpoint.path.replace("/", "_").replace("{", "").replace("}", ""),
        "summary": endpoint.summary,
        "responses": {
            "200": {"description": endpoint.says, **({"content": content} if content else {})},
            "4XX": {"description": "The request is refused.", "content": refusal},
            "5XX": {"description": "The server cannot answer.", "content": refusal},
        },
        "security": [] if endpoint.is_public else [{}, {"bearer": []}, {"key": []}],
    }
    if endpoint.bodies:
        schemas = [schema_of[body] for body in endpoint.bodies]
        body = schemas[0] if len(schemas) == 1 else {"anyOf": schemas}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
    if endpoint.has_any_body:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": {"type": "object"}}}}
    if "{name}" in endpoint.path:
        operation["parameters"] = [{"name": "name", "in": "path", "required": True, "schema": {"type": "string"}}]
    return operation
