"""Clusters of Ray that ask for a token, and what a server's log says about the nodes of its workers."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from support.running import Running


@contextmanager
def ray_token() -> Iterator[None]:
    """Have the Ray clusters of the block ask for a token. Without it, what they do depends on files in the home."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN", "a token of Moestro's tests")
        patch.setenv("RAY_worker_niceness", "0")  # By default 15: other tests would then leave workers no time.
        yield


def _places(server: Running) -> list[tuple[str, str, str]]:
    return re.findall(r"INFO (.+ \d+) runs on (\S+) \(Ray node (\w+)\)", server.text)


def node_ids(server: Running) -> dict[str, str]:
    """The id of the node on which each worker runs; later lines win."""
    return {worker: node_id for worker, _, node_id in _places(server)}


def node_addresses(server: Running) -> dict[str, str]:
    """The address of the node on which each worker runs; later lines win."""
    return {worker: address for worker, address, _ in _places(server)}
