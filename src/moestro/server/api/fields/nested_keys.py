"""Finds keys below the top level of a body that nothing reads, so that none is dropped in silence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
from msgspec import inspect

from moestro.errors import RequestError, shown
from moestro.server.api.fields.unsupported import HARMLESS_BELOW, REFUSED_BELOW, REMEDIES_BELOW

_Trail = tuple[Any, str | int]  # The trail to the value around, and the value's key or position there.


class _KeysOf:
    """Objects and lists that a value may be, as its type says.

    Attributes:
        struct: Type of an object; None means that any key is allowed.
        keys: Shape behind each known key of an object.
        items: Shape of the items of a list; None means that they are open.
    """

    __slots__ = ("items", "keys", "struct")

    def __init__(self) -> None:
        self.struct: type | None = None
        self.keys: dict[str, _KeysOf] = {}
        self.items: _KeysOf | None = None


class NestedKeys:
    """Keys that the fields of a body may have below themselves.

    Args:
        fields: Struct of the body.
        shapes: Types by field, in place of those that the struct gives them.
    """

    def __init__(self, fields: type[msgspec.Struct], shapes: Mapping[str, Any] | None = None) -> None:
        self._known: dict[type, _KeysOf] = {}
        self._fields = _keys_of(inspect.type_info(fields), self._known).keys | {
            name: _keys_of(inspect.type_info(given), self._known) for name, given in (shapes or {}).items()
        }

    def unread(self, raw: Mapping[str, msgspec.Raw]) -> list[str]:
        """Return the places of keys that nothing reads, such as `messages[1].weight`.

        Args:
            raw: Body by the names of its fields.

        Raises:
            RequestError: A key asks for what this server does not support and what would change the answer.
        """
        found: list[str] = []
        for name, value in raw.items():
            shape = self._fields.get(name)
            if shape is not None and (shape.struct or shape.items):
                found += _unread(msgspec.json.decode(value), shape, (None, name))
        return found


def _unread(value: Any, shape: _KeysOf, trail: _Trail) -> Iterator[str]:
    if isinstance(value, dict) and shape.struct is not None:
        for key, inner in value.items():
            if key not in shape.keys:
                if inner is not None and key not in HARMLESS_BELOW:
                    place = _place((trail, key))
                    _refuse(shape.struct, key, inner, place)
                    yield place
            elif isinstance(inner, (dict, list)):
                yield from _unread(inner, shape.keys[key], (trail, key))
    elif isinstance(value, list) and shape.items is not None:
        for i, item in enumerate(value):
            yield from _unread(item, shape.items, (trail, i))


def _refuse(struct: type, key: str, value: object, place: str) -> None:
    neutral = REFUSED_BELOW.get(struct, {}).get(key)
    if neutral is None or value in neutral:
        return
    given = shown(msgspec.json.encode(value).decode())
    remedy = REMEDIES_BELOW.get(key, "Leave it out.")
    text = f"{place} is not supported, and {given} would change the answer. {remedy}"
    raise RequestError(text, param=place, code="unsupported_parameter")


def _place(trail: _Trail) -> str:
    around, last = trail
    if around is None:
        return str(last)
    return f"{_place(around)}[{last}]" if isinstance(last, int) else f"{_place(around)}.{last}"


def _keys_of(given: inspect.Type, known: dict[type, _KeysOf]) -> _KeysOf:
    """Return the shape of a type; structs may contain each other."""
    shape = _KeysOf()
    for each in given.types if isinstance(given, inspect.UnionType) else (given,):
        if isinstance(each, inspect.ListType):
            shape.items = _keys_of(each.item_type, known)
        elif isinstance(each, inspect.StructType):
            inner = known.get(each.cls)
            if inner is None:
                inner = known[each.cls] = _KeysOf()
                inner.struct = each.cls
                inner.keys.update((field.encode_name, _keys_of(field.type, known)) for field in each.fields)
            shape.struct, shape.keys = inner.struct, inner.keys
    return shape
