"""The lowest TTFT by simulation: each engine's steps are rolled out until the request has its first token.

LMetric's `llm-d` is such a policy, with VIDUR as its simulator (section 4.6, Fig. 14).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import NS_PER_S
from moestro.core.rng import Draws
from moestro.cost.model import Batch
from moestro.repro.testbed import TimedLoad
from moestro.routing.policy_contract import (
    Choice,
    Ended,
    EngineLost,
    FirstToken,
    Needs,
    Routed,
    RouteEvent,
    RoutePolicy,
    RouteView,
)
from moestro.routing.scoring import Counts, choose
from moestro.workload.rows import Streams


class Watching:
    """Forwards to a policy. A subclass notes decisions in `decide` or events in `observe`.

    Args:
        policy: the policy that decides.
    """

    def __init__(self, policy: RoutePolicy) -> None:
        self._policy = policy

    @property
    def needs(self) -> Needs:
        """The needs of the policy."""
        return self._policy.needs

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """The choice of the policy."""
        return self._policy.decide(view, draws)

    def observe(self, event: RouteEvent) -> None:
        """Forward an event to the policy."""
        self._policy.observe(event)


class WatchedClasses(Watching):
    """Notes the figures of LMetric's detector for each request whose class it tracks.

    Args:
        policy: LMetric with its detector.
    """

    def __init__(self, policy: RoutePolicy) -> None:
        super().__init__(policy)
        self._shares: list[tuple[float, float]] = []

    def observe(self, event: RouteEvent) -> None:
        """Note the class's share of requests and of engines, unless no engine has its blocks."""
        super().observe(event)
        if isinstance(event, Routed) and event.detail.get("holder_share"):
            self._shares.append((event.detail["class_share"], event.detail["holder_share"]))

    def sample(self, num_points: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Class shares and holder shares, sampled evenly from the whole run, at most `num_points`."""
        at = np.linspace(0, len(self._shares) - 1, min(num_points, len(self._shares))).astype(int)
        chosen = [self._shares[i] for i in at]
        return tuple(x for x, _ in chosen), tuple(m for _, m in chosen)


Floats = NDArray[np.float64]

_SCORE = "predicted_ttft_ns"


class Watched(Watching):
    """Notes the predictions of a policy whose score is a predicted TTFT, and the actual values.

    Args:
        policy: the policy that decides.

    Attributes:
        predicted_ns: predictions of the requests that have a first token, in the order of the first tokens.
        actual_ns: actual TTFT of the same requests.
    """

    def __init__(self, policy: RoutePolicy) -> None:
        super().__init__(policy)
        self._pending: dict[str, tuple[float, int]] = {}
        self.predicted_ns: list[float] = []
        self.actual_ns: list[int] = []

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """The choice of the policy, with its score in the detail."""
        choice = super().decide(view, draws)
        return Choice(choice.engine, choice.score, choice.reason, choice.scores, {_SCORE: choice.score})

    def observe(self, event: RouteEvent) -> None:
        """Note a prediction when a request is routed, and its actual TTFT at the first token."""
        super().observe(event)
        match event:
            case Routed():
                self._pending[event.request.request_id] = (event.detail[_SCORE], event.now_ns)
            case FirstToken():
                predicted_ns, routed_ns = self._pending.pop(event.request_id)
                self.predicted_ns.append(predicted_ns)
                self.actual_ns.append(event.now_ns - routed_ns)

    def relative_errors(self) -> Floats:
        """The relative errors |predicted / actual - 1|, float64[n]."""
        ratio: Floats = np.asarray(self.predicted_ns) / np.maximum(np.asarray(self.actual_ns), 1)
        return np.abs(ratio - 1)


StepNs = Callable[[Batch], int]


class EngineTwin:
    """A model of one engine: prompts in the order of arrival, decodes, and the end of the step under way.

    Steps are planned as the engines plan them: a token for each decode, then chunks of prompts until the budget is
    spent. A request decodes until its end is observed. Limit: room in the KV cache is not modelled, so a prompt that
    waits for room is predicted too early.

    Args:
        step_ns: price of a step, ns; of the served network, or of another for a mistuned twin.
        max_num_batched_tokens: budget of a step.
    """

    def __init__(self, step_ns: StepNs, max_num_batched_tokens: int) -> None:
        self._step_ns = step_ns
        self._budget = max_num_batched_tokens
        self._prompts: dict[str, tuple[int, int]] = {}  # request -> tokens in the cache, tokens to compute
        self._decodes: dict[str, int] = {}  # request -> context, less `_num_steps`
        self._num_steps = 0
        self._clock_ns = 0  # end of the step under way

    def ttft_ns(self, num_hit_tokens: int, num_new_tokens: int, now_ns: int) -> int:
        """Roll the engine out until a request that arrives now has its first token.

        Args:
            num_hit_tokens: prompt tokens in the engine's cache.
            num_new_tokens: prompt tokens to compute.

        Returns:
            The time from now, ns.
        """
        self._catch_up(now_ns)
        clock_ns, steps = self._clock_ns, 0
        left = [*self._prompts.values(), (num_hit_tokens, max(num_new_tokens, 1))]
        contexts = np.fromiter(self._decodes.values(), np.int64, len(self._decodes)) + self._num_steps
        while left:
            chunks, left, ended = _next_chunks(left, self._budget - len(contexts))
            clock_ns += self._price(contexts + steps, chunks)
            contexts = np.append(contexts, np.array(ended, np.int64) - steps)
            steps += 1
        return clock_ns - now_ns

    def sent(self, request_id: str, num_hit_tokens: int, num_new_tokens: int, now_ns: int) -> None:
        """Add a request that arrives now."""
        self._catch_up(now_ns)
        self._prompts[request_id] = (num_hit_tokens, max(num_new_tokens, 1))

    def first_token(self, request_id: str, now_ns: int) -> None:
        """Take in that a step ended now and that a prompt is computed, whatever the twin thought."""
        self._catch_up(now_ns)
        self._clock_ns = now_ns
        prompt = self._prompts.pop(request_id, None)
        if prompt is not None:
            self._decodes[request_id] = sum(prompt) - self._num_steps

    def ended(self, request_id: str, now_ns: int) -> None:
        """Take in that a step ended now, with the last token of a request."""
        self._catch_up(now_ns)
        self._clock_ns = now_ns
        self._prompts.pop(request_id, None)
        self._decodes.pop(request_id, None)

    def _catch_up(self, now_ns: int) -> None:
        """Run steps until the one under way at `now_ns`; an idle engine can begin one at once."""
        while self._clock_ns < now_ns and (self._prompts or self._decodes):
            contexts = np.fromiter(self._decodes.values(), np.int64, len(self._decodes)) + self._num_steps
            if not self._prompts:
                step_ns = self._price(contexts, [])
                num_steps = -(-(now_ns - self._clock_ns) // step_ns)
                self._clock_ns += num_steps * step_ns
                self._num_steps += num_steps
                return
            before = self._prompts
            chunks, left, _ = _next_chunks(list(before.values()), self._budget - len(contexts))
            self._clock_ns += self._price(contexts, chunks)
            self._num_steps += 1
            num_ended = len(before) - len(left)
            for at, (request_id, prompt) in enumerate(before.items()):
                if at < num_ended:
                    self._decodes[request_id] = sum(prompt) - self._num_steps
            self._prompts = dict(zip(list(before)[num_ended:], left, strict=True))
        self._clock_ns = max(self._clock_ns, now_ns)

    def _price(self, contexts: Counts, chunks: list[tuple[int, int]]) -> int:
        start = np.concatenate([contexts, np.array([at for at, _ in chunks], np.int64)])
        num_tokens = np.concatenate([np.ones(len(contexts), np.int64), np.array([n for _, n in chunks], np.int64)])
        return self._step_ns(Batch(start, num_tokens))


def _next_chunks(
    prompts: list[tuple[int, int]], budget: int
) -> tuple[list[tuple[int, int]], list[tuple[int, int]], list[int]]:
    """Plan the prompts' part of a step.

    Args:
        prompts: (tokens in the cache, tokens to compute) in the order of arrival.
        budget: tokens left beside the decodes; at least one is planned, so that a roll-out ends.

    Returns:
        The chunks as (start, tokens), the prompts that are left, and the contexts of those that are done.
    """
    chunks: list[tuple[int, int]] = []
    ended: list[int] = []
    budget = max(budget, 1)
    for at, (cached, new) in enumerate(prompts):
        tokens = min(new, budget)
        chunks.append((cached, tokens))
        budget -= tokens
        if tokens < new:
            return chunks, [(cached + tokens, new - tokens), *prompts[at + 1 :]], ended
        ended.append(cached + new)
        if not budget:
            return chunks, prompts[at + 1 :], ended
    return chunks, [], ended


class RolledOutTtft:
    """Chooses the engine on which a roll-out of its twin ends first.

    Args:
        step_ns: price of a step, ns.
        max_num_batched_tokens: budget of a step.

    Source: LMetric, section 4.6 and Fig. 14.
    """

    needs = Needs(hits=True, ttft=True)

    def __init__(self, step_ns: StepNs, max_num_batched_tokens: int) -> None:
        self._twins: defaultdict[int, EngineTwin] = defaultdict(partial(EngineTwin, step_ns, max_num_batched_tokens))

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """Choose the lowest rolled-out TTFT."""
        hits, known = view.hit_tokens.tolist(), view.request.num_known_tokens
        rows = enumerate(view.engines.routable.tolist())
        scores = np.array(
            [
                self._twins[engine].ttft_ns(hits[engine], known - hits[engine], view.now_ns) if is_routable else np.inf
                for engine, is_routable in rows
            ]
        )
        return choose(view, scores, draws, "rolled-out TTFT in ns")

    def observe(self, event: RouteEvent) -> None:
        """Keep the twins in step."""
        match event:
            case Routed():
                new = event.request.num_known_tokens - event.hit_tokens
                self._twins[event.engine].sent(event.request.request_id, event.hit_tokens, new, event.now_ns)
            case FirstToken():
                self._twins[event.engine].first_token(event.request_id, event.now_ns)
            case Ended():
                self._twins[event.engine].ended(event.request_id, event.now_ns)
            case EngineLost():
                self._twins.pop(event.engine, None)


# A hot prefix that a product of indicators cannot spread (LMetric, section 5.2).

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
