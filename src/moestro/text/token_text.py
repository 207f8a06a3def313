"""Single tokens as text and bytes, as answers with log probabilities show them."""

from __future__ import annotations

import re
from typing import NamedTuple

from moestro.text.tokenizer_library import TokenizerLibrary

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
