"""The boundary to the tokenizers library: whatever it raises, a panic included, ends one request and nothing else."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from moestro.core.processes import as_exception, cause_of
from moestro.errors import RequestError

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
