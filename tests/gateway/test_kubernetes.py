"""Engines of Kubernetes, followed at an imitation of its API server that really watches."""

from __future__ import annotations

import asyncio
import contextlib
import logging

import pytest
from gateway.rig import FakeEngine, Rig, looped, rig
from gateway.test_discovery import figure, names, started
from support.imitated_kubernetes import (
    PODS,
    POOLS,
    SLICES,
    ImitatedKubernetes,
    endpoint,
    endpoint_slice,
    pod,
    pool,
)

from moestro.errors import ConfigError
from moestro.gateway.discovery.kubernetes import (
    ObjectCache,
    WatchError,
    engines_of_pods,
    engines_of_slices,
    pool_of,
)
from moestro.gateway.part_settings import DiscoverySettings


@contextlib.asynccontextmanager
async def cluster(tmp_path, *engines: FakeEngine, **settings):
    account = tmp_path / "account"
    async with ImitatedKubernetes().running(account) as kubernetes:
        for at, engine in enumerate(engines):
            await kubernetes.put(PODS, engine.name, pod(f"127.0.0.{at + 1}", engine.port))
        given = {"service_discovery": True, "kubernetes_api": kubernetes.url, "service_account_dir": account}
        async with rig(*engines, listed=True, is_up=False, **given | settings) as it:
            yield kubernetes, it


async def until_up(it: Rig, *wanted: str) -> None:
    await it.until(lambda: {name for name, condition in names(it).items() if condition == "up"} == set(wanted))


@contextlib.asynccontextmanager
async def reachable(*wanted: str):
    """Engines that answer at every address of this machine, as pods have addresses of their own."""
    async with started(*wanted) as engines:
        for engine in engines:
            server = engine.server
            port = engine.port
            server.close()
            loop = asyncio.get_running_loop()
            protocol = type(engine).start.__globals__["Wire"]
            engine.server = await loop.create_server(lambda e=engine, p=protocol: p(e), "0.0.0.0", port)
        yield engines


@looped
async def test_pods_of_a_selector_come_and_go(tmp_path):
    async with (
        reachable("pod-a", "pod-b", "pod-c") as engines,
        cluster(tmp_path, *engines, selector=("app=vllm",)) as (kubernetes, it),
    ):
        await until_up(it, "pod-a", "pod-b", "pod-c")  # in two pages of a list
        assert (await it.call()).status == 200
        await kubernetes.put(PODS, "pod-a", pod("127.0.0.1", engines[0].port, is_ready=False))
        await until_up(it, "pod-b", "pod-c")
        assert names(it)["pod-a"] == "absent"
        await kubernetes.put(PODS, "pod-a", pod("127.0.0.1", engines[0].port))
        await until_up(it, "pod-a", "pod-b", "pod-c")
        ending = pod("127.0.0.2", engines[1].port, deletionTimestamp="2026-01-01T00:00:00Z")
        await kubernetes.put(PODS, "pod-b", ending)
        await until_up(it, "pod-a", "pod-c")
        await kubernetes.delete(PODS, "pod-b")
        await kubernetes.put(PODS, "other", pod("127.0.0.4", engines[0].port, labels={"app": "web"}))
        await asyncio.sleep(0.2)
        await until_up(it, "pod-a", "pod-c")
        assert len(kubernetes.lists) == 2, "events, not lists, brought the changes"
        assert figure(it, 'engines{source="kubernetes"}') == 2


