"""A rank process: reads its launch spec from stdin and runs the rank's loop, for a rank alone or a worker of a group.

The caller supplies the rank. The process serves until the API server sends `Shutdown`, or until stdin ends because the
API server is gone.

A worker of a group in `async` mode is a home with attention, a worker with experts, or both in one process:

load      open the device of this worker's part, and listen at its address
join      tell the coordinator; it answers with the members once all have joined
connect   say hello to the others, and wait for theirs
serve     the loop of all ranks, with one inbox for the API server, the other workers and timers
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from moestro.config.launch_spec import STACK_DUMP, STANDBY, GroupSpec, LaunchSpec, read_launch_spec
from moestro.config.linux_process import bind_to_cores, die_with_parent, has_opened_gpu, rename_last_arguments
from moestro.config.user_files import accept_user_code
from moestro.core.experts.expert_table import ExpertLayers
from moestro.core.load_figures import PaceCounts
from moestro.core.request import ModelInfo
from moestro.core.stages import StagedDevice
from moestro.engine.rank import Rank
from moestro.engine.settings import SchedulerOptions
from moestro.errors import ConfigError, EngineDiedError, GroupLostError, MoestroError
from moestro.flow.dispatcher import PeerSettings
from moestro.flow.executor import FlowExecutor
from moestro.flow.registry import make_step_policy
from moestro.wire.hop_frames import Hello, HopLimits, TensorFrames
from moestro.wire.messages import ClockReading, Failed, Joined, Members, Phase, ReadClock, Ready, Shutdown, identity_of
from moestro.wire.sockets import ListenAddress
from moestro.worker.channel import ORPHANED, Beats, Channel
from moestro.worker.peer_inbox import PeerInbox, SlotMemory, near_workers
from moestro.worker.peer_links import LinkPace, PeerLinks
from moestro.worker.rank_builder import ExpertRank, OnPhase, Send, make_home, side_jobs_of
from moestro.worker.rank_loop import following_grammars, run_rank
from moestro.worker.two_phase import Channels, TwoPhase

logger = logging.getLogger(__name__)


# A worker of a group: its sizes, its part, and its way from the launch spec to the loop.


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerSizes:
    """Sizes of a worker's device.

    Attributes:
        num_rows: tokens that may be in the network at once; 0 without attention.
        num_remote_places: tokens of others that may be among the worker's experts; 0 without experts.
    """

    num_rows: int
    num_remote_places: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WorkerPart:
    """What a worker has loaded.

    Attributes:
        device: computes the worker's part of the network.
        num_experts: logical experts of a layer of the network.
        info: the whole network, and the KV cache. None means a worker without attention.
        tensors: turns the device's tensors into frames.
        memory: of the experts, which other ones can replace; None without experts.
        launch_ahead: items with the device at once.
        link_pace: holds messages for as long as a modelled link takes; None with a device that is not paced.
        pace_counts: supplier of the counts of a paced device.
        channels: opens channels for large tensors to other workers. None means that all tensors go with their messages,
            as with a device that computes nothing, or encrypted ones.
        on_home: called with the rank of a worker with attention, which is made after its device.
    """

    device: StagedDevice
    num_experts: int
    info: ModelInfo | None
    tensors: TensorFrames
    memory: SlotMemory | None = None
    launch_ahead: int = 1
    link_pace: LinkPace | None = None
    pace_counts: Callable[[], PaceCounts | None] = lambda: None
    channels: Channels | None = None
    on_home: Callable[[Rank], None] = lambda _: None


# (spec, sizes, called with the name of each phase) -> what the worker has loaded
LoadPart = Callable[[LaunchSpec, WorkerSizes, OnPhase], WorkerPart]


def num_home_rows(limits: SchedulerOptions) -> int:
    """Compute the tokens that a home has in the network at most.

    A sequence has one unit in flight, and most units are decodes; the classes have as many places each.
    """
    return 2 * limits.max_num_seqs + limits.max_num_batched_tokens


def worker_sizes(spec: LaunchSpec, group: GroupSpec) -> WorkerSizes:
    """Compute the sizes of a worker's device from the settings."""
    num_rows = num_home_rows(spec.scheduler)
    return WorkerSizes(
        num_rows=num_rows if group.is_home else 0,
        num_remote_places=(group.stepping.expert_credits or num_rows) * group.num_homes if group.has_experts else 0,
    )


