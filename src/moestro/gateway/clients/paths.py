"""Paths and methods that clients can reach. Each path has one spelling, so that the list cannot be bypassed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple
from urllib.parse import unquote

from moestro.web.page import PAGE_PATHS

Methods = frozenset[bytes]

_READ: Methods = frozenset({b"GET", b"HEAD"})
# Engines answer a browser's preflight, because CORS is configured there.
_POST: Methods = frozenset({b"POST", b"OPTIONS"})
_READ_OF_ENGINE = _READ | {b"OPTIONS"}
_ALL = _READ | _POST | {b"PUT", b"PATCH", b"DELETE"}

# Paths that the router answers itself.
OWN_PATHS: dict[str, Methods] = {
    "/health": _READ,
    "/ping": _READ | {b"POST"},  # SageMaker's health check
    "/ready": _READ,
    "/readyz": _READ,
    "/version": _READ,
    "/metrics": _READ,
    "/statistics": _READ,
    "/openapi.json": _READ,
    "/docs": _READ,
    **dict.fromkeys(PAGE_PATHS, _READ),
    "/v1/models": _READ,
}
CHAT_PATH, BATCH_PATH = "/v1/chat/completions", "/v1/chat/completions/batch"
MODELS = "/v1/models/"  # prefix of the model cards, which the router answers too
# Paths of vLLM, SGLang and Moestro that answer prompts or describe the model. Paths that change, stop, trace or
# describe the process are left out.
_ENGINE_PATHS: dict[str, Methods] = {
    **dict.fromkeys(
        (
            *(CHAT_PATH, "/v1/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens"),
            BATCH_PATH,
            *("/v1/chat/completions/render", "/v1/completions/render", "/v1/embeddings", "/v2/embed", "/v1/classify"),
            *("/v1/score", "/v1/rerank", "/v2/rerank", "/v1/tokenize", "/v1/detokenize", "/inference/v1/generate"),
            *("/v1/audio/transcriptions", "/v1/audio/translations", "/v1/audio/speech"),
            *("/v1/images/generations", "/v1/images/edits"),
            *("/tokenize", "/detokenize", "/pooling", "/score", "/rerank"),
        ),
        _POST,
    ),
    **dict.fromkeys(("/generate", "/encode", "/classify"), _POST | {b"PUT"}),  # SGLang answers PUT as well
    **dict.fromkeys(("/get_model_info", "/model_info", "/tokenizer_info"), _READ_OF_ENGINE),
}
_ENGINE_TREES: dict[str, Methods] = {"/v1/responses/": _READ_OF_ENGINE | {b"POST", b"DELETE"}}
_TREE_MARK = "/*"  # at the end of an --open-path

# Segments other than "", "." and "..", made of characters that no server decodes, drops or splits at.
_SEGMENT = rb"/(?!\.{1,2}(?:/|\Z))(?:[A-Za-z0-9._~!$&'()*+,=:@-]%b)+"
_PLAIN = re.compile(b"/|(?:%b)+" % (_SEGMENT % b""))
_MODEL = re.compile(b"/v1/models(?:%b)+" % (_SEGMENT % b"|%[0-9A-Fa-f]{2}"))


class Route(NamedTuple):
    """Handling of a path.

    Attributes:
        methods: allowed methods.
        is_own: whether the router answers the path; otherwise an engine does.
    """

    methods: Methods
    is_own: bool


class Routes:
    """All paths that the router accepts.

    Args:
        opened: paths added by the operator, `/PATH` or `/TREE/*`. The router's own paths cannot be replaced.
    """

    def __init__(self, opened: Iterable[str] = ()) -> None:
        exact, trees = dict(_ENGINE_PATHS), dict(_ENGINE_TREES)
        for path in opened:
            if path.endswith(_TREE_MARK):
                trees[path.removesuffix("*")] = _ALL
            else:
                exact[path] = _ALL
        self._exact = {path: Route(methods, is_own=False) for path, methods in exact.items()}
        self._exact |= {path: Route(methods, is_own=True) for path, methods in OWN_PATHS.items()}
        self._trees = [(MODELS, Route(_READ, is_own=True))]
        self._trees += [(tree, Route(methods, is_own=False)) for tree, methods in trees.items()]

    def passed(self) -> list[tuple[str, Methods]]:
        """Return the single paths that engines answer, with their methods."""
        return [(path, route.methods) for path, route in self._exact.items() if not route.is_own]

    def find(self, path: str) -> Route | None:
        """Return the route of a plain path; None means no such path."""
        found = self._exact.get(path)
        if found is None:
            found = next((route for tree, route in self._trees if path.startswith(tree)), None)
        return found


def plain_path(target: bytes) -> str:
    """Return the path of a request's target, without the query; empty if two servers could read it in different ways.

    Escapes are allowed only in model names (`x%2Fy`). They are decoded here, once, and are never forwarded.
    """
    path = target.partition(b"?")[0]
    if b"#" in target:
        return ""
    if _PLAIN.fullmatch(path):
        return path.decode()
    return unquote(path.decode()) if _MODEL.fullmatch(path) else ""


def can_be_opened(path: str) -> bool:
    """Return whether `path` is a valid `--open-path`: clients can request it, and the router does not answer it."""
    path = path.removesuffix(_TREE_MARK)
    return (
        bool(_PLAIN.fullmatch(path.encode()))
        and "*" not in path
        and path not in OWN_PATHS
        and not f"{path}/".startswith(MODELS)
    )
