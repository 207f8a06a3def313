"""The contract of routing policies: their view, their choice and the events that they observe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal, Protocol

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.request import Request
from moestro.core.rng import Draws
from moestro.core.views import EngineTable

# Engines report at every step, vLLM's coordinator at least every 4 s, and `moestro route` reads /metrics every second.
# So each of them has reported again within 5 s; an owner with slower reports sets `RouterSettings.fresh_ns`.
FRESH_NS = 5_000_000_000

# (p_tokens, queued_tokens, batch), each [n] -> ns [n]: predicted time to first token on each engine. `p_tokens` counts
# the request's own and the queued prompt tokens, `batch` the requests on the engine.
PredictTtft = Callable[[NDArray[np.float64], NDArray[np.float64], NDArray[np.int64]], NDArray[np.float64]]


class RouteView(msgspec.Struct, frozen=True, eq=False, gc=False):
    """One request and the engines that it may go to. At least one row of `engines` is routable.

    Attributes:
        request: the request to route. Views never contain the output length.
        engines: the engine table, one row per engine.
        hit_tokens: int64[n], tokens of the prompt's leading full blocks that each engine's cache is expected to hold;
            in any tier; 0 where unknown.
        block_size: tokens per KV block.
        now_ns: time of the decision.
        decision_id: number of earlier decisions.
        fresh_ns: age up to which a reported figure counts, ns.
        not_compared: figures that some routable engines have reported lately and others have not, each with bool[n],
            the engines that lack it. `engines` shows them as never reported, so that no engine is compared by them.
        host_tokens: int64[n], those of `hit_tokens` that the cache holds in host memory alone, and copies back. None
            means that it is 0 for all engines.
    """

    request: Request
    engines: EngineTable
    hit_tokens: NDArray[np.int64]
    block_size: int
    now_ns: int
    decision_id: int
    fresh_ns: int = FRESH_NS
    not_compared: Mapping[str, NDArray[np.bool_]] = MappingProxyType({})
    host_tokens: NDArray[np.int64] | None = None


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
    hit_tokens: int  # prompt tokens that the engine's cache is expected to hold, in any tier
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


class RoutedElsewhere(msgspec.Struct, frozen=True, tag=True):
    """Event: another router sent a request to an engine."""

    engine: int
    num_new_tokens: int  # prompt tokens that the engine was expected to compute
    session_id: str | None
    user: str | None
    now_ns: int


RouteEvent = Routed | FirstToken | Ended | EngineLost | RoutedElsewhere


@dataclass(frozen=True, slots=True)
class Needs:
    """The sources of a policy: inputs that it reads beyond the router's own counts.

    Attributes:
        hits: whether the policy reads `hit_tokens`. If not, the router keeps no prefix index.
        figures: names of `LoadFigures` fields, each valid until it is older than the view's `fresh_ns`.
        otherwise: replacement for a missing or old figure, in words.
        required: those of `figures` without which the policy would be another one. A router whose sources cannot give
            them refuses the policy.
        mark: field of a request that names its session or user; None means that the policy reads neither.
        ttft: whether the policy compares predicted times to first token.
        speeds: whether the policy reads the speeds of engines, which the router then learns.
        prompts: whether the policy may read the names of a prompt's blocks. If not, a router need not hash prompts.
    """

    hits: bool = False
    figures: tuple[str, ...] = ()
    otherwise: str = ""
    required: tuple[str, ...] = ()
    mark: Literal["session_id", "user"] | None = None
    ttft: bool = False
    speeds: bool = False
    prompts: bool = True

    def in_words(self) -> str:
        """Describe the sources for the table of policies."""
        parts = ["cache hits"] if self.hits else []
        parts += [f"`{figure}`, required" for figure in self.required]
        others = ", ".join(f"`{figure}`" for figure in self.figures if figure not in self.required)
        if others or self.otherwise:
            parts.append(f"{others} (otherwise {self.otherwise})" if self.otherwise else others)
        parts += [f"the request's `{self.mark}`"] if self.mark else []
        parts += ["predicted TTFT"] if self.ttft else []
        parts += ["learned speeds"] if self.speeds else []
        return "; ".join(parts) or "own counts"


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteInputs:
    """What the owner of a router can supply to its policy.

    Attributes:
        figures: names of the `LoadFigures` fields that engines may report. None means all of them.
        remedy: what an operator changes so that more figures come; a sentence.
        predict_ttft_ns: predictor of the TTFT. None means that a policy that needs one learns from answers.
    """

    figures: frozenset[str] | None = None
    remedy: str = ""
    predict_ttft_ns: PredictTtft | None = None

    def lacking(self, needs: Needs) -> tuple[str, ...]:
        """Return the required figures that cannot come."""
        return () if self.figures is None else tuple(name for name in needs.required if name not in self.figures)


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
