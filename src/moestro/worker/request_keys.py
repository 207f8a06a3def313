"""Keys of requests by their ids, so that a request visits the same experts on every paced engine."""

from __future__ import annotations

import numpy as np

from moestro.core.columns import true_rows
from moestro.core.token_keys import Keys, named_request_key
from moestro.core.work import Units
from moestro.engine.sequences import SequenceTable

_NO_SEQUENCE = -1


class RequestKeys:
    """Makes the keys by which a paced device draws experts.

    Args:
        table: running sequences of the device's rank.
    """

    def __init__(self, table: SequenceTable) -> None:
        self._table = table
        # By slot: the sequence whose key was made last, and its key.
        self._serial = np.full(len(table.sequences), _NO_SEQUENCE, np.int64)
        self._key: Keys = np.zeros(len(table.sequences), np.uint64)

    def of(self, units: Units) -> Keys:
        """uint64[n], key of each unit's request."""
        for row in true_rows(self._serial.take(units.slot) != units.serial):
            slot = int(units.slot[row])
            self._key[slot] = named_request_key(self._table.at(slot).request.request_id)
            self._serial[slot] = units.serial[row]
        keys: Keys = self._key.take(units.slot)
        return keys
