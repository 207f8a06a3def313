"""Refuses a tokenizer that makes much of little: its normalizers may repeat a character without bound.

The file's own figures bound the growth of any text. A child process with limits then loads the tokenizer and tries it,
because a library in native code neither ends early nor lets signals through.
"""

from __future__ import annotations

import contextlib
import math
import os
import resource
import select
import signal
import string
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from tokenizers import Tokenizer as Backend

from moestro.errors import ConfigError
from moestro.files.checkpoint import MAX_TOKENIZER_BYTES, read_bytes
from moestro.text.chats.chat_template import address_space_bytes

CPU_LIMIT_S = 10  # of loading and trying; the largest published tokenizers take 2 s
WALL_LIMIT_S = 60.0  # the same on a machine that is busy
MEMORY_LIMIT_BYTES = 3 << 30  # address space beyond the parent's; a file of 64 MiB takes up to 1.2 GB
MAX_GROWTH = 256  # characters or tokens that one character of a text may become; NFKC makes 18 of one
MAX_TOKENS_TEXT_CHARS = 4096  # text of the tokens of one character, special ones around it included
_CHARACTERS = (*string.printable, "é", "ß", "中", "한", "\u0301", "\ufdfa", "\U0001f600", "\U00020000")
_READ_BYTES = 4096


class _Parts(msgspec.Struct):
    """Parts of tokenizer.json that change texts."""

    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None


def refuse_growth(path: Path, load: Callable[[], Backend]) -> None:
    """Refuse the tokenizer in `path` if texts grow without a reasonable bound, or if it exceeds the limits of a trial.

    Args:
        path: directory with tokenizer.json.
        load: loads the tokenizer. A child process calls it.

    Raises:
        ConfigError: the tokenizer is refused. Other errors of loading it are the caller's to find.
    """
    with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):  # the library words these better
        parts = msgspec.json.decode(read_bytes(path / "tokenizer.json", MAX_TOKENIZER_BYTES), type=_Parts)
        for name in _Parts.__struct_fields__:
            if (growth := _growth(getattr(parts, name))) > MAX_GROWTH:
                raise ConfigError(
                    f"the {name} in {path / 'tokenizer.json'} may make {growth:.3g} characters of one; the limit is"
                    f" {MAX_GROWTH}: use another tokenizer"
                )
    if found := _try_in_child(load):
        raise ConfigError(f"the tokenizer in {path} {found}: use another tokenizer")


def _growth(part: object) -> float:
    """Return an upper bound of the characters that a normalizer or decoder makes of one, for any text."""
    if not isinstance(part, dict):
        return 1.0
    kind = part.get("type")
    if kind == "Sequence":
        inner: object = next((part[key] for key in ("normalizers", "pretokenizers", "decoders") if key in part), [])
        return math.prod(map(_growth, inner)) if isinstance(inner, list) else 1.0
    if kind == "Replace":
        pattern, content = part.get("pattern"), part.get("content")
        if not isinstance(pattern, dict) or not isinstance(content, str):
            return 1.0
        plain = pattern.get("String")
        if isinstance(plain, str) and plain:
            return max(1.0, len(content) / len(plain))
        return 1.0 + len(content)  # a regular expression may match before each character
    return 1.0


def _try_in_child(load: Callable[[], Backend]) -> str:
    """Return why the tokenizer is refused; empty if it is not."""
    reading, writing = os.pipe()
    memory_bytes = address_space_bytes() + MEMORY_LIMIT_BYTES
    pid = os.fork()
    if pid == 0:
        try:
            _limit(memory_bytes, writing)
            os.write(writing, _try(load()).encode())
        finally:
            os._exit(0)  # whatever was raised; the parent meets the same error
    os.close(writing)
    try:
        found = _read_to_end(reading)
    finally:
        os.close(reading)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if found is None or (found == b"" and os.WIFSIGNALED(status)):
        return (
            f"takes more than {CPU_LIMIT_S} s or {MEMORY_LIMIT_BYTES >> 20} MiB of memory to load and to encode single"
            " characters"
        )
    return found.decode()


def _read_to_end(file: int) -> bytes | None:
    """Return what the child writes; None after the limit of time."""
    ends_at_s, found = time.monotonic() + WALL_LIMIT_S, b""
    while select.select([file], [], [], max(0.0, ends_at_s - time.monotonic()))[0]:
        piece = os.read(file, _READ_BYTES)
        if not piece:
            return found
        found += piece
    return None


def _limit(memory_bytes: int, kept: int) -> None:
    """Let the kernel hold the limits, and leave the parent's files and signals alone."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGXCPU):
        signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # the library writes of its end
        os.dup2(nothing, stream)
    os.closerange(3, kept)  # the port is free as soon as the parent has left
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
    resource.setrlimit(resource.RLIMIT_AS, (memory_bytes, memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_LIMIT_S, CPU_LIMIT_S))


def _try(backend: Backend) -> str:
    """Encode single characters and decode their tokens. Returns what exceeds a limit; empty if nothing does."""
    for character in _CHARACTERS:
        try:
            normalizer = backend.normalizer
            num_chars = 1 if normalizer is None else len(normalizer.normalize_str(character))
            ids = backend.encode(character, add_special_tokens=True).ids
            num_text_chars = len(backend.decode(ids, skip_special_tokens=False))
        except MemoryError:
            os.abort()
        except BaseException:  # noqa: S112 - a panic; one for any text is met by the parent
            continue
        if num_chars > MAX_GROWTH or len(ids) > MAX_GROWTH:
            num, noun = max((num_chars, "characters"), (len(ids), "tokens"))
            return f"makes {num:,} {noun} of {character!r}; the limit is {MAX_GROWTH}"
        if num_text_chars > MAX_TOKENS_TEXT_CHARS:
            return (
                f"makes {num_text_chars:,} characters of the tokens of {character!r}; the limit is"
                f" {MAX_TOKENS_TEXT_CHARS:,}"
            )
    return ""
