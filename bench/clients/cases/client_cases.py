"""Runs the cases of one client, in the client's own environment, and prints one JSON line for each.

    PYTHON bench/clients/cases/CLIENT.py BASE_URL MODEL

This file imports nothing but the standard library, so that it runs beside any client.
"""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

PROMPT = "Write a Python function `close`: Close the file."
MAX_TOKENS = 800
_REASON_CHARS = 400

Case = TypeVar("Case", bound=Callable[["Place"], object])


@dataclass(frozen=True)
class Place:
    """Address of a server or a router, and the name of its model."""

    root: str
    model: str

    @property
    def url(self) -> str:
        """Base URL of OpenAI's API."""
        return f"{self.root}/v1"


Error = TypeVar("Error", bound=Exception)
_CASES: list[tuple[str, Callable[[Place], object]]] = []


def case(name: str) -> Callable[[Case], Case]:
    """Register a case: a function that returns if the client got what it requested, and raises otherwise."""

    def register(function: Case) -> Case:
        _CASES.append((name, function))
        return function

    return register


def refusal(kind: type[Error], call: Callable[[], object]) -> Error:
    """Return the error of class `kind` by which a client reports a refusal; AssertionError if there is none."""
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"no {kind.__name__} was raised")


def run_cases() -> None:
    """Run every case against the server of the command line. A case that raises does not end the others."""
    place = Place(sys.argv[1], sys.argv[2])
    for name, function in _CASES:
        reason = ""
        try:
            function(place)
        except Exception as error:
            last = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{last.filename.rpartition('/')[2]}:{last.lineno}"
            reason = f"{type(error).__name__} at {where}: {error}"[:_REASON_CHARS]
        print(json.dumps({"case": name, "passed": not reason, "reason": reason}), flush=True)
