"""Machines on this machine: network namespaces on one bridge, each with its own address and its own /tmp/ray."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path

_ALL_PROTOCOLS = 3  # ETH_P_ALL
_RUN_THERE = 'mount --bind "$0" /tmp/ray && exec "$@"'


def why_not() -> str:
    """Why this machine cannot have namespaces; "" if it can."""
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        return "needs root, iproute2 and util-linux"
    probe, bridge = f"moestro-probe-{os.getpid()}", f"mop{os.getpid()}"
    if _ip("netns", "add", probe).returncode:
        return "this machine permits no network namespaces"
    _ip("netns", "del", probe)
    if _ip("link", "add", bridge, "type", "bridge").returncode:
        return "this machine permits no bridges"
    _ip("link", "del", bridge)
    return ""


def _ip(*arguments: str) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(["ip", *arguments], capture_output=True, check=False)


class Namespaces:
    """`num` machines with the addresses 10.99.0.1 and following; this process reaches them too."""

    def __init__(self, num: int, directory: Path) -> None:
        self._directory, self._mark = directory, os.getpid() % 10_000
        self._bridge = f"mo{self._mark}br"
        self.addresses = [f"10.99.0.{i + 1}" for i in range(num)]
        Path("/tmp/ray").mkdir(exist_ok=True)
        self._must("link", "add", self._bridge, "type", "bridge")
        self._must("addr", "add", "10.99.0.254/24", "dev", self._bridge)
        self._must("link", "set", self._bridge, "up")
        for i, address in enumerate(self.addresses):
            name, port = self._name(i), self._port(i)
            self._must("netns", "add", name)
            self._must("link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", name)
            self._must("link", "set", port, "master", self._bridge, "up")
            self._must("-n", name, "addr", "add", f"{address}/24", "dev", "eth0")
            self._must("-n", name, "link", "set", "eth0", "up")
            self._must("-n", name, "link", "set", "lo", "up")
            (directory / str(i)).mkdir()

    def command(self, machine: int, command: Sequence[str]) -> list[str]:
        """`command`, to be run on a machine. Signals reach it itself."""
        there = ["ip", "netns", "exec", self._name(machine), "unshare", "-m", "sh", "-c", _RUN_THERE]
        return [*there, str(self._directory / str(machine)), *command]

    def cut(self, machine: int) -> None:
        """Make a machine vanish from the network, without a word."""
        self._must("link", "set", self._port(machine), "down")

    def capture(self, machine: int) -> Capture:
        return Capture(self._port(machine))

    def close(self) -> None:
        for i in range(len(self.addresses)):
            _ip("netns", "del", self._name(i))
            _ip("link", "del", self._port(i))
        _ip("link", "del", self._bridge)

    def _name(self, machine: int) -> str:
        return f"mo{self._mark}-{machine}"

    def _port(self, machine: int) -> str:
        return f"mo{self._mark}p{machine}"

    @staticmethod
    def _must(*arguments: str) -> None:
        done = _ip(*arguments)
        assert done.returncode == 0, (arguments, done.stderr)


class Capture:
    """Looks for byte strings in all that passes a port, as an eavesdropper on the wire could."""

    def __init__(self, port: str) -> None:
        self._socket = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(_ALL_PROTOCOLS))
        self._socket.bind((port, 0))
        self._socket.settimeout(0.2)
        self._packets: list[bytes] = []
        self._is_over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over:
            with contextlib.suppress(TimeoutError, OSError):
                self._packets.append(self._socket.recv(65536))

    def stop(self) -> list[bytes]:
        """The packets."""
        self._is_over = True
        self._thread.join()
        self._socket.close()
        return self._packets
