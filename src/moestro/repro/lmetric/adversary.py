"""A hot prefix that a product cannot spread (LMetric, section 5.2): for a while, many requests ask nearly the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moestro.core.clock import NS_PER_S
from moestro.repro.testbed import TimedLoad
from moestro.workload.rows import Streams

HOT_SHARE = 0.5  # of the middle third's requests
HOT_TOKENS = 8192  # that they have in common
OWN_TOKENS = 24  # and not
LEAD_S = 3


def with_hot_prefix(load: TimedLoad, seed: int) -> TimedLoad:
    """`load`, in whose middle third a share of the requests ask one long prompt and differ only at its very end.

    One of them comes LEAD_S before the others, so that one engine holds the prompt when the flood begins: were they to
    come at once, each would find the others' engines busy with it, and the prompt would be everywhere before it is hot.

    Args:
        load: of generated sessions: streams say what its prompts share.
    """
    rows, third = load.rows, len(load.rows) // 3
    assert rows.streams is not None, "prompts share what streams say"
    assert rows.stream is not None, "prompts share what streams say"
    hot = third + np.flatnonzero(np.random.default_rng([seed, 2]).random(third) < HOT_SHARE)
    is_late = load.offsets_ns[hot] >= load.offsets_ns[hot[0]] + LEAD_S * NS_PER_S
    hot = np.concatenate([hot[:1], hot[is_late]])
    prefix = len(rows.streams.parent)  # a stream of its own, and one behind it for each request
    parent = np.concatenate([rows.streams.parent, [-1], np.full(len(hot), prefix)])
    start = np.concatenate([rows.streams.start, [0], np.full(len(hot), HOT_TOKENS)])
    stream, prompts = rows.stream.copy(), rows.num_prompt_tokens.copy()
    stream[hot] = prefix + 1 + np.arange(len(hot))
    prompts[hot] = HOT_TOKENS + OWN_TOKENS
    asked = replace(rows, streams=Streams(parent, start), stream=stream, num_prompt_tokens=prompts)
    return replace(load, name=f"{load.name} with a hot prefix", rows=asked)
