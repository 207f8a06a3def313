"""An imitation of Kubernetes' API server: lists in pages, and watches that follow real versions.

It keeps every object with a version that grows with each change, and sends a watch the changes after its version. It
answers 410 for a version that is older than its history, sends bookmarks, and wants the current token.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import ssl
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import trustme
from aiohttp import web

PODS = "/api/v1/namespaces/{namespace}/pods"
SLICES = "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
POOLS = "/apis/inference.networking.k8s.io/v1/namespaces/{namespace}/inferencepools"


class ImitatedKubernetes:
    """One API server.

    Attributes:
        token: The token that it accepts.
        lists: Paths of the lists that it has answered.
        watches: Versions from which watches have begun.
        page: Objects of one page.
        bookmark_s: Interval of bookmarks.
    """

    def __init__(self) -> None:
        self.token = "token-1"
        self.lists: list[str] = []
        self.watches: list[int] = []
        self.page = 2
        self.bookmark_s = 0.1
        self.url = ""
        self._version = 100
        self._objects: dict[tuple[str, str], dict[str, Any]] = {}
        self._history: list[tuple[int, str, str, dict[str, Any]]] = []
        self._forgotten = 0
        self._changed = asyncio.Condition()
        self._streams: set[web.StreamResponse] = set()
        self._ending = False

    # --- the cluster

    async def put(self, path: str, name: str, found: dict[str, Any]) -> None:
        self._version += 1
        metadata = {"name": name, "namespace": "ns", "resourceVersion": str(self._version)} | found.get("metadata", {})
        kind = "MODIFIED" if (path, name) in self._objects else "ADDED"
        await self._note(kind, path, self._objects.setdefault((path, name), {}) | found | {"metadata": metadata})

    async def delete(self, path: str, name: str) -> None:
        self._version += 1
        found = self._objects[path, name]
        gone = found | {"metadata": found["metadata"] | {"resourceVersion": str(self._version)}}
        await self._note("DELETED", path, gone)

    async def _note(self, kind: str, path: str, found: dict[str, Any]) -> None:
        name = found["metadata"]["name"]
        if kind == "DELETED":
            del self._objects[path, name]
        else:
            self._objects[path, name] = found
        self._history.append((self._version, kind, path, found))
        async with self._changed:
            self._changed.notify_all()

    def forget_history(self) -> None:
        """As after a compaction: a watch can begin at the newest version alone."""
        self._forgotten = self._version
        self._history.clear()

    async def break_watches(self) -> None:
        """Cut every watch off in the middle."""
        for stream in list(self._streams):
            assert stream._req is not None
            stream._req.transport.abort()

    async def send_error(self, code: int) -> None:
        """End every watch with an event of an error."""
        status = {"kind": "Status", "code": code, "reason": "Expired", "message": "too old resource version"}
        for stream in list(self._streams):
            await stream.write(json.dumps({"type": "ERROR", "object": status}).encode() + b"\n")
            self._streams.discard(stream)

    # --- the API

    async def answer(self, http: web.Request) -> web.StreamResponse:
        if http.headers.get("Authorization") != f"Bearer {self.token}":
            return web.json_response({"kind": "Status", "message": "Unauthorized"}, status=401)
        if http.path in ("/apis/inference.networking.k8s.io/v1",):
            return web.json_response({"kind": "APIResourceList"})
        if not any(http.path == path.format(namespace="ns") for path in (PODS, SLICES, POOLS)):
            return web.json_response({"kind": "Status", "message": "not found"}, status=404)
        return await (self._watch(http) if http.query.get("watch") else self._list(http))

    async def _list(self, http: web.Request) -> web.Response:
        self.lists.append(http.path)
        found = [each for (path, _), each in sorted(self._objects.items()) if self._is_meant(http, path, each)]
        begin = int(http.query.get("continue", "0"))
        size = min(self.page, int(http.query["limit"]))
        metadata = {"resourceVersion": str(self._version)}
        if begin + size < len(found):
            metadata["continue"] = str(begin + size)
        return web.json_response({"metadata": metadata, "items": found[begin : begin + size]})

    async def _watch(self, http: web.Request) -> web.StreamResponse:
        version = int(http.query["resourceVersion"])
        self.watches.append(version)
        if version < self._forgotten:
            return web.json_response({"kind": "Status", "code": 410, "message": "too old"}, status=410)
        stream = web.StreamResponse()
        await stream.prepare(http)
        self._streams.add(stream)
        try:
            while not self._ending and stream in self._streams:
                for at, kind, path, found in [each for each in self._history if each[0] > version]:
                    version = at
                    if self._is_meant(http, path, found):
                        await stream.write(json.dumps({"type": kind, "object": found}).encode() + b"\n")
                try:
                    async with asyncio.timeout(self.bookmark_s), self._changed:
                        await self._changed.wait()
                except TimeoutError:
                    version = self._version if version >= self._forgotten else version
                    mark = {"kind": "Pod", "metadata": {"resourceVersion": str(version)}}
                    await stream.write(json.dumps({"type": "BOOKMARK", "object": mark}).encode() + b"\n")
        finally:
            self._streams.discard(stream)
        return stream

    def _is_meant(self, http: web.Request, path: str, found: dict[str, Any]) -> bool:
        if http.path != path.format(namespace="ns"):
            return False
        fields = http.query.get("fieldSelector", "")
        if fields and fields != f"metadata.name={found['metadata']['name']}":
            return False
        wanted = [pair.partition("=") for pair in http.query.get("labelSelector", "").split(",") if pair]
        labels = found["metadata"].get("labels", {})
        return all(labels.get(key) == value for key, _, value in wanted)

    @contextlib.asynccontextmanager
    async def running(self, account: Path) -> AsyncIterator[ImitatedKubernetes]:
        """Serve HTTPS, and write the files of a service account to `account`."""
        authority = trustme.CA()
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        authority.issue_cert("127.0.0.1").configure_cert(context)
        account.mkdir()  # noqa: ASYNC240
        authority.cert_pem.write_to_path(account / "ca.crt")
        (account / "token").write_text(self.token)
        (account / "namespace").write_text("ns\n")
        app = web.Application()
        app.router.add_get("/{path:.*}", self.answer)
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context)
        await site.start()
        self.url = f"https://127.0.0.1:{runner.addresses[0][1]}"
        try:
            yield self
        finally:
            self._ending = True
            await runner.cleanup()


def pod(ip: str, port: int, *, is_ready: bool = True, labels: dict[str, str] | None = None, **metadata: str) -> dict:
    return {
        "metadata": {"labels": {"app": "vllm"} if labels is None else labels, **metadata},
        "spec": {"containers": [{"ports": [{"containerPort": port}]}]},
        "status": {
            "phase": "Running",
            "podIP": ip,
            "conditions": [{"type": "Ready", "status": "True" if is_ready else "False"}],
        },
    }


def endpoint_slice(service: str, port: int, *endpoints: dict) -> dict:
    return {
        "metadata": {"labels": {"kubernetes.io/service-name": service}},
        "addressType": "IPv4",
        "ports": [{"name": "http", "port": port, "protocol": "TCP"}],
        "endpoints": list(endpoints),
    }


def endpoint(name: str, ip: str, **conditions: bool) -> dict:
    return {"addresses": [ip], "conditions": conditions, "targetRef": {"kind": "Pod", "name": name}}


def pool(port: int, **labels: str) -> dict:
    return {"spec": {"selector": {"matchLabels": labels}, "targetPorts": [{"number": port}]}}
