"""Fixtures that tests of this room share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.running import MOESTRO, Running


@pytest.fixture(scope="module")
def routed(server, tmp_path_factory) -> Iterator[Running]:
    """A router before the real server."""
    command = (MOESTRO, "route", "--engine", server.url, "--admin-port", "0")
    router = Running(command, tmp_path_factory.mktemp("route"))
    yield router
    router.kill()


@pytest.fixture(params=["direct", "routed"])
def place(request, server) -> Running:
    """The real server, and a router before it."""
    return server if request.param == "direct" else request.getfixturevalue("routed")
