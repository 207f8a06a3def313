"""The launcher for Ray, before a fake cluster: what is reserved, checked, given back, and reported as lacking."""

from __future__ import annotations

import asyncio
import json
import signal
import threading
import time
from types import SimpleNamespace

import pytest

from moestro import __version__
from moestro.cli import app as app_module
from moestro.cli import main
from moestro.config.serve_settings import LauncherSettings, ServeSettings
from moestro.cost.networks import CONFIGS
from moestro.cost.settings import PacedSettings
from moestro.errors import ConfigError
from moestro.server.processes.launch_specs import _paths
from moestro.server.processes.launchers import WORKER, ProcessEnd
from moestro.server.processes.ray_launcher import NodeFacts

pytest.importorskip("ray")

from ray.exceptions import RayActorError

from moestro.server.processes import ray_launcher
from moestro.server.processes.ray_launcher import RayLauncher, RayNeeds, join_cluster


class FakeAgent:
    """An agent whose methods answer after a delay; `wait` answers when the process ends, or the agent dies."""

    def __init__(self, facts: NodeFacts, delay_s: float) -> None:
        self.facts, self.started, self.written, self.signals = facts, [], b"", []
        self.is_deaf, self.delay_s = False, delay_s
        self.end: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        for name in ("describe", "start", "write", "signal", "wait"):
            setattr(self, name, SimpleNamespace(remote=getattr(self, f"_{name}")))

    def _soon(self, value=None):
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        if not self.is_deaf:
            loop.call_later(self.delay_s, lambda: future.done() or future.set_result(value))
        return future

    def _describe(self, paths):
        return self._soon(self.facts)

    def _start(self, arguments, num_threads):
        self.end = asyncio.get_running_loop().create_future()
        self.started.append((arguments, num_threads))
        return self._soon()

    def _write(self, data):
        self.written += data
        return self._soon()

    def _signal(self, number):
        self.signals.append(number)
        if number == signal.SIGKILL and not self.is_deaf and not self.end.done():
            self.end.set_result(-9)

    async def _wait(self):
        return await asyncio.shield(self.end)

    def die(self) -> None:
        self.end.set_exception(RayActorError())


class FakeGroup:
    def __init__(self, node: str, avoided: frozenset[str], *, has_room: bool) -> None:
        self.node, self.avoided, self.has_room, self.is_released = node, avoided, has_room, False

    def wait(self, timeout_s: float) -> bool:
        time.sleep(timeout_s / 10)
        return self.has_room


class FakeCluster:
    """A cluster with room for `room` processes, whose agents answer after delays of their own."""

    address = "10.0.0.1"

    def __init__(self, room: int, delays_s: tuple[float, ...] = (0.0,), **facts) -> None:
        self.room, self.delays_s = room, delays_s
        self.facts = NodeFacts(**({"version": __version__, "absent": ()} | facts))
        self.groups: list[FakeGroup] = []
        self.agents: list[FakeAgent] = []
        self.ended: list[FakeAgent] = []
        self.bundles: list[dict[str, float]] = []
        self.gpus = self.has_left = False
        self.alive = {"id-0", "id-1", "id-2"}

    def node_ids(self):
        return frozenset(self.alive)

    def has_gpus(self) -> bool:
        return self.gpus

    def describe_room(self) -> str:
        return "2 nodes, and 0 of 4 CPU free"

    def reserve(self, bundle, avoid=()):
        self.bundles.append(dict(bundle))
        nodes = sorted(self.alive - set(avoid))
        has_room = bool(nodes) and self.num_reserved < self.room
        node = nodes[len(self.groups) % len(nodes)] if nodes else ""
        self.groups.append(FakeGroup(node, frozenset(avoid), has_room=has_room))
        return self.groups[-1]

    @property
    def num_reserved(self) -> int:
        return sum(not group.is_released for group in self.groups)

    def host_of(self, group):
        return "10.0.0.2", group.node

    def agent(self, group, resources):
        self.agents.append(FakeAgent(self.facts, self.delays_s[len(self.agents) % len(self.delays_s)]))
        return self.agents[-1]

    def end(self, agent) -> None:
        self.ended.append(agent)

    def release(self, group) -> None:
        group.is_released = True

    def leave(self) -> None:
        self.has_left = True


