"""What the log of a server on a Ray cluster says about the nodes of its workers."""

from __future__ import annotations

import re

from support.running import Running


def _places(server: Running) -> list[tuple[str, str, str]]:
    return re.findall(r"INFO (.+ \d+) runs on (\S+) \(Ray node (\w+)\)", server.text)


def node_ids(server: Running) -> dict[str, str]:
    """The id of the node on which each worker runs; later lines win."""
    return {worker: node_id for worker, _, node_id in _places(server)}


def node_addresses(server: Running) -> dict[str, str]:
    """The address of the node on which each worker runs; later lines win."""
    return {worker: address for worker, address, _ in _places(server)}
