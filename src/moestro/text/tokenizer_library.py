"""The boundary to the tokenizers library: whatever it raises, a panic included, ends one request and nothing else."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from tokenizers import Encoding
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

from moestro.core.native_panic import as_exception, cause_of
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
