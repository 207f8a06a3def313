"""A rank process: reads its launch spec from stdin and runs the rank's loop. The caller supplies the rank.

The process serves until the API server sends `Shutdown`, or until stdin ends because the API server is gone.
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
from pathlib import Path
from typing import NoReturn

from moestro.config.launch_spec import STACK_DUMP, STANDBY, LaunchSpec, read_launch_spec
from moestro.config.linux_process import bind_to_cores, die_with_parent, has_opened_gpu, rename_last_arguments
from moestro.config.user_code import accept_user_code
from moestro.core.request import ModelInfo
from moestro.engine.rank import Rank
from moestro.errors import ConfigError, EngineDiedError, GroupLostError, MoestroError
from moestro.wire.messages import ClockReading, Failed, Phase, ReadClock, Ready, Shutdown, identity_of
from moestro.worker.channel import ORPHANED, Beats, Channel
from moestro.worker.group_process import LoadPart, serve_group_worker, worker_sizes
from moestro.worker.rank_builder import OnPhase, Send, side_jobs_of
from moestro.worker.rank_loop import following_grammars, run_rank

# A process on standby: it has loaded a worker's libraries, and forks a worker whenever the API server wants one.
#
# A worker therefore starts in some hundredths of a second, any number of them at once, and they share the libraries'
# memory. Libraries must not have begun to compute: threads and an opened GPU do not survive a fork.

logger = logging.getLogger(__name__)

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
    while True:
        name, descriptors, _, _ = socket.recv_fds(control, _MAX_NAME, 2)
        if not name:
            return False
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
