"""What happens before any process starts: refusals, the bound ports, and the private directory of the ranks' socket.

The checks refuse what this machine, this checkpoint or this network cannot do; workers check the rest.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from moestro.config.linux_process import available_memory_bytes, has_gpu
from moestro.config.serve_settings import ServerSettings, ServeSettings
from moestro.cost.networks import network_from_config
from moestro.errors import ConfigError
from moestro.files.checkpoint import Checkpoint, check_files, read_checkpoint
from moestro.files.config_fields import num_experts_of
from moestro.web.ports.connections import MAX_OPERATOR_CONNECTIONS, allow_open_files, bound_socket, files_of_port
from moestro.web.ports.lifecycle import process_age_s
from moestro.wire.messages import Phase

logger = logging.getLogger(__name__)
ADMIN_HOST = "127.0.0.1"
# A placement of DeepSeek-V3 on 320 devices with its shares and moves takes 2 MB.
ADMIN_BODY_BYTES = 8 << 20


class StartClock:
    """Records consecutive phases since the process started.

    Attributes:
        phases: Phases so far; their sum is the time from the start of the process to the last mark.
    """

    def __init__(self) -> None:
        self._since = time.monotonic() - process_age_s()
        self.phases: list[Phase] = []

    def mark(self, name: str) -> None:
        """End the phase that began at the last mark, and call it `name`."""
        now = time.monotonic()
        self.phases.append(Phase(name, now - self._since))
        self._since = now

    def mark_engines(self, phases: Sequence[Sequence[Phase]]) -> None:
        """Add the phases of the slowest engine. The next phase includes the time that messages took to arrive."""
        slowest = max(phases, key=lambda own: sum(phase.seconds for phase in own))
        self.phases.extend(slowest)
        self._since += sum(phase.seconds for phase in slowest)


_GIB = 1 << 30


@contextlib.contextmanager
def bound_ports(settings: ServerSettings) -> Iterator[tuple[socket.socket, socket.socket | None]]:
    """Bind the ports of clients and of operators before anything is loaded, and close them with the block."""
    with contextlib.ExitStack() as ports:
        clients = ports.enter_context(bound_socket(settings.host, settings.port))
        operators = None
        if settings.admin_port is not None:
            operators = ports.enter_context(bound_socket(ADMIN_HOST, settings.admin_port, "--admin-port"))
        yield clients, operators


def allow_files(settings: ServeSettings) -> None:
    """Let this process open a file for each connection and process that it may have."""
    num_processes = settings.num_engines
    if settings.stepping.mode == "async":
        num_processes = settings.group.num_places
    num_operators = 0 if settings.server.admin_port is None else files_of_port(MAX_OPERATOR_CONNECTIONS)
    allow_open_files(files_of_port(settings.server.max_connections) + num_operators, num_processes)


def check_start(settings: ServeSettings) -> None:
    """Check the checkpoint's files, and the number of workers against its experts and the machine's memory.

    Raises:
        ConfigError: A file is refused, or there are too many workers; the text says what to do.
    """
    if settings.model.tokenizer is not None:
        check_files(settings.model.tokenizer_directory)
    if settings.paced is not None:
        return  # A paced device has the memory and the network of another machine.
    has_weights = settings.model.load_format != "dummy"
    checkpoint = read_checkpoint(Path(settings.model.model), has_weights=has_weights)
    _check_experts(settings, num_experts_of(checkpoint.config))
    if settings.model.device == "cpu" or (settings.model.device == "auto" and not has_gpu()):
        _check_memory(settings, checkpoint, available_memory_bytes())


def _check_experts(settings: ServeSettings, num_experts: int | None) -> None:
    """Compare the number of workers with the experts. None means that workers find the number when they load."""
    mode = settings.stepping.mode
    num_shares = {"async": settings.group.num_shares, "ep": settings.processes.engines}.get(mode, 1)
    if num_experts is None or num_shares <= num_experts:
        return
    if mode == "ep":
        raise ConfigError(
            f"--mode ep needs an expert for each engine: the model has {num_experts} experts a layer, so give"
            f" --engines {num_experts} or less"
        )
    flag = "--experts" if settings.group.num_expert_workers else "--attention"
    raise ConfigError(
        f"--mode {mode} spreads experts over {num_shares} workers, and the network has {num_experts} experts a layer:"
        f" lower {flag}, or take another --mode"
    )


def _check_memory(settings: ServeSettings, checkpoint: Checkpoint, available: int | None) -> None:
    """Compare the memory of all engines, which each load the whole network, with what is left."""
    model, num_engines = settings.model, settings.num_engines
    weights = _weight_bytes(checkpoint)
    cache = 0 if model.num_gpu_blocks_override is not None else model.kv_cache_bytes
    if available is None:
        return
    if num_engines * (weights + cache) <= available:
        _check_host_memory(model.kv_offloading_size, available / num_engines - weights - cache, num_engines)
        return
    flag = "--attention" if settings.stepping.mode == "async" else "--engines"
    raise ConfigError(
        f"{num_engines} engines need {num_engines * (weights + cache) / _GIB:.1f} GiB of memory, each"
        f" {weights / _GIB:.1f} for weights and {cache / _GIB:.1f} for KV, and {available / _GIB:.1f} are free: lower"
        f" {flag}{' or --kv-cache-memory-bytes' if cache else ''}"
    )


def _check_host_memory(wanted_gib: float, free: float, num_engines: int) -> None:
    """Compare the host memory of each engine on a CPU with `free`, the bytes that its weights and its KV leave."""
    if wanted_gib * _GIB <= free:
        return
    each = f" for each of {num_engines} engines" if num_engines > 1 else ""
    raise ConfigError(
        f"--kv-offloading-size {wanted_gib:g} GiB{each} is more than this host has free: beside weights and KV,"
        f" {free / _GIB:.2f} GiB{each} fit. Give less, or 0 to compute evicted KV again."
    )


def _weight_bytes(checkpoint: Checkpoint) -> int:
    """Return the bytes of the weight files; of dummy weights those that the config's sizes make, or 0 if unknown."""
    if checkpoint.tensors:
        return sum(path.stat().st_size for path in {tensor.file for tensor in checkpoint.tensors.values()})
    try:
        return int(network_from_config("config.json", checkpoint.config).weight_bytes())
    except ConfigError:
        return 0  # The family's own values of missing sizes are known to a worker.