def serve_group_worker(spec: LaunchSpec, group: GroupSpec, channel: Channel, part: WorkerPart) -> None:
    """Run one worker, which has loaded its part, until the API server asks it to end.

    Raises:
        EngineDiedError: another worker did not connect.
    """
    shape = part.device.shape
    layers = tuple(layer for layer, is_sparse in enumerate(shape.is_sparse) if is_sparse)
    experts = ExpertLayers(num_layers=shape.num_layers, layers=layers, num_experts=part.num_experts)
    limits = HopLimits(
        worker=group.worker,
        num_workers=group.num_workers,
        num_layers=shape.num_layers,
        num_chosen=shape.num_chosen,
        num_slots=shape.num_experts,
        num_places=shape.num_places,
        num_remote_places=shape.num_remote_places,
    )
    endpoint = ListenAddress(spec.peer_address, spec.keys)
    way = _two_phase(group, part) if part.link_pace is None else part.link_pace
    hello = Hello(group.worker, spec.launch, "cpu" if part.channels is None else part.channels.device_name)
    links = PeerLinks(hello, endpoint, part.tensors, limits, way)
    try:
        inbox = PeerInbox(group, channel, links, part.memory, part.pace_counts)
        channel.send(Joined(links.address, experts))
        members = inbox.await_members()
        if members is None:
            return
        executor = _executor(spec, group, part, links, members)
        inbox.use(executor)
        if not inbox.await_peers():
            return
        note = "" if part.channels is None else part.channels.describe(list(links.devices.values()))
        if note:
            logger.info("%s", note)
        if part.info is None:
            channel.send(Ready(None))
            run_rank(ExpertRank(executor), inbox, channel.now_ns)
            return
        home = make_home(spec, executor, part.info)
        part.on_home(home)
        with following_grammars(spec, home, part.info, inbox) as source:
            channel.send(Ready(part.info))
            run_rank(home, source, channel.now_ns, side_jobs_of(spec, home))
    finally:
        links.close()


def _two_phase(group: GroupSpec, part: WorkerPart) -> TwoPhase | None:
    """Return how large tensors travel; None means with their messages."""
    if part.channels is None:
        return None
    return TwoPhase(channels=part.channels, given_limit=group.stepping.inline_limit)


def _executor(spec: LaunchSpec, group: GroupSpec, part: WorkerPart, links: PeerLinks, members: Members) -> FlowExecutor:
    stepping = group.stepping
    name = stepping.attention_step_policy if group.is_home else stepping.expert_step_policy
    peers = PeerSettings(
        worker=group.worker,
        num_workers=group.num_workers,
        table=members.table.whole_table(),
        num_credits=stepping.expert_credits or num_home_rows(spec.scheduler),
        dtype=part.tensors.dtype,
        incarnation=spec.launch,
        counts_visits=spec.records_events,
        is_near=near_workers(members.addresses, group.worker),
    )
    policy = make_step_policy(name, spec.stepping.max_be_wait)
    return FlowExecutor(part.device, policy, part.launch_ahead, peers, links)


# A process on standby: it has loaded a worker's libraries, and forks a worker whenever the API server wants one.
#
# A worker therefore starts in some hundredths of a second, any number of them at once, and they share the libraries'
# memory. Libraries must not have begun to compute: threads and an opened GPU do not survive a fork.


_MAX_NAME = 64  # bytes
_ADOPTED_WITHIN_S = 5.0


def is_standby() -> bool:
    """Whether this process was started to fork workers."""
    return tuple(sys.argv[-len(STANDBY) :]) == STANDBY


