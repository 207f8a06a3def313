"""A process on standby: it has loaded a worker's libraries, and forks a worker whenever the API server wants one.

A worker therefore starts in some hundredths of a second, any number of them at once, and they share the libraries'
memory. Libraries must not have begun to compute: threads and an opened GPU do not survive a fork.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import time

from moestro.config.launch_spec import STANDBY
from moestro.config.linux_process import die_with_parent, has_opened_gpu, rename_last_arguments

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
