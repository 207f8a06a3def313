"""What a routing policy sees, what it answers, and what it is told afterwards."""

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

# Busy engines speak at every step, vLLM's coordinator at least every 4 s; what is older says little of a queue.
FRESH_NS = 5_000_000_000


class RouteView(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One request and the engines that it could go to. At least one row of `engines` is routable.

    Attributes:
        request: to be routed; what it will generate is in no view.
        engines: see there.
        hit_tokens: int64[n], tokens of the prompt in whole blocks, from its beginning, that each engine's cache is
            thought to hold; all zero where nothing is known.
        block_size: tokens of a block.
        now_ns: the time of the decision.
        decision_id: decisions before this one.
    """

    request: Request
    engines: EngineTable
    hit_tokens: NDArray[np.int64]
    block_size: int
    now_ns: int
    decision_id: int


class Choice(msgspec.Struct, frozen=True, eq=False, gc=False):
    """A policy's answer.

    Attributes:
        engine: the row chosen.
        score: its score, lower is better.
        reason: why, in a few words that an operator reads.
        scores: [n], of all rows, unroutable ones too; None: the policy scores none.
        detail: figures that `observe` will want back, or that explain the answer.
    """

    engine: int
    score: float
    reason: str
    scores: NDArray[np.float64] | NDArray[np.int64] | None = None
    detail: Mapping[str, float] = msgspec.field(default_factory=dict)


class Routed(msgspec.Struct, frozen=True, tag=True):
    """A decision was carried out."""

    request: Request
    engine: int
    hit_tokens: int  # that the engine's cache was thought to hold
    detail: Mapping[str, float]
    now_ns: int


class FirstToken(msgspec.Struct, frozen=True, tag=True):
    """A request's prompt is computed."""

    request_id: str
    engine: int
    now_ns: int


class Ended(msgspec.Struct, frozen=True, tag=True):
    """A request is over, whatever its end was."""

    request_id: str
    engine: int
    sent_ns: int
    now_ns: int
    num_output_tokens: int | None = None  # None: nobody counted


class EngineLost(msgspec.Struct, frozen=True, tag=True):
    """An engine was started again or taken away: what it knew is gone, and its number may come to mean another."""

    engine: int
    now_ns: int


RouteEvent = Routed | FirstToken | Ended | EngineLost


@dataclass(frozen=True, slots=True)
class Needs:
    """What a policy looks at beyond the router's own counts.

    Attributes:
        hits: `hit_tokens`; a router keeps no prefix index for a policy that does not.
        figures: names of `LoadFigures`, each believed while it is no older than FRESH_NS.
        otherwise: what it does without a figure that is missing or old.
    """

    hits: bool = False
    figures: tuple[str, ...] = ()
    otherwise: str = ""


class RoutePolicy(Protocol):
    """Chooses an engine for a request."""

    @property
    def needs(self) -> Needs:
        """What it looks at."""
        ...

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """A routable row. Changes nothing; equal state, view and draws give an equal answer."""
        ...

    def observe(self, event: RouteEvent) -> None:
        """Take note; the only place where the policy's state changes."""
        ...
