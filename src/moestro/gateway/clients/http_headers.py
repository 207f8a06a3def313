"""Heads of HTTP messages in transit: which headers are forwarded, dropped and added, and a cache of parsed heads.

Clients and engines send the same heads again and again, apart from the length. Such a head is parsed once by llhttp and
later only compared. Messages that differ, or arrive in several reads, are parsed. So the cache never interprets HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Generic, NamedTuple, TypeVar

from moestro.gateway.clients.paths import plain_path
from moestro.web.access import CLIENT_HEADER
from moestro.web.bodies import BodyHold
from moestro.web.errors import HttpError
from moestro.web.ports.heads import HOST_PATTERN, session_in
from moestro.web.tracing import TRACEPARENT
from moestro.wire.load_report import LOAD_REPORT_HEADER

# Withheld where the router has a span of its own, whose context it sends.
TRACE_HEADERS = frozenset({TRACEPARENT.encode()})

Headers = list[tuple[bytes, bytes, bytes]]  # (name in lower case, name as received, value)

Named = dict[bytes, bytes]  # values by name in lower case; the last value wins

# Headers of one connection, not of the message (RFC 9110, 7.6.1), and headers that the proxy sets.
_HOP_BY_HOP = frozenset(
    {
        *(b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"transfer-encoding", b"upgrade"),
        *(b"proxy-authenticate", b"proxy-authorization"),
    }
)
_NOT_TO_ENGINE = _HOP_BY_HOP | {
    *(b"host", b"content-length", b"expect", b"x-request-id"),
    *(b"forwarded", b"x-forwarded-for", b"x-forwarded-host", b"x-forwarded-proto", b"x-real-ip"),
    *(CLIENT_HEADER.lower().encode(), LOAD_REPORT_HEADER.encode()),
}
# Only the router sets these; an engine's values would be mistaken for the router's.
_NOT_TO_CLIENT = _HOP_BY_HOP | {
    *(b"content-length", b"x-request-id", b"x-moestro-engine", b"x-moestro-reason", LOAD_REPORT_HEADER.encode()),
}
KEY_HEADERS = frozenset({b"authorization", b"x-api-key"})
# vLLM and SGLang send the request to this data-parallel rank. Letters' case does not matter.
RANK_HEADER = b"x-data-parallel-rank"
# Withheld where the router handles CORS: an engine that handles it too would add its headers a second time.
CORS_HEADERS = frozenset({b"origin", b"access-control-request-method", b"access-control-request-headers"})
_NEEDED = frozenset({b"content-length", b"content-type", b"authorization"})
_BODILESS = frozenset({b"GET", b"HEAD", b"DELETE", b"OPTIONS"})
_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
# An answer with this status and header refuses a request that has come back to the router that the header names.
LOOP_STATUS = HTTPStatus.LOOP_DETECTED.value
LOOP_HEADER = b"x-moestro-loop"
_VERSIONS = frozenset({"1.1", "1.0"})
# Headers that must not be repeated, because servers differ in which line they use.
_SINGLE = frozenset({b"host", b"authorization", b"x-api-key", b"transfer-encoding", b"content-encoding", b"expect"})
_HOST = re.compile(HOST_PATTERN.encode())
_PLAIN_ID = re.compile(rb"[\x21-\x7e]{1,128}")
_NOT_IN_HEADER = re.compile(r"[^\x20-\x7e]")
_SHOWN_CHARS = 200


@dataclass(frozen=True, slots=True, eq=False)
class RequestHead:
    """Head of a client's request, shared by requests whose heads differ only in their lengths.

    Attributes:
        target: path and query as received.
        is_last: whether the connection closes after the response.
        is_old: whether the client speaks HTTP/1.0, without chunked bodies.
        path: path of the target without the query; empty if it is ambiguous.
        session_id: name of the conversation in the headers; None means that they name none.
        written: results of `EngineHead.of` for this head, by engine head.
    """

    method: bytes
    target: bytes
    headers: Headers
    named: Named
    is_last: bool = False
    is_old: bool = False
    path: str = field(init=False)
    session_id: str | None = field(init=False)
    written: dict[EngineHead, bytes] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "path", plain_path(self.target))
        object.__setattr__(self, "session_id", session_in(self._text_of))

    def _text_of(self, name: str) -> str:
        """Return the value of a header by its name in lower case; empty without it."""
        return self.named.get(name.encode(), b"").decode("utf-8", "surrogateescape")


@dataclass(slots=True, eq=False)
class Incoming:
    """A complete request of a client."""

    head: RequestHead
    body: bytes
    client: str = ""
    request_id: str = ""
    on_over: Callable[[], None] | None = None  # called when the response has ended; None means no callback
    hold: BodyHold | None = None  # memory of the body; None for a small body


@dataclass(frozen=True, slots=True, eq=False)
class AnswerHead:
    """Head of an engine's response without its length, shared by responses with equal heads.

    Attributes:
        lines: status line and headers for the client.
        is_kept: whether the connection stays open for another response.
    """

    status: int
    named: Named
    lines: bytes
    is_kept: bool = True
    is_event_stream: bool = field(init=False)

    def __post_init__(self) -> None:
        is_event_stream = self.named.get(b"content-type", b"").startswith(b"text/event-stream")
        object.__setattr__(self, "is_event_stream", is_event_stream)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EngineHead:
    """Common part of the heads of all requests to one engine.

    Attributes:
        host: value of Host.
        prefix: path prefix of the engine's API; usually empty.
        via: pseudonym of this router in Via (RFC 9110, 7.6.3), by which it finds out that a request has come back.
        authorization: replacement for the client's Authorization, for an engine with its own key.
        rank: data-parallel rank that the request is for, in place of the client's choice. None means no rank.
        withheld: names of client headers, in lower case, that are meant for this router only.
    """

    host: bytes
    prefix: bytes = b""
    via: bytes = b"moestro"
    authorization: bytes | None = None
    rank: int | None = None
    withheld: frozenset[bytes] = frozenset()
    _dropped: frozenset[bytes] = field(init=False, default=frozenset())

    def __post_init__(self) -> None:
        replaced = KEY_HEADERS if self.authorization is not None else frozenset()
        if self.rank is not None:
            replaced |= {RANK_HEADER}
        object.__setattr__(self, "_dropped", _NOT_TO_ENGINE | self.withheld | replaced)

    def of(self, incoming: Incoming, client: Hashable = None, traceparent: str = "") -> bytes:
        """Return the head of the request to the engine. The body follows unchanged.

        Args:
            client: Name of the client, which an engine with its own key gets; None means none.
            traceparent: Context of the router's span, in place of the client's; empty means none.
        """
        head, body = incoming.head, incoming.body
        written = head.written.get(self)
        if written is None:
            written = head.written[self] = self._written(head)
        length = f"Content-Length: {len(body)}\r\n" if body or head.method not in _BODILESS else ""
        before = head.named.get(b"x-forwarded-for")
        chain = incoming.client if before is None else f"{before.decode('latin-1')}, {incoming.client}"
        named = "" if client is None or self.authorization is None else f"{CLIENT_HEADER}: {client}\r\n"
        traced = f"{TRACEPARENT}: {traceparent}\r\n" if traceparent else ""
        own = f"{length}X-Forwarded-For: {chain}\r\n{named}{traced}X-Request-Id: {incoming.request_id}\r\n\r\n"
        return written + own.encode("latin-1")

    def _written(self, head: RequestHead) -> bytes:
        """Return the part of the engine's head that is the same for all requests with `head`."""
        dropped = self._dropped
        if b"connection" in head.named:
            dropped |= _named_by_connection(head.headers)
        lines = [b"%b %b%b HTTP/1.1\r\nHost: %b\r\n" % (head.method, self.prefix, head.target, self.host)]
        lines += [b"%b: %b\r\n" % (name, value) for lower, name, value in head.headers if lower not in dropped]
        if self.authorization is not None:
            lines.append(b"Authorization: %b\r\n" % self.authorization)
        if self.rank is None:  # A server's load is that of all its ranks.
            lines.append(b"%b: 1\r\n" % LOAD_REPORT_HEADER.encode())
        else:
            lines.append(b"%b: %d\r\n" % (RANK_HEADER, self.rank))
        lines.append(b"Via: 1.1 %b\r\n" % self.via)
        return b"".join(lines)


