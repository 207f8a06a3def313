"""Which running sequence frees its KV, to be copied back from host memory or computed again later."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moestro.core.user_code import load_policy
from moestro.core.views import BE, LS, EvictView, Victim
from moestro.errors import ConfigError

_FLAG = "--evict-policy"


@dataclass(frozen=True, slots=True)
class EvictPolicy:
    """Who yields, and to whom.

    Attributes:
        choose: (view) -> who is evicted when a running sequence finds no free block; the view is never empty.
        makes_way: whether a waiting latency-sensitive request that lacks a slot or blocks takes those of running
            best-effort sequences too; `choose` then sees only these. The order must be one that puts LS first.
        description: what it does in one line.
    """

    choose: Callable[[EvictView], Victim]
    makes_way: bool
    description: str


def last_in_order(view: EvictView) -> Victim:
    """The one that the order policy would admit last. With `fcfs` that is the latest arrival (vLLM's choice).

    The first in order is never evicted for another, so somebody always comes to an end: no livelock; and what the order
    policy does not look at (`priority` under `fcfs`) pushes nobody out.
    """
    return Victim(int(view.order_rank.argmax()))


def least_computed_be_first(view: EvictView) -> Victim:
    """The best-effort sequence of which the least is computed, or where all are latency-sensitive the last in order.

    Best effort then loses the least that it can. Who needed the block gets it and gains a token, which no eviction
    takes back, so somebody always comes to an end.

    Source: QLLM preempts best effort for latency-sensitive jobs and keeps its KV; where KV itself is what is lacking,
    the choice is ours.
    """
    rows = np.flatnonzero(view.service_class == BE)
    if len(rows) == 0:
        return last_in_order(view)
    return Victim(int(rows[np.lexsort((-view.order_rank[rows], view.num_computed_tokens[rows]))[0]]))


EVICTION: dict[str, EvictPolicy] = {
    "last_in_order": EvictPolicy(
        last_in_order, makes_way=False, description="The sequence that the scheduling policy would admit last."
    ),
    "least_computed_be_first": EvictPolicy(
        least_computed_be_first,
        makes_way=True,
        description="Best effort, least computed first, also for a waiting latency-sensitive request (QLLM).",
    ),
}


def make_evict_policy(text: str) -> EvictPolicy:
    """The policy that `text` names.

    Args:
        text: a name in EVICTION, or `FILE.py:NAME`: a function (view) -> Victim, an object that can be called so, or a
            class of such objects, which is made without arguments. With an attribute `makes_way` that is true it is
            asked for waiting latency-sensitive requests too (see `EvictPolicy`). It is tried once, on two rows.

    Raises:
        ConfigError: there is no such policy, or it fails its trial.
    """
    if text in EVICTION:
        return EVICTION[text]
    file, _, name = text.partition(":")
    if not file.endswith(".py"):
        raise ConfigError(f"unknown evict_policy {text!r}; known: {', '.join(EVICTION)}, or FILE.py:NAME")
    return load_policy(_FLAG, Path(file), name, _tried)


def _tried(choose: Any) -> EvictPolicy:
    answer = choose(EvictView(np.array([1, 0]), np.array([64, 32], np.int32), np.array([BE, LS], np.uint8), 128))
    if not isinstance(answer, Victim) or answer.row not in (0, 1):
        raise ConfigError(f"it answered {answer!r} for two rows: a Victim of row 0 or 1 is wanted")
    makes_way = bool(getattr(choose, "makes_way", False))
    return EvictPolicy(choose, makes_way=makes_way, description=f"of the user's own: {choose!r}")
