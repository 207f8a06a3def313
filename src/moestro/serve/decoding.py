"""From the bytes of a request's body to typed fields, or to a refusal that says where it went wrong."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeVar

import msgspec

from moestro.errors import RequestError
from moestro.serve.protocol import ChatFields, CompletionFields
from moestro.serve.refusals import shown
from moestro.serve.unsupported import IN_CHAT, IN_COMPLETIONS, refuse_unsupported

logger = logging.getLogger(__name__)

Fields = TypeVar("Fields", bound=msgspec.Struct)

_COMPLETION = msgspec.json.Decoder(CompletionFields)
_CHAT = msgspec.json.Decoder(ChatFields)
_RAW = msgspec.json.Decoder(dict[str, msgspec.Raw])
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_PLACE = re.compile(r"(.*) - at `\$\.?(.*)`$", re.DOTALL)


def decode_completion(body: bytes, check_prompt: Callable[[memoryview], None]) -> CompletionFields:
    """The fields of `POST /v1/completions`; RequestError if this is no such body.

    Args:
        check_prompt: is shown the prompt's JSON before it is decoded, and may refuse it.
    """
    return decode_fields(body, _COMPLETION, IN_COMPLETIONS, {"prompt": check_prompt})


def decode_chat(body: bytes) -> ChatFields:
    """The fields of `POST /v1/chat/completions`; RequestError if this is no such body."""
    return decode_fields(body, _CHAT, IN_CHAT)


def decode_fields(
    body: bytes,
    decoder: msgspec.json.Decoder[Fields],
    neutral: dict[str, tuple[object, ...]],
    checks: Mapping[str, Callable[[memoryview], None]] = MappingProxyType({}),
) -> Fields:
    """The fields that `decoder` reads; RequestError if this is no such body, or asks for what `neutral` bars.

    Args:
        checks: for some fields, what looks at their JSON before they are decoded.
    """
    try:
        body.decode()  # msgspec looks at the UTF-8 of the values it keeps, and only at those
        raw = _RAW.decode(body)
        refuse_unsupported(raw, neutral)
        for name in raw.keys() & checks.keys():
            checks[name](memoryview(raw[name]))
        fields = decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _wrong_type(str(error)) from None
    except RecursionError:
        raise _not_json("it is nested too deeply") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise _not_json(str(error)) from None
    ignored = raw.keys() - set(fields.__struct_fields__) - neutral.keys()
    if ignored:
        logger.debug("fields ignored: %s", shown(", ".join(sorted(ignored))))
    return fields


def _not_json(cause: str) -> RequestError:
    return RequestError(f"The request body is not valid JSON: {shown(cause)}.", code="invalid_json")


def _wrong_type(message: str) -> RequestError:
    """msgspec's own words, with the place as `param`."""
    param = None
    if match := _PLACE.match(message):
        message, param = match[1], match[2] or None
    if missing := _MISSING.search(message):
        name = missing[1]
        param = f"{param}.{name}" if param else name
        message = "this field is required and is missing"
    place = f"{shown(param)}: " if param else "Request body: "
    return RequestError(f"{place}{message}.", param=param, code="invalid_type")