def has_passed(head: RequestHead, pseudonym: bytes) -> bool:
    """Return whether a request has already passed the proxy that calls itself `pseudonym` in Via."""
    return any(pseudonym in value.replace(b",", b" ").split() for lower, _, value in head.headers if lower == b"via")


def answer_lines(status: int, headers: Headers, named: Named) -> bytes:
    """Return the status line and forwarded headers of an engine's response, without the framing of its body."""
    dropped = _NOT_TO_CLIENT
    if b"connection" in named:
        dropped |= _named_by_connection(headers)
    lines = [b"%b: %b\r\n" % (name, value) for lower, name, value in headers if lower not in dropped]
    return _status_line(status) + b"".join(lines)


def fault_of(head: RequestHead, version: str) -> HttpError | None:
    """Check a request's head against RFC 9110 and 9112, and return the first fault; None means no fault.

    Args:
        head: head of the request.
        version: HTTP version, as the parser read it.
    """
    if version not in _VERSIONS:
        return _bad_head("The version must be HTTP/1.1 or HTTP/1.0.")
    if not head.path:
        text = (
            "The path is ambiguous. Send the path alone, as it is documented: without"
            " escapes, empty or dotted segments, a slash at the end, backslashes, semicolons, a fragment or a host."
        )
        return HttpError(400, text, "ambiguous_path")
    if len(head.named) < len(head.headers):
        names = [lower for lower, _, _ in head.headers]
        if twice := next((name for name in _SINGLE if names.count(name) > 1), None):
            return _bad_head(f"{twice.decode().title()} may be given once, but is given several times.")
    return _host_fault(head) or _coding_fault(head)