_PREFIX = "moestro-"
_LOCK = "lock"  # Locked while the server lives; the kernel releases the lock, however the process ends.
_NEW_LOCK = "lock.new"


@contextlib.contextmanager
def private_directory() -> Iterator[Path]:
    """Yield a directory that only this user can enter, and remove it afterwards. First remove those of dead servers."""
    _sweep(Path(tempfile.gettempdir()))
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX))  # Created with mode 0700.
    lock = _lock(directory)
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)
        os.close(lock)


def _lock(directory: Path) -> int:
    """Lock `directory`, and return the descriptor that holds the lock.

    The lock file gets its final name only once it is locked. An unlocked file thus belongs to a dead server, never to
    one that is just starting.
    """
    lock = os.open(directory / _NEW_LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    with contextlib.suppress(OSError):  # On a file system without locks, no other server removes the directory.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        (directory / _NEW_LOCK).rename(directory / _LOCK)
    return lock


def _sweep(parent: Path) -> None:
    """Remove the directories of this user's dead servers from `parent`. A failure is logged and does not raise."""
    try:
        found = [path for path in parent.iterdir() if path.name.startswith(_PREFIX)]
    except OSError as error:
        logger.warning("cannot look for directories of earlier servers in %s: %s", parent, error)
        return
    for directory in found:
        with contextlib.suppress(OSError):  # No lock file, no access, already removed, or locked by a live server.
            _remove_if_dead(directory)


def _remove_if_dead(directory: Path) -> None:
    """Remove `directory` if it belongs to a dead server of this user; OSError if it has no lock or is locked."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        status = os.fstat(opened)
        if status.st_uid != os.geteuid() or stat.S_IMODE(status.st_mode) != 0o700:
            return
        lock = os.open(_LOCK, os.O_RDWR | os.O_NOFOLLOW, dir_fd=opened)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory)
            logger.info("removed %s, the directory of a killed server", directory)
        finally:
            os.close(lock)
    finally:
        os.close(opened)
