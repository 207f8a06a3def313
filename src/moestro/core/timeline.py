"""What the latency words mean, said once for load generator, simulator and reports. Times are integer nanoseconds."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Timelines:
    """Answered requests, one row each: when they came, and when their tokens left.

    ITL, each gap between deliveries, is kept flat by whoever records it: a delivery may hold several tokens.

    Attributes:
        arrival_ns: int64[n].
        first_token_ns, last_token_ns: int64[n], when the first and the last token were delivered.
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
        """int64[n], arrival to first token."""
        return self.first_token_ns - self.arrival_ns

    @property
    def e2e_ns(self) -> Int64s:
        """int64[n], arrival to last token."""
        return self.last_token_ns - self.arrival_ns

    @property
    def tpot_ns(self) -> NDArray[np.float64]:
        """float64[n], mean gap between the tokens of one request; NaN where there is one token and so no gap."""
        gaps = self.num_tokens - 1
        mean = np.full(len(self), np.nan)
        np.divide(self.last_token_ns - self.first_token_ns, gaps, out=mean, where=gaps > 0)
        return mean
