"""Engines in the objects of Kubernetes, sans-IO: lists and events in, entries out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import msgspec

from moestro.core.hosts import in_address
from moestro.errors import ConfigError
from moestro.gateway.discovery.entries import MAX_ENGINES, EngineEntry
from moestro.gateway.settings import EngineUrl

Object = Mapping[str, Any]

GONE = 410


class WatchError(Exception):
    """A watch that cannot go on from where it is.

    Attributes:
        is_gone: Whether the version has become too old, so that the list has to be read again at once.
    """

    def __init__(self, text: str, *, is_gone: bool = False) -> None:
        super().__init__(text)
        self.is_gone = is_gone


@dataclass(slots=True)
class ObjectCache:
    """The objects of one watched list, as of one version.

    Attributes:
        version: `resourceVersion` from which the watch goes on.
    """

    version: str = ""
    _objects: dict[str, Object] | None = None

    @property
    def objects(self) -> list[Object]:
        """The objects, in the order of their names."""
        found = self._objects or {}
        return [found[key] for key in sorted(found)]

    def replace(self, items: Iterable[Object], version: str) -> None:
        """Take in a whole list."""
        self._objects = {_key(item): item for item in items}
        self.version = version

    def take(self, line: bytes) -> None:
        """Take in one event of a watch.

        Raises:
            WatchError: The event ends the watch.
        """
        try:
            event = msgspec.json.decode(line)
            kind, found = event["type"], event["object"]
            if kind == "ERROR":
                text = f"{found.get('reason', 'error')}: {found.get('message', '')}"
                raise WatchError(text, is_gone=found.get("code") == GONE)
            self.version = found["metadata"]["resourceVersion"]
            if kind == "BOOKMARK":
                return
            key = _key(found)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise WatchError(f"an event cannot be read: {error}") from None
        assert self._objects is not None, "a list precedes its events"
        if kind == "DELETED":
            self._objects.pop(key, None)
        elif kind in ("ADDED", "MODIFIED"):
            self._objects[key] = found
        else:
            raise WatchError(f"an event has the unknown type {kind!r}")


class FoundEngines(NamedTuple):
    """The engines in some objects, and what keeps others from being engines; empty if nothing does."""

    entries: list[EngineEntry]
    fault: str = ""


def engines_of_pods(pods: Iterable[Object], ports: Sequence[int]) -> FoundEngines:
    """Return the engines of pods that are ready and not about to end.

    Args:
        ports: Ports of each pod; empty means the first port of its containers.
    """
    entries: list[EngineEntry] = []
    fault = ""
    for pod in pods:
        host = _text(pod, "status", "podIP")
        if not host or not _is_ready(pod):
            continue
        name = _text(pod, "metadata", "name")
        own = list(ports) or _container_ports(pod)[:1]
        if not own:
            fault = f"pod {name} declares no containerPort: give --service-discovery-port"
        labels = _labels(pod)
        entries += [_entry(name if len(own) == 1 else f"{name}:{port}", host, port, labels) for port in own]
    return _bounded(entries, fault)


def engines_of_slices(slices: Iterable[Object], port: int | None) -> FoundEngines:
    """Return the engines of EndpointSlices whose endpoints are ready. An endpoint in two slices is one engine.

    Args:
        port: Port of the engines; None means the first of each slice.
    """
    entries: dict[str, EngineEntry] = {}
    fault = ""
    for each in slices:
        endpoints = [endpoint for endpoint in each.get("endpoints") or () if _takes_requests(endpoint)]
        ports = [found["port"] for found in each.get("ports") or () if found.get("port")]
        if endpoints and port is None and not ports:
            fault = f"EndpointSlice {_text(each, 'metadata', 'name')} has no port: give --service-discovery-port"
            continue
        for endpoint in endpoints:
            host = endpoint["addresses"][0]
            number = ports[0] if port is None else port
            name = _text(endpoint, "targetRef", "name") or f"{in_address(host)}:{number}"
            entries[name] = _entry(name, host, number, {})
    return _bounded(list(entries.values()), fault)


@dataclass(frozen=True, slots=True)
class InferencePool:
    """What an InferencePool says of its pods.

    Attributes:
        labels: Labels that its pods have.
        ports: Ports of each pod.
    """

    labels: dict[str, str]
    ports: tuple[int, ...]


def pool_of(found: Object) -> InferencePool:
    """Return the selector and the ports of an InferencePool.

    Raises:
        ConfigError: The object has no selector.
    """
    spec = found.get("spec") or {}
    selector = spec.get("selector") or {}
    labels = selector.get("matchLabels", selector)
    if not labels or not all(isinstance(value, str) for value in labels.values()):
        raise ConfigError(f"InferencePool {_text(found, 'metadata', 'name')} has no selector with labels")
    ports = [each.get("number") for each in spec.get("targetPorts") or ()] or [spec.get("targetPortNumber")]
    return InferencePool(dict(labels), tuple(port for port in ports if isinstance(port, int)))


def _entry(name: str, host: str, port: int, labels: Mapping[str, str]) -> EngineEntry:
    return EngineEntry(url=_parsed(f"{name}=http://{in_address(host)}:{port}"), labels=labels)


@lru_cache(MAX_ENGINES)
def _parsed(url: str) -> EngineUrl:
    """Return a parsed address; each event needs those of all engines."""
    return EngineUrl.parse(url, "Kubernetes")


def _bounded(entries: list[EngineEntry], fault: str) -> FoundEngines:
    if len(entries) > MAX_ENGINES:
        fault = f"there are {len(entries)} engines, and {MAX_ENGINES} is the most: give a narrower selector"
    return FoundEngines(entries[:MAX_ENGINES], fault)


def _is_ready(pod: Object) -> bool:
    if _text(pod, "metadata", "deletionTimestamp") or _text(pod, "status", "phase") != "Running":
        return False
    conditions = (pod.get("status") or {}).get("conditions") or ()
    return any(each.get("type") == "Ready" and each.get("status") == "True" for each in conditions)


def _takes_requests(endpoint: Object) -> bool:
    conditions: Mapping[str, bool | None] = endpoint.get("conditions") or {}
    is_ready = conditions.get("ready") is not False  # Unset means ready.
    return is_ready and not conditions.get("terminating") and bool(endpoint.get("addresses"))


def _container_ports(pod: Object) -> list[int]:
    return list(_ports_in((pod.get("spec") or {}).get("containers") or ()))


def _ports_in(containers: Iterable[Object]) -> Iterator[int]:
    for container in containers:
        for port in container.get("ports") or ():
            if isinstance(port.get("containerPort"), int):
                yield port["containerPort"]


def _labels(found: Object) -> dict[str, str]:
    labels = (found.get("metadata") or {}).get("labels") or {}
    return {str(key): str(value) for key, value in labels.items()}


def _key(found: Object) -> str:
    metadata = found["metadata"]
    return f"{metadata.get('namespace', '')}/{metadata['name']}"


def _text(found: Object, *path: str) -> str:
    value: Any = found
    for step in path:
        value = value.get(step) if isinstance(value, dict) else None
    return value if isinstance(value, str) else ""
