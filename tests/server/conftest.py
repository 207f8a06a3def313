"""Fixtures that tests of this room share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from support.running import Running, routing


@pytest.fixture(scope="module")
def routed(server, tmp_path_factory) -> Iterator[Running]:
    """A router before the real server."""
    with routing(server, tmp_path_factory.mktemp("route")) as router:
        yield router


@pytest.fixture(params=["direct", "routed"])
def place(request, server) -> Running:
    """The real server, and a router before it."""
    return server if request.param == "direct" else request.getfixturevalue("routed")
