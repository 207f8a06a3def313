"""Which models the engines serve, and the merged list of them that clients get."""

from __future__ import annotations

import msgspec

_NONE: frozenset[int] = frozenset()
_MAX_MODELS = 10_000  # of one engine; a longer list is not one


class _Listed(msgspec.Struct):
    data: list[msgspec.Raw]


class _Id(msgspec.Struct):
    id: str


class Models:
    """The cards of `/v1/models`, by engine, as the engines wrote them."""

    def __init__(self) -> None:
        self._cards: dict[int, dict[str, bytes]] = {}
        self._excluded: dict[str, frozenset[int]] = {}

    def learn(self, row: int, body: bytes) -> None:
        """An engine listed its models; what is no such list changes nothing."""
        try:
            raws = msgspec.json.decode(body, type=_Listed).data[:_MAX_MODELS]
            cards = {msgspec.json.decode(raw, type=_Id).id: bytes(raw) for raw in raws}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        if cards != self._cards.get(row):
            self._cards[row] = cards
            self._index()

    def forget(self, row: int) -> None:
        """An engine is gone."""
        if self._cards.pop(row, None) is not None:
            self._index()

    def excluded(self, model: str | None) -> frozenset[int]:
        """Rows that are known not to serve `model`, if any is known to; a model that nobody knows may be anywhere."""
        return self._excluded.get(model, _NONE) if model is not None else _NONE

    @property
    def are_alike(self) -> bool:
        """Every engine serves what every other does, as far as is known."""
        return not self._excluded

    def names_of(self, row: int) -> tuple[str, ...]:
        """What one engine serves."""
        return tuple(self._cards.get(row, {}))

    def listed(self) -> bytes:
        """The body of `GET /v1/models`: each name once."""
        cards = self._merged()
        return b'{"object":"list","data":[%b]}' % b",".join(cards[name] for name in sorted(cards))

    def card(self, name: str) -> bytes | None:
        """The body of `GET /v1/models/NAME`."""
        return self._merged().get(name)

    def _merged(self) -> dict[str, bytes]:
        merged: dict[str, bytes] = {}
        for cards in self._cards.values():
            merged = cards | merged
        return merged

    def _index(self) -> None:
        names = {name for cards in self._cards.values() for name in cards}
        lacking = {name: frozenset(row for row, cards in self._cards.items() if name not in cards) for name in names}
        self._excluded = {name: rows for name, rows in lacking.items() if rows}
