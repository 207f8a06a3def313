"""Models of the engines, and their merged list for clients."""

from __future__ import annotations

import msgspec

_NONE: frozenset[int] = frozenset()
_MAX_MODELS = 10_000  # limit per engine; further entries are ignored


class _Listed(msgspec.Struct):
    data: list[msgspec.Raw]


class _Id(msgspec.Struct):
    id: str


class _ContextField(msgspec.Struct):
    max_model_len: int | None = None


class Models:
    """The model cards of `/v1/models` by engine, as the engines wrote them."""

    def __init__(self) -> None:
        self._cards: dict[int, dict[str, bytes]] = {}
        self._resting: dict[int, dict[str, bytes]] = {}  # Of engines that no list has.
        self._excluded: dict[str, frozenset[int]] = {}

    def learn(self, row: int, body: bytes) -> None:
        """Store an engine's model list. A malformed list is ignored."""
        try:
            raws = msgspec.json.decode(body, type=_Listed).data[:_MAX_MODELS]
            cards = {msgspec.json.decode(raw, type=_Id).id: bytes(raw) for raw in raws}
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return
        if row in self._resting:
            self._resting[row] = cards
        elif cards != self._cards.get(row):
            self._cards[row] = cards
            self._index()

    def declare(self, row: int, name: str) -> None:
        """Store the operator's word for an engine's model, until the engine lists its models."""
        self.learn(row, b'{"data":[%b]}' % msgspec.json.encode({"id": name, "object": "model"}))

    def forget(self, row: int) -> None:
        """Drop the models of a removed engine."""
        self._resting.pop(row, None)
        if self._cards.pop(row, None) is not None:
            self._index()

    def rest(self, row: int) -> None:
        """Leave out the models of an engine that gets no requests, until `wake`."""
        self._resting[row] = self._cards.pop(row, {})
        self._index()

    def wake(self, row: int) -> None:
        """Count the models of a resting engine again."""
        if (cards := self._resting.pop(row, None)) is not None:
            self._cards[row] = cards
            self._index()

    def excluded(self, model: str | None) -> frozenset[int]:
        """Return the rows known not to serve `model`. The set is empty for a model that no engine lists."""
        return self._excluded.get(model, _NONE) if model is not None else _NONE

    @property
    def are_alike(self) -> bool:
        """Whether all engines serve the same models, as far as known."""
        return not self._excluded

    def names_of(self, row: int) -> tuple[str, ...]:
        """Return the names of the models that one engine serves."""
        return tuple(self._cards.get(row, {}))

    def listed(self) -> bytes:
        """Return the body of `GET /v1/models`, with each name once."""
        cards = self._merged()
        return b'{"object":"list","data":[%b]}' % b",".join(cards[name] for name in sorted(cards))

    def card(self, name: str) -> bytes | None:
        """Return the body of `GET /v1/models/NAME`, or None for an unknown model."""
        return self._merged().get(name)

    def context_of(self, name: str | None) -> int | None:
        """Return the tokens of the longest sequence of a model; None if its engines differ or do not report it.

        Args:
            name: Name of the model; None means all models.
        """
        cards = [card for each in self._cards.values() for known, card in each.items() if name in (None, known)]
        lengths = {_length_of(card) for card in cards}
        return lengths.pop() if len(lengths) == 1 else None

    def _merged(self) -> dict[str, bytes]:
        merged: dict[str, bytes] = {}
        for cards in self._cards.values():
            merged = cards | merged
        return merged

    def _index(self) -> None:
        names = {name for cards in self._cards.values() for name in cards}
        lacking = {name: frozenset(row for row, cards in self._cards.items() if name not in cards) for name in names}
        self._excluded = {name: rows for name, rows in lacking.items() if rows}


def _length_of(card: bytes) -> int | None:
    try:
        return msgspec.json.decode(card, type=_ContextField).max_model_len
    except msgspec.ValidationError:
        return None
