"""The holders of places, as the micro-queues ask them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moestro.core.work import Int32s

Int64s = NDArray[np.int64]


class PlaceTable(Protocol):
    """Class and age of the tokens at places: `TokenPool` for a home's own tokens, `Guests` for those of other homes."""

    def classes_at(self, places: Int32s) -> NDArray[np.uint8]:
        """uint8[n], service class of the token at each place."""
        ...

    def queued_ns_at(self, places: Int32s) -> Int64s:
        """int64[n], time since when each token waits for its experts."""
        ...

    def passed_ns_at(self, places: Int32s) -> Int64s:
        """int64[n], for how long each token was passed over so far (`QueueTable.passed_ns`)."""
        ...

    @property
    def num_best_effort(self) -> int:
        """Number of tokens or units of class BE; 0 tells the class of all without a look."""
        ...

    @property
    def num_passed(self) -> int:
        """Number of tokens or units that were passed over at all."""
        ...
