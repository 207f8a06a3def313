"""Lists of engines, sans-IO: their entries and file form, and what to do so that the router has the listed engines."""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import yaml

from moestro.errors import ConfigError, shown
from moestro.files.text_files import text_of
from moestro.gateway.settings import EngineUrl, parsed_ranks

MAX_ENGINES = 4096  # Of one list.
MAX_FILE_BYTES = 4 << 20
_MAX_YAML_BYTES = 512 << 10  # Its parser is slow; lines of JSON are not.
_MAX_KEY_BYTES = 64 << 10


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineEntry:
    """One engine of a list.

    Attributes:
        url: Address and name of the engine.
        model: Name of its model, for a server without `/v1/models`; empty means that the server names it.
        labels: Labels of the engine, for operators and the selector.
        dp_ranks: Data-parallel ranks as in `--dp-ranks`; empty means as the flag says.
        api_key: Key that the engine gets; None means that of `--engine-api-key`.
        server_name: Name in the engine's certificate; empty means the host of the URL.
    """

    url: EngineUrl
    model: str = ""
    labels: Mapping[str, str] = field(default_factory=dict)
    dp_ranks: str = ""
    api_key: str | None = field(default=None, repr=False)
    server_name: str = ""

    @property
    def name(self) -> str:
        """Name of the engine, which is unique in a fleet."""
        return self.url.name

    @property
    def place(self) -> tuple[str, str]:
        """What makes two entries one server."""
        return self.url.url, self.server_name


class _ListedEngine(msgspec.Struct, forbid_unknown_fields=True):
    url: str
    name: str = ""
    model: str = ""
    labels: dict[str, str] = {}
    dp_ranks: int | str = ""
    speed: float | None = None
    copy_price: float | None = None
    group: str | None = None
    api_key_file: str | None = None


@dataclass(frozen=True, slots=True)
class ListedFile:
    """The contents of a file of engines.

    Attributes:
        entries: Its engines.
        key_files: Files with their keys.
    """

    entries: tuple[EngineEntry, ...]
    key_files: tuple[Path, ...]


def parse_file(text: bytes, directory: Path) -> ListedFile:
    """Return the engines of a file: a YAML or JSON list, a mapping with the key `engines`, or lines of JSON.

    Args:
        directory: Directory of the file, from which relative paths in it count.

    Raises:
        ConfigError: The text is no such list, or one of its engines cannot be used.
    """
    lines = _lines(text)
    if len(lines) > MAX_ENGINES:
        raise ConfigError(f"it lists {len(lines)} engines, and {MAX_ENGINES} is the most")
    keys: dict[Path, str] = {}
    entries = tuple(_entry(line, number, directory, keys) for number, line in enumerate(lines, 1))
    for attribute in ("name", "place"):
        counts = Counter(getattr(entry, attribute) for entry in entries)
        if twice := next((value for value, count in counts.items() if count > 1), None):
            raise ConfigError(f"it lists {twice if attribute == 'name' else twice[0]} twice")
    return ListedFile(entries, tuple(keys))


def selected(entries: Sequence[EngineEntry], labels: Mapping[str, str]) -> tuple[EngineEntry, ...]:
    """Return the entries that have all `labels`."""
    return tuple(entry for entry in entries if labels.items() <= entry.labels.items())


def _lines(text: bytes) -> list[Any]:
    try:
        decoded = text_of(text)
        rows = [row for row in map(str.strip, decoded.splitlines()) if row]
        if rows and all(row[0] == "{" and row[-1] == "}" for row in rows):
            return [msgspec.json.decode(row) for row in rows]
        if len(text) > _MAX_YAML_BYTES:
            raise ConfigError(f"it has more than {_MAX_YAML_BYTES} bytes of YAML: write lines of JSON, one per engine")
        found = yaml.safe_load(decoded)
    except (UnicodeDecodeError, RecursionError, msgspec.DecodeError) as error:
        raise ConfigError(f"it is neither YAML nor lines of JSON: {error}") from None
    except (yaml.YAMLError, ValueError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" in line {mark.line + 1}" if mark is not None else ""
        raise ConfigError(f"it is not YAML{where}: {getattr(error, 'problem', None) or error}") from None
    if isinstance(found, dict) and list(found) == ["engines"]:
        found = found["engines"]
    if not isinstance(found, list):
        # Also an empty file: a writer that is stopped after it has emptied the file must not remove every engine.
        raise ConfigError("it is no list of engines; write [] for a list without any")
    return found


def _entry(line: Any, number: int, directory: Path, keys: dict[Path, str]) -> EngineEntry:
    place = f"engine {number}"
    if isinstance(line, str):
        line = {"url": line}
    try:
        listed = msgspec.convert(line, _ListedEngine)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"{place}: {error}; known are url, name, model, labels, dp_ranks, speed, copy_price, group, api_key_file"
        ) from None
    name = f"{listed.name}=" if listed.name else ""
    given = {"speed": listed.speed, "copy_price": listed.copy_price, "group": listed.group}
    traits = [f"{trait}={value}" for trait, value in given.items() if value is not None]
    url = EngineUrl.parse(",".join((f"{name}{listed.url}", *traits)), place)
    ranks = str(listed.dp_ranks)
    if ranks:
        parsed_ranks(ranks, f"{place}: dp_ranks")
    key = None if listed.api_key_file is None else _key(directory / listed.api_key_file, place, keys)
    return EngineEntry(url=url, model=listed.model, labels=listed.labels, dp_ranks=ranks, api_key=key)


def _key(file: Path, place: str, keys: dict[Path, str]) -> str:
    if file not in keys:
        try:
            key = text_of(file.read_bytes()[:_MAX_KEY_BYTES]).strip()
        except (OSError, UnicodeDecodeError) as error:
            cause = getattr(error, "strerror", None) or "it is no text"
            raise ConfigError(f"{place}: api_key_file {shown(str(file))}: {cause}") from None
        if not key.isascii() or not key.isprintable() or not key:
            raise ConfigError(f"{place}: api_key_file {shown(str(file))} must have one line of printable ASCII")
        keys[file] = key
    return keys[file]


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
        ignored: Entries that do not count, as texts for the log: another one of the same name or address hides them, or
            the operator has removed the engine.
        removed: Returns the names of engines that the operator has removed, which no list brings back.
    """

    def __init__(self, rules: KeepRules = KeepRules()) -> None:
        self._rules = rules
        self._own: dict[str, EngineEntry] = {}  # Of the command line and the admin plane.
        self._listed: dict[str, tuple[EngineEntry, ...]] = dict.fromkeys(SOURCES, ())
        self._present: dict[str, EngineEntry] = {}
        self._absent: OrderedDict[str, tuple[EngineEntry, int]] = OrderedDict()  # With the time of their removal.
        self.ignored: tuple[str, ...] = ()
        self.removed: Callable[[], Collection[str]] = lambda: ()

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
        """Remove an engine at once, by the operator's wish, which `removed` has by now."""
        kept = self._absent.pop(name, None)
        entry = self._present.pop(name, None) or (kept and kept[0])
        self._own.pop(name, None)
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
        removed = self.removed()
        for source, entry in self._in_order():
            if entry.name in removed and entry.name not in self._own:
                ignored.append(f"{entry.name}={entry.url.url} of {source}: the operator has removed it")
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
