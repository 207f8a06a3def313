"""Our own: LMetric's product, taken apart into the delays that it stands for, and mended where one of them is missing.

Sent to engine i, a request of which p tokens are new there, behind Q queued ones, delays

    itself, until its first token:           Q + p
    W requests that wait for theirs:         p each (about as many come while it waits as wait now)
    R requests that decode, by its prefill:  p each
    R + W requests, by its own decode:       L each, L being the tokens that an answer has on average
    itself, by their decode:                 L for each of them

all in units of one prompt token's time. A second before a first token weighs more than one spread over an answer, by
as much as answers take longer than first tokens do; by Little's law that is R / W, over all engines. One request more
on each side keeps a handful of them from saying too much, and it never weighs less: g = max(1, (R + 1) / (W + 1)). So

    score = pressure / speed * (g (Q + p (1 + W)) + p R + 2 L (R + W))

LMetric's (Q + p) (B + 1), with B = R + W, has p (1 + W + R) too. It has Q (B + 1) where the queue delays the newcomer
once: near saturation that drowns what a hit saves. And it has nothing for decode, so a full hit on an engine with an
empty queue costs nothing there, whatever the batch.
"""

from __future__ import annotations

import numpy as np

from moestro.core.rng import Draws
from moestro.routing.indicators import (
    expert_pressure,
    foreign_prefill_tokens,
    fresh,
    new_tokens,
    own_prefill_tokens,
)
from moestro.routing.policy_contract import Choice, Ended, EngineLost, Needs, Routed, RouteEvent, RouteView
from moestro.routing.registry import ROUTE_POLICIES
from moestro.routing.scoring import Counts, Mask, Scores, choose

_HORIZON = 1024  # requests over about which means are taken
_ROUNDS = 16  # decisions for each engine, over about which recent work is remembered
_RESCALE_AT = 1e12