@looped
async def test_a_watch_that_breaks_goes_on_from_its_version_and_one_that_is_too_old_lists_again(tmp_path):
    async with (
        reachable("pod-a", "pod-b") as engines,
        cluster(tmp_path, engines[0], selector=("app=vllm",)) as (
            kubernetes,
            it,
        ),
    ):
        await until_up(it, "pod-a")
        await it.until(lambda: kubernetes.watches != [])
        await kubernetes.break_watches()
        await kubernetes.put(PODS, "pod-b", pod("127.0.0.2", engines[1].port))
        await until_up(it, "pod-a", "pod-b")
        assert len(kubernetes.lists) == 1
        assert len(kubernetes.watches) == 2
        await kubernetes.send_error(410)
        await it.until(lambda: len(kubernetes.lists) == 2)
        await kubernetes.break_watches()
        await kubernetes.delete(PODS, "pod-b")
        kubernetes.forget_history()
        await until_up(it, "pod-a")
        await it.until(lambda: len(kubernetes.lists) >= 3)


@looped
async def test_bookmarks_keep_a_watch_young_enough(tmp_path):
    async with reachable("pod-a") as engines, cluster(tmp_path, *engines, selector=("app=vllm",)) as (kubernetes, it):
        await until_up(it, "pod-a")
        for number in range(5):
            await kubernetes.put(PODS, f"web-{number}", pod("127.0.0.9", 1, labels={"app": "web"}))
        await asyncio.sleep(0.4)  # a bookmark says that the watch has passed them
        kubernetes.forget_history()
        num_lists = len(kubernetes.lists)
        await kubernetes.break_watches()
        await it.until(lambda: len(kubernetes.watches) >= 2)
        assert kubernetes.watches[1] >= kubernetes.watches[0] + 5, "the watch goes on from the bookmark"
        await asyncio.sleep(0.3)
        assert len(kubernetes.lists) == num_lists


@looped
async def test_a_renewed_token_is_used_and_a_refused_one_keeps_the_engines(tmp_path, caplog):
    caplog.set_level(logging.INFO)
    async with (
        reachable("pod-a", "pod-b") as engines,
        cluster(tmp_path, engines[0], selector=("app=vllm",)) as (
            kubernetes,
            it,
        ),
    ):
        await until_up(it, "pod-a")
        kubernetes.token = "token-2"
        await kubernetes.break_watches()
        await it.until(lambda: "answers 401: Unauthorized" in caplog.text)
        assert names(it) == {"pod-a": "up"}
        assert (await it.call()).status == 200
        await kubernetes.put(PODS, "pod-b", pod("127.0.0.2", engines[1].port))
        (tmp_path / "account" / "token").write_text("token-2\n")
        await until_up(it, "pod-a", "pod-b")
        assert "token-" not in caplog.text


@looped
async def test_endpoints_of_a_service(tmp_path):
    async with (
        reachable("pod-a", "pod-b") as (a, b),
        cluster(tmp_path, service_discovery_service="vllm") as (
            kubernetes,
            it,
        ),
    ):
        assert a.port != b.port
        ends = [endpoint("pod-a", "127.0.0.1"), endpoint("pod-b", "127.0.0.2", ready=False)]
        await kubernetes.put(SLICES, "vllm-1", endpoint_slice("vllm", a.port, *ends))
        await kubernetes.put(SLICES, "web-1", endpoint_slice("web", a.port, endpoint("web", "127.0.0.3")))
        await until_up(it, "pod-a")
        ends[1]["conditions"] = {"ready": True}
        await kubernetes.put(SLICES, "vllm-2", endpoint_slice("vllm", a.port, *ends))
        await until_up(it, "pod-a", "pod-b")
        await kubernetes.delete(SLICES, "vllm-2")
        await until_up(it, "pod-a")


@looped
async def test_pods_of_an_inference_pool_whose_selector_changes(tmp_path):
    async with reachable("pod-a", "pod-b") as (a, b), cluster(tmp_path, inference_pool="pool") as (kubernetes, it):
        await kubernetes.put(PODS, "pod-a", pod("127.0.0.1", 1, labels={"set": "one"}))
        await kubernetes.put(PODS, "pod-b", pod("127.0.0.2", 1, labels={"set": "two"}))
        await kubernetes.put(POOLS, "another", pool(b.port, set="two"))
        await kubernetes.put(POOLS, "pool", pool(a.port, set="one"))
        await until_up(it, "pod-a")
        await kubernetes.put(POOLS, "pool", pool(b.port, set="two"))
        await until_up(it, "pod-b")
        await kubernetes.delete(POOLS, "pool")
        await asyncio.sleep(0.3)
        await until_up(it, "pod-b")  # a pool that is deleted by mistake takes no engine away