def fork_workers() -> bool:
    """Fork a worker for each message of the API server, until the server is gone.

    A message is the worker's name with the descriptors of its stdin and of a socket that it inherits, if any. The
    answer is the worker's process id and the number of that socket. The API server becomes the worker's parent, because
    the process between the two ends at once. A process with the name of this one is another one on standby: its stdin
    is the socket from which it reads its own messages.

    Returns:
        True in a worker, whose stdin is now its own; False in a process on standby.
    """
    server = os.getppid()
    control = socket.socket(fileno=os.dup(0))
    if has_opened_gpu():
        logger.warning("the process on standby ends, and each worker loads its own libraries: one has opened the GPU")
        return False
    with contextlib.suppress(ConnectionError):  # the server has ended meanwhile
        while True:
            name, descriptors, _, _ = socket.recv_fds(control, _MAX_NAME, 2)
            if not name:
                break
            between = os.fork()
            if between == 0:
                if os.fork():
                    os._exit(0)
                is_worker = name.decode() != STANDBY[-1]
                _become_child(descriptors[0], server)
                if is_worker:
                    rename_last_arguments(STANDBY[0], name.decode())
                control.send(" ".join(map(str, (os.getpid(), *descriptors[1:]))).encode())
                control.close()
                if is_worker:
                    return True
                control = socket.socket(fileno=os.dup(0))
                continue
            for descriptor in descriptors:
                os.close(descriptor)
            os.waitpid(between, 0)
    return False


def _become_child(stdin: int, server: int) -> None:
    """Become a child of the API server, with a session and a stdin of its own."""
    os.setsid()  # Ctrl-C reaches only the API server
    os.dup2(stdin, 0)
    os.close(stdin)
    deadline = time.monotonic() + _ADOPTED_WITHIN_S
    while os.getppid() != server:  # until the process between has ended
        if time.monotonic() > deadline:
            os._exit(1)
        time.sleep(0.001)
    die_with_parent()
    if os.getppid() != server:
        os._exit(1)


_NUM_QUESTIONS = 8  # of which the one with the fastest answer counts: the others waited in some queue
_ANSWER_S = 10.0


def server_clock(channel: Channel) -> Callable[[], int]:
    """Measure how far the API server's clock is from this machine's, and return a function that reads it, in ns.

    The error is at most half of the fastest round trip. Later drift is not corrected.

    Raises:
        EngineDiedError: the API server does not answer.
    """
    _, offset_ns = min(_ask(channel) for _ in range(_NUM_QUESTIONS))
    return lambda: time.monotonic_ns() + offset_ns


def _ask(channel: Channel) -> tuple[int, int]:
    """Return the duration of one round trip, and the offset that it suggests."""
    requested_ns = time.monotonic_ns()
    channel.send(ReadClock(requested_ns))
    # Nothing else is sent to a rank that is not ready, except for the end of its process.
    for message in channel.receive(_ANSWER_S):
        answered_ns = time.monotonic_ns()
        if isinstance(message, ClockReading) and message.requested_ns == requested_ns:
            return answered_ns - requested_ns, message.server_ns - (requested_ns + answered_ns) // 2
    raise EngineDiedError(f"the API server did not tell its time within {_ANSWER_S:g} s")


Build = Callable[[LaunchSpec, OnPhase, Send], tuple[Rank, ModelInfo]]

# A rank that lost its group waits so long for the API server, which ends the whole group when it sees which rank ended
# first. The API server sees the end of a process at once, and waits 0.2 s for its last messages.
_GROUP_END_S = 2.0


