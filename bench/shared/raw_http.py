"""Histories of raw bytes that a stranger sends to a port, and what must hold of every answer to them.

A history is a function of (seed, number): complete requests, perhaps broken bytes behind them, and a way of sending
both. `send` plays a history against one port and returns what is wrong with the answers. Bytes that no log may repeat
carry `SECRET`.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
import re
import socket
import struct
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise

SECRET = b"do-not-repeat-me"
ANSWER_S = 60.0  # Every complete request is answered within this time, also on a busy machine.
_QUIET_S = 0.1  # Silence after which a stranger gives up on bytes that may be the start of a longer request.
_HEAD = re.compile(rb"HTTP/\d\.\d (\d{3}) [^\r\n]*\r\n((?:[^\r\n]+\r\n)*)\r\n")
_OVER = frozenset({400, 403, 404, 405, 408, 411, 413, 414, 415, 417, 431, 501, 505})  # Statuses of broken requests.
_JSON = b"Content-Type: application/json\r\n"
_NAMES = (
    *("Host", "Expect", "Origin", "Content-Type", "Authorization", "X-Api-Key", "X-Request-Id", "Cookie", "Connection"),
    *("Transfer-Encoding", "Content-Length", "Content-Encoding", "Upgrade", "If-None-Match", "Range", "Accept"),
    *("Sec-WebSocket-Key1", "Access-Control-Request-Method", "Keep-Alive", "TE", "Trailer", "X-Forwarded-For", "X-Any"),
)


class Leaving(StrEnum):
    """How a stranger ends its connection."""

    READ = "reads all answers"
    HALF = "closes its sending side and reads on"
    CLOSE = "closes in the middle"
    RESET = "resets in the middle"


@dataclass(frozen=True, slots=True)
class Port:
    """A port under attack.

    Attributes:
        name: unique name, for reports.
        paths: paths that answer a GET, with their status.
        post: path that takes a JSON body.
    """

    name: str
    number: int
    paths: tuple[tuple[str, int], ...]
    post: str


@dataclass(slots=True)
class History:
    """What one stranger sends on one connection.

    Attributes:
        ids: id of each complete valid request, in order; its answer repeats it.
        statuses: expected status of each; None means any below 500.
        broken: bytes behind them that no server can serve, or whose meaning is unknown.
        is_refusable: whether `broken` must be refused; otherwise it may also wait for more, or be served.
        cuts: positions at which the bytes are cut into writes.
        leaving: how the connection ends.
        num_sent: bytes that are sent before the stranger leaves in the middle.
        num_read: bytes that it reads before it leaves.
    """

    ids: list[bytes] = field(default_factory=list)
    statuses: list[int | None] = field(default_factory=list)
    good: bytes = b""
    broken: bytes = b""
    is_refusable: bool = False
    cuts: list[int] = field(default_factory=list)
    leaving: Leaving = Leaving.READ
    num_sent: int = 0
    num_read: int = 0

    @property
    def writes(self) -> list[bytes]:
        """All bytes, in the pieces in which they are sent."""
        data = self.good + self.broken
        if self.leaving in (Leaving.CLOSE, Leaving.RESET):
            data = data[: self.num_sent]
        at = [0, *(cut for cut in self.cuts if cut < len(data)), len(data)]
        return [data[begin:end] for begin, end in pairwise(at) if end > begin]


def history(seed: int, number: int, port: Port) -> History:
    """Return the history `number` of `seed` for `port`."""
    rng = random.Random(f"{seed}-{number}-{port.name}")
    made = History()
    for index in range(rng.choice([0, 1, 1, 2, 5, 40])):
        _add_request(made, b"h%d-%d" % (number, index), rng, port)
    if rng.random() < 0.7:
        made.broken, made.is_refusable = _broken(rng, port)
    size = len(made.good) + len(made.broken)
    made.cuts = sorted(rng.randrange(size) for _ in range(rng.choice([0, 0, 1, 3, 30]))) if size else []
    made.leaving = rng.choices(list(Leaving), [5, 1, 2, 2])[0]
    made.num_sent = rng.choice([size, size, rng.randrange(size + 1)])
    made.num_read = rng.choice([0, 0, 1, 200])
    return made


def _add_request(made: History, name: bytes, rng: random.Random, port: Port) -> None:
    path, status = rng.choice([*port.paths, ("/nothing", 404)])
    head = b"X-Request-Id: %b\r\n" % name
    match rng.randrange(6):
        case 0:
            body = b'{"prompt": "%b", "max_tokens": 1, "unknown": [' % SECRET  # broken JSON, complete HTTP
            expect = rng.choice([b"", b"Expect: 100-continue\r\n"])
            made.good += _post(port, head + expect + b"Content-Length: %d\r\n" % len(body)) + body
            made.statuses.append(None)
        case 1:
            body = b'{"prompt": "%b"' % SECRET
            extension = rng.choice([b"", b";a=b", b";x=" + b"y" * 500])
            trailer = rng.choice([b"", b"X-Trailer: t\r\n"])
            made.good += _post(port, head + b"Transfer-Encoding: chunked\r\n")
            made.good += b"%x%b\r\n%b\r\n0\r\n%b\r\n" % (len(body), extension, body, trailer)
            made.statuses.append(None)
        case _:
            host = rng.choice([b"x", b"127.0.0.1", b"localhost:80", b"[::1]:80"])
            if "operators" in port.name:
                host = rng.choice([b"127.0.0.1:1", b"localhost", b"[::1]:80"])
            made.good += b"GET %b HTTP/1.1\r\nHost: %b\r\n%b\r\n" % (path.encode(), host, head)
            made.statuses.append(status)
    made.ids.append(name)


def _post(port: Port, lines: bytes) -> bytes:
    return b"POST %b HTTP/1.1\r\nHost: localhost\r\n%b%b\r\n" % (port.post.encode(), _JSON, lines)


def _broken(rng: random.Random, port: Port) -> tuple[bytes, bool]:
    """Return bytes of one kind, and whether a server must refuse them."""
    match rng.randrange(4):
        case 0:
            return rng.choice(refused(port)), True
        case 1:
            return _odd_byte(rng, port), False
        case 2:
            return rng.choice(unusual(port)), False
        case _:
            return _mutated(rng, port), False


def _odd_byte(rng: random.Random, port: Port) -> bytes:
    """Return a request with one byte of 0 to 255 in the name or value of a header."""
    byte, name = bytes([rng.randrange(256)]), rng.choice(_NAMES).encode()
    value = rng.choice([SECRET, b"", b"1", b"[", b"]", b"[x]", b"100-continue", b"Bearer " + SECRET])
    at = rng.randrange(len(value) + 1)
    if rng.random() < 0.3:
        line = name[: len(name) // 2] + byte + name[len(name) // 2 :] + b": " + value
    else:
        line = name + b": " + value[:at] + byte + value[at:]
    path = rng.choice([port.post, *(path for path, _ in port.paths)]).encode()
    method = rng.choice([b"GET", b"POST", b"OPTIONS", b"HEAD"])
    host = b"" if name == b"Host" else b"Host: localhost\r\n"
    return b"%b %b HTTP/1.%d\r\n%b%b\r\n\r\n" % (method, path, rng.choice([0, 1, 1]), host, line)


def _mutated(rng: random.Random, port: Port) -> bytes:
    body = b'{"prompt": "%b"}' % SECRET
    data = bytearray(_post(port, b"X-Key: %b\r\nContent-Length: %d\r\n" % (SECRET, len(body))) + body)
    for _ in range(rng.randrange(1, 5)):
        at = rng.randrange(len(data))
        data[at : at + rng.choice([0, 1, 1, 4])] = rng.randbytes(rng.choice([0, 1, 1, 3]))
    return bytes(data)


def refused(port: Port) -> list[bytes]:
    """Return requests that every port must refuse; the connection ends with the refusal."""
    path, get = port.paths[0][0].encode(), b"GET %b HTTP/1.1\r\nHost: localhost\r\n" % port.paths[0][0].encode()
    chunked = _post(port, b"Transfer-Encoding: chunked\r\n")
    return [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + SECRET,  # the first bytes of TLS
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + SECRET,
        b"GET /" + SECRET + b"\r\n\r\n",  # HTTP/0.9
        b"GET %b HTTP/9.9\r\nHost: localhost\r\nX: %b\r\n\r\n" % (path, SECRET),
        b"GET %b HTTP/1.1\r\nX: %b\r\n\r\n" % (path, SECRET),  # no Host
        get + b"Host: %b\r\n\r\n" % SECRET,
        get + b"Authorization: Bearer %b\x01\r\n\r\n" % SECRET,
        get + b"Authorization: Bearer %b\r\nAuthorization: Bearer %b\r\n\r\n" % (SECRET, SECRET),
        get + b"%b : b\r\n\r\n" % SECRET,
        get + b"A: b\r\n %b\r\n\r\n" % SECRET,
        get.replace(b"\r\n", b"\n") + b"A: %b\n\n" % SECRET,
        get + b"X-Long: %b\r\n\r\n" % (SECRET * 20_000),
        b"GET /%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % (SECRET * 20_000),
        get + b"A: b\r\n" * 10_000 + b"\r\n",
        get + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
        _post(port, b"Content-Length: 1\r\nContent-Length: 2\r\n") + SECRET,
        _post(port, b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n") + b"0\r\n\r\n" + SECRET,
        _post(port, b"Content-Length: -1\r\n") + SECRET,
        _post(port, b"Content-Length: 99999999999999999999\r\n") + SECRET,
        _post(port, b"Expect: tea\r\nContent-Length: 0\r\n"),
        _post(port, b"Expect: 100-continue\xff\r\nContent-Length: 0\r\n"),
        chunked + b"zz\r\n" + SECRET,
        chunked + b"2;" + SECRET * 30_000 + b"\r\n{}\r\n0\r\n\r\n",
        chunked + b"2\r\n{}\r\n0\r\n" + b"X: " + SECRET * 30_000 + b"\r\n\r\n",
    ]


def unusual(port: Port) -> list[bytes]:
    """Return requests that a port may serve or refuse, but neither crash on nor repeat in its log."""
    path = port.paths[0][0].encode()
    get = b"GET %b HTTP/1.1\r\nHost: localhost\r\n" % path
    old = b"GET %b HTTP/1.0\r\n" % path
    return [
        old + b"\r\n" + SECRET,  # bytes behind the end of a connection
        old + b"\r\n" + old + b"\r\n",
        old + b"Connection: keep-alive\r\n\r\n" + SECRET,
        get + b"Connection: close\r\n\r\n" + SECRET * 1000,
        b"GET %b HTTP/1.1\r\nHost: [x]\r\n\r\n" % path,
        b"GET %b HTTP/1.1\r\nHost: [1:2:3]:x\r\n\r\n" % path,
        b"GET http://%b%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % (SECRET, path),
        b"GET http://[%b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path,
        b"CONNECT %b:443 HTTP/1.1\r\nHost: localhost\r\n\r\n" % SECRET,
        b"CONNECT x HTTP/1.1\r\nHost: localhost\r\n\r\n" + SECRET,
        b"OPTIONS * HTTP/1.1\r\nHost: localhost\r\n\r\n",
        b"OPTIONS %b HTTP/1.1\r\nHost: localhost\r\nOrigin: \xff\r\nAccess-Control-Request-Method: \xff\r\n\r\n" % path,
        b"GET %b?limit=%%ff%b\xff HTTP/1.1\r\nHost: localhost\r\n\r\n" % (path, SECRET),
        b"GET /%ff%00%0a" + SECRET + b"\xfe HTTP/1.1\r\nHost: localhost\r\n\r\n",
        get + b"Upgrade: websocket\r\nConnection: Upgrade\r\n\r\n" + SECRET,
        get + b"Upgrade: h2c\r\nConnection: Upgrade, HTTP2-Settings\r\nHTTP2-Settings: AAAA\r\n\r\n",
        get + b"Expect: 100-continue\r\n\r\n",
        get + b"Expect: \xff%b\r\n\r\n" % SECRET,
        get + b"Content-Type: text/\xff; charset=%b\r\n\r\n" % SECRET,
        b"M-SEARCH %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path,
        b"BREW %b HTTP/1.1\r\nHost: localhost\r\n\r\n" % path,
        b"\r\n\r\n\r\n" + get + b"\r\n",
        _post(port, b"Content-Length: 100\r\n") + SECRET,  # a body that ends early
        _post(port, b"Expect: 100-continue\r\nContent-Length: 100\r\n"),
        _post(port, b"Content-Type: application/json; charset=%b\r\nContent-Length: 2\r\n" % SECRET) + b"{}",
        get + b"X: %b" % SECRET,  # a head that ends early
    ]


async def send(made: History, port: Port) -> str | None:
    """Play a history, and return what is wrong with the answers; None means nothing."""
    try:
        async with asyncio.timeout(ANSWER_S):
            received = await _play(made, port)
    except TimeoutError:
        return f"no answer within {ANSWER_S:g} s"
    return None if received is None else _fault(made, received)


async def _play(made: History, port: Port) -> bytes | None:
    """Return all bytes of the port; None where the stranger left in the middle."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port.number, limit=1 << 24)
    if made.leaving is Leaving.RESET:
        linger = struct.pack("ii", 1, 0)
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
    try:
        with contextlib.suppress(ConnectionError):
            for piece in made.writes:
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            if made.leaving is Leaving.HALF:
                writer.write_eof()
        if made.leaving in (Leaving.CLOSE, Leaving.RESET):
            await _read_some(reader, made.num_read)
            return None
        return await _read_all(made, reader)
    finally:
        if made.leaving is Leaving.RESET:
            writer.transport.abort()
        writer.close()


