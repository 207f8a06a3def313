"""The tokenizers library behind bounds: its failures end one request, and a trial refuses unbearable tokenizers.

Normalizers may repeat a character without bound. The file's own figures bound the growth of any text. A child process
with limits then loads the tokenizer and tries it, because a library in native code neither ends early nor lets signals
through.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import re
import resource
import select
import signal
import string
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from tokenizers import Encoding
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from moestro.core.processes import as_exception, cause_of
from moestro.errors import ConfigError, RequestError
from moestro.files.checkpoint import MAX_TOKENIZER_BYTES, read_bytes
from moestro.text.child_process import limit_memory

logger = logging.getLogger(__name__)

_LOG_INTERVAL_S = 60.0  # A tokenizer that fails for one text may fail for each request.
_GAVE_UP = "retry-limit-in-match over"  # Oniguruma's bound on one search.
_INVALID_PREFIX = "Invalid prefix encountered"


class TokenizerError(RequestError):
    """The tokenizers library failed on the text or the tokens of one request.

    Args:
        doing: what failed, for instance "encode this text".
    """

    http_status = 500
    error_type = "server_error"

    def __init__(self, doing: str) -> None:
        super().__init__(
            f"The model's tokenizer cannot {doing}: its tokenizer.json is at fault, and the server's log has the cause."
            " A retry will fail in the same way: change the prompt, or contact the operator.",
            code="tokenizer_error",
        )


class TextLimitError(RequestError):
    """A pattern of the tokenizer gave up on a text, because it would have to try too many ways to match it."""

    def __init__(self) -> None:
        super().__init__(
            "The model's tokenizer gave up on this text: one of its patterns would have to try too many ways to match"
            " it. Change the text, for instance break up long runs of one character.",
            code="tokenizer_limit",
        )


class InvalidPrefixError(Exception):
    """A token changed text that the stream has returned already."""


class TokenizerLibrary:
    """A tokenizer of the library. Safe to call from several threads.

    Of the library's calls, only those for a batch release the interpreter's lock, so that other threads run meanwhile.

    Args:
        backend: the tokenizer.

    Raises:
        RequestError: `TokenizerError` from each method; the library failed. `TextLimitError` from encodings.
    """

    def __init__(self, backend: Backend) -> None:
        self.backend = backend

    def encoding(self, text: str, *, add_special_tokens: bool) -> Encoding:
        """Tokens of `text`; with `add_special_tokens` also those that the model needs around every text."""
        try:
            found: Encoding = self.backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        except BaseException as error:
            if _GAVE_UP in str(error):
                raise TextLimitError from None  # Not logged: the text is the client's choice.
            raise _failed(error, "encode this text") from None
        return found

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`, as `encoding` finds them."""
        return list(self.encoding(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        """Text of tokens."""
        try:
            text: str = self.backend.decode_batch([list(ids)], skip_special_tokens=skip_special_tokens)[0]
        except BaseException as error:
            raise _failed(error, "decode these tokens") from None
        return text

    def name(self, token_id: int) -> str | None:
        """Entry of a token in the vocabulary; None means that there is none."""
        try:
            name: str | None = self.backend.id_to_token(token_id)
        except BaseException as error:
            raise _failed(error, "name this token") from None
        return name

    def step(self, stream: DecodeStream, token_id: int) -> str | None:
        """Add a token to a stream, and return the text that it completes; None means that it completes none.

        Raises:
            InvalidPrefixError: the token changes text that the stream has returned.
        """
        try:
            text: str | None = stream.step(self.backend, token_id)
        except BaseException as error:
            if _INVALID_PREFIX in str(error):
                raise InvalidPrefixError from None
            raise _failed(error, "decode these tokens") from None
        return text


_lock = threading.Lock()
_due_s = 0.0
_num_left_out = 0


def _failed(error: BaseException, doing: str) -> TokenizerError:
    """Return the error for the client, and log its cause at most once in an interval, without the client's text."""
    global _due_s, _num_left_out  # noqa: PLW0603 - one log of the process, whatever tokenizer fails
    cause = cause_of(as_exception(error))
    with _lock:
        now_s, left_out = time.monotonic(), _num_left_out
        if now_s < _due_s:
            _num_left_out += 1
            return TokenizerError(doing)
        _due_s, _num_left_out = now_s + _LOG_INTERVAL_S, 0
    more = f" (and {left_out:,} more since the last such line)" if left_out else ""
    logger.error("the tokenizer cannot %s: %s%s; its tokenizer.json is at fault", doing, cause, more)
    return TokenizerError(doing)


# Single tokens as text and bytes, as answers with log probabilities show them.

ANY_TEXT = "a"  # which any tokenizer can encode
_UNFINISHED = "\ufffd"  # a decoder's replacement for bytes that are no character
_BYTE_PIECE = re.compile(r"<0x([0-9A-F]{2})>")


class TokenText(NamedTuple):
    """One token. `text` differs for tokens with different bytes; `raw` pieces join to the answer's bytes."""

    text: str
    raw: bytes


class TokenTexts:
    """The texts of a vocabulary, computed on first use. Safe to call from several threads.

    A token that is only part of a character has no text of its own; its text is OpenAI's notation, `bytes:\\xe2\\x96`.
    """

    def __init__(self, library: TokenizerLibrary) -> None:
        self._library = library
        self._known: dict[int, TokenText] = {}
        # Some decoders strip the space of a first token, so each token is decoded behind another one.
        self._anchor = library.encode(ANY_TEXT, add_special_tokens=False)[-1:]
        self._anchor_text = library.decode(self._anchor, skip_special_tokens=True)

    def __getitem__(self, token_id: int) -> TokenText:
        found = self._known.get(token_id)
        if found is None:
            found = self._known[token_id] = self._find(token_id)
        return found

    def _find(self, token_id: int) -> TokenText:
        decoded = self._library.decode([*self._anchor, token_id])
        text = decoded.removeprefix(self._anchor_text)
        if _UNFINISHED not in text:
            return TokenText(text, text.encode())
        raw = _bytes_of(self._library.name(token_id) or "")
        if raw is None or _is_text(raw):
            return TokenText(text, text.encode())
        return TokenText("bytes:" + "".join(f"\\x{byte:02x}" for byte in raw), raw)


def _bytes_of(piece: str) -> bytes | None:
    """Bytes of a vocabulary entry, byte-level or byte fallback; None if it is neither."""
    if match := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    values = [_BYTE_OF_SYMBOL.get(symbol) for symbol in piece]
    return bytes(value for value in values if value is not None) if None not in values else None


def _is_text(raw: bytes) -> bool:
    try:
        raw.decode()
    except UnicodeDecodeError:
        return False
    return True


def _byte_symbols() -> dict[str, int]:
    """GPT-2's table: printable bytes map to themselves, the others to code points from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_BYTE_OF_SYMBOL = _byte_symbols()


# Trial of a tokenizer before it serves: its own figures, then a child process with limits.

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
    pid = os.fork()
    if pid == 0:
        try:
            _limit(writing)
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


def _limit(kept: int) -> None:
    """Let the kernel hold the limits, and leave the parent's files and signals alone."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGXCPU):
        signal.signal(number, signal.SIG_DFL)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):  # the library writes of its end
        os.dup2(nothing, stream)
    os.closerange(3, kept)  # the port is free as soon as the parent has left
    os.closerange(kept + 1, os.sysconf("SC_OPEN_MAX"))
    limit_memory(MEMORY_LIMIT_BYTES)
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
