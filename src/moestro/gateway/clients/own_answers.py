"""Complete answers of the router itself, and those on paths other than probes and models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from moestro.web.openapi import DOCS_HEADERS, docs_page
from moestro.web.page import PAGE_HEADERS, PAGE_PATHS, VERSION_BODY, page_file
from moestro.web.prometheus import CONTENT_TYPE

_JSON = "application/json"


class OwnAnswer(NamedTuple):
    """Body of a complete answer, with further header lines."""

    body: bytes
    content_type: str
    header_lines: bytes = b""
    status: int = 200


OwnAnswers = Mapping[str, Callable[[], OwnAnswer]]


def own_answers(metrics: Callable[[], bytes], statistics: Callable[[], bytes], openapi: bytes) -> OwnAnswers:
    """Return the function that answers each path.

    Args:
        metrics: Returns the text of `/metrics`.
        statistics: Returns the JSON of `/statistics`.
        openapi: Document of `/openapi.json`.
    """
    return {
        "/version": lambda: OwnAnswer(VERSION_BODY, _JSON),
        "/metrics": lambda: OwnAnswer(metrics(), CONTENT_TYPE),
        "/statistics": lambda: OwnAnswer(statistics(), _JSON),
        "/openapi.json": lambda: OwnAnswer(openapi, _JSON),
        "/docs": lambda: OwnAnswer(docs_page(), "text/html; charset=utf-8", _lines(DOCS_HEADERS)),
        **{path: partial(_file, path) for path in PAGE_PATHS},
    }


def _file(path: str) -> OwnAnswer:
    file = page_file(path, "route", "clients")
    return OwnAnswer(file.body, file.content_type, _lines(PAGE_HEADERS))


def _lines(headers: Mapping[str, str]) -> bytes:
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode()
