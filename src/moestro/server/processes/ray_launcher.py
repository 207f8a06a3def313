"""Places worker processes on the nodes of a Ray cluster. The only module that imports Ray.

Each process has a placement group of one bundle. An actor on the bundle's node, a `NodeAgent`, starts the process. A
process whose node is gone gets another group, and the former is given back. One group for all would not do: Ray finds
nodes for all lost bundles of a group or for none of them, and makes the groups of everybody else wait meanwhile.

Ray takes seconds to find that a node is gone, and until then gives out room there; a group that it has begun to place
on such a node may wait for ever. So nodes that do not answer are avoided, and a waiting group is requested again
whenever the nodes in question change.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import ray
from ray.exceptions import RayError
from ray.util import get_node_ip_address
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from moestro import __version__
from moestro.config.cores import thread_environment
from moestro.config.serve_settings import LauncherSettings
from moestro.core.processes import CurveKeys, in_address
from moestro.errors import ConfigError, EngineDiedError
from moestro.server.processes.launchers import WORKER, ProcessEnd, StartedProcess
from moestro.wire.sockets import new_curve_keys

logger = logging.getLogger(__name__)


class NodeFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a node says of itself.

    Attributes:
        version: Moestro's version.
        absent: Those of the requested paths that it lacks.
    """

    version: str
    absent: tuple[str, ...]


class NodeAgent:
    """Starts a worker process, keeps its stdin open, and passes on signals and its end.

    The process ends with this actor, because its stdin ends. Its output goes where the actor's goes: through Ray's log
    to the API server's.
    """

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    def describe(self, paths: Sequence[str]) -> NodeFacts:
        """Return what the API server checks before it starts a worker here."""
        return NodeFacts(version=__version__, absent=tuple(path for path in paths if not Path(path).exists()))

    def start(self, arguments: Sequence[str], num_threads: int) -> None:
        """Start the interpreter of this node with `arguments`, after the end of the process before."""
        # Ray sets the number of threads to the actor's cores, but not in every version.
        environment = os.environ | thread_environment(1) | {"OMP_NUM_THREADS": str(num_threads)}
        self._process = subprocess.Popen(  # noqa: S603 - the arguments are Moestro's own
            [sys.executable, *arguments], stdin=subprocess.PIPE, env=environment, start_new_session=True
        )

    def write(self, data: bytes) -> None:
        """Write to the process's stdin. A process that has ended reads nothing."""
        stdin = self._started.stdin
        assert stdin is not None, "it was started with a pipe"
        try:
            stdin.write(data)
            stdin.flush()
        except BrokenPipeError:
            return

    def signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        self._started.send_signal(number)

    def wait(self) -> int:
        """Wait for the end of the process, and return its code as `subprocess` has it."""
        return self._started.wait()

    @property
    def _started(self) -> subprocess.Popen[bytes]:
        assert self._process is not None, "called after `start`"
        return self._process


_CONNECT_S = 5.0
_WAIT_S = 0.5  # Time of one look at a placement group, after which a cancelled start ends.
_AGENT_S = 20.0  # Ray starts an interpreter in about a second, on a busy node in several. At a server's start: longer.
_SPARE_S = 2.0  # Time in which there must be room for a process on standby.
_ANSWER_S = 5.0  # An agent answers in milliseconds; one that does not may be on a machine that has gone.
_SIGKILL_S = 1.0  # Time in which a killed process's end must be reported; its node is else taken for dead.
_ELSEWHERE_S = 2.0  # Time for which a process looks for room on other nodes than those that did not answer.
_MAX_PATIENCE = 16  # Factor of the times above after silences in a row: all nodes of a busy cluster may just be slow.
_SILENT_S = 60.0  # Time for which a node that did not answer is avoided: by then, Ray has found whether it is gone.
_ACTOR_THREADS = 4  # of one agent: one waits for the end of the process, the others answer.

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class RayNeeds:
    """What a server needs of a cluster.

    Attributes:
        num_processes: Processes at the start.
        device: Device of the workers, as `--device` names it.
        paths: Files and directories that every node must have.
        options: Choices of the operator.
        has_standby: Whether a process with loaded libraries waits for the next worker that ends.
    """

    num_processes: int
    device: str
    paths: tuple[str, ...]
    options: LauncherSettings
    has_standby: bool = False