async def _read_some(reader: asyncio.StreamReader, num_bytes: int) -> None:
    with contextlib.suppress(ConnectionError, TimeoutError):
        async with asyncio.timeout(_QUIET_S):
            while num_bytes > 0 and (data := await reader.read(num_bytes)):
                num_bytes -= len(data)


async def _read_all(made: History, reader: asyncio.StreamReader) -> bytes:
    """Read until the port closes, as it must behind a refusal, or until all is answered and nothing else comes."""
    received = b""
    while True:
        is_owed = made.is_refusable or _num_answers(received) < len(made.ids) or made.leaving is Leaving.HALF
        try:
            async with asyncio.timeout(None if is_owed else _QUIET_S):
                data = await reader.read(1 << 16)
        except TimeoutError:
            return received
        except ConnectionError:
            return received
        if not data:
            return received
        received += data


def _num_answers(received: bytes) -> int:
    return sum(status != b"100" for status, _ in _HEAD.findall(received))


def _fault(made: History, received: bytes) -> str | None:
    """Return what is wrong with the answers; None means nothing."""
    answers = [(int(status), lines.lower()) for status, lines in _HEAD.findall(received) if status != b"100"]
    num_wanted = len(made.ids)
    if bad := [status for status, _ in answers if status >= 500 and status not in _OVER]:
        return f"status {bad[0]}"
    is_over = made.leaving is Leaving.HALF or any(
        b"connection: close\r\n" in lines for _, lines in answers[:num_wanted]
    )
    if not is_over and len(answers) < num_wanted + made.is_refusable:
        return f"{len(answers)} answers to {num_wanted} requests{' and a refusal' * made.is_refusable}"
    for (status, lines), name, expected in zip(answers, made.ids, made.statuses, strict=False):
        if b"x-request-id: %b\r\n" % name not in lines:
            return "an answer is not that of its request"
        if expected not in {None, status}:
            return f"status {status} in place of {expected}"
    return _fault_behind(made, answers[num_wanted:])


