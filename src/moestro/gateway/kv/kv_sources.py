"""Endpoints of engines' KV events: parses the operator's settings and resolves them for each engine."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from moestro.core.hosts import in_address
from moestro.errors import ConfigError

_ENDPOINT = re.compile(r"tcp://(\*|\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):([0-9]{1,5})|ipc://.+")
_ALL = ""  # key of the endpoint for all engines
_RANK = re.compile(r"@\d{1,4}\Z")
_LAST_PORT = 65_535


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
            `NAME=tcp://HOST:PORT` for one engine or address, which takes precedence. Data-parallel rank r of an address
            publishes at PORT + r, as in vLLM and SGLang, unless its own name `NAME@r` has an endpoint.
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
        """Raise ConfigError if an endpoint names no address of `known`, and no rank of one."""
        for name in (self._events | self._replay).keys() - {_ALL}:
            if name not in known and _RANK.sub("", name) not in known:
                raise ConfigError(f"--kv-events names unknown engine {name}; known engines: {', '.join(sorted(known))}")

    def check_ranks(self, names: Collection[str], num_ranks: int) -> None:
        """Raise ConfigError if a data-parallel rank of an address in `names` cannot have the endpoint after the last.

        Args:
            num_ranks: ranks of each address.
        """
        for name in names:
            rank = next((each for each in range(num_ranks) if self._lacks(name, each)), None)
            if rank is not None:
                raise ConfigError(
                    f"--kv-events: rank {rank} of {name} has no port: give tcp://*:PORT with PORT + {rank} up"
                    f" to {_LAST_PORT}, or {name}@{rank}=tcp://HOST:PORT"
                )

    def _lacks(self, name: str, rank: int) -> bool:
        """Return whether rank 0 of an address has an endpoint, and `rank` has none."""
        first, own = self.of(name, "", 0), self.of(name, "", rank)
        if first is None:
            return False
        return own is None or (first.replay is not None and own.replay is None)

    def of(self, name: str, host: str, rank: int | None = None) -> KvSource | None:
        """Return the endpoints of an engine, or None for an engine without KV events.

        Args:
            name: name of the engine's address.
            host: host of the address.
            rank: number of the data-parallel rank at the address; None means that it has one engine.
        """
        events = self._endpoint(self._events, name, host, rank)
        return None if events is None else KvSource(events, self._endpoint(self._replay, name, host, rank))

    def _endpoint(self, given: Mapping[str, str], name: str, host: str, rank: int | None) -> str | None:
        if rank is not None and (own := given.get(f"{name}@{rank}")):
            return _at(own, host)
        endpoint = given.get(name, given.get(_ALL))
        shifted = None if endpoint is None else _of_rank(endpoint, rank or 0)
        return None if shifted is None else _at(shifted, host)


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
    return 0 < int(endpoint.rpartition(":")[2]) <= _LAST_PORT


def _of_rank(endpoint: str, rank: int) -> str | None:
    """Return the endpoint of a data-parallel rank, where rank 0 publishes at `endpoint`; None: it cannot have one."""
    before, _, port = endpoint.rpartition(":")
    if not rank:
        return endpoint
    if not endpoint.startswith("tcp:") or int(port) + rank > _LAST_PORT:
        return None
    return f"{before}:{int(port) + rank}"


def _at(endpoint: str, host: str) -> str:
    return endpoint.replace("//*:", f"//{in_address(host)}:")
