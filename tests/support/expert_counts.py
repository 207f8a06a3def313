"""How often each expert is visited by the tokens of some requests, as a server tells it to operators."""

from __future__ import annotations

import numpy as np
from support.running import Running, call_admin, complete

NUM_LAYERS, NUM_EXPERTS, NUM_CHOSEN = 7, 16, 2  # of the demo model


def expert_counts(server: Running) -> np.ndarray:
    """int64[layers, experts], visits since the server started, of all engines."""
    counts = call_admin(server, "GET", "/admin/experts?arrays=true").json["arrays"]["counts"]
    return sum(np.array(own, np.int64) for own in counts if own)


def ask_for_counts(server: Running, salt: str) -> np.ndarray:
    """Send a few requests, one after the other, and return the visits of their tokens, int64[layers, experts].

    `salt`: begins all prompts, so that no part of them is cached.
    """
    num_tokens = 0
    complete(server, prompt=salt, max_tokens=1)  # so that there are counts to begin with
    before = expert_counts(server)
    for i in range(4):
        reply = complete(server, prompt=f"{i} {salt} of experts\n" * (1 + 8 * i), max_tokens=5 + i, temperature=0)
        usage = reply.json["usage"]
        assert usage["prompt_tokens_details"]["cached_tokens"] == 0
        num_tokens += usage["total_tokens"] - 1  # the last token is not computed
    counts = expert_counts(server) - before
    assert counts.sum() == len(counts) * NUM_CHOSEN * num_tokens
    assert (counts.sum(axis=1) == NUM_CHOSEN * num_tokens).all()
    return counts
