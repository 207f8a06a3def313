"""A rank in `preemptive` mode on virtual time: the production scheduler, flow and step policy over priced stages.

Every item is a separate event; there are no jumps as in `Group`. The rank accepts a request as soon as it arrives,
as a worker's loop does between two items. The current item ends first.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import FOREVER_NS
from moestro.core.request import Request
from moestro.core.script import Script
from moestro.core.stages import NUM_PLANS
from moestro.core.views import StepPolicy
from moestro.cost.gate import PopularityGate
from moestro.cost.model import StageCostModel
from moestro.cost.priced_device import Scripts
from moestro.cost.priced_stages import PricedStages, whole_setup
from moestro.engine.rank import build_preemptive_rank
from moestro.engine.settings import SchedulerSettings
from moestro.engine.step_output import StepOutput
from moestro.sim.groups.group import Seat


class StagedRank:
    """One rank in `preemptive` mode; implements `sim.engine.Ranks`.

    Args:
        settings: scheduler settings.
        cost: prices of the stages.
        policy: step policy.
        passes_decodes: whether latency-sensitive units pass best-effort ones after their first token too, as in
            `engine.rank.Rank`.
        gate: draws the experts of each token. None means the popularity of `cost` in all layers.

    Attributes:
        seats: the rank.
        device: device of the rank.
        tells_prefill: False, because steps overlap and no time belongs to one plan. A seat's `plan` stays None.
    """

    tells_prefill = False
    steps_together = False

    def __init__(
        self,
        settings: SchedulerSettings,
        cost: StageCostModel,
        policy: StepPolicy,
        *,
        passes_decodes: bool,
        gate: PopularityGate | None = None,
    ) -> None:
        scripts = Scripts(settings.block_size)
        setup = whole_setup(cost, NUM_PLANS * settings.max_num_batched_tokens, settings.block_size, gate)
        device = PricedStages(cost, setup, lambda units, _: scripts.answer(units), scripts.request_keys)
        self.device = device
        self._rank = build_preemptive_rank(settings, device, policy, passes_decodes=passes_decodes)
        self.seats = [Seat(self._rank, scripts)]
        self.next_ns: int | None = None
        self.began_ns = 0
        self.ends: NDArray[np.int64] | None = None

    def add(self, seat: int, request: Request, script: Script, now_ns: int) -> int:
        """Add a request to the waiting queue; the rank steps at once.

        Returns:
            Serial number of the request.

        Raises:
            RequestError: the rank refuses the request; no state has changed.
        """
        serial = self.seats[seat].add(request, script, now_ns)
        self.next_ns = now_ns
        return serial

    def catch_up(self, before_ns: int) -> None:
        """Return without effect, because there are no jumps."""

    def turn(self, now_ns: int, until_ns: int = FOREVER_NS) -> list[StepOutput]:
        """Collect finished items, start the next one, and return the step output."""
        self.began_ns = now_ns
        output = self._rank.collect(now_ns)
        self.seats[0].forget_ended(output)
        self._rank.begin(now_ns)
        ready_ns = self._rank.ready_at_ns()
        self.next_ns = None if ready_ns == FOREVER_NS else ready_ns
        self.seats[0].publish_step_ends((now_ns,))
        return [output]
