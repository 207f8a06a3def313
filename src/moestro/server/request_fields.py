"""Decodes request bodies into typed fields; the error for an invalid body names the place of the fault."""

from __future__ import annotations

import codecs
import logging
import re
import sys
from collections.abc import Callable
from typing import Generic, TypeVar

import msgspec

from moestro.errors import RequestError, shown
from moestro.server.protocol import ChatFields, CompletionFields
from moestro.server.unsupported import IN_CHAT, IN_COMPLETIONS, refuse_unsupported
from moestro.web.json_elements import MAX_DIGITS, MAX_ELEMENTS, SCAN_BYTES, count_elements, has_long_number

logger = logging.getLogger(__name__)

Fields = TypeVar("Fields", bound=msgspec.Struct)
Check = Callable[[memoryview], None]

_ABSENT = msgspec.Raw()
_NAMES = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_PLACE = re.compile(r"(.*) - at `\$\.?(.*)`$", re.DOTALL)


class BodyDecoder(Generic[Fields]):
    """Decodes the bodies of one path.

    Args:
        fields: Struct of the fields to read.
        neutral: Fields that are known and not supported yet, with the values that request nothing.
        ids: Name of the field that may hold more token ids than `MAX_ELEMENTS`.
    """

    def __init__(
        self, fields: type[Fields], neutral: dict[str, tuple[object, ...]] | None = None, ids: str | None = None
    ) -> None:
        self._neutral = neutral or {}
        self._ids = ids
        self._decoder = msgspec.json.Decoder(fields)
        names = dict.fromkeys((*fields.__struct_fields__, *self._neutral))
        # Unlike a dict, a struct creates no objects for unknown fields, however many there are.
        self._raw = msgspec.json.Decoder(msgspec.defstruct("RawFields", [(n, msgspec.Raw, _ABSENT) for n in names]))

    def __call__(self, body: bytes, check_ids: Check | None = None) -> Fields:
        """Return the fields of `body`.

        Args:
            check_ids: Callable that refuses too many token ids; receives their JSON before they are decoded.

        Raises:
            RequestError: The body is invalid, has too many elements, or requests an unsupported feature.
        """
        try:
            _check_utf8(body)
            _refuse_slow_reading(body)
            raw = self._raw_fields(body)
            if check_ids is not None and self._ids in raw:
                check_ids(memoryview(raw[self._ids]))
            _refuse_many_elements(body, raw, self._ids)
            refuse_unsupported(raw, self._neutral)
            fields = self._decoder.decode(body)
        except msgspec.ValidationError as error:
            raise _wrong_type(str(error)) from None
        except RecursionError:
            raise _not_json("it is nested too deeply") from None
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise _not_json(str(error)) from None
        if logger.isEnabledFor(logging.DEBUG) and (ignored := _NAMES.decode(body).keys() - set(self._known())):
            logger.debug("fields ignored: %s", shown(", ".join(sorted(ignored))))
        return fields

    def _known(self) -> tuple[str, ...]:
        return self._raw.type.__struct_fields__

    def _raw_fields(self, body: bytes) -> dict[str, msgspec.Raw]:
        """Return the JSON of each known field in `body`."""
        found = self._raw.decode(body)
        return {name: value for name in self._known() if (value := getattr(found, name)) is not _ABSENT}


decode_completion = BodyDecoder(CompletionFields, IN_COMPLETIONS, ids="prompt")
decode_chat = BodyDecoder(ChatFields, IN_CHAT)


def _check_utf8(body: bytes) -> None:
    """Raise UnicodeDecodeError if `body` is not UTF-8; msgspec looks only at the values that it keeps."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    for start in range(0, len(body), SCAN_BYTES):
        decoder.decode(body[start : start + SCAN_BYTES], final=start + SCAN_BYTES >= len(body))


def _refuse_slow_reading(body: bytes) -> None:
    """Raise RequestError if a search for the fields of `body`, or the parsing of its numbers, would take long."""
    if len(body) <= MAX_ELEMENTS:
        return
    if count_elements(body, MAX_ELEMENTS + 1, b":") > MAX_ELEMENTS:
        raise _too_many_elements(None)
    if has_long_number(body):
        raise RequestError(f"A number in the request body may have at most {MAX_DIGITS} digits.", code="invalid_value")


def _refuse_many_elements(body: bytes, raw: dict[str, msgspec.Raw], ids: str | None) -> None:
    if len(body) <= MAX_ELEMENTS:
        return
    allowed = MAX_ELEMENTS + (count_elements(raw[ids], sys.maxsize) if ids in raw else 0)
    if count_elements(body, allowed + 1) <= allowed:
        return
    counts = {name: count_elements(value, MAX_ELEMENTS + 1) for name, value in raw.items() if name != ids}
    largest = max(counts, key=counts.__getitem__, default=None)
    raise _too_many_elements(largest)


def _too_many_elements(param: str | None) -> RequestError:
    return RequestError(
        f"The request body may have at most {MAX_ELEMENTS} list items and map entries, not counting token ids of a"
        " prompt. Send a shorter body, or several requests.",
        param=param,
        code="too_many_elements",
    )


def _not_json(cause: str) -> RequestError:
    return RequestError(f"The request body is not valid JSON: {shown(cause)}.", code="invalid_json")


def _wrong_type(message: str) -> RequestError:
    """Return the error for a validation message of msgspec, with the place of the fault as `param`."""
    param = None
    if match := _PLACE.match(message):
        message, param = match[1], match[2] or None
    if missing := _MISSING.search(message):
        name = missing[1]
        param = f"{param}.{name}" if param else name
        message = "this field is required and is missing"
    place = f"{shown(param)}: " if param else "Request body: "
    return RequestError(f"{place}{message}.", param=param, code="invalid_type")
