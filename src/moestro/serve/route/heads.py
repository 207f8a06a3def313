"""Heads of HTTP messages, on their way through: what is passed on, what is left out, what is added."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from http import HTTPStatus

Headers = list[tuple[bytes, bytes]]

MAX_HEAD_BYTES = 64 << 10  # of one message; tokens in cookies and traces are long, nothing else is
# Of one connection, not of the message (RFC 9110, 7.6.1), and what the proxy writes itself.
_HOP_BY_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
        *(b"proxy-authenticate", b"proxy-authorization"),
    }
)
_NOT_TO_ENGINE = _HOP_BY_HOP | {
    *(b"host", b"content-length", b"expect", b"x-request-id"),
    *(b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip"),
}
# An engine's own word on these would be taken for ours.
_NOT_TO_CLIENT = _HOP_BY_HOP | {b"x-request-id", b"x-moestro-engine", b"x-moestro-reason"}
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_PLAIN_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_NOT_IN_HEADER = re.compile(r"[^\x20-\x7e]")
_SHOWN_CHARS = 200


@dataclass(slots=True)
class Incoming:
    """A client's request, whole.

    Attributes:
        target: as it was sent: path and query.
        is_last: the connection ends after the answer.
        is_old: HTTP/1.0: no chunks.
    """

    method: bytes
    target: bytes
    headers: Headers
    body: bytes
    is_last: bool
    is_old: bool
    client: str = ""
    request_id: str = ""

    @property
    def path(self) -> str:
        """Without the query."""
        return self.target.partition(b"?")[0].decode("ascii", "replace")

    def header(self, name: bytes) -> bytes | None:
        """The first of that name, which is given in lower case."""
        for known, value in self.headers:
            if len(known) == len(name) and known.lower() == name:
                return value
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHead:
    """What heads of requests to one engine have in common.

    Attributes:
        host: the value of Host.
        prefix: the path under which the engine's API lies; usually empty.
        authorization: replaces the client's, where the engine has a key of its own.
        drops_authorization: the client's is for this router alone.
    """

    host: bytes
    prefix: bytes = b""
    authorization: bytes | None = None
    drops_authorization: bool = False
    _dropped: frozenset[bytes] = field(init=False, default=frozenset())

    def __post_init__(self) -> None:
        drops = self.drops_authorization or self.authorization is not None
        object.__setattr__(self, "_dropped", _NOT_TO_ENGINE | ({b"authorization"} if drops else set()))

    def of(self, incoming: Incoming) -> bytes:
        """The head of the request that the engine gets; the body follows as it came."""
        parts = [b"%b %b%b HTTP/1.1\r\nHost: %b\r\n" % (incoming.method, self.prefix, incoming.target, self.host)]
        named = _named_by_connection(incoming.headers)
        for name, value in incoming.headers:
            lower = name.lower()
            if lower not in self._dropped and lower not in named:
                parts.append(b"%b: %b\r\n" % (name, value))
        if self.authorization is not None:
            parts.append(b"Authorization: %b\r\n" % self.authorization)
        if incoming.body or incoming.method not in (b"GET", b"HEAD", b"DELETE", b"OPTIONS"):
            parts.append(b"Content-Length: %d\r\n" % len(incoming.body))
        before = incoming.header(b"x-forwarded-for")
        chain = incoming.client.encode() if before is None else b"%b, %b" % (before, incoming.client.encode())
        parts.append(b"X-Forwarded-For: %b\r\nX-Request-Id: %b\r\n\r\n" % (chain, incoming.request_id.encode()))
        return b"".join(parts)


def answer_head(status: int, headers: Headers, added: bytes) -> tuple[bytes, bool]:
    """The head of an engine's answer for the client, without the line that says how the body is framed.

    Args:
        added: whole lines of ours.

    Returns:
        The head, open at its end, and whether the engine said how long the body is.
    """
    parts = [_status_line(status)]
    named = _named_by_connection(headers)
    has_length = False
    for name, value in headers:
        lower = name.lower()
        if lower not in _NOT_TO_CLIENT and lower not in named:
            parts.append(b"%b: %b\r\n" % (name, value))
            has_length = has_length or lower == b"content-length"
    parts.append(added)
    return b"".join(parts), has_length


def own_head(status: int, content_type: str, length: int, added: bytes = b"") -> bytes:
    """The head of an answer of our own, open at its end."""
    typed = f"Content-Type: {content_type}\r\n" if length else ""
    return _status_line(status) + f"{typed}Content-Length: {length}\r\n".encode() + added


def header_line(name: str, text: str) -> bytes:
    """One line, whatever the text is: what is no plain ASCII becomes a question mark, and the end is cut off."""
    return f"{name}: {_NOT_IN_HEADER.sub('?', text[:_SHOWN_CHARS])}\r\n".encode()


def plain_id(given: bytes | None) -> str | None:
    """A client's request id, if it is short and plain."""
    return given.decode() if given is not None and _PLAIN_ID.fullmatch(given) else None


def _status_line(status: int) -> bytes:
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    """Headers that `Connection` declares to be of this connection only."""
    found: Iterable[bytes] = (
        value.lower() for name, value in headers if len(name) == 10 and name.lower() == b"connection"
    )
    names = {part.strip() for value in found for part in value.split(b",")}
    # Nobody may use it to take away what the message needs.
    return frozenset(names - {b"", b"close", b"keep-alive", b"content-length", b"content-type", b"authorization"})
