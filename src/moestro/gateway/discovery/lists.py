"""Lists of engines, sans-IO: what to do so that the router has the engines that its sources list."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from moestro.errors import ConfigError
from moestro.gateway.discovery.entries import EngineEntry

SOURCES = ("file", "dns", "kubernetes")  # The first one that lists a name or an address decides.


class ChangeKind(StrEnum):
    """What happens to an engine."""

    ADD = "add"
    UPDATE = "update"  # It stays, and its entry has changed.
    LEAVE = "leave"  # No list has it: it gets no more requests, and what is known of it is kept.
    RETURN = "return"  # It is listed again after `LEAVE`.
    REMOVE = "remove"


class Change(NamedTuple):
    """One change of the engines."""

    kind: ChangeKind
    entry: EngineEntry


@dataclass(frozen=True, slots=True)
class KeepRules:
    """Bounds of what is kept of engines that are listed no more.

    Attributes:
        keep_ns: Time after which such an engine is removed.
        max_kept: Number of such engines; beyond it, the one that left first is removed.
    """

    keep_ns: int = 300_000_000_000
    max_kept: int = 64


class EngineLists:
    """Joins the operator's engines and the sources' lists, and returns the changes that follow from each event.

    An engine is known by its name. With another address it is another engine. No two engines have one address.
    The caller applies the changes in their order.

    Attributes:
        ignored: Entries that another one of the same name or address hides, as texts for the log.
    """

    def __init__(self, rules: KeepRules = KeepRules()) -> None:
        self._rules = rules
        self._own: dict[str, EngineEntry] = {}  # Of the command line and the admin plane.
        self._listed: dict[str, tuple[EngineEntry, ...]] = dict.fromkeys(SOURCES, ())
        self._dismissed: set[str] = set()  # Removed by the operator, until their source lists them no more.
        self._present: dict[str, EngineEntry] = {}
        self._absent: OrderedDict[str, tuple[EngineEntry, int]] = OrderedDict()  # With the time of their removal.
        self.ignored: tuple[str, ...] = ()

    @property
    def num_absent(self) -> int:
        """Number of engines that no list has, and that are kept."""
        return len(self._absent)

    def num_listed(self, source: str) -> int:
        """Return the number of engines that a source lists."""
        return len(self._listed[source])

    def replace(self, source: str, entries: Sequence[EngineEntry], now_ns: int) -> list[Change]:
        """Take in the whole list of a source."""
        self._listed[source] = tuple(entries)
        names = {entry.name for each in self._listed.values() for entry in each}
        self._dismissed &= names
        return self._changes(now_ns)

    def add(self, entry: EngineEntry, now_ns: int) -> list[Change]:
        """Add an engine of the operator's.

        Raises:
            ConfigError: Another engine has this name or address.
        """
        for known in self._present.values():
            if known.name == entry.name or known.url.url == entry.url.url:
                raise ConfigError(f"engine {entry.name}={entry.url.url}: {known.name}={known.url.url} exists already")
        self._own[entry.name] = entry
        return self._changes(now_ns)

    def remove(self, name: str, now_ns: int) -> list[Change]:
        """Remove an engine for good, by the operator's wish. A source that lists it still does not bring it back."""
        kept = self._absent.pop(name, None)
        entry = self._present.pop(name, None) or (kept and kept[0])
        self._own.pop(name, None)
        if any(listed.name == name for each in self._listed.values() for listed in each):
            self._dismissed.add(name)
        return [Change(ChangeKind.REMOVE, entry), *self._changes(now_ns)] if entry else []

    def failed(self, name: str) -> None:
        """Record that an engine could not be added: the next change of any list tries again."""
        self._present.pop(name, None)
        self._own.pop(name, None)

    def lost(self, name: str) -> list[Change]:
        """Remove an absent engine that is down: a process that is gone has left nothing to keep."""
        kept = self._absent.pop(name, None)
        return [] if kept is None else [Change(ChangeKind.REMOVE, kept[0])]

    def expire(self, now_ns: int) -> list[Change]:
        """Remove absent engines whose time is over."""
        over = [name for name, (_, until_ns) in self._absent.items() if until_ns <= now_ns]
        return [change for name in over for change in self.lost(name)]

    # --- inside

    def _wanted(self) -> dict[str, EngineEntry]:
        """Return the engines that there should be, by name."""
        wanted: dict[str, EngineEntry] = {}
        places: dict[tuple[str, str], str] = {}
        ignored = []
        for source, entry in self._in_order():
            if entry.name in self._dismissed and entry.name not in self._own:
                continue
            holder = entry.name if entry.name in wanted else places.get(entry.place)
            if holder is None:
                wanted[entry.name] = entry
                places[entry.place] = entry.name
            elif wanted[holder].place != entry.place or holder != entry.name:
                held = wanted[holder]
                ignored.append(f"{entry.name}={entry.url.url} of {source}: {held.name}={held.url.url} exists already")
        self.ignored = tuple(ignored)
        return wanted

    def _in_order(self) -> Iterator[tuple[str, EngineEntry]]:
        for entry in self._own.values():
            yield "the operator", entry
        for source in SOURCES:
            for entry in self._listed[source]:
                yield source, entry

    def _changes(self, now_ns: int) -> list[Change]:
        wanted = self._wanted()
        changes = []
        for name, entry in list(self._present.items()):
            new = wanted.get(name)
            if new is not None and new.place == entry.place:
                if new != entry:
                    self._present[name] = new
                    changes.append(Change(ChangeKind.UPDATE, new))
                continue
            del self._present[name]
            if new is None:
                self._absent[name] = (entry, now_ns + self._rules.keep_ns)
                changes.append(Change(ChangeKind.LEAVE, entry))
            else:
                changes.append(Change(ChangeKind.REMOVE, entry))
        for entry in wanted.values():
            if entry.name not in self._present:
                changes += self._arrival(entry)
                self._present[entry.name] = entry
        while len(self._absent) > self._rules.max_kept:
            changes.append(Change(ChangeKind.REMOVE, self._absent.popitem(last=False)[1][0]))
        return changes

    def _arrival(self, entry: EngineEntry) -> list[Change]:
        """Return what brings in an engine that is not present, and ends absent ones that it replaces."""
        kept = self._absent.pop(entry.name, None)
        if kept is not None and kept[0].place == entry.place:
            return [Change(ChangeKind.RETURN, entry)]
        changes = [] if kept is None else [Change(ChangeKind.REMOVE, kept[0])]
        for name, (absent, _) in list(self._absent.items()):
            if absent.place == entry.place:
                changes += self.lost(name)
        return [*changes, Change(ChangeKind.ADD, entry)]