@looped
async def test_an_unreachable_api_server_does_not_keep_the_router_from_its_own_engines(tmp_path):
    engine = FakeEngine("own")
    given = {"service_discovery": True, "kubernetes_api": "http://127.0.0.1:1", "selector": ("app=vllm",)}
    async with rig(engine, **given, service_account_dir=tmp_path) as it:
        assert (await it.call()).status == 200
        await it.until(lambda: figure(it, 'reads_total{result="failed",source="kubernetes"}') > 1)


def test_objects_of_an_unexpected_form_are_left_out_or_named():
    ready = pod("10.0.0.1", 8000)
    ready["metadata"]["name"] = "a"
    assert [each.url.url for each in engines_of_pods([ready], ()).entries] == ["http://10.0.0.1:8000"]
    assert [each.name for each in engines_of_pods([ready], (1, 2)).entries] == ["a:1", "a:2"]
    bare = ready | {"spec": {}, "metadata": {"name": "b"}}
    assert engines_of_pods([bare, ready], ()).fault == "pod b declares no containerPort: give --service-discovery-port"
    assert [each.name for each in engines_of_pods([bare, ready], ()).entries] == ["a"]
    assert engines_of_pods([{"metadata": {"name": "c"}}], ()).entries == []
    empty = {"metadata": {"name": "s"}, "endpoints": [endpoint("a", "10.0.0.1")], "ports": None}
    assert "EndpointSlice s has no port" in engines_of_slices([empty], None).fault
    v6 = endpoint_slice("s", 80, {"addresses": ["fd00::1"]}) | {"addressType": "IPv6"}
    assert [each.url.url for each in engines_of_slices([v6], None).entries] == ["http://[fd00::1]:80"]
    assert pool_of({"spec": {"selector": {"a": "b"}, "targetPortNumber": 8000}}).ports == (8000,)  # v1alpha2
    with pytest.raises(ConfigError, match="InferencePool p has no selector"):
        pool_of({"metadata": {"name": "p"}, "spec": {}})


@pytest.mark.parametrize(
    "line",
    [
        b"{",
        b"[]",
        b"null",
        b'{"type": "ADDED"}',
        b'{"type": "ADDED", "object": {}}',
        b'{"type": "ADDED", "object": {"metadata": {"resourceVersion": "1"}}}',
        b'{"type": "NEW", "object": {"metadata": {"resourceVersion": "1", "name": "a"}}}',
        b"\xff",
        b"[" * 10_000,
    ],
)
def test_wrong_event_ends_the_watch(line):
    cache = ObjectCache()
    cache.replace([], "1")
    with pytest.raises(WatchError):
        cache.take(line)
    assert cache.objects == []


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"service_discovery": True}, "give --selector KEY=VALUE"),
        ({"service_discovery": True, "selector": ("a=b",), "inference_pool": "p"}, "give one of them"),
        ({"selector": ("app",)}, "give KEY=VALUE"),
        ({"service_discovery_port": 70000}, "port"),
    ],
)
def test_wrong_settings_have_a_clear_error(given, error):
    with pytest.raises(ConfigError, match=error):
        DiscoverySettings(**given)


def test_outside_of_kubernetes_the_address_must_be_given(monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    from moestro.gateway.discovery.kubernetes import Kubernetes  # noqa: PLC0415

    with pytest.raises(ConfigError, match="give --kubernetes-api"):
        Kubernetes(DiscoverySettings(service_discovery=True, selector=("a=b",)))
