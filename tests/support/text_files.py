"""The ways in which editors and shells write one text."""

from __future__ import annotations


def lines_of_unix(text: str) -> bytes:
    return text.encode()


def notepad(text: str) -> bytes:
    return text.replace("\n", "\r\n").encode("utf-8-sig")


def windows_without_mark(text: str) -> bytes:
    return text.replace("\n", "\r\n").encode()


def powershell(text: str) -> bytes:
    return text.replace("\n", "\r\n").encode("utf-16")


WRITERS = [lines_of_unix, notepad, windows_without_mark, powershell]