def launcher_on(
    cluster: FakeCluster, num_processes: int, device: str = "cpu", *, has_standby: bool = False
) -> RayLauncher:
    options = LauncherSettings(launcher="ray", ray_timeout=1, ray_worker_cpus=3)
    needs = RayNeeds(
        num_processes=num_processes, device=device, paths=("/models/a",), options=options, has_standby=has_standby
    )
    return RayLauncher(cluster, needs, WORKER)


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch):
    for name in ("_AGENT_S", "_ANSWER_S", "_SPARE_S", "_SIGKILL_S", "_WAIT_S"):
        monkeypatch.setattr(ray_launcher, name, 0.05)
    monkeypatch.setattr(ray_launcher, "_ELSEWHERE_S", 0.2)


def in_loop(test):
    def run():
        asyncio.run(test())

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


@in_loop
async def test_a_process_starts_on_reserved_room_with_the_node_s_interpreter_and_gets_its_spec():
    cluster = FakeCluster(room=2)
    launcher = launcher_on(cluster, 2)
    await launcher.open()
    assert cluster.bundles == [{"CPU": 3.0}] * 2
    process = await launcher.spawn(("experts", "0"))
    (agent,) = [each for each in cluster.agents if each.started]
    assert agent.started == [(("-m", "moestro.worker.worker", "experts", "0"), 3)]
    assert process.peer_address == "tcp://10.0.0.2:*"
    assert process.place.startswith("10.0.0.2 (Ray node id-")
    await process.write(b"spec")
    assert agent.written == b"spec"
    assert not process.has_ended
    agent.end.set_result(7)
    assert await process.wait() == ProcessEnd.of(7)
    assert process.has_ended
    assert launcher.keys is not None
    assert launcher.server_address == "tcp://10.0.0.1:*"


@in_loop
async def test_at_a_server_s_start_agents_have_the_time_of_ray_timeout():
    cluster = FakeCluster(room=2, delays_s=(0.2,))  # four times what a later agent has
    launcher = launcher_on(cluster, 2)
    await launcher.open()
    assert len(cluster.agents) == 2


@in_loop
async def test_no_agent_is_being_started_when_a_start_has_failed():
    cluster = FakeCluster(room=2, delays_s=(0.0, 0.2), version="0.0.1")
    launcher = launcher_on(cluster, 2)
    with pytest.raises(ConfigError, match=r"has Moestro 0\.0\.1"):
        await launcher.open()
    assert len(asyncio.all_tasks()) == 1


@in_loop
async def test_the_next_process_takes_the_place_of_one_that_ended():
    cluster = FakeCluster(room=1)
    launcher = launcher_on(cluster, 1)
    await launcher.open()
    for _ in range(3):
        process = await launcher.spawn(("both", "0"))
        process.signal(signal.SIGKILL)
        assert (await process.wait()).was_killed
    assert len(cluster.agents) == 1
    assert len(cluster.agents[0].started) == 3


@in_loop
async def test_a_process_whose_node_is_gone_gets_room_elsewhere_and_gives_the_former_back():
    cluster = FakeCluster(room=1)
    launcher = launcher_on(cluster, 1)
    await launcher.open()
    process = await launcher.spawn(("both", "0"))
    cluster.agents[0].die()
    end = await process.wait()
    assert end.was_killed
    assert "10.0.0.2" in end.how
    assert cluster.num_reserved == 0
    await launcher.spawn(("both", "0"))
    assert len(cluster.agents) == 2
    assert cluster.num_reserved == 1


@in_loop
async def test_a_process_does_not_start_on_free_room_whose_node_is_gone():
    cluster = FakeCluster(room=2)
    launcher = launcher_on(cluster, 2)
    await launcher.open()
    cluster.agents[1].is_deaf = True
    await launcher.spawn(("both", "0"))
    assert cluster.agents[0].started
    assert cluster.num_reserved == 1


@in_loop
async def test_a_node_that_does_not_answer_a_kill_counts_as_gone():
    cluster = FakeCluster(room=1)
    launcher = launcher_on(cluster, 1)
    await launcher.open()
    process = await launcher.spawn(("both", "0"))
    cluster.agents[0].is_deaf = True
    thread = threading.Thread(target=process.signal, args=(signal.SIGKILL,))  # as a server does that ends by force
    thread.start()
    assert "does not answer" in (await process.wait()).how
    thread.join()
    assert cluster.ended == [cluster.agents[0]]
    assert cluster.num_reserved == 0