def _fault_behind(made: History, answers: list[tuple[int, bytes]]) -> str | None:
    """Return what is wrong with the answers behind those to the complete requests."""
    if not made.broken:
        return f"{len(answers)} answers too many" if answers else None
    if not made.is_refusable or not answers:
        return None
    if answers[0][0] not in _OVER:
        return f"status {answers[0][0]} for {made.broken[:60]!r}"
    return f"answers behind a refusal: {[status for status, _ in answers]}" if len(answers) > 1 else None


async def play(ports: Iterable[Port], seed: int, numbers: Iterable[int], num_at_once: int = 16) -> Counter[str]:
    """Play the histories `numbers` of `seed` against each port, and return the number of each kind of fault.

    Each fault names its port and the first history in which it was found.
    """
    first: dict[str, int] = {}
    found: Counter[str] = Counter()
    turns = asyncio.Semaphore(num_at_once)

    async def one(port: Port, number: int) -> None:
        async with turns:
            fault = await send(history(seed, number, port), port)
        if fault is not None:
            kind = f"{port.name}: {fault}"
            found[kind] += 1
            first.setdefault(kind, number)

    await asyncio.gather(*(one(port, number) for number in numbers for port in ports))
    return Counter({f"{kind} (history {first[kind]})": count for kind, count in found.items()})
