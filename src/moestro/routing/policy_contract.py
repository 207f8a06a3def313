"""The contract of routing policies: their view, their choice and the events that they observe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.request import Request
from moestro.core.rng import Draws
from moestro.core.views import EngineTable

# Busy engines report at every step, vLLM's coordinator at least every 4 s. Older figures say little about a queue.
FRESH_NS = 5_000_000_000


class RouteView(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One request and the engines that it may go to. At least one row of `engines` is routable.

    Attributes:
        request: the request to route. Views never contain the output length.
        engines: the engine table, one row per engine.
        hit_tokens: int64[n], tokens of the prompt's leading full blocks that each engine's cache is expected to hold;
            0 where unknown.
        block_size: tokens per KV block.
        now_ns: time of the decision.
        decision_id: number of earlier decisions.
    """

    request: Request
    engines: EngineTable
    hit_tokens: NDArray[np.int64]
    block_size: int
    now_ns: int
    decision_id: int


class Choice(msgspec.Struct, frozen=True, eq=False, gc=False):
    """The choice of a policy.

    Attributes:
        engine: row of the chosen engine.
        score: its score; lower is better.
        reason: short reason for operators.
        scores: [n], scores of all rows, unroutable rows included. None means the policy computes no scores.
        detail: figures for `observe` or for explaining the choice.
    """

    engine: int
    score: float
    reason: str
    scores: NDArray[np.float64] | NDArray[np.int64] | None = None
    detail: Mapping[str, float] = msgspec.field(default_factory=dict)


class Routed(msgspec.Struct, frozen=True, tag=True):
    """Event: a request was sent to the chosen engine."""

    request: Request
    engine: int
    hit_tokens: int  # prompt tokens that the engine's cache is expected to hold
    detail: Mapping[str, float]
    now_ns: int


class FirstToken(msgspec.Struct, frozen=True, tag=True):
    """Event: a request's prompt is computed."""

    request_id: str
    engine: int
    now_ns: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """Event: a request ended, for any reason."""

    request_id: str
    engine: int
    sent_ns: int
    now_ns: int
    num_output_tokens: int | None = None  # None means not counted


class EngineLost(msgspec.Struct, frozen=True, tag=True):
    """Event: an engine restarted or was removed. Its cache is gone, and its number may later name another engine."""

    engine: int
    now_ns: int


RouteEvent = Routed | FirstToken | Ended | EngineLost


@dataclass(frozen=True, slots=True)
class Needs:
    """Inputs that a policy reads beyond the router's own counts.

    Attributes:
        hits: whether the policy reads `hit_tokens`. If not, the router keeps no prefix index.
        figures: names of `LoadFigures` fields, each valid until it is older than FRESH_NS.
        otherwise: replacement for a missing or old figure, in words.
    """

    hits: bool = False
    figures: tuple[str, ...] = ()
    otherwise: str = ""


class RoutePolicy(Protocol):
    """Chooses an engine for a request."""

    @property
    def needs(self) -> Needs:
        """Inputs that the policy reads."""
        ...

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """Choose a routable row without changing state. Equal state, view and draws give an equal choice."""
        ...

    def observe(self, event: RouteEvent) -> None:
        """Update the policy's state, which changes only here."""
        ...