@in_loop
async def test_a_standby_on_a_node_that_is_gone_ends_when_it_gets_a_spec():
    cluster = FakeCluster(room=1)
    launcher = launcher_on(cluster, 1, has_standby=True)
    await launcher.open()
    await launcher.prepare_standby()
    process = await launcher.spawn(("both", "0"))
    assert len(cluster.agents) == 1
    cluster.agents[0].is_deaf = True
    await process.write(b"spec")
    assert process.has_ended


@in_loop
async def test_after_a_silent_node_processes_start_on_others_and_its_standby_and_free_room_are_not_used():
    cluster = FakeCluster(room=4)
    launcher = launcher_on(cluster, 3, has_standby=True)
    await launcher.open()
    cluster.alive = {"id-0", "id-1"}  # from here on; the seats are on id-0, id-1 and id-2
    process = await launcher.spawn(("experts", "0"))
    lost = process.node_id
    for agent in cluster.agents:
        agent.is_deaf = agent.is_deaf or cluster.groups[cluster.agents.index(agent)].node == lost
    process.signal(signal.SIGKILL)
    await process.wait()
    others = [await launcher.spawn(("experts", str(i))) for i in range(3)]
    assert lost not in {each.node_id for each in others}
    assert cluster.groups[-1].avoided == {lost}


@in_loop
async def test_a_standby_on_a_node_that_has_not_answered_is_not_used():
    cluster = FakeCluster(room=3)
    cluster.alive = {"id-0"}
    launcher = launcher_on(cluster, 1, has_standby=True)
    await launcher.open()
    process = await launcher.spawn(("experts", "0"))
    await launcher.prepare_standby()
    cluster.agents[0].is_deaf = cluster.agents[1].is_deaf = True
    process.signal(signal.SIGKILL)
    await process.wait()
    cluster.alive |= {"id-1"}
    assert (await launcher.spawn(("experts", "0"))).node_id == "id-1"


@in_loop
async def test_room_is_requested_again_when_the_nodes_change():
    """Ray may have begun to place the group on a node that was gone, where it waits for ever."""
    cluster = FakeCluster(room=1)
    launcher = launcher_on(cluster, 1)
    await launcher.open()
    first = asyncio.create_task(launcher.spawn(("experts", "0")))
    second = asyncio.create_task(launcher.spawn(("experts", "1")))
    await first
    await asyncio.sleep(0.1)
    waiting = cluster.groups[-1]
    assert not waiting.has_room
    cluster.room = 2
    cluster.alive -= {"id-2"}
    assert (await second).node_id in cluster.alive
    assert waiting.is_released


@in_loop
async def test_a_cluster_whose_nodes_are_all_slow_gets_more_time_until_an_agent_answers():
    cluster = FakeCluster(room=1)
    launcher = launcher_on(cluster, 1)
    await launcher.open()
    process = await launcher.spawn(("experts", "0"))
    cluster.delays_s = (0.3,)  # six times what an agent has
    cluster.agents[-1].die()
    await process.wait()
    num_silent = 0
    while True:
        try:
            await launcher.spawn(("experts", "0"))
            break
        except OSError:
            num_silent += 1
    assert num_silent == 3  # with twice, four times and eight times as long


@in_loop
async def test_the_only_node_is_used_again_although_it_did_not_answer():
    cluster = FakeCluster(room=1)
    cluster.alive = {"id-0"}
    launcher = launcher_on(cluster, 1)
    await launcher.open()
    process = await launcher.spawn(("both", "0"))
    cluster.agents[0].is_deaf = True
    process.signal(signal.SIGKILL)
    await process.wait()
    assert (await launcher.spawn(("both", "0"))).node_id == "id-0"


@in_loop
async def test_a_standby_does_not_wait_for_room_and_a_worker_s_wait_ends_with_what_lacks():
    cluster = FakeCluster(room=1)
    launcher = launcher_on(cluster, 1, has_standby=True)
    await launcher.open()
    await launcher.spawn(("both", "0"))
    await launcher.prepare_standby()
    with pytest.raises(OSError, match="no room for 1 process of 3 CPU each"):
        await launcher.spawn(("both", "1"))
    assert cluster.num_reserved == 1


@in_loop
async def test_a_start_without_room_says_what_is_there_and_what_to_do():
    cluster = FakeCluster(room=2)
    launcher = launcher_on(cluster, 3, "cuda")
    with pytest.raises(ConfigError, match=r"no room for 3 processes of 3 CPU and 1 GPU each .* 0 of 4 CPU free"):
        await launcher.open()
    await launcher.close()
    assert cluster.num_reserved == 0
    assert cluster.has_left


