"""A rank in `preemptive` mode on virtual time: the production scheduler, flow and step policy over priced stages.

Every item is an event of its own: steps are not taken at once, as `Group` does. Whoever arrives is seen at once, as by
a rank's loop that looks into its inbox after every piece; the piece under way then ends first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.request import Request
from moestro.core.script import Script
from moestro.core.views import StepPolicy
from moestro.cost.model import StageCostModel
from moestro.cost.priced_device import Scripts
from moestro.cost.priced_stages import PricedStages
from moestro.engine.rank import build_preemptive_rank
from moestro.engine.settings import SchedulerSettings
from moestro.engine.step_output import StepOutput
from moestro.sim.group import Seat


class StagedRank:
    """One rank, which `sim.engine.Ranks` describes.

    Args:
        settings: of the rank.
        cost: prices its stages.
        policy: what its device runs next.
        passes_decodes: see `engine.rank.Rank`.

    Attributes:
        seats: its only one.
        tells_prefill: False: steps overlap, and no time belongs to one plan alone; a seat's `plan` stays None.
    """

    tells_prefill = False

    def __init__(
        self, settings: SchedulerSettings, cost: StageCostModel, policy: StepPolicy, *, passes_decodes: bool
    ) -> None:
        scripts = Scripts(settings.block_size)
        device = PricedStages(
            cost, settings.max_num_batched_tokens, settings.block_size, lambda units, _: scripts.answer(units)
        )
        self._rank = build_preemptive_rank(settings, device, policy, passes_decodes=passes_decodes)
        self.seats = [Seat(self._rank, scripts)]
        self.next_ns: int | None = None
        self.began_ns = 0
        self.ends: NDArray[np.int64] | None = None

    def add(self, seat: int, request: Request, script: Script, now_ns: int) -> int:
        """Put a request in the waiting queue: the rank looks at it now.

        Returns:
            Its serial.

        Raises:
            RequestError: it is refused; nothing has changed.
        """
        serial = self.seats[seat].add(request, script, now_ns)
        self.next_ns = now_ns
        return serial

    def catch_up(self, before_ns: int) -> None:
        """Nothing: there are no jumps."""

    def turn(self, now_ns: int) -> list[StepOutput]:
        """Take what is ready, and begin what comes next."""
        self.began_ns = now_ns
        output = self._rank.collect(now_ns)
        self.seats[0].forget_ended(output)
        self._rank.begin(now_ns)
        self.next_ns = self._rank.ready_at_ns()
        self.seats[0].publish_step_ends((now_ns,))
        return [output]
