"""Checks of a request's head that all aiohttp servers share. They precede aiohttp's own, which echo and may fail."""

from __future__ import annotations

import re

from aiohttp import HttpVersion10, HttpVersion11, web

from moestro.web.errors import HttpError
from moestro.web.ports.framing import MAX_HEAD_BYTES, MAX_HEADERS, head_too_large

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
