"""Notices which sources of a policy an engine does not supply: never so far, no more, or again."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from moestro.core.views import NEVER_NS, EngineTable
from moestro.routing.policy_contract import Needs

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
