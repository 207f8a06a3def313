"""Decodes JSON texts of models and clients, valid or not."""

from __future__ import annotations

from typing import Any

import msgspec

from moestro.core.json_elements import is_too_deep


def decoded(text: str) -> Any:
    """Return the value of a JSON text; `msgspec.UNSET` if it is not valid, or nested too deeply to be passed on."""
    try:
        data = text.encode()
        return msgspec.UNSET if is_too_deep(data) else msgspec.json.decode(data)
    except (msgspec.DecodeError, RecursionError, UnicodeError):
        return msgspec.UNSET
