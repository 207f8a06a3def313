"""Moestro's own policy: LMetric's product, split into the delays that it stands for, with the missing ones added.

A request with p new tokens, sent to engine i behind Q queued tokens, delays

    itself, until its first token:           Q + p
    W requests that wait for theirs:         p each (about as many arrive while it waits as wait now)
    R requests that decode, by its prefill:  p each
    R + W requests, by its own decode:       L each, where L is the mean number of tokens of an answer
    itself, by their decode:                 L for each of them

in units of one prompt token's time. The last two lines give 2 L (R + W). A second before a first token weighs more than
a second spread over an answer. The ratio is that of the durations of answers and of waiting for first tokens. By
Little's law this is R / W, summed over all engines. Adding 1 to both limits the effect of small counts:
g = max(1, (R + 1) / (W + 1)), where 1 is the weight of a client that only counts the time to its last token. The score
is

    score = pressure / speed * (g (Q + p (1 + W)) + p R + 2 L (R + W))

LMetric's (Q + p) (B + 1), with B = R + W, contains p (1 + W + R) too. It contains Q (B + 1), although the queue delays
the new request only once; near saturation this term hides the savings of a hit. LMetric has no term for decode, so a
full hit on an engine with an empty queue costs nothing, whatever its batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moestro.core.rng import Draws
from moestro.core.views import ALONE, all_true
from moestro.routing.kernel.passes import route_kernel
from moestro.routing.policy_contract import (
    Choice,
    Ended,
    EngineLost,
    Needs,
    Routed,
    RoutedElsewhere,
    RouteEvent,
    RouteView,
)
from moestro.routing.registry import ROUTE_POLICIES
from moestro.routing.scoring import (
    ONE,
    Counts,
    Mask,
    Scores,
    any_fresh,
    choose,
    expert_pressure,
    foreign_prefill_tokens,
    fresh,
    new_tokens,
    own_prefill_tokens,
    total,
)

_RESCALE_AT = 1e12  # far below the largest float, so that sums keep their precision


@dataclass(frozen=True, slots=True, kw_only=True)
class MoestroConstants:
    """Constants of the policy `moestro`. `bench/simulator/moestro_constants.py` varies each of them.

    Attributes:
        horizon: approximate number of answers in a mean. The mean of 1,024 lengths whose deviation equals their mean
            is right within 3 %.
        rounds: approximate number of decisions per engine over which recent work is remembered.
        decode_weight: tokens by which a decoding neighbour delays an answer, over its length, in both directions; 2
            follows from the model.
        least_weight: least weight of a second before the first token; 1 follows from the model.
        first_answer_tokens: length of an answer before any has ended; OpenAI's default of `max_tokens`.
    """

    horizon: int = 1024
    rounds: int = 16
    decode_weight: float = 2.0
    least_weight: float = 1.0
    first_answer_tokens: float = 16.0


CONSTANTS = MoestroConstants()


@ROUTE_POLICIES.register(
    "moestro",
    "Takes the least delay that the request causes to all requests and itself, counted in prompt tokens.",
    source="Moestro; LMetric, section 5, for the product",
)
class Moestro:
    """Chooses the least delay that the request causes to all requests, itself included.

    The policy adds three terms to the module's score:

    * Tokens without a free KV block on an engine count as tokens to compute first.
    * Each engine's batch is increased by its share of recent work, one request on average. Otherwise sessions with
      pauses, which leave no request in flight, would all go to the engines with a shared prefix.
    * Requests of other routers count by the excess over the engine with the fewest, less those sent since its report.
      Otherwise all routers would send to the engine that looks emptiest to all of them.

    The policy has no settings: its weights follow from counts, and its constants from the model or from a sweep.

    Args:
        constants: constants to try in place of the policy's own.

    Source: Moestro; LMetric, section 5, for the product.
    """

    needs = Needs(
        hits=True,
        figures=("queued_prefill_tokens", "kv_usage", "expert_pressure", "num_waiting", "num_running"),
        otherwise="the router's own counts; expert pressure 1; no other router",
        speeds=True,
    )

    def __init__(self, constants: MoestroConstants = CONSTANTS) -> None:
        self._constants = constants
        self._answer_tokens = _Mean(constants.horizon)
        self._new_tokens = _Mean(constants.horizon)
        self._stay_ns = _Mean(constants.horizon)
        self._work = np.zeros(0)  # per engine: tokens of each request times `_worth` at its sending
        self._work_in_all = 0.0
        self._worth = 1.0  # weight of a token sent now; it grows, so that older work counts less and less

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """Choose the lowest score."""
        return choose(view, self.scores(view), draws, "delay in prompt tokens")

    def scores(self, view: RouteView) -> Scores:
        """Return the score of each engine, float64[n]."""
        kernel, engines, constants = route_kernel.look(), view.engines, self._constants
        if kernel is not None and engines.group is None:
            answer = self._answer_tokens.value or constants.first_answer_tokens
            weights = constants.decode_weight, constants.least_weight, self._per_work(len(engines))
            scores = kernel.delays(
                engines,
                (view.hit_tokens, view.host_tokens, self._work),
                (view.request.num_known_tokens, answer, *weights),
                view.now_ns - view.fresh_ns,
            )
            if scores is not None:
                return scores
        return self._plain_scores(view)

    def _plain_scores(self, view: RouteView) -> Scores:
        """Return `scores` by NumPy's code, to the bit."""
        engines, constants = view.engines, self._constants
        load, waiting = engines.num_in_flight, engines.num_prefilling
        num_waiting = total(waiting)
        weight = max(constants.least_weight, (total(load) - num_waiting + 1) / (num_waiting + 1))
        batch = self._recent_share(view)
        batch += load
        queued = own_prefill_tokens(view)
        if np.count_nonzero(engines.num_foreign):
            batch, queued = self._with_others(view, batch, queued)
        new = new_tokens(view)
        np.maximum(new, ONE, out=new)
        answer = self._answer_tokens.value or constants.first_answer_tokens
        missing = _missing_tokens(view, new, answer)
        computed = queued + new if missing is None else queued + missing + new
        # In place from here: memory that is new takes as long as the sum that fills it.
        scores: Scores = new * waiting
        scores += computed if view.host_tokens is None else computed + view.host_tokens * engines.copy_price
        scores *= weight
        decodes = batch - waiting
        decodes *= new
        answers = batch * (constants.decode_weight * answer)
        if engines.group is not None:
            steps = _GroupSteps(engines.group, queued, waiting, batch)
            decodes = np.where(steps.is_grouped, steps.decode_delay(computed, new), decodes)
            answers = np.where(steps.is_grouped, steps.answers(answer), answers)
        scores += decodes
        if engines.has_speeds:
            scores /= engines.speed
            answers /= engines.decode_speed
        scores += answers
        if any_fresh(view, engines.expert_pressure):
            scores *= expert_pressure(view)
        return scores

    def observe(self, event: RouteEvent) -> None:
        """Count the work of routed requests, and the lengths and durations of answers."""
        match event:
            case Routed():
                new = max(1, event.request.num_known_tokens - event.hit_tokens)
                self._new_tokens.add(new)
                self._count_work(event.engine, new + self._answer_tokens.value)
            case RoutedElsewhere():
                self._count_work(event.engine, event.num_new_tokens + self._answer_tokens.value)
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
        """Return recent work over its mean, float64[n], which the caller may change; 0 without any."""
        work, num_engines = self._work, len(view.engines)
        if len(work) < num_engines:
            work = np.concatenate([work, np.zeros(num_engines - len(work))])
        share: Scores = work * self._per_work(num_engines)
        return share

    def _per_work(self, num_engines: int) -> float:
        return num_engines / self._work_in_all if self._work_in_all > 0 else 1.0

    def _count_work(self, engine: int, tokens: float) -> None:
        if engine >= len(self._work):
            self._work = np.concatenate([self._work, np.zeros(engine + 1 - len(self._work))])
        self._work[engine] += tokens * self._worth
        self._work_in_all += tokens * self._worth
        self._worth *= 1 + 1 / (self._constants.rounds * len(self._work))
        if self._worth > _RESCALE_AT:
            self._work /= self._worth
            self._work_in_all /= self._worth
            self._worth = 1.0

    def _with_others(self, view: RouteView, batch: Scores, queued: Scores) -> tuple[Scores, Scores]:
        """Add the estimated requests and prompt tokens of other routers to `batch` and `queued`."""
        engines = view.engines
        if not self._stay_ns.value:
            return batch, queued
        known = fresh(view, engines.num_waiting)
        requests = np.where(known, engines.num_foreign, 0)
        # By Little's law, in the time that one request stays, as many requests arrive as are present.
        since = requests.sum() * np.where(known, view.now_ns - engines.num_waiting.as_of_ns, 0) / self._stay_ns.value
        tokens = foreign_prefill_tokens(view)
        return (
            batch + _excess(requests, since, engines.routable),
            queued + _excess(tokens, since * self._new_tokens.value, engines.routable),
        )