@pytest.mark.parametrize(("gpus", "bundle"), [(True, {"CPU": 3.0, "GPU": 1.0}), (False, {"CPU": 3.0})])
def test_the_device_auto_reserves_gpus_where_the_cluster_has_some(gpus, bundle):
    async def inside():
        cluster = FakeCluster(room=1)
        cluster.gpus = gpus
        await launcher_on(cluster, 1, "auto").open()
        assert cluster.bundles == [bundle]

    asyncio.run(inside())


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"version": "0.0.1"}, "the node 10.0.0.2 has Moestro 0.0.1"),
        ({"absent": ("/models/a",)}, "the node 10.0.0.2 has no /models/a: copy it there"),
    ],
)
def test_a_node_that_lacks_something_is_named(facts, text):
    async def inside():
        with pytest.raises(ConfigError, match=text):
            await launcher_on(FakeCluster(room=1, **facts), 1).open()

    asyncio.run(inside())


@in_loop
async def test_everything_can_be_ended_at_once():
    cluster = FakeCluster(room=2)
    launcher = launcher_on(cluster, 2)
    await launcher.open()
    launcher.kill_all()
    assert cluster.ended == cluster.agents


def test_a_cluster_that_cannot_be_reached_is_an_error_at_once():
    with pytest.raises(ConfigError, match=r"cannot reach the Ray cluster at 127\.0\.0\.1:9 .*ray start"):
        join_cluster("127.0.0.1:9")


def test_a_cluster_that_asks_for_a_token_is_named_with_what_to_set(monkeypatch):
    def refuse(**_):
        raise ConnectionError("Failed to connect to Ray cluster at 10.0.0.1:6379") from RuntimeError(
            "Failed to connect to GCS. ray.exceptions.AuthenticationError: RPC error: InvalidAuthToken: Authentication"
            " token is missing or incorrect. Note: RAY_AUTH_MODE is currently 'disabled' (not 'token')."
        )

    monkeypatch.setattr(ray_launcher.ray, "init", refuse)
    with pytest.raises(ConfigError, match=r"asks for a token, .* set RAY_AUTH_MODE=token, and copy the head's"):
        join_cluster("auto")


MIXTRAL = ("--model", "mixtral-8x7b", "--paced-arithmetic", "none")


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--mode", "ep", "--engines", "2"), "--mode ep exchanges on one machine"),
        (("--mode", "async", "--device", "paced:h200", *MIXTRAL), "the clock of one machine"),
        (("--kv-events-config", '{"enable_kv_cache_events": true}'), "publishes without encryption"),
        (("--ray-address", "ray://10.0.0.1:10001"), "is for Ray's remote client"),
        (("--ray-address", "127.0.0.1:9"), "cannot reach the Ray cluster at 127.0.0.1:9"),
        (("--ray-worker-cpus", "0"), "--ray-worker-cpus"),
    ],
)
def test_what_cannot_work_on_several_machines_is_refused_with_what_to_do(flags, text, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--port", "0", "--launcher", "ray", *flags])
    assert ended.value.code in (1, 2)
    assert text in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_ray_s_address_without_ray_is_refused(capsys):
    with pytest.raises(SystemExit):
        main(["serve", "--ray-address", "127.0.0.1:9"])
    assert "--ray-address is for --launcher ray" in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_without_the_extra_one_sentence_says_what_to_install(monkeypatch, capsys):
    monkeypatch.setitem(app_module.EXTRAS, "ray", ("no_such_library",))
    with pytest.raises(SystemExit) as ended:
        main(["serve", "--launcher", "ray"])
    assert ended.value.code == 2
    error = capsys.readouterr().err
    assert error == "moestro: --launcher ray needs libraries that are not installed: pip install 'moestro[ray]'\n"


def test_nodes_need_the_files_of_the_model_and_of_a_paced_network(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIGS["mixtral-8x7b"]))

    def paths(network: str, arithmetic: str) -> tuple[str, ...]:
        paced = PacedSettings(device="paced:h200", network=network, paced_arithmetic=arithmetic)
        return _paths(ServeSettings(pacing=paced))

    assert paths("mixtral-8x7b", "none") == ()
    assert paths(str(tmp_path), "none") == (str(tmp_path),)
    model = ServeSettings().model.model
    assert paths("mixtral-8x7b", "demo") == (model,)
    assert paths(str(tmp_path), "demo") == (model, str(tmp_path))