@ROUTE_POLICIES.register(
    "moestro",
    "Takes the least delay that the request causes to all requests and itself, counted in prompt tokens.",
    source="Moestro; LMetric, section 5, for the product",
)
class Moestro:
    """The least delay that the request causes, itself included.

    Beyond the score of the module's text:

    * Tokens for which an engine has no free KV block count as if they were to be computed first.
    * On top of its batch an engine counts as having its share of the recent work, one request on average; or sessions
      with pauses, which leave nothing in flight, would all go where a shared prefix is.
    * Of other routers' requests only that counts by which an engine has more than the one that has fewest, less what
      they have sent since it spoke: or all routers would send to the engine that looked emptiest to all of them.

    There is nothing to set: what the score weighs with is counted.

    Source: ours; LMetric, section 5, for the product.
    """

    needs = Needs(
        hits=True,
        figures=("queued_prefill_tokens", "kv_usage", "expert_pressure", "num_waiting", "num_running"),
        otherwise="the router's own counts; expert pressure 1; no other router",
    )

    def __init__(self) -> None:
        self._answer_tokens = _Mean()
        self._new_tokens = _Mean()
        self._stay_ns = _Mean()
        self._work = np.zeros(0)  # of each engine, every piece at its worth when it was sent
        self._work_in_all = 0.0
        self._worth = 1.0  # of a token sent now; it grows, so that what was sent before counts less and less

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """The lowest score."""
        engines = view.engines
        load, waiting = engines.num_in_flight, engines.num_prefilling
        num_waiting = int(np.add.reduce(waiting))
        weight = max(1.0, (int(np.add.reduce(load)) - num_waiting + 1) / (num_waiting + 1))
        batch: Scores = load + self._recent_share(view)
        queued = own_prefill_tokens(view)
        if np.count_nonzero(engines.num_foreign):
            batch, queued = self._with_others(view, batch, queued)
        new = np.maximum(new_tokens(view), 1)
        answer = self._answer_tokens.value or float(view.block_size)
        queued += _missing_tokens(view, new + answer)
        scores: Scores = weight * (queued + new * (1 + waiting)) + new * (batch - waiting) + 2 * answer * batch
        scores *= _slowness(view)
        return choose(view, scores, draws, "delay in prompt tokens")

    def observe(self, event: RouteEvent) -> None:
        """Count work, answers and stays."""
        match event:
            case Routed():
                new = max(1, event.request.num_known_tokens - event.hit_tokens)
                self._new_tokens.add(new)
                self._count_work(event.engine, new + self._answer_tokens.value)
            case Ended():
                if event.num_output_tokens:
                    self._answer_tokens.add(event.num_output_tokens)
                    self._stay_ns.add(event.now_ns - event.sent_ns)
            case EngineLost() if event.engine < len(self._work):
                self._work_in_all -= float(self._work[event.engine])
                self._work[event.engine] = 0
            case _:
                pass

    def _recent_share(self, view: RouteView) -> Scores:
        """float64[n], recent work over its mean; without any, 0."""
        work, num_engines = self._work, len(view.engines)
        if len(work) < num_engines:
            work = np.concatenate([work, np.zeros(num_engines - len(work))])
        share: Scores = work * (num_engines / self._work_in_all) if self._work_in_all > 0 else work
        return share

    def _count_work(self, engine: int, tokens: float) -> None:
        if engine >= len(self._work):
            self._work = np.concatenate([self._work, np.zeros(engine + 1 - len(self._work))])
        self._work[engine] += tokens * self._worth
        self._work_in_all += tokens * self._worth
        self._worth *= 1 + 1 / (_ROUNDS * len(self._work))
        if self._worth > _RESCALE_AT:
            self._work /= self._worth
            self._work_in_all /= self._worth
            self._worth = 1.0

    def _with_others(self, view: RouteView, batch: Scores, queued: Scores) -> tuple[Scores, Scores]:
        """Both, and what other routers have on each engine, as far as it can be told."""
        engines = view.engines
        if not self._stay_ns.value:
            return batch, queued
        known = fresh(view, engines.num_waiting)
        requests = np.where(known, engines.num_foreign, 0)
        # By Little's law as many come in the time that a request stays as are there.
        since = requests.sum() * np.where(known, view.now_ns - engines.num_waiting.as_of_ns, 0) / self._stay_ns.value
        tokens = foreign_prefill_tokens(view)
        return (
            batch + _excess(requests, since, engines.routable),
            queued + _excess(tokens, since * self._new_tokens.value, engines.routable),
        )


class _Mean:
    """Of numbers that come one by one; after _HORIZON of them older ones fade."""

    def __init__(self) -> None:
        self.value = 0.0
        self._num = 0

    def add(self, number: float) -> None:
        self._num = min(self._num + 1, _HORIZON)
        self.value += (number - self.value) / self._num


def _excess(others: Scores | Counts, since: Scores, routable: Mask) -> Scores:
    """By how much each engine has more than the one that has least, beyond what may have changed since."""
    least = float(others[routable].min())
    return np.maximum(others - least - since, 0.0)


def _missing_tokens(view: RouteView, needed: Scores) -> Scores | float:
    """Of `needed` tokens, those for which each engine has no free KV block; 0 where nobody has said how many it has."""
    figure, capacity = view.engines.kv_usage, view.engines.num_kv_tokens
    known = fresh(view, figure)
    num_known = np.count_nonzero(known)
    if not num_known:
        return 0.0
    missing = np.maximum(needed - (1 - figure.values) * capacity, 0.0)
    return missing if num_known == len(known) else np.where(known, missing, 0.0)


def _slowness(view: RouteView) -> Scores:
    """What one token's time is on each engine, relative to the others'."""
    engines = view.engines
    if np.count_nonzero(fresh(view, engines.expert_pressure)):
        return expert_pressure(view) / engines.speed
    return 1 / engines.speed
