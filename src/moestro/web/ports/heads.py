"""Checks of a request's head that all aiohttp servers share. They precede aiohttp's own, which echo and may fail."""

from __future__ import annotations

import re
from collections.abc import Callable

from aiohttp import HttpVersion10, HttpVersion11, web

from moestro.web.errors import HttpError

# Limits of what surrounds the bodies of requests, the same on all ports: heads, chunk framing, trailers, times.

MAX_HEAD_BYTES = 64 << 10  # Of one message; only tokens in cookies and traces are long.
MAX_HEADERS = 128  # Clients and proxies send fewer than 50.
IDLE_S = 75.0  # Time for the next head. Pools of common clients and proxies keep idle connections for less time.
WRITE_S = 60.0  # Time that a client may leave its answer unread.
LINGER_S = 3.0  # Time for a client that is refused in the middle of its body to notice the refusal.


class FramingCount:
    """Counts the received bytes of a connection that belong to no body.

    Heads and trailers may have 64 KiB each. The framing of chunks may have 64 KiB plus the size of the body, which
    allows any number of chunks of 6 bytes and more.

    Attributes:
        num_body_bytes: Bytes of the current message's body.
    """

    __slots__ = ("_num_between", "_num_read", "num_body_bytes")

    def __init__(self) -> None:
        self._num_between = 0  # Since the last byte of a body: heads, chunk framing, trailers.
        self._num_read = 0  # Since the head or the previous message.
        self.num_body_bytes = 0

    @property
    def is_over(self) -> bool:
        """Whether a limit is exceeded."""
        return self._num_between > MAX_HEAD_BYTES or self._num_read > MAX_HEAD_BYTES + 2 * self.num_body_bytes

    def read(self, num_bytes: int) -> None:
        """Count bytes as framing; `body` and `restart` correct this."""
        self._num_between += num_bytes
        self._num_read += num_bytes

    def body(self, num_bytes: int) -> None:
        """Count a part of the body."""
        self._num_between = 0
        self.num_body_bytes += num_bytes

    def restart(self) -> None:
        """Begin to count again, after a head or a message. The rest of the same read is not counted."""
        self._num_between = self._num_read = 0


def head_too_large() -> HttpError:
    """Return the refusal of a head, of trailers or of chunk framing above a limit."""
    rule = (
        f"A head may have {MAX_HEAD_BYTES} bytes and {MAX_HEADERS} headers, and trailers may have {MAX_HEAD_BYTES}"
        " bytes; to frame chunks, as many more as they carry."
    )
    return HttpError(431, rule, "head_too_large")


HOST_PATTERN = r"(?:[A-Za-z0-9._~!$&'()*+,;=%-]*|\[[0-9A-Fa-f:.]+\])(?::[0-9]*)?"
_HOST = re.compile(HOST_PATTERN)
_PORT = re.compile(r":[0-9]*\Z")
_VERSIONS = frozenset({HttpVersion10, HttpVersion11})
# Servers could disagree on which of two such headers counts. The parser refuses a second Host.
_ONCE = ("Authorization", "X-Api-Key", "Content-Encoding", "Expect")
_MAX_LENGTH_DIGITS = 19


class HeadError(HttpError):
    """Refusal of a head. The connection ends with it, because servers differ in what follows such a head."""


def check_head(http: web.BaseRequest) -> None:
    """Raise HeadError if the head is too large, ambiguous or not supported."""
    headers, raw = http.headers, http.raw_headers
    num_bytes = len(http.raw_path) + sum(len(name) + len(value) for name, value in raw)
    if len(raw) > MAX_HEADERS or num_bytes > MAX_HEAD_BYTES:
        too_large = head_too_large()
        raise HeadError(too_large.http_status, too_large.message, str(too_large.code))
    if http.version not in _VERSIONS:
        raise _malformed("the version must be HTTP/1.1 or HTTP/1.0")
    for name in _ONCE:
        if len(headers.getall(name, ())) > 1:
            raise HeadError(400, f"{name} may be given once, but is given several times.", "bad_request")
    if not _HOST.fullmatch(headers.get("Host", "")):
        raise _malformed("the value of Host must be a host, with a port or without")
    _check_coding(http)


def host_name(host: str) -> str:
    """Return the name or address in a Host header that `check_head` has passed, in lower case."""
    return _PORT.sub("", host).strip("[]").lower()


def _check_coding(http: web.BaseRequest) -> None:
    """Check the headers that say how the body and the connection are used."""
    headers = http.headers
    if len(headers.get("Content-Length", "")) > _MAX_LENGTH_DIGITS:
        raise _malformed("Content-Length has too many digits")
    coding, expected = headers.get("Transfer-Encoding"), headers.get("Expect")
    if coding is not None and http.version == HttpVersion10:
        raise _malformed("HTTP/1.0 has no Transfer-Encoding")
    if coding is not None and coding.lower() != "chunked":
        raise HeadError(501, "Transfer-Encoding must be chunked.", "unsupported_transfer_encoding")
    if expected is not None and expected.lower() != "100-continue":
        raise HeadError(417, "Expect must be 100-continue.", "expectation_failed")
    if http.method == "CONNECT" or headers.get("Upgrade", "").lower() == "websocket":
        raise HeadError(501, "This server neither upgrades nor tunnels connections.", "upgrade_not_supported")


def _malformed(fault: str) -> HeadError:
    return HeadError(400, f"Malformed HTTP: {fault}.", "bad_request")


# The conversation that a request's headers name; the server and the router read the same headers.

MAX_SESSION_CHARS = 1024
# The first header that is given counts. The last two come from Codex and Claude Code.
SESSION_HEADERS = ("x-session-affinity", "x-session-id", "session-id", "x-claude-code-session-id")


def session_in(header: Callable[[str], str | None]) -> str | None:
    """Return the name of the conversation; None means that the body may name one, which counts less.

    Args:
        header: Returns the value of a header by its name in lower case; None or an empty text without it.
    """
    name = next((name for each in SESSION_HEADERS if (name := header(each))), None)
    # aiohttp has surrogates for bytes that are no UTF-8; no message to an engine can carry them.
    return name.encode("utf-8", "surrogateescape").decode("latin-1")[:MAX_SESSION_CHARS] if name else None
