"""Edits of a request's body on its way to an engine, which an operator has allowed."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

_decode = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode


def with_fields(body: bytes, fields: Mapping[str, bytes | None]) -> bytes:
    """Return a JSON object with `fields` in place of its own fields of these names.

    Args:
        body: bytes of the object. Anything else is returned as it is, because the engine has the better error message.
        fields: JSON of each value by its name; None removes the field.
    """
    try:
        found = _decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return body
    for name, value in fields.items():
        found.pop(name, None)
        if value is not None:
            found[name] = msgspec.Raw(value)
    return msgspec.json.encode(found)
