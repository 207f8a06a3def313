"""Engines of a Kubernetes cluster: lists and watches at its API server, with the service account's token.

What its objects say is read sans-IO: lists and events in, entries out.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import ssl
import time
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec

from moestro.core.processes import in_address
from moestro.errors import ConfigError, shown
from moestro.gateway.discovery.discovery import ListListener
from moestro.gateway.discovery.lists import MAX_ENGINES, EngineEntry
from moestro.gateway.part_settings import DiscoverySettings
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


_PAGE = 500  # Objects of one page of a list.
_MAX_LIST_BYTES = 64 << 20
_MAX_EVENT_BYTES = 4 << 20
_WATCH_S = 60  # The server ends a watch then, and a new one goes on from the last version.
_LATE_S = 15.0  # A watch that ends this much too late has lost its server.
_REQUEST_S, _CONNECT_S = 30.0, 10.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.5, 30.0
_SERVICE_LABEL = "kubernetes.io/service-name"
_POOLS = ("inference.networking.k8s.io/v1", "inference.networking.x-k8s.io/v1alpha2")


class ClusterApi:
    """The API server of a cluster.

    Args:
        settings: Where it is, and where the service account's files are.
    """

    def __init__(self, settings: DiscoverySettings) -> None:
        self._directory = settings.service_account_dir
        self._url = (settings.kubernetes_api or _url_of_cluster()).rstrip("/")

    @property
    def url(self) -> str:
        """Base URL."""
        return self._url

    def namespace(self) -> str:
        """Return the namespace of the service account, `default` without one."""
        with contextlib.suppress(OSError, UnicodeDecodeError):
            return (self._directory / "namespace").read_text().strip() or "default"
        return "default"

    @contextlib.asynccontextmanager
    async def get(self, path: str, query: Mapping[str, str], total_s: float) -> AsyncIterator[aiohttp.ClientResponse]:
        """Send a request, whose answer the block reads.

        Raises:
            WatchError: The answer is no success.
        """
        authority = self._authority()
        timeout = aiohttp.ClientTimeout(total=total_s, sock_connect=_CONNECT_S)
        # The token is read for each request, because Kubernetes renews it about once an hour.
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(self._url + path, params=query, headers=self._headers(), ssl=authority) as answer,
        ):
            if answer.status != 200:
                body = await answer.content.read(4096)
                text = f"{self._url}{path} answers {answer.status}{_message(body)}"
                raise WatchError(text, is_gone=answer.status == GONE)
            yield answer

    def _headers(self) -> dict[str, str]:
        headers = {"Accept": "application/json", "User-Agent": "moestro-route"}
        with contextlib.suppress(FileNotFoundError):
            headers["Authorization"] = f"Bearer {_read(self._directory / 'token')}"
        return headers

    def _authority(self) -> ssl.SSLContext | bool:
        file = self._directory / "ca.crt"
        if not self._url.startswith("https:") or not file.exists():
            return True
        try:
            return ssl.create_default_context(cafile=file)
        except OSError as error:
            raise WatchError(f"{file}: {error.strerror or error}") from None


class Reflector:
    """Keeps the objects of one path of the API server up to date.

    Args:
        path: Path of the list.
        query: Selectors of the objects.
        changed: Called with the objects after each change.
        failed: Called with the cause of each failure, after which the objects stay as they are.
    """

    def __init__(
        self,
        server: ClusterApi,
        path: str,
        query: Mapping[str, str],
        changed: Callable[[list[Object]], None],
        failed: Callable[[str], None],
    ) -> None:
        self._server = server
        self._path = path
        self._query = query
        self._changed = changed
        self._failed = failed
        self._cache = ObjectCache()

    async def run(self) -> None:
        """List, then watch, until cancelled. After a failure the list is read again, later each time."""
        wait_s = _FIRST_WAIT_S
        is_listed = False
        while True:
            try:
                if not is_listed:
                    await self._list()
                    is_listed = True
                begun_s = time.monotonic()
                await self._watch()
                if time.monotonic() - begun_s > _FIRST_WAIT_S:
                    wait_s = _FIRST_WAIT_S
                    continue
            except WatchError as error:
                is_listed = False
                if error.is_gone:
                    await asyncio.sleep(_FIRST_WAIT_S * random.random())  # noqa: S311 - spreads the load of routers
                    continue
                self._failed(str(error))
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                # A watch that broke off goes on from its version; a server that does not know it answers 410.
                self._failed(f"{self._server.url}: {error or type(error).__name__}")
            await asyncio.sleep(wait_s * (0.5 + random.random() / 2))  # noqa: S311
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)

    async def _list(self) -> None:
        items: list[Object] = []
        query = {**self._query, "limit": str(_PAGE)}
        while True:
            async with self._server.get(self._path, query, _REQUEST_S) as answer:
                found = _decoded(await _whole(answer))
            items += found.get("items") or ()
            metadata = found.get("metadata") or {}
            if not metadata.get("continue"):
                break
            query["continue"] = metadata["continue"]
        self._cache.replace(items, metadata.get("resourceVersion", ""))
        self._changed(self._cache.objects)

    async def _watch(self) -> None:
        query = {
            **self._query,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": self._cache.version,
            "timeoutSeconds": str(_WATCH_S),
        }
        async with self._server.get(self._path, query, _WATCH_S + _LATE_S) as answer:
            async for lines in _lines(answer):
                try:
                    for line in lines:
                        self._cache.take(line)
                finally:
                    self._changed(self._cache.objects)  # Bookmarks too show that the list is still true.


class Kubernetes:
    """EngineSource that follows pods, the endpoints of a service, or the pods of an InferencePool.

    Args:
        settings: What to follow, and where.

    Raises:
        ConfigError: There is no API server.
    """

    name = "kubernetes"

    def __init__(self, settings: DiscoverySettings) -> None:
        self._settings = settings
        self._server = ClusterApi(settings)
        self.what = f"--service-discovery at {self._server.url}"

    async def follow(self, listener: ListListener) -> None:
        """Implement `EngineSource.follow`."""
        settings = self._settings
        if settings.inference_pool is not None:
            await self._follow_pool(listener, settings.inference_pool)
        elif settings.service_discovery_service is not None:
            path = f"/apis/discovery.k8s.io/v1/namespaces/{self._namespace}/endpointslices"
            query = {"labelSelector": f"{_SERVICE_LABEL}={settings.service_discovery_service}"}
            port = settings.service_discovery_port
            await self._reflector(listener, path, query, lambda found: engines_of_slices(found, port)).run()
        else:
            ports = () if settings.service_discovery_port is None else (settings.service_discovery_port,)
            await self._pods(listener, InferencePool(settings.labels, ports)).run()

    async def _follow_pool(self, listener: ListListener, name: str) -> None:
        """Follow the pods of a pool, and begin anew when its selector changes."""
        pools: asyncio.Queue[InferencePool | None] = asyncio.Queue()

        def changed(found: list[Object]) -> None:
            try:
                pools.put_nowait(pool_of(found[0]) if found else None)
            except ConfigError as error:
                listener.report(None, str(error))

        path = f"/apis/{await self._pool_version()}/namespaces/{self._namespace}/inferencepools"
        query = {"fieldSelector": f"metadata.name={name}"}
        pool, pods = None, None
        async with asyncio.TaskGroup() as tasks:
            own = Reflector(self._server, path, query, changed, lambda cause: listener.report(None, cause))
            tasks.create_task(own.run())
            while True:
                new = await pools.get()
                if new == pool and pods is not None:
                    continue
                if pods is not None:
                    pods.cancel()
                    await asyncio.gather(pods, return_exceptions=True)
                pool, pods = new, None
                if new is None:
                    listener.report(None, f"InferencePool {name} does not exist")
                else:
                    pods = tasks.create_task(self._pods(listener, new).run())

    async def _pool_version(self) -> str:
        """Return the API of pools that the cluster has, the newest one first."""
        for version in _POOLS:
            with contextlib.suppress(WatchError):
                async with self._server.get(f"/apis/{version}", {}, _REQUEST_S):
                    return version
        return _POOLS[0]

    def _pods(self, listener: ListListener, pool: InferencePool) -> Reflector:
        query = {"labelSelector": ",".join(f"{key}={value}" for key, value in pool.labels.items())}
        path = f"/api/v1/namespaces/{self._namespace}/pods"
        port = self._settings.service_discovery_port
        ports = pool.ports if port is None else (port,)
        return self._reflector(listener, path, query, lambda found: engines_of_pods(found, ports))

    def _reflector(
        self,
        listener: ListListener,
        path: str,
        query: Mapping[str, str],
        engines_of: Callable[[list[Object]], FoundEngines],
    ) -> Reflector:
        def changed(found: list[Object]) -> None:
            try:
                engines = engines_of(found)
            except ConfigError as error:
                listener.report(None, str(error))
            except (KeyError, TypeError, AttributeError, IndexError) as error:
                listener.report(None, f"an object has not the form of its API: {error!r}")
            else:
                listener.report(*engines)

        return Reflector(self._server, path, query, changed, lambda cause: listener.report(None, cause))

    @property
    def _namespace(self) -> str:
        return self._settings.service_discovery_namespace or self._server.namespace()


def _url_of_cluster() -> str:
    host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    if not host:
        raise ConfigError(
            "--service-discovery: this process does not run in Kubernetes (KUBERNETES_SERVICE_HOST is not set): give"
            " --kubernetes-api, such as http://127.0.0.1:8001 of kubectl proxy"
        )
    return f"https://{in_address(host)}:{port}"


async def _whole(answer: aiohttp.ClientResponse) -> bytes:
    body = bytearray()
    async for piece in answer.content.iter_any():
        body += piece
        if len(body) > _MAX_LIST_BYTES:
            raise WatchError(f"{answer.url.path}: a page of the list has more than {_MAX_LIST_BYTES} bytes")
    return bytes(body)


async def _lines(answer: aiohttp.ClientResponse) -> AsyncIterator[list[bytes]]:
    """Yield the complete lines of each read."""
    rest = bytearray()
    async for piece in answer.content.iter_any():
        rest += piece
        *lines, last = rest.split(b"\n")
        rest = bytearray(last)
        if len(rest) > _MAX_EVENT_BYTES:
            raise WatchError(f"{answer.url.path}: an event has more than {_MAX_EVENT_BYTES} bytes")
        if complete := [bytes(line) for line in lines if line.strip()]:
            yield complete


def _decoded(body: bytes) -> dict[str, Any]:
    try:
        return msgspec.json.decode(body, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WatchError(f"the list cannot be read: {error}") from None


def _message(body: bytes) -> str:
    try:
        text = msgspec.json.decode(body, type=dict[str, Any]).get("message", "")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return ""
    return f": {shown(str(text))}" if text else ""


def _read(file: Path) -> str:
    text = file.read_text().strip()
    if not text.isascii() or not text.isprintable():
        raise WatchError(f"{file} is no token")
    return text
