"""The interface between the simulated cluster and its ranks, in `fused` or `preemptive` mode."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moestro.core.request import Request
from moestro.core.script import Script
from moestro.engine.step_output import StepOutput
from moestro.sim.groups.group import Seat


class Ranks(Protocol):
    """Ranks on virtual time. The cluster calls `turn` at `next_ns`, and `add` when a request arrives.

    Attributes:
        began_ns: start of the current step or jump.
        ends: end of each step of the current jump, int64[k]. None means that no jump is running.
        tells_prefill: whether a seat's `plan` runs from `began_ns` on, so that the time of prefill is known.
    """

    began_ns: int
    ends: NDArray[np.int64] | None

    @property
    def next_ns(self) -> int | None:
        """Time of the next `turn`. None means that the ranks are idle until a request arrives."""
        ...

    @property
    def tells_prefill(self) -> bool:
        """Whether the time of prefill is known."""
        ...

    @property
    def steps_together(self) -> bool:
        """Whether several ranks begin every step together."""
        ...

    @property
    def seats(self) -> Sequence[Seat]:
        """The ranks."""
        ...

    def add(self, seat: int, request: Request, script: Script, now_ns: int) -> int:
        """Add a request to a rank's waiting queue, and return its serial number on that rank.

        Raises:
            RequestError: the rank refuses the request; no state has changed.
        """
        ...

    def catch_up(self, before_ns: int) -> None:
        """Take the steps of the current jump that ended before `before_ns`, so that their KV events are available."""
        ...

    def turn(self, now_ns: int, until_ns: int) -> list[StepOutput]:
        """End the current step or jump, start the next one, and return the step output of each rank.

        Args:
            until_ns: time of the next event elsewhere. Until then the ranks may go on alone, as long as no request
                gains a token.
        """
        ...
