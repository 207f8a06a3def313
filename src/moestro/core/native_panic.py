"""Panics of libraries in Rust, which pyo3 raises as a `BaseException`: one that no `except Exception` stops."""

from __future__ import annotations

import re

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