class RayCluster:
    """The cluster that this process has joined.

    Attributes:
        address: Address of this node for the others.
    """

    def __init__(self) -> None:
        self.address = get_node_ip_address()

    def has_gpus(self) -> bool:
        """Whether some node has a GPU."""
        return bool(ray.cluster_resources().get("GPU", 0))

    def describe_room(self) -> str:
        """Return what the cluster has, and what of it is free."""
        alive = _alive()
        total, free = ray.cluster_resources(), ray.available_resources()
        parts = [f"{free.get(kind, 0):g} of {total.get(kind, 0):g} {kind}" for kind in ("CPU", "GPU") if kind in total]
        nodes = f"{len(alive)} node{'' if len(alive) == 1 else 's'}"
        return f"{nodes}, and {' and '.join(parts) or 'no CPU'} free"

    def node_ids(self) -> frozenset[str]:
        """Return the ids of the nodes that Ray takes for alive."""
        return frozenset(node["NodeID"] for node in _alive())

    def reserve(self, bundle: dict[str, float], avoid: Collection[str] = ()) -> PlacementGroup:
        """Reserve a bundle on some node; it returns at once. Ray prefers the node that has most to spare.

        Args:
            avoid: Ids of nodes that must not be chosen.
        """
        selector = [{"ray.io/node-id": f"!in({','.join(sorted(avoid))})"}] if avoid else None
        return placement_group([bundle], bundle_label_selector=selector)

    def host_of(self, group: PlacementGroup) -> tuple[str, str] | None:
        """Return the address and the id of the node that has a group's bundle; None means that it has just gone."""
        node_id = placement_group_table(group)["bundles_to_node_id"].get(0)
        return next(((node["NodeManagerAddress"], node_id) for node in _alive() if node["NodeID"] == node_id), None)

    def agent(self, group: PlacementGroup, resources: dict[str, float]) -> Any:
        """Return the handle of a new agent on a group's bundle; it starts in the background."""
        return (
            ray.remote(NodeAgent)
            .options(
                num_cpus=resources["CPU"],
                num_gpus=resources.get("GPU", 0),
                max_concurrency=_ACTOR_THREADS,
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=0),
            )
            .remote()
        )

    def end(self, agent: Any) -> None:
        """End an agent, and with it its process; nothing is left to end in a cluster that this process has left."""
        if ray.is_initialized():  # Ray would else start a cluster of its own.
            with contextlib.suppress(RayError):
                ray.kill(agent)

    def release(self, group: PlacementGroup) -> None:
        """Give a reservation back; nothing is left to give back to a cluster that this process has left."""
        if ray.is_initialized():
            with contextlib.suppress(RayError):
                remove_placement_group(group)

    def leave(self) -> None:
        """Leave the cluster. Ray ends what this process has left there."""
        ray.shutdown()


def _alive() -> list[dict[str, Any]]:
    return [node for node in ray.nodes() if node["Alive"]]


def join_cluster(address: str | None) -> RayCluster:
    """Join a Ray cluster as this process. Call it before signal handlers are set, because Ray sets its own.

    Args:
        address: HOST:PORT of the head. None means RAY_ADDRESS, or the cluster of this machine.

    Raises:
        ConfigError: There is no such cluster, or this machine is none of its nodes.
    """
    address = address or os.environ.get("RAY_ADDRESS") or "auto"
    _check_reachable(address)
    try:
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=True)
    except Exception as error:  # Ray raises errors of many kinds here.
        raise ConfigError(_explain(error, address)) from error
    return RayCluster()


def _explain(error: Exception, address: str) -> str:
    """Say why a cluster cannot be joined, and what to do."""
    if "authentication token" in f"{error} {error.__cause__}".lower():
        reason = "it asks for a token, and this process has none or another one"
        advice = (
            "set RAY_AUTH_MODE=token, and copy the head's ~/.ray/auth_token to this machine or set RAY_AUTH_TOKEN,"
            " before `ray start` on every other node and before `moestro serve`; or start the head with"
            " RAY_AUTH_MODE=disabled"
        )
    else:
        reason = " ".join(str(error).split())[:300]
        advice = "run `ray start` on this machine, or give --ray-address"
    return f"cannot join the Ray cluster at {address} ({reason}): {advice}"


