"""A stranger sends raw bytes to all four ports, in a few known ways and then at random; no log may show it.

    python bench/robustness/strangers/raw_http.py [--seconds N] [--seed S] [--source SRC] [--json FILE]

Known ways: each is sent 200 times, and its figure is the number of log lines that it causes. Idle connections to an
operators' port: the other port must answer all the same. Random histories: complete and broken requests in pieces, by
clients that close, reset and half-close. Each complete request must be answered once, in order; broken ones are
refused or cut off; no status is 500. The logs have no traceback and no byte of a request.
"""

from __future__ import annotations

import asyncio
import contextlib
import resource
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from frame import Place, run

sys.path.insert(0, str(Path(__file__).parents[2]))
from shared.raw_http import SECRET, Port, play
from shared.server import free_port

NUM_EACH = 200  # connections of each known way
NUM_IDLE = 500  # connections that send nothing
OPEN_FILES = 600  # soft limit with which those servers start; both ports share it
OPEN_STREAM = b'{"prompt": "a", "stream": true, "max_tokens": 1}'
WAYS = {
    "bytes behind HTTP/1.0": b"GET /health HTTP/1.0\r\n\r\n" + SECRET,
    "Expect and gone": b"POST /x HTTP/1.1\r\nHost: localhost\r\nExpect: 100-continue\r\nContent-Length: 9\r\n\r\n",
    "Expect beyond ASCII": b"GET /health HTTP/1.1\r\nHost: localhost\r\nExpect: \xff\r\n\r\n",
    "Host in brackets": b"GET /statistics HTTP/1.1\r\nHost: [x]\r\n\r\n",
    "a key with a control byte": b"GET / HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer " + SECRET + b"\x01\r\n\r\n",
    "a stream and gone": b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    b"Content-Length: %d\r\n\r\n" % len(OPEN_STREAM) + OPEN_STREAM,
}


async def attack(place: Place) -> dict[str, object]:
    ports = {name: free_port() for name in ("serve", "route")}
    engine = place.serving("--admin-port", str(ports["serve"]))
    with engine as server, place.routing(server, flags=("--admin-port", str(ports["route"]))) as router:
        all_ports = [
            _clients("serve clients", server.url),
            Port("serve operators", ports["serve"], (("/statistics", 200),), "/admin/placement"),
            _clients("route clients", router.url),
            Port("route operators", ports["route"], (("/statistics", 200), ("/metrics", 200)), "/admin/engines"),
        ]
        lines = {f"{way}, {port.name}": await _lines_of(place, data, port) for way, data in WAYS.items()
                 for port in all_ports}  # fmt: skip
        faults = await _play_for(place.seconds, place.seed, all_ports)
        marked = {name: place.log(name).count(SECRET.decode()) for name in ports}
    idle = {verb: await _idle(place, verb) for verb in ports}
    return {
        "log_lines": {way: count for way, count in lines.items() if count},
        "histories": faults.pop("histories", 0),
        "faults": dict(faults.most_common(40)),
        "secrets_in_log": marked,
        "client_port_beside_idle_operators": idle,
    }


def _clients(name: str, url: str) -> Port:
    return Port(name, int(url.rpartition(":")[2]), (("/health", 200), ("/version", 200)), "/v1/completions")


async def _lines_of(place: Place, data: bytes, port: Port) -> int:
    """Return the number of log lines, tracebacks included, that `data` causes; half of the strangers leave at once."""
    before = _num_lines(place)
    for number in range(NUM_EACH):
        with contextlib.suppress(ConnectionError, TimeoutError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port.number)
            writer.write(data)
            if number % 2:
                async with asyncio.timeout(0.02):
                    await reader.read(1)
            else:
                await asyncio.sleep(0.0005 * (number % 8))
            writer.transport.abort()
    await asyncio.sleep(0.5)
    return _num_lines(place) - before


def _num_lines(place: Place) -> int:
    return sum(place.log(name).count("\n") for name in ("serve", "route"))


async def _play_for(seconds: float, seed: int, ports: list[Port]) -> Counter[str]:
    """Play random histories for `seconds`, and return their faults and their number."""
    found: Counter[str] = Counter()
    ends_at, number = time.monotonic() + seconds, 0
    while time.monotonic() < ends_at:
        found.update(await play(ports, seed, range(number, number + 50)))
        number += 50
    return found + Counter({"histories": number * len(ports)})


async def _idle(place: Place, verb: str) -> str:
    """Return how the clients' port answers beside idle connections to the operators' port."""
    admin = free_port()
    flags = ("--admin-port", str(admin), "--max-connections", "256")
    with contextlib.ExitStack() as stack:
        if verb == "serve":
            with _open_files():
                attacked = stack.enter_context(place.serving(*flags, name="idle-serve"))
        else:
            engine = stack.enter_context(place.serving(name="idle-route-engine"))
            with _open_files():
                attacked = stack.enter_context(place.routing(engine, flags=flags, name="idle-route"))
        idle = [await asyncio.open_connection("127.0.0.1", admin) for _ in range(NUM_IDLE)]
        await asyncio.sleep(1)
        taken = [await asyncio.open_connection("127.0.0.1", int(attacked.url.rpartition(":")[2])) for _ in range(200)]
        await asyncio.sleep(1)
        try:
            got = await asyncio.to_thread(lambda: urllib.request.urlopen(f"{attacked.url}/health", timeout=10).status)
        except OSError as error:
            got = type(error).__name__
        for _, writer in idle + taken:
            writer.transport.abort()
        await asyncio.sleep(1)  # The next servers start with few open files.
        return str(got)


@contextlib.contextmanager
def _open_files() -> Iterator[None]:
    """Start processes inside the block with a low limit of open files, which they may raise."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (OPEN_FILES, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


if __name__ == "__main__":
    run(attack, __doc__)