def own_head(status: int, content_type: str, length: int, added: bytes = b"") -> bytes:
    """Return the head of a response made by the router, without the final empty line."""
    typed = f"Content-Type: {content_type}\r\n" if length else ""
    return _status_line(status) + f"{typed}Content-Length: {length}\r\n".encode() + added


def header_text(text: str) -> str:
    """Return `text` in a form that fits a header: non-ASCII becomes a question mark, and long text is cut off."""
    text = text[:_SHOWN_CHARS]
    return text if text.isascii() and text.isprintable() else _NOT_IN_HEADER.sub("?", text)


def size_of(headers: Headers) -> int:
    """Return the total size of all names and values, bytes."""
    return sum(len(name) + len(value) for _, name, value in headers)


def plain_id(given: bytes) -> str | None:
    """Return a client's request id if it is short printable ASCII, otherwise None."""
    return given.decode() if _PLAIN_ID.fullmatch(given) else None


def _host_fault(head: RequestHead) -> HttpError | None:
    host = head.named.get(b"host")
    if host is None:
        return None if head.is_old else _bad_head("HTTP/1.1 needs a Host.")
    return None if _HOST.fullmatch(host) else _bad_head("The value of Host must be a host, with a port or without.")


def _coding_fault(head: RequestHead) -> HttpError | None:
    """Check the headers that say how the body is transferred."""
    coding, expected = head.named.get(b"transfer-encoding"), head.named.get(b"expect")
    if coding is not None and head.is_old:
        return _bad_head("HTTP/1.0 has no Transfer-Encoding: send a Content-Length.")
    if coding is not None and coding.lower() != b"chunked":
        return HttpError(501, "Transfer-Encoding must be chunked.", "unsupported_transfer_encoding")
    if expected is not None and expected.lower() != b"100-continue" and not head.is_old:
        return HttpError(417, "Expect must be 100-continue.", "expectation_failed")
    return None


