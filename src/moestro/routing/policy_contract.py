"""The contract of routing policies: their view, their choice, the events that they observe, and what they require.

A request has a name of its session, its user, or neither. A watch notices which sources of a policy an engine does not
supply: never so far, no more, or again.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.load_figures import ROUTED_FIGURES
from moestro.core.request import Request, SamplingParams
from moestro.core.rng import Draws
from moestro.core.views import NEVER_NS, EngineTable, Figure

# Engines report at every step, vLLM's coordinator at least every 4 s, and `moestro route` reads /metrics every second.
# So each of them has reported again within 5 s; an owner with slower reports sets `RouterSettings.fresh_ns`.
FRESH_NS = 5_000_000_000

# (p_tokens, queued_tokens, batch), each [n] -> ns [n]: predicted time to first token on each engine. `p_tokens` counts
# the request's own and the queued prompt tokens, `batch` the requests on the engine.
PredictTtft = Callable[[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]], NDArray[np.float64]]


class RouteView(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One request and the engines that it may go to. At least one row of `engines` is routable.

    Attributes:
        request: the request to route. Views never contain the output length.
        engines: the engine table, one row per engine.
        hit_tokens: float64[n], tokens of the prompt's leading full blocks that each engine's cache is expected to hold,
            in any tier; 0 where unknown.
        block_size: tokens per KV block.
        now_ns: time of the decision.
        decision_id: number of earlier decisions.
        fresh_ns: age up to which a reported figure counts, ns.
        not_compared: figures that some routable engines have reported lately and others have not, each with bool[n],
            the engines that lack it. `engines` shows them as never reported, so that no engine is compared by them.
        host_tokens: float64[n], those of `hit_tokens` that the cache holds in host memory alone, and copies back. None
            means that it is 0 for all engines.
    """

    request: Request
    engines: EngineTable
    hit_tokens: NDArray[np.float64]
    block_size: int
    now_ns: int
    decision_id: int
    fresh_ns: int = FRESH_NS
    not_compared: Mapping[str, NDArray[np.bool_]] = MappingProxyType({})
    host_tokens: NDArray[np.float64] | None = None


