"""A hot prefix that a product of indicators cannot spread (LMetric, section 5.2)."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from moestro.core.clock import NS_PER_S
from moestro.repro.testbed import TimedLoad
from moestro.workload.rows import Streams

HOT_SHARE = 0.5  # share of the middle third's requests
HOT_TOKENS = 8192  # tokens that hot prompts share
OWN_TOKENS = 24  # tokens of their own at the end
LEAD_S = 3


def with_hot_prefix(load: TimedLoad, seed: int) -> TimedLoad:
    """A load with a hot prefix: in its middle third, many requests send one long prompt that differs only at its end.

    One of them arrives LEAD_S before the others, so that one engine holds the prompt when the others arrive.
    If all arrived at once, the prompt would be on every engine before it is hot.

    Args:
        load: load of generated sessions, whose streams name the shared parts of prompts.
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
    changed = replace(rows, streams=Streams(parent, start), stream=stream, num_prompt_tokens=prompts)
    return replace(load, name=f"{load.name} with a hot prefix", rows=changed)
