"""`moestro route` before a real server whose KV blocks are larger than the router's blocks of text."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from gateway.test_command import ROUTE
from support.running import Running, complete, metrics, wait_until

BLOCK = 256  # tokens, against 32 of a text block of 128 bytes
SHARED = "You are a careful assistant. Answer in one word.\n" * 6  # two text blocks and more, below one of the engine


@pytest.fixture(scope="module")
def pair(real_command, tmp_path_factory) -> Iterator[tuple[Running, Running]]:
    server = Running((*real_command, "--block-size", str(BLOCK)), tmp_path_factory.mktemp("large blocks"))
    flags = ("--engine", server.url, "--route-policy", "lmetric", "--text-block-bytes", "128")
    route = Running((*ROUTE, *flags), tmp_path_factory.mktemp("route"))
    yield server, route
    route.kill()
    server.kill()


def hits(route: Running) -> tuple[float, float]:
    """Predicted and actual hits, tokens."""
    found = metrics(route)
    names = ("moestro:route_predicted_hit_tokens_total", "moestro:route_hit_tokens_total")
    predicted, actual = (sum(value for key, value in found.items() if key.startswith(name)) for name in names)
    return predicted, actual


def test_a_common_beginning_below_an_engines_block_is_no_hit_and_one_above_it_is(pair):
    _, route = pair
    wait_until(lambda: "1 of 1 up" in route.text)
    for i in range(8):
        reply = complete(route, prompt=f"{SHARED}Question {i}?", max_tokens=1)
        assert reply.status == 200, reply.body
    wait_until(lambda: metrics(route)["moestro:route_requests_total"] == 8)
    assert hits(route) == (0, 0)
    for i in range(8):
        assert complete(route, prompt=f"{SHARED * 8}Question {i}?", max_tokens=1).status == 200
    predicted, actual = hits(route)
    assert actual >= 7 * BLOCK
    assert predicted > 0