def _check_reachable(address: str) -> None:
    """Find out early whether anything listens: Ray would try for a minute, and end the process."""
    host, _, port = address.rpartition(":")
    if not (host and port.isdecimal()):
        return  # "auto"
    try:
        socket.create_connection((host.strip("[]"), int(port)), _CONNECT_S).close()
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"cannot reach the Ray cluster at {address} ({error}): start it with `ray start --head --port={port}`, or"
            " give another --ray-address"
        ) from error


@dataclass(slots=True, eq=False)
class _Seat:
    """Room for one process.

    Attributes:
        group: Placement group of one bundle.
        nodes: Ids of the nodes among which Ray was to choose.
        agent: The agent there; None means that it was lost, or has not been started.
        node: Address and id of its node; None means that the group has none yet.
    """

    group: PlacementGroup
    nodes: frozenset[str]
    agent: Any = None
    node: tuple[str, str] | None = None


class RayProcess:
    """A worker process on a node; implements `StartedProcess`. No socket of this machine is of use there.

    Args:
        seat: Bundle on which it runs, and whose agent has started it.
        on_end: Callback with the seat when the process has ended.
        on_silence: Callback with the seat when its node did not answer, before `on_end`.
    """

    def __init__(self, seat: _Seat, on_end: Callable[[_Seat], None], on_silence: Callable[[_Seat], None]) -> None:
        assert seat.node is not None, "a process runs on a node"
        address, self.node_id = seat.node
        self.place = f"{address} (Ray node {self.node_id})"
        self.peer_address = f"tcp://{in_address(address)}:*"
        self.listen_fd: int | None = None
        self._seat, self._on_end, self._on_silence = seat, on_end, on_silence
        self._agent = seat.agent
        self._end: asyncio.Future[ProcessEnd] = asyncio.get_running_loop().create_future()
        self._loop = asyncio.get_running_loop()
        self._watcher = asyncio.create_task(self._watch())

    @property
    def has_ended(self) -> bool:
        """Whether the process has ended."""
        return self._end.done()

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process for certain."""
        return False  # Its node would have to say so.

    async def write(self, data: bytes) -> None:
        """Write to the stdin of the process, which stays open."""
        try:
            await _answer(self._agent.write.remote(data), _ANSWER_S)
        except EngineDiedError:  # A process on standby may be on a node that is gone without notice.
            self._give_up()

    def signal(self, number: int) -> None:
        """Send the process a signal, unless it has ended."""
        if self.has_ended:
            return
        with contextlib.suppress(RayError):
            self._agent.signal.remote(number)
        if number == signal.SIGKILL:
            with contextlib.suppress(RuntimeError):  # The loop has ended, and with it this process.
                self._loop.call_soon_threadsafe(self._loop.call_later, _SIGKILL_S, self._give_up)

    async def wait(self) -> ProcessEnd:
        """Wait for the end of the process."""
        return await asyncio.shield(self._end)

    async def _watch(self) -> None:
        try:
            end = ProcessEnd.of(await self._agent.wait.remote())
        except RayError:
            self._seat.agent = None
            end = ProcessEnd(f"its node {self.place} has gone, or Ray's actor there", was_killed=True)
        self._finish(end)

    def _give_up(self) -> None:
        """Take the node for dead: it did not report the end of a killed process. The actor must not come back."""
        if not self.has_ended:
            self._on_silence(self._seat)
            self._finish(ProcessEnd(f"its node {self.place} does not answer", was_killed=True))

    def _finish(self, end: ProcessEnd) -> None:
        if not self._end.done():
            self._end.set_result(end)
            self._on_end(self._seat)


class RayLauncher:
    """Starts worker processes on a Ray cluster; implements `Launcher`.

    Args:
        cluster: The cluster.
        needs: What the server needs of it.
        command: Command of a worker process; each node runs it with its own interpreter.
    """

    def __init__(self, cluster: RayCluster, needs: RayNeeds, command: Sequence[str] = WORKER) -> None:
        self.keys: CurveKeys | None = new_curve_keys()
        self.server_address = f"tcp://{in_address(cluster.address)}:*"
        self._cluster, self._needs, self._arguments = cluster, needs, tuple(command[1:])
        self._seats: list[_Seat] = []
        self._free: list[_Seat] = []  # Those whose process has ended; all have an agent.
        self._bundle: dict[str, float] = {"CPU": float(needs.options.ray_worker_cpus)}
        self._standby: RayProcess | None = None
        self._silent: dict[str, float] = {}  # Ids of nodes that did not answer, and when.
        self._patience = 1  # Factor of the times in which an agent must answer, which silences in a row double.
        self._is_preparing = False  # whether a process on standby is being started

    async def open(self) -> None:
        """Reserve room for all processes of the start, and start their agents."""
        needs = self._needs
        if needs.device == "cuda" or (needs.device == "auto" and await asyncio.to_thread(self._cluster.has_gpus)):
            self._bundle["GPU"] = 1.0
        nodes = await asyncio.to_thread(self._cluster.node_ids)
        self._seats = [_Seat(self._cluster.reserve(self._bundle), nodes) for _ in range(needs.num_processes)]
        start_s = time.monotonic()
        for seat in self._seats:
            if not await self._has_room(seat, start_s, needs.options.ray_timeout):
                raise ConfigError(await self._describe_lack(needs.num_processes, needs.options.ray_timeout))
        timeout_s = max(needs.options.ray_timeout, _AGENT_S)  # Nodes that start together are busy.
        tasks = [asyncio.create_task(self._occupy(seat, timeout_s)) for seat in self._seats]
        for error in await asyncio.gather(*tasks, return_exceptions=True):  # All end, before the cluster is left.
            if isinstance(error, BaseException):
                raise error
        self._free = list(self._seats)

    async def _has_room(self, seat: _Seat, start_s: float, timeout_s: float) -> bool:
        """Wait until a seat has its room, requested from Ray again whenever the nodes to choose from change."""
        while not await asyncio.to_thread(seat.group.wait, _WAIT_S):
            waited_s = time.monotonic() - start_s
            if waited_s > timeout_s:
                return False
            silent = self._silent_nodes() if waited_s < _ELSEWHERE_S else frozenset()
            nodes = await asyncio.to_thread(self._cluster.node_ids) - silent
            if nodes != seat.nodes:
                self._cluster.release(seat.group)
                seat.group, seat.nodes = self._cluster.reserve(self._bundle, silent), nodes
        return True

    def _silent_nodes(self) -> frozenset[str]:
        """Return the ids of the nodes that did not answer a short time ago."""
        now_s = time.monotonic()
        self._silent = {node: when_s for node, when_s in self._silent.items() if now_s - when_s < _SILENT_S}
        return frozenset(self._silent)

    async def _describe_lack(self, num_processes: int, timeout_s: float) -> str:
        room = await asyncio.to_thread(self._cluster.describe_room)
        each = " and ".join(f"{count:g} {kind}" for kind, count in self._bundle.items())
        return (
            f"Ray has no room for {num_processes} process{'es' if num_processes > 1 else ''} of {each} each after"
            f" {timeout_s:g} s: the cluster has {room}. Add nodes, end"
            " other work, start fewer workers or none on standby (--no-standby), or raise --ray-timeout"
        )

    async def _occupy(self, seat: _Seat, timeout_s: float) -> None:
        """Start an agent on a seat, and check its node.

        Args:
            timeout_s: Time in which the agent must answer.

        Raises:
            ConfigError: The node lacks something.
            EngineDiedError: The agent does not answer.
        """
        seat.node = await asyncio.to_thread(self._cluster.host_of, seat.group)
        if seat.node is None:
            raise EngineDiedError("a node of the Ray cluster has just gone")
        seat.agent = self._cluster.agent(seat.group, self._bundle)
        facts: NodeFacts = await self._ask(seat, seat.agent.describe.remote(self._needs.paths), timeout_s)
        address, _ = seat.node
        if facts.version != __version__:
            text = (
                f"the node {address} has Moestro {facts.version}, and this one {__version__}: install the same version"
            )
            raise ConfigError(text)
        if facts.absent:
            text = f"the node {address} has no {facts.absent[0]}: copy it there, to the same path on every node"
            raise ConfigError(text)

    async def _ask(self, seat: _Seat, reply: Awaitable[T], timeout_s: float) -> T:
        """Return the answer of a seat's agent; its node is silent when none comes in time.

        Args:
            timeout_s: Time for the answer where the last one came in time. Each
                silence in a row doubles it, until a process starts.

        Raises:
            EngineDiedError: None came in time, or the node has gone.
        """
        try:
            return await _answer(reply, timeout_s * self._patience)
        except EngineDiedError:
            self._note_silence(seat)
            self._patience = min(2 * self._patience, _MAX_PATIENCE)
            raise

    def _note_silence(self, seat: _Seat) -> None:
        """Avoid the node of a seat, and end its agent, which must not come back."""
        assert seat.node is not None, "an agent runs on a node"
        self._silent[seat.node[1]] = time.monotonic()
        self._cluster.end(seat.agent)
        seat.agent = None

    async def spawn(self, name: Sequence[str], listen_fd: int | None = None) -> StartedProcess:
        """Implement `Launcher.spawn`."""
        assert listen_fd is None, "a socket of this machine is of no use on another one"
        standby, self._standby = self._standby, None
        if standby is not None and not standby.has_ended:
            if standby.node_id not in self._silent_nodes():
                return standby
            standby.signal(signal.SIGKILL)
        return await self._spawn(name, self._needs.options.ray_timeout)

    async def prepare_standby(self) -> None:
        """Implement `Launcher.prepare_standby`: a worker that waits for room waits longer."""
        has_one = self._standby is not None and not self._standby.has_ended
        if not self._needs.has_standby or self._is_preparing or has_one:
            return
        self._is_preparing = True
        try:
            self._standby = await self._spawn(("standby",), _SPARE_S)
        except OSError as error:
            logger.warning("no process is on standby: %s", error)
        finally:
            self._is_preparing = False

    async def _spawn(self, name: Sequence[str], timeout_s: float) -> RayProcess:
        """Start a process where another one has ended, or elsewhere if there is room in time.

        Raises:
            OSError: There is no room, or the node does not answer.
        """
        while self._free:
            seat = self._free.pop()
            if seat.node is not None and seat.node[1] in self._silent_nodes():
                self._drop(seat)
                continue
            with contextlib.suppress(OSError):  # The node has gone since, without notice.
                return await self._start(seat, name)
        silent = self._silent_nodes()
        nodes = await asyncio.to_thread(self._cluster.node_ids) - silent
        seat = _Seat(self._cluster.reserve(self._bundle, silent), nodes)
        self._seats.append(seat)
        return await self._start(seat, name, timeout_s)

    async def _start(self, seat: _Seat, name: Sequence[str], timeout_s: float = 0.0) -> RayProcess:
        """Start a process on a seat, and give the seat back if this fails.

        Args:
            timeout_s: Time in which a seat without an agent must get its room.
        """
        try:
            if seat.agent is None:
                if not await self._has_room(seat, time.monotonic(), timeout_s):
                    raise EngineDiedError(await self._describe_lack(1, timeout_s))
                await self._occupy(seat, _AGENT_S)
            num_threads = self._needs.options.ray_worker_cpus
            await self._ask(seat, seat.agent.start.remote((*self._arguments, *name), num_threads), _ANSWER_S)
        except BaseException as error:
            self._drop(seat)
            if isinstance(error, ConfigError | EngineDiedError):
                raise OSError(str(error)) from error
            raise
        self._patience = 1
        return RayProcess(seat, self._give_back, self._note_silence)

    def _give_back(self, seat: _Seat) -> None:
        if seat.agent is None:
            self._drop(seat)
        else:
            self._free.append(seat)

    def _drop(self, seat: _Seat) -> None:
        if seat not in self._seats:
            return  # The launcher was closed.
        if seat.agent is not None:
            self._cluster.end(seat.agent)
        self._seats.remove(seat)
        self._cluster.release(seat.group)

    async def close(self) -> None:
        """Implement `Launcher.close`."""
        for seat in list(self._seats):
            self._drop(seat)
        self._cluster.leave()

    def kill_all(self) -> None:
        """Implement `Launcher.kill_all`."""
        for seat in list(self._seats):
            if seat.agent is not None:
                self._cluster.end(seat.agent)


async def _answer(reply: Awaitable[T], timeout_s: float) -> T:
    """Return an agent's answer.

    Raises:
        EngineDiedError: None came in time, or its node has gone.
    """
    try:
        async with asyncio.timeout(timeout_s):
            return await reply
    except TimeoutError:
        raise EngineDiedError(f"a node of the Ray cluster did not answer within {timeout_s:g} s") from None
    except RayError as error:
        raise EngineDiedError(f"a node of the Ray cluster failed: {' '.join(str(error).split())[:500]}") from error
