"""Parses server-sent events from a byte stream."""

from __future__ import annotations

from dataclasses import dataclass

MAX_EVENT_BYTES = 16 << 20


class StreamSyntaxError(Exception):
    """The stream is not a readable stream of events."""


@dataclass(frozen=True, slots=True)
class Event:
    """One event. `kind` is empty unless the server named it."""

    kind: str
    data: bytes


class EventReader:
    """Splits a byte stream into events; comments and other fields are skipped."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Event]:
        """Return the events that `data` completes.

        Raises:
            StreamSyntaxError: an event is longer than MAX_EVENT_BYTES.
        """
        # A trailing \r stays in the rest, to meet its \n in the next piece.
        *blocks, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        if len(self._rest) > MAX_EVENT_BYTES:
            raise StreamSyntaxError(f"an event of more than {MAX_EVENT_BYTES} bytes")
        return [event for block in blocks if (event := _event(block)) is not None]


def _event(block: bytes) -> Event | None:
    kind, data = "", []
    for line in block.split(b"\n"):
        if line.startswith(b"data:"):
            data.append(line[5:].removeprefix(b" "))
        elif line.startswith(b"event:"):
            kind = line[6:].strip().decode(errors="replace")
    return Event(kind, b"\n".join(data)) if data else None
