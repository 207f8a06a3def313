"""Names of a request that a routing policy goes by: its session, its user, or neither."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moestro.core.load_figures import ROUTED_FIGURES
from moestro.core.request import Request, SamplingParams
from moestro.core.rng import Draws
from moestro.core.views import EngineTable, Figure
from moestro.routing.policy_contract import RoutePolicy, RouteView

NAMES = ("session_id", "user")
_NUM_ENGINES = 2
_BLOCK_SIZE = 16


class _WatchedRequest:
    """A request without session and user, which notes which of its names are read."""

    def __init__(self) -> None:
        self.read: set[str] = set()
        self._request = Request(request_id="trial", num_prompt_tokens=1, sampling=SamplingParams(), arrival_ns=0)

    def __getattr__(self, name: str) -> object:
        if name in NAMES:
            self.read.add(name)
        return getattr(self._request, name)


def names_read_by(policy: RoutePolicy) -> tuple[str, ...]:
    """Find the names that a policy goes by, with two decisions on trial, which change nothing in it.

    Args:
        policy: a policy of any kind, also of a user's file.

    Returns:
        Those of NAMES that it reads. A policy that fails in a trial counts as one that reads none.
    """
    blank = EngineTable.blank(_NUM_ENGINES)
    reported = Figure(np.zeros(_NUM_ENGINES), np.zeros(_NUM_ENGINES, np.int64))
    figures: dict[str, Any] = dict.fromkeys(ROUTED_FIGURES, reported)
    full = replace(blank, **figures)  # some policies look at names only with figures
    watched = _WatchedRequest()
    for engines in (blank, full):
        view = RouteView(watched, engines, np.zeros(_NUM_ENGINES, np.int64), _BLOCK_SIZE, 0, 0)  # type: ignore[arg-type]
        with contextlib.suppress(Exception):  # a user's policy may want more of a request
            policy.decide(view, Draws(0, 0))
    return tuple(name for name in NAMES if name in watched.read)


def unnamed_note(title: str, policy: RoutePolicy, named: Mapping[str, NDArray[np.bool_]]) -> str | None:
    """Say that a policy goes by names which requests lack; None if all requests have them, or it goes by none.

    Args:
        title: name of the policy for readers.
        named: whether each request has the name, bool[n], for each of NAMES.
    """
    names = names_read_by(policy)
    if not names:
        return None
    has_none = ~np.logical_or.reduce([named[name] for name in names])
    if not has_none.any():
        return None
    how_many = "no request names" if has_none.all() else f"{has_none.mean():.0%} of the requests do not name"
    return f"{title} goes by {' or '.join(names)}, which {how_many}: for these it decides without affinity"
