"""The waiting queue of one engine: columns for the order policy, objects for the scheduler."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from moestro.core.views import WaitingView
from moestro.engine.sequences import Sequence
from moestro.policy.ordering import OrderPolicy

_COLUMNS = np.dtype(
    [("arrival_ns", np.int64), ("serial", np.int64), ("num_prompt_tokens", np.int32), ("priority", np.int32)]
)


class WaitingQueue:
    """Sequences that hold no KV, in the order in which they came; the policy orders them when asked.

    Rows are appended and marked dead, and compacted when half are dead, so that a long queue costs no Python per row.

    Attributes:
        num_tokens: of all that wait.
    """

    def __init__(self) -> None:
        self._rows = np.empty(16, _COLUMNS)
        self._live = np.zeros(16, np.bool_)
        self._sequences: list[Sequence | None] = []
        self._row_of: dict[int, int] = {}
        self.num_tokens = 0

    def __len__(self) -> int:
        return len(self._row_of)

    def add(self, sequence: Sequence) -> None:
        """Append `sequence`, which is not in the queue."""
        assert sequence.serial not in self._row_of, f"{sequence.request.request_id} is waiting already"
        row = len(self._sequences)
        if row == len(self._rows):
            self._compact()
            row = len(self._sequences)
        self._rows[row] = _row(sequence)
        self._live[row] = True
        self._sequences.append(sequence)
        self._row_of[sequence.serial] = row
        self.num_tokens += sequence.num_tokens

    def remove(self, sequence: Sequence) -> None:
        """Take `sequence`, which is in the queue, out of it."""
        row = self._row_of.pop(sequence.serial)
        self._live[row] = False
        self._sequences[row] = None
        self.num_tokens -= sequence.num_tokens

    def in_order(self, policy: OrderPolicy, now_ns: int) -> Iterator[Sequence]:
        """The sequences, the first to be admitted first; the queue must not change while they are drawn."""
        rows = np.flatnonzero(self._live)
        for row in rows[policy(_view(self._rows[rows]), now_ns)]:
            sequence = self._sequences[row]
            assert sequence is not None, f"row {row} is dead"
            yield sequence

    def _compact(self) -> None:
        """Drop dead rows; double the space when more than half are alive."""
        rows = np.flatnonzero(self._live)
        size = len(self._rows) * (2 if 2 * len(rows) > len(self._rows) else 1)
        kept = np.empty(size, _COLUMNS)
        kept[: len(rows)] = self._rows[rows]
        self._rows = kept
        self._live = np.arange(size) < len(rows)
        self._sequences = [self._sequences[row] for row in rows.tolist()]
        self._row_of = {int(serial): row for row, serial in enumerate(kept["serial"][: len(rows)].tolist())}


def rank_in_order(sequences: list[Sequence], policy: OrderPolicy, now_ns: int) -> NDArray[np.int64]:
    """int64[n]: the place of each of `sequences` in the policy's order."""
    order = policy(_view(np.array([_row(sequence) for sequence in sequences], _COLUMNS)), now_ns)
    ranks = np.empty(len(sequences), np.int64)
    ranks[order] = np.arange(len(sequences))
    return ranks


def _row(sequence: Sequence) -> tuple[int, int, int, int]:
    request = sequence.request
    return request.arrival_ns, sequence.serial, request.num_prompt_tokens, request.priority


def _view(rows: NDArray[np.void]) -> WaitingView:
    return WaitingView(rows["arrival_ns"], rows["num_prompt_tokens"], rows["priority"], rows["serial"])