def run_process(build: Build, load_part: LoadPart) -> int:
    """Run one rank, or one worker of a group; returns the exit status of the process.

    In the process on standby, run the worker of each process that it forks.

    Args:
        build: function that makes a rank that has the whole network, and its model information.
        load_part: function that loads the part of a worker of a group.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the API server decides when to leave
    die_with_parent()  # if the API server ended before, stdin has ended too
    if is_standby() and not fork_workers():
        return ORPHANED
    faulthandler.enable()
    faulthandler.register(STACK_DUMP)  # needs no interpreter lock: it also works while the main loop hangs in a kernel
    accept_user_code()
    try:
        spec = read_launch_spec(sys.stdin.buffer)
    except EOFError:  # the API server ended while this process loaded its libraries
        return ORPHANED
    _show_name(spec)
    logging.basicConfig(level=spec.log_level.upper(), format=f"%(levelname)s {spec.name}: %(message)s")
    if spec.paced is not None:
        _sharpen_timers()
    if spec.cores and not bind_to_cores(spec.cores):  # before other threads begin
        logging.getLogger(__name__).warning("cannot be bound to the cores %s", spec.cores)
    beats = Beats(spec.beat_ms, spec.idle_beat_ms)
    channel = Channel(spec.address, identity_of(spec.rank, spec.launch), sys.stdin.fileno(), beats, spec.keys)
    try:
        _serve(spec, channel, build, load_part)
    except GroupLostError as error:
        if _is_dismissed(channel):  # The group is stopping, and another rank left first.
            return 0
        channel.send(Failed(_cause(error)))
        return 1
    except Exception as error:
        if not isinstance(error, ConfigError):
            traceback.print_exc()
        channel.send(Failed(_cause(error), isinstance(error, ConfigError)))
        return 1
    else:
        return 0
    finally:
        channel.close()


def _serve(spec: LaunchSpec, channel: Channel, build: Build, load_part: LoadPart) -> None:
    if spec.keys is not None:  # the API server may be on another machine
        channel.now_ns = server_clock(channel)
    on_phase = _PhaseTimer(spec.launched_ns, channel)
    if spec.group is not None:
        group = spec.group
        serve_group_worker(spec, group, channel, load_part(spec, worker_sizes(spec, group), on_phase))
    else:
        rank, info = build(spec, on_phase, channel.send)
        with following_grammars(spec, rank, info, channel) as inbox:
            channel.send(Ready(info))
            run_rank(rank, inbox, channel.now_ns, side_jobs_of(spec, rank))


def _is_dismissed(channel: Channel) -> bool:
    """Wait for a shutdown message. False means that none came within `_GROUP_END_S`."""
    until_ns = time.monotonic_ns() + int(_GROUP_END_S * 1e9)
    while (left_ns := until_ns - time.monotonic_ns()) > 0:
        if any(isinstance(message, Shutdown) for message in channel.receive(left_ns / 1e9)):
            return True
    return False


def _show_name(spec: LaunchSpec) -> None:
    """Make the process's name in `ps -o comm` and `top` say what it is; a standby's command line cannot know."""
    with contextlib.suppress(OSError):  # not Linux
        Path("/proc/self/comm").write_text(f"{spec.name.kind}-{spec.name.number}")


def _sharpen_timers() -> None:
    """Make the main thread wake when it asks to: Linux lets timers be 50 us late to save power.

    Without it, the end of a modelled item is taken in 67 us late in the median on an idle core; with it, 17 us.
    """
    with contextlib.suppress(OSError):  # not Linux, or a sandbox without /proc
        Path("/proc/self/timerslack_ns").write_text("1")


def leave(status: int) -> NoReturn:
    """End this process with `status` at once.

    The interpreter would take seconds to unload torch's modules, and nothing is left to save.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


class _PhaseTimer:
    """Called when a phase begins, it reports the previous one, so that together they account for every second."""

    def __init__(self, launched_ns: int, channel: Channel) -> None:
        self._name, self._since_ns = "load libraries", launched_ns
        self._channel = channel

    def __call__(self, name: str) -> None:
        now_ns = self._channel.now_ns()
        self._channel.send(Phase(self._name, (now_ns - self._since_ns) / 1e9))
        self._name, self._since_ns = name, now_ns


def _cause(error: Exception) -> str:
    """Describe an error in one line; errors of other packages get their type, which often says more than the text."""
    text = " ".join(str(error).split())
    return text if isinstance(error, MoestroError) else f"{type(error).__name__}: {text}"
