"""Entries of a list of engines, and the file form of such a list."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

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
