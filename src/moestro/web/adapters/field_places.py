"""Names the fields at fault in a client's body, and maps places in a chat's body to those that they come from."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from moestro.errors import RequestError, shown

_BORDERS = ("", ".", "[")  # What follows a place in the places inside of it.
_MISSING = re.compile(r"Object missing required field `(\w+)`")
_PLACE = re.compile(r"(.*) - at `\$\.?(.*)`$", re.DOTALL)


def wrong_type(error: msgspec.ValidationError, place: str = "") -> RequestError:
    """Return the refusal for a field of a wrong type, with the field's place as `param`.

    Args:
        place: Place of the decoded value in the body; empty for the body itself.
    """
    message = str(error)
    if match := _PLACE.match(message):
        message, place = match[1], _joined(place, match[2])
    if missing := _MISSING.search(message):
        message, place = "this field is required and is missing", _joined(place, missing[1])
    named = f"{shown(place)}: " if place else "Request body: "
    return RequestError(f"{named}{message}.", param=place or None, code="invalid_type")


def _joined(place: str, inner: str) -> str:
    return f"{place}.{inner}" if place and inner and not inner.startswith("[") else place + inner


class FieldPlaces:
    """Places of fields by the places of a chat's body, such as `messages[1].content`.

    A place that is not known lies at the same point within the innermost known place around it.

    Args:
        names: Known places of all bodies of an API.
    """

    def __init__(self, names: Mapping[str, str]) -> None:
        self._own = dict(names)

    def add(self, place: str, own: str) -> None:
        """Note that the field at `place` of the chat's body was at `own` in the client's."""
        self._own[place] = own

    def own_place(self, place: str) -> str:
        """Return the place in the client's body. Without a known place around it, `place` has the same name there."""
        around = [known for known in self._own if place.startswith(known) and place[len(known) :][:1] in _BORDERS]
        known = max(around, key=len, default="")
        return self._own[known] + place[len(known) :] if known else place

    @contextlib.contextmanager
    def naming_errors(self) -> Iterator[None]:
        """Let each RequestError of the block name the field of the client's body, in `param` and in its text."""
        try:
            yield
        except RequestError as error:
            if error.param is not None:
                own = self.own_place(error.param)
                if error.message.startswith(error.param):
                    error.message = own + error.message[len(error.param) :]
                    error.args = (error.message,)
                error.param = own
            raise


@dataclass(frozen=True, slots=True)
class TranslatedChat:
    """Body of a chat completion, and the places that its fields had in the client's body.

    Attributes:
        left_out: Places in the client's body of what the chat has no counterpart for and can do without.
    """

    fields: dict[str, Any]
    places: FieldPlaces
    left_out: tuple[str, ...] = ()
