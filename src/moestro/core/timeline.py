"""Definitions of latencies, shared by load generator, simulator and reports. Times are integer nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Timelines:
    """Arrival and token times of answered requests, one row each.

    Inter-token latencies are not kept here: the recorder stores each gap between deliveries in a flat list, since one
    delivery may hold several tokens.

    Attributes:
        arrival_ns: int64[n].
        first_token_ns, last_token_ns: int64[n], delivery of the first and the last token.
        num_tokens: int64[n], tokens generated, at least 1.
    """

    arrival_ns: Int64s
    first_token_ns: Int64s
    last_token_ns: Int64s
    num_tokens: Int64s

    def __len__(self) -> int:
        return len(self.arrival_ns)

    @property
    def ttft_ns(self) -> Int64s:
        """int64[n], time from arrival to the first token."""
        return self.first_token_ns - self.arrival_ns

    @property
    def e2e_ns(self) -> Int64s:
        """int64[n], time from arrival to the last token."""
        return self.last_token_ns - self.arrival_ns

    @property
    def tpot_ns(self) -> NDArray[np.float64]:
        """float64[n], mean gap between the tokens of a request; NaN for a single token."""
        gaps = self.num_tokens - 1
        mean = np.full(len(self), np.nan)
        np.divide(self.last_token_ns - self.first_token_ns, gaps, out=mean, where=gaps > 0)
        return mean
