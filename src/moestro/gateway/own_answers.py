"""What the router itself answers on paths other than probes and models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

from moestro.web.page import PAGE_HEADERS, PAGE_PATHS, page_file
from moestro.web.probes import VERSION_BODY
from moestro.web.prometheus import CONTENT_TYPE

_JSON = "application/json"


class OwnAnswer(NamedTuple):
    """Body of a complete answer, with further header lines."""

    body: bytes
    content_type: str
    header_lines: bytes = b""


OwnAnswers = Mapping[str, Callable[[], OwnAnswer]]


def own_answers(metrics: Callable[[], bytes], statistics: Callable[[], bytes]) -> OwnAnswers:
    """Return the function that answers each path.

    Args:
        metrics: Returns the text of `/metrics`.
        statistics: Returns the JSON of `/statistics`.
    """
    return {
        "/version": lambda: OwnAnswer(VERSION_BODY, _JSON),
        "/metrics": lambda: OwnAnswer(metrics(), CONTENT_TYPE),
        "/statistics": lambda: OwnAnswer(statistics(), _JSON),
        **{path: partial(_file, path) for path in PAGE_PATHS},
    }


def _file(path: str) -> OwnAnswer:
    file = page_file(path, "route", "clients")
    lines = "".join(f"{name}: {value}\r\n" for name, value in PAGE_HEADERS.items())
    return OwnAnswer(file.body, file.content_type, lines.encode())