class _Mean:
    """Running mean; after `horizon` numbers, older ones fade."""

    def __init__(self, horizon: int) -> None:
        self.value = 0.0
        self._horizon = horizon
        self._num = 0

    def add(self, number: float) -> None:
        self._num = min(self._num + 1, self._horizon)
        self.value += (number - self.value) / self._num


def _excess(others: Scores | Counts, since: Scores, routable: Mask) -> Scores:
    """Return each engine's excess over the lowest value, less the possible change `since` the report."""
    least = float(others[routable].min())
    return np.maximum(others - least - since, 0.0)


def _missing_tokens(view: RouteView, new: Scores, answer: float) -> Scores | None:
    """Return the tokens for which each engine has no free KV block, 0 for an unknown KV use; None means 0 for all."""
    figure, capacity = view.engines.kv_usage, view.engines.num_kv_tokens
    if not any_fresh(view, figure):
        return None
    known = fresh(view, figure)
    missing = np.maximum(new + answer - (1 - figure.values) * capacity, 0.0)
    return missing if all_true(known) else np.where(known, missing, 0.0)


class _GroupSteps:
    """What a request adds to the steps of the engines that begin each step together.

    A step of a group takes as long as that of its longest engine. docs/policies.md (Engines that step together) derives
    the score of a request with p new tokens on an engine with Q queued tokens and batch B.

    Args:
        group: int64[n], number of each engine's group; ALONE for an engine without one.
        queued: float64[n], Q.
        waiting: float64[n], requests without a first token.
        batch: float64[n], B.

    Attributes:
        is_grouped: bool[n], whether the engine has a group.
    """

    def __init__(self, group: Counts, queued: Scores, waiting: Scores, batch: Scores) -> None:
        self.is_grouped = group != ALONE
        rows = np.flatnonzero(self.is_grouped)
        of_row, num_groups = group[rows], int(group.max()) + 1
        longest, largest = np.zeros(num_groups), np.zeros(num_groups)
        np.maximum.at(longest, of_row, queued[rows])
        np.maximum.at(largest, of_row, batch[rows])
        num_engines = np.maximum(np.bincount(of_row, minlength=num_groups), 1)
        mean = np.bincount(of_row, queued[rows], num_groups) / num_engines
        self._group = np.where(self.is_grouped, group, 0)
        self._num_waiting = np.bincount(of_row, waiting[rows], num_groups)
        self._num_requests = np.bincount(of_row, batch[rows], num_groups)
        self._num_engines, self._longest, self._largest = num_engines, longest, largest
        self._level = np.divide(mean, longest, out=np.zeros(num_groups), where=longest > 0)
        self._batch = batch

    def decode_delay(self, computed: Scores, new: Scores) -> Scores:
        """Return the delay of the group's decodes by the prompt, float64[n]; `computed` has Q + p, and `new` p.

        Below the longest queue a prompt is computed in steps that are as long without it. But the share `level` of that
        room is taken by other requests; so much of the prompt displaces them, and lengthens the mean queue.
        """
        group = self._group
        longer = np.maximum(computed - self._longest[group], 0.0)
        level = self._level[group]
        num_decoding = self._num_requests[group] - self._num_waiting[group]
        delay: Scores = num_decoding * (longer + level * (new / self._num_engines[group] - longer))
        return delay

    def answers(self, num_tokens: float) -> Scores:
        """Return the delay by an answer of `num_tokens` tokens, float64[n]."""
        group, batch = self._group, self._batch
        largest = self._largest[group]
        growth = np.maximum(batch + 1, largest) - largest + batch / self._num_engines[group]
        delay: Scores = num_tokens * self._num_requests[group] * growth
        return delay
