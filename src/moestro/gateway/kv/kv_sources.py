"""Endpoints of engines' KV events: parses the operator's settings and resolves them for each engine."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from moestro.core.hosts import in_address
from moestro.errors import ConfigError

_ENDPOINT = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})|ipc://.+")
_ALL = ""  # key of the endpoint for all engines


@dataclass(frozen=True, slots=True)
class KvSource:
    """Endpoints of one publisher.

    Attributes:
        events: endpoint of the events, in zmq's form.
        replay: endpoint of the replay; None means no replay.
    """

    events: str
    replay: str | None


class KvSources:
    """The publishers of all engines.

        events: `tcp://*:PORT` for the same port at every engine's address, as in vLLM's settings; or
            `NAME=tcp://HOST:PORT` for one engine, which takes precedence.
        replay: replay endpoints in the same form.

    Raises:
        ConfigError: an endpoint is invalid, or a replay endpoint has no events endpoint.
    """

    def __init__(self, events: Collection[str], replay: Collection[str]) -> None:
        self._events = _by_engine("--kv-events", events)
        self._replay = _by_engine("--kv-replay", replay)
        lone = next((name for name in self._replay if name not in self._events and _ALL not in self._events), None)
        if lone is not None:
            raise ConfigError(f"--kv-replay {self._replay[lone]} is for events that --kv-events does not name")

    def __bool__(self) -> bool:
        return bool(self._events)

    def check_names(self, known: Collection[str]) -> None:
        """Raise ConfigError if an endpoint names an engine that is not in `known`."""
        for name in (self._events | self._replay).keys() - {_ALL, *known}:
            raise ConfigError(f"--kv-events names unknown engine {name}; known engines: {', '.join(sorted(known))}")

    def of(self, name: str, host: str) -> KvSource | None:
        """Return the endpoints of the engine `name` at `host`, or None for an engine without KV events."""
        events = self._events.get(name, self._events.get(_ALL))
        if events is None:
            return None
        replay = self._replay.get(name, self._replay.get(_ALL))
        return KvSource(_at(events, host), None if replay is None else _at(replay, host))


def _by_engine(flag: str, given: Collection[str]) -> dict[str, str]:
    endpoints: dict[str, str] = {}
    for text in given:
        name, separator, endpoint = text.partition("=")
        if not separator:
            name, endpoint = _ALL, text
        if not _ENDPOINT.fullmatch(endpoint) or (endpoint.startswith("tcp:") and not _port_is_real(endpoint)):
            raise ConfigError(f"{flag} {text}: give tcp://*:PORT for all engines, or NAME=tcp://HOST:PORT for one")
        if name == _ALL and "*" not in endpoint:
            raise ConfigError(f"{flag} {text}: name the engine, NAME={endpoint}; tcp://*:PORT stands for all engines")
        if name in endpoints:
            raise ConfigError(f"{flag} {text}: {endpoints[name]} is already given for the same engines")
        endpoints[name] = endpoint
    return endpoints


def _port_is_real(endpoint: str) -> bool:
    return 0 < int(endpoint.rpartition(":")[2]) <= 65535


def _at(endpoint: str, host: str) -> str:
    return endpoint.replace("//*:", f"//{in_address(host)}:")
