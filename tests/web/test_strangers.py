"""Raw bytes of strangers at all four ports: every complete request has one answer, and the log shows none of them."""

from __future__ import annotations

import asyncio
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.running import MOESTRO, Running, call, call_admin, complete, free_port, is_idle, wait_until

from moestro.web.ports.heads import MAX_HEAD_BYTES, MAX_HEADERS

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
from shared.raw_http import SECRET, History, Leaving, Port, play, refused, send, unusual

SEED = 0
NUM_HISTORIES = 60  # at each port
_MAX_LINES = 40  # Each kind of fault has a line a minute; a flood has hundreds.


@pytest.fixture(scope="module")
def router(fake: Running, tmp_path_factory) -> Iterator[Running]:
    directory = tmp_path_factory.mktemp("router")
    running = Running((MOESTRO, "route", "--engine", fake.url), directory, admin_port=free_port())
    yield running
    running.kill()


@pytest.fixture(scope="module")
def ports(fake: Running, router: Running) -> tuple[Port, ...]:
    read = (("/health", 200), ("/version", 200))
    return (
        Port("serve clients", fake.address[1], read, "/v1/completions"),
        Port("serve operators", fake.admin_port, (("/statistics", 200),), "/admin/placement"),
        Port("route clients", router.address[1], read, "/v1/completions"),
        Port("route operators", router.admin_port, (("/statistics", 200), ("/metrics", 200)), "/admin/engines"),
    )


@pytest.fixture
def logs(fake: Running, router: Running) -> Iterator[None]:
    """The logs of both processes, which the strangers of a test must not have reached."""
    before = {running: len(running.text) for running in (fake, router)}
    yield
    for running, begin in before.items():
        text = running.text[begin:]
        assert SECRET.decode() not in text
        assert "Traceback" not in text
        assert text.count("\n") <= _MAX_LINES, text


@pytest.mark.usefixtures("logs")
def test_law_random_strangers_get_one_answer_a_request_and_no_log_line(fake, router, ports):
    faults = asyncio.run(play(ports, SEED, range(NUM_HISTORIES)))
    assert not faults, faults
    wait_until(lambda: is_idle(fake))
    assert complete(router, max_tokens=1).status == 200
    assert call(fake, "GET", "/health").status == call_admin(router, "GET", "/statistics").status == 200


@pytest.mark.usefixtures("logs")
def test_every_kind_of_broken_request_is_refused_at_every_port(ports):
    async def all_kinds() -> list[str]:
        cases = [(port, data) for port in ports for data in refused(port)]
        found = await asyncio.gather(*(send(History(broken=data, is_refusable=True), port) for port, data in cases))
        return [
            f"{port.name}: {fault}: {data[:80]!r}" for (port, data), fault in zip(cases, found, strict=True) if fault
        ]

    assert not (found := asyncio.run(all_kinds())), "\n".join(found)


@pytest.mark.usefixtures("logs")
@pytest.mark.parametrize(("num_headers", "num_more"), [(2, 0), (2, 1), (MAX_HEADERS, 0), (MAX_HEADERS + 1, 0)])
def test_the_limit_of_a_head_is_the_same_at_all_ports(ports, num_headers, num_more):
    is_over = num_more > 0 or num_headers > MAX_HEADERS
    for port in ports:
        path = port.paths[0][0].encode()
        lines = [b"Host: localhost\r\n", *([b"A: b\r\n"] * (num_headers - 2))]
        num_left = MAX_HEAD_BYTES - len(path) - sum(len(line) - len(b": \r\n") for line in lines) - len(b"X")
        lines.append(b"X: %b\r\n" % (b"v" * (num_left + num_more)))
        data = b"GET %b HTTP/1.1\r\n%b\r\n" % (path, b"".join(lines))
        with socket.create_connection(("127.0.0.1", port.number)) as connection:
            connection.sendall(data)
            assert connection.recv(12)[9:] == (b"431" if is_over else b"200"), port.name


@pytest.mark.usefixtures("logs")
@pytest.mark.parametrize("leaving", Leaving)
def test_unusual_requests_of_clients_that_stay_or_leave_write_no_log(ports, leaving):
    async def all_kinds() -> list[str]:
        cases = [(port, data) for port in ports for data in (*unusual(port), *refused(port))]
        made = [History(broken=data, leaving=leaving, num_sent=len(data)) for _, data in cases]
        found = await asyncio.gather(*(send(each, port) for each, (port, _) in zip(made, cases, strict=True)))
        return [
            f"{port.name}: {fault}: {data[:80]!r}" for (port, data), fault in zip(cases, found, strict=True) if fault
        ]

    assert not (found := asyncio.run(all_kinds())), "\n".join(found)
