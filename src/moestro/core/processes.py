"""Processes: names of workers, keys of sockets between machines, hosts, and failures that must not end a process.

A side job, such as a record, may fail while its process serves on. pyo3 raises a panic of a library in Rust as a
`BaseException`, which no `except Exception` stops; here it becomes an exception.
"""

from __future__ import annotations

import functools
import ipaddress
import logging
import re
from collections.abc import Callable
from enum import StrEnum
from functools import lru_cache
from typing import Concatenate, NamedTuple, ParamSpec, Protocol, TypeVar

import msgspec


class WorkerKind(StrEnum):
    """The part of the network that a worker has."""

    ATTENTION = "attention"
    EXPERTS = "experts"
    BOTH = "both"


class Worker(NamedTuple):
    """A worker process, as its command line and messages for the operator name it.

    Attributes:
        kind: the part of the network that it has.
        number: among the workers of its kind, from 0.
    """

    kind: WorkerKind
    number: int

    def __str__(self) -> str:
        match self.kind:
            case WorkerKind.EXPERTS:
                return f"expert worker {self.number}"
            case WorkerKind.ATTENTION | WorkerKind.BOTH:
                return f"engine {self.number}"


class CurveKeys(msgspec.Struct, frozen=True, kw_only=True):
    """Two key pairs of CURVE in Z85, which all processes of one server share; a process that has them is admitted.

    A socket that listens proves the pair `server`, and one that connects proves the pair `client`.
    """

    server_public: bytes
    server_secret: bytes
    client_public: bytes
    client_secret: bytes

    def __repr__(self) -> str:
        """Return a text without the keys, which logs and tracebacks must not contain."""
        return "CurveKeys(…)"


_IPV6_PREFIX = 64  # prefix of the smallest network of one customer, who can use all of its addresses


def in_address(host: str) -> str:
    """Return a host as it stands before a port: an IPv6 address in brackets, anything else unchanged."""
    return f"[{host}]" if ":" in host else host


@lru_cache(maxsize=4096)
def network_of(address: str) -> str:
    """Return the name under which an address counts: an IPv4 address, or the /64 network of an IPv6 address."""
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return address  # of a Unix socket
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.ip_network((found, _IPV6_PREFIX), strict=False))


_P = ParamSpec("_P")


class SideJob(Protocol):
    """An object whose methods may fail without harm.

    Attributes:
        has_failed: whether the job has ended because of an error.
    """

    has_failed: bool


_Job = TypeVar("_Job", bound=SideJob)
_Method = Callable[Concatenate[_Job, _P], None]


def ending_on_error(logger: logging.Logger, message: str) -> Callable[[_Method[_Job, _P]], _Method[_Job, _P]]:
    """Return a decorator that ends a side job where the method fails: it logs once, and later calls do nothing.

    Args:
        logger: receiver of the error.
        message: what no longer happens, and what goes on.
    """

    def guard(method: _Method[_Job, _P]) -> _Method[_Job, _P]:
        @functools.wraps(method)
        def guarded(self: _Job, /, *args: _P.args, **kwargs: _P.kwargs) -> None:
            if not self.has_failed:
                try:
                    method(self, *args, **kwargs)
                except Exception:
                    self.has_failed = True
                    logger.exception(message)

        return guarded

    return guard


_PANIC = "PanicException"  # of `pyo3_runtime`, which cannot be imported
_QUOTE = re.compile(r"[`'\"]")
_CAUSE_CHARS = 120


class NativePanic(Exception):  # noqa: N818 - a panic is what Rust calls it
    """A library met a state that its authors excluded. Its data structures may be used on; the call has no result."""


def as_exception(error: BaseException) -> Exception:
    """Return the error of a library as an `Exception`: itself, or a `NativePanic` for a panic.

    Raises:
        BaseException: `error` is neither, for instance a KeyboardInterrupt; it is raised again.
    """
    if isinstance(error, Exception):
        return error
    if type(error).__name__ == _PANIC:
        return NativePanic(f"panic: {error}")
    raise error


def cause_of(error: Exception) -> str:
    """Describe the error of a library without what it quotes, which may be a client's text."""
    first = (str(error).splitlines() or [""])[0]
    cause = _QUOTE.split(first)[0][:_CAUSE_CHARS].strip()
    return f"{type(error).__name__}: {cause}" if cause else type(error).__name__
