"""What the simulated cluster drives: ranks that begin and end steps together, or one that works in stages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moestro.core.request import Request
from moestro.core.script import Script
from moestro.engine.step_output import StepOutput
from moestro.sim.group import Seat


class Ranks(Protocol):
    """Ranks on virtual time: `turn` is called when the time is `next_ns`, and `add` when a request arrives.

    Attributes:
        next_ns: when there is something to do; None: only when a request arrives.
        began_ns: when what is under way began.
        ends: int64[k], when each step of the jump under way ends; None: no jump is under way.
        tells_prefill: the `plan` of a seat is what runs from `began_ns` on, so that its time can be told apart.
    """

    next_ns: int | None
    began_ns: int
    ends: NDArray[np.int64] | None

    @property
    def tells_prefill(self) -> bool:
        """See above."""
        ...

    @property
    def seats(self) -> Sequence[Seat]:
        """The ranks."""
        ...

    def add(self, seat: int, request: Request, script: Script, now_ns: int) -> int:
        """Put a request in the waiting queue of a rank. Returns its serial there.

        Raises:
            RequestError: it is refused; nothing has changed.
        """
        ...

    def catch_up(self, before_ns: int) -> None:
        """Take the steps of the jump under way that ended before then, so that what they publish can be heard."""
        ...

    def turn(self, now_ns: int) -> list[StepOutput]:
        """What was under way is over, or a request has come: go on. Returns what each rank's requests gained."""
        ...