class Choice(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The choice of a policy.

    Attributes:
        engine: row of the chosen engine.
        score: its score; lower is better.
        reason: short reason for operators.
        scores: [n], scores of all rows, unroutable rows included. None means the policy computes no scores.
        detail: figures for `observe` or for explaining the choice.
    """

    engine: int
    score: float
    reason: str
    scores: NDArray[np.float64] | NDArray[np.int64] | None = None
    detail: Mapping[str, float] = msgspec.field(default_factory=dict)


class Routed(msgspec.Struct, frozen=True, tag=True):
    """Event: a request was sent to the chosen engine."""

    request: Request
    engine: int
    hit_tokens: int  # prompt tokens that the engine's cache is expected to hold, in any tier
    detail: Mapping[str, float]
    now_ns: int


class FirstToken(msgspec.Struct, frozen=True, tag=True):
    """Event: a request's prompt is computed."""

    request_id: str
    engine: int
    now_ns: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Event: a request ended, for any reason."""

    request_id: str
    engine: int
    sent_ns: int
    now_ns: int
    num_output_tokens: int | None = None  # None means not counted


class EngineLost(msgspec.Struct, frozen=True, tag=True):
    """Event: an engine restarted or was removed. Its cache is gone, and its number may later name another engine."""

    engine: int
    now_ns: int


class RoutedElsewhere(msgspec.Struct, frozen=True, tag=True):
    """Event: another router sent a request to an engine."""

    engine: int
    num_new_tokens: int  # prompt tokens that the engine was expected to compute
    session_id: str | None
    user: str | None
    now_ns: int


RouteEvent = Routed | FirstToken | Ended | EngineLost | RoutedElsewhere


@dataclass(frozen=True, slots=True)
class Needs:
    """The sources of a policy: inputs that it reads beyond the router's own counts.

    Attributes:
        hits: whether the policy reads `hit_tokens`. If not, the router keeps no prefix index.
        figures: names of `LoadFigures` fields, each valid until it is older than the view's `fresh_ns`.
        otherwise: replacement for a missing or old figure, in words.
        required: those of `figures` without which the policy would be another one. A router whose sources cannot give
            them refuses the policy.
        mark: field of a request that names its session or user; None means that the policy reads neither.
        ttft: whether the policy compares predicted times to first token.
        speeds: whether the policy reads the speeds of engines, which the router then learns.
        prompts: whether the policy may read the names of a prompt's blocks. If not, a router need not hash prompts.
    """

    hits: bool = False
    figures: tuple[str, ...] = ()
    otherwise: str = ""
    required: tuple[str, ...] = ()
    mark: Literal["session_id", "user"] | None = None
    ttft: bool = False
    speeds: bool = False
    prompts: bool = True

    def in_words(self) -> str:
        """Describe the sources for the table of policies."""
        parts = ["cache hits"] if self.hits else []
        parts += [f"`{figure}`, required" for figure in self.required]
        others = ", ".join(f"`{figure}`" for figure in self.figures if figure not in self.required)
        if others or self.otherwise:
            parts.append(f"{others} (otherwise {self.otherwise})" if self.otherwise else others)
        parts += [f"the request's `{self.mark}`"] if self.mark else []
        parts += ["predicted TTFT"] if self.ttft else []
        parts += ["learned speeds"] if self.speeds else []
        return "; ".join(parts) or "own counts"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteInputs:
    """What the owner of a router can supply to its policy.

    Attributes:
        figures: names of the `LoadFigures` fields that engines may report. None means all of them.
        remedy: what an operator changes so that more figures come; a sentence.
        predict_ttft_ns: predictor of the TTFT. None means that a policy that needs one learns from answers.
    """

    figures: frozenset[str] | None = None
    remedy: str = ""
    predict_ttft_ns: PredictTtft | None = None

    def lacking(self, needs: Needs) -> tuple[str, ...]:
        """Return the required figures that cannot come."""
        return () if self.figures is None else tuple(name for name in needs.required if name not in self.figures)


class RoutePolicy(Protocol):
    """Chooses an engine for a request."""

    @property
    def needs(self) -> Needs:
        """Inputs that the policy reads."""
        ...

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """Choose a routable row without changing state. Equal state, view and draws give an equal choice."""
        ...

    def observe(self, event: RouteEvent) -> None:
        """Update the policy's state, which changes only here."""
        ...


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
        view = RouteView(watched, engines, np.zeros(_NUM_ENGINES), _BLOCK_SIZE, 0, 0)  # type: ignore[arg-type]
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


KV_EVENTS = "kv_events"


class SourceChange(StrEnum):
    """Changes of a source that an operator should know of."""

    NEVER = "never"
    STOPPED = "stopped"
    AGAIN = "again"


@dataclass(frozen=True, slots=True)
class SourceNews:
    """Sources of one engine that changed in the same way.

    Attributes:
        change: the change.
        sources: names of figures, or KV_EVENTS.
    """

    change: SourceChange
    sources: tuple[str, ...]


@dataclass(slots=True)
class _Watched:
    """State of one engine.

    Attributes:
        since_ns: begin of the watch; below 0 means that it begins with the next look.
        lacks_events_ns: time since which KV events are missing; None means that they are not.
        missing: sources that are missing, and how.
        had: sources that were there once.
    """

    since_ns: int
    lacks_events_ns: int | None = None
    missing: dict[str, SourceChange] = field(default_factory=dict)
    had: set[str] = field(default_factory=set)


class SourceWatch:
    """Compares what a policy needs with what each engine reports.

    Args:
        needs: sources of the policy.
        fresh_ns: age up to which a figure counts, ns.
    """

    def __init__(self, needs: Needs, fresh_ns: int) -> None:
        self._figures = needs.figures
        self._fresh_ns = fresh_ns
        self._rows: dict[int, _Watched] = {}

    def missing(self, engine: int) -> frozenset[str]:
        """Return the sources that `engine` did not supply at the last look."""
        row = self._rows.get(engine)
        return frozenset() if row is None else frozenset(row.missing)

    def forget(self, engine: int) -> None:
        """Watch `engine` anew: its process was replaced, or it gets no requests."""
        row = self._rows.get(engine)
        if row is not None:
            row.since_ns = -1

    def remove(self, engine: int) -> None:
        """Stop watching `engine`, whose number may name another one later."""
        self._rows.pop(engine, None)

    def look(
        self, engine: int, table: EngineTable, now_ns: int, *, lacks_events: bool | None = None
    ) -> list[SourceNews]:
        """Return what has changed since the last look.

        Args:
            lacks_events: whether the KV events of the engine are missing; None means that none are expected.
        """
        row = self._rows.setdefault(engine, _Watched(now_ns))
        if row.since_ns < 0:
            row.since_ns = now_ns
        news: dict[SourceChange, list[str]] = {}
        for name in self._figures:
            as_of_ns = int(getattr(table, name).as_of_ns[engine])
            is_late = now_ns - max(as_of_ns, row.since_ns) > self._fresh_ns
            is_there = as_of_ns != NEVER_NS and now_ns - as_of_ns <= self._fresh_ns
            self._note(row, name, news, is_late=is_late, is_there=is_there)
        if lacks_events is not None:
            if not lacks_events:
                row.lacks_events_ns = None
            elif row.lacks_events_ns is None:
                row.lacks_events_ns = now_ns
            is_late = lacks_events and now_ns - max(row.lacks_events_ns or 0, row.since_ns) > self._fresh_ns
            self._note(row, KV_EVENTS, news, is_late=is_late, is_there=not lacks_events)
        return [SourceNews(change, tuple(names)) for change, names in news.items()]

    def _note(
        self, row: _Watched, name: str, news: dict[SourceChange, list[str]], *, is_late: bool, is_there: bool
    ) -> None:
        if is_there:
            row.had.add(name)
            if row.missing.pop(name, None) is not None:
                news.setdefault(SourceChange.AGAIN, []).append(name)
        elif is_late and name not in row.missing:
            row.missing[name] = SourceChange.STOPPED if name in row.had else SourceChange.NEVER
            news.setdefault(row.missing[name], []).append(name)