def _bad_head(text: str) -> HttpError:
    return HttpError(400, text, "bad_request")


def _status_line(status: int) -> bytes:
    return _STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status


def _named_by_connection(headers: Headers) -> frozenset[bytes]:
    """Return the headers that `Connection` declares to belong to this connection only."""
    values = [value.lower() for lower, _, value in headers if lower == b"connection"]
    # A client must not use Connection to remove headers that the message needs.
    return frozenset(part.strip() for value in values for part in value.split(b",")) - _NEEDED


_LENGTH = re.compile(rb"\r\n[Cc]ontent-[Ll]ength: ?(\d{1,9})(?=\r\n)")
_VARYING = rb"\r\n%b: ([\x20-\x7e]{0,1024})(?=\r\n)"  # other bytes are left to the parser
_END = b"\r\n\r\n"
_BLANK = (b"\r", b"\n")  # a parser skips these before a message, so the first `_END` may not end the head
_MAX_KEY_BYTES = 4096  # longer heads are not cached

Head = TypeVar("Head")


class KnownHead(NamedTuple, Generic[Head]):
    """A message whose head is cached.

    Attributes:
        head: the cached head.
        begin: start of the body.
        length: length of the body. None means that the head gives none.
        varying: value of the varying header. Empty without it.
    """

    head: Head
    begin: int
    length: int | None
    varying: bytes


class HeaderCache(Generic[Head]):
    """Parsed heads by their bytes, without the digits of their length and without the value of one varying header.

    Heads with and without a length have separate tables, because the key alone cannot tell an empty length from a
    removed one.

    Args:
        max_known: limit of cached heads in each table.
        varying: name of a header whose value differs from message to message, in the letters in which it is sent. None
            means no header.
    """

    def __init__(self, max_known: int, varying: str | None = None) -> None:
        self._max_known = max_known
        self._varying = None if varying is None else re.compile(_VARYING % varying.encode())
        self._with_length: dict[bytes, Head] = {}
        self._without: dict[bytes, Head] = {}

    def find(self, data: bytes) -> KnownHead[Head] | None:
        """Return the cached head of `data`, with what varies; None means unknown."""
        if data.startswith(_BLANK):
            return None
        end = data.find(_END) + len(_END)
        text, varying = data[:end], b""
        if self._varying is not None:
            text, varying = self._cut(text)
        if (head := self._without.get(text)) is not None:
            return KnownHead(head, end, None, varying)
        found = _LENGTH.search(text)
        if found is None:
            return None
        start, stop = found.span(1)
        head = self._with_length.get(text[:start] + text[stop:])
        return None if head is None else KnownHead(head, end, int(text[start:stop]), varying)

    def _cut(self, text: bytes) -> tuple[bytes, bytes]:
        """Return a head without the value of the varying header, and the value."""
        found = None if self._varying is None else self._varying.search(text)
        return (text, b"") if found is None else (text[: found.start(1)] + text[found.end(1) :], found[1])

    def learn(self, data: bytes, head: Head, *, has_length: bool) -> None:
        """Cache `head`, which the parser has read from the complete head at the start of `data`."""
        if data.startswith(_BLANK):
            return
        end = data.find(_END) + len(_END)
        text, _ = self._cut(data[:end])
        found = _LENGTH.search(text)
        if not len(_END) <= end <= _MAX_KEY_BYTES or (found is not None) != has_length:
            return  # the head is too long, or writes its length in an unusual form
        if found is None:
            heads, key = self._without, text
        else:
            heads, key = self._with_length, text[: found.start(1)] + text[found.end(1) :]
        if len(heads) >= self._max_known:
            heads.clear()  # heads in use return at once
        heads[key] = head
