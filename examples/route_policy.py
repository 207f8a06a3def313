"""Two routing policies of one's own: `moestro serve --engines 4 --route-policy examples/route_policy.py:fewest_tokens`.

A function is a score for each engine, lower is better; a class may remember what it has decided.
"""

import numpy as np

from moestro.routing.policy_contract import Choice, Needs, Routed
from moestro.routing.scoring import lowest, new_tokens, queued_prefill_tokens


def fewest_tokens(view):
    """Prompt tokens to compute, and a hundred for each request that is there."""
    return queued_prefill_tokens(view) + new_tokens(view) + 100 * view.engines.num_in_flight


class StickyPrompt:
    """Prompts that begin with the same block go to the same engine; a new one goes to the emptiest."""

    needs = Needs()  # no prefix index, no figures: the router's own counts are enough

    def __init__(self):
        self.engines = {}

    def decide(self, view, draws):
        """Look, and change nothing: what is remembered changes in `observe`."""
        engine = self.engines.get(view.request.block_hashes[:16])
        if engine is not None and view.engines.routable[engine]:
            return Choice(engine, 0.0, "where this beginning went before")
        load = np.asarray(view.engines.num_in_flight, np.float64)
        engine = lowest(load, view.engines.routable, draws)
        return Choice(engine, float(load[engine]), "emptiest", load)

    def observe(self, event):
        """Called after every decision, first token and end."""
        if isinstance(event, Routed):
            self.engines[event.request.block_hashes[:16]] = event.engine
