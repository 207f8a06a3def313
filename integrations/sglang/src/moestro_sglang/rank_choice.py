"""Chooses a data-parallel rank of SGLang for each request by one of Moestro's routing policies.

SGLang's controller hears of no answer and no end. It has the load that each rank reports after its steps: requests that
run and wait, tokens, and the use of the KV cache. Ends and first tokens follow from these numbers, oldest first.

Nothing here needs SGLang: a report is any object with the attributes of `RankLoad`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np

from moestro.core.hashing import hash_blocks, hash_key
from moestro.core.load_figures import LoadFigures
from moestro.core.request import Request, SamplingParams
from moestro.routing.policy_contract import RouteInputs
from moestro.routing.registry import policy_from
from moestro.routing.router import Router
from moestro.routing.settings import EngineSpec, RouterSettings

BLOCK_TOKENS = 64  # SGLang shares prefixes of any length; a shorter block costs more to hash and finds little more
_FRESH_NS = 60_000_000_000  # a report is kept until the next one, which a long step delays
_FIGURES = frozenset({"num_waiting", "num_running", "kv_usage", "queued_prefill_tokens", "num_tokens"})


class RankLoad(Protocol):
    """Attributes of a rank's report, under SGLang's names.

    Attributes:
        timestamp: Time of the report, seconds since 1970.
        dp_rank: Number of the rank.
        num_running_reqs, num_waiting_reqs: Requests.
        num_waiting_uncached_tokens: Prompt tokens yet to be computed.
        num_total_tokens: Tokens of running and waiting requests.
        max_total_num_tokens: Capacity of the KV cache.
        token_usage: Fraction of the KV cache in use.
    """

    timestamp: float
    dp_rank: int
    num_running_reqs: int
    num_waiting_reqs: int
    num_waiting_uncached_tokens: int
    num_total_tokens: int
    max_total_num_tokens: int
    token_usage: float


class RankChoice:
    """Chooses ranks, and counts what each one has.

    Args:
        text: Routing policy, `NAME` or `NAME:SETTING=VALUE,...`.
        num_ranks: Data-parallel ranks.

    Attributes:
        is_failing: Whether the last report could not be read, as the caller notes.

    Raises:
        ConfigError: The policy cannot be used; the text says why.
    """

    def __init__(self, text: str, num_ranks: int) -> None:
        self.is_failing = False
        remedy = "SGLang's ranks report no others"
        policy = policy_from(text, inputs=RouteInputs(figures=_FIGURES, remedy=remedy))
        self._router = Router(policy, RouterSettings(block_size=BLOCK_TOKENS, fresh_ns=_FRESH_NS))
        self._serials = itertools.count()
        self._sent: list[dict[str, int]] = [{} for _ in range(num_ranks)]  # names in flight, with the time of sending
        self._num_waiting = [0] * num_ranks
        self._last_ns = [0] * num_ranks
        self._capacity = [0] * num_ranks
        for _ in range(num_ranks):
            self._router.set_routable(self._router.add_engine(), routable=True)

    def choose(
        self, tokens: Sequence[int] | None, now_ns: int, *, cache: str = "", user: str | None = None,
        session: str | None = None,
    ) -> int:  # fmt: skip
        """Choose a rank, and count the request there.

        Args:
            tokens: Tokens of the prompt; None where there are none.
            now_ns: Time on the clock of the reports.
            cache: Name of the part of the cache that the prompt may share: its adapter and its extra key.
            user, session: Whom the request is of.

        Raises:
            NoEngineError: No rank is available.
        """
        # Placeholders of images may have more than 32 bits, which only a name of the block loses.
        ids = np.asarray([] if tokens is None else tokens, np.int64).astype(np.int32)
        request = Request(
            request_id=str(next(self._serials)),
            num_prompt_tokens=max(1, len(ids)),
            sampling=SamplingParams(),
            arrival_ns=now_ns,
            block_hashes=hash_blocks(hash_key(cache), ids, BLOCK_TOKENS),
            session_id=session,
            user=user,
        )
        rank = self._router.submit(request, now_ns).engine
        self._sent[rank][request.request_id] = now_ns
        return rank

    def set_available(self, is_available: Iterable[bool]) -> None:
        """Take ranks out of rotation, or into it."""
        for rank, routable in zip(range(len(self._sent)), is_available, strict=False):
            self._router.set_routable(rank, routable=routable)

    def report(self, loads: Iterable[RankLoad], now_ns: int) -> None:
        """Take in the reports of ranks; one that was seen before counts again while its rank has nothing to do."""
        for load in loads:
            rank, at_ns = load.dp_rank, int(load.timestamp * 1e9)
            if not 0 <= rank < len(self._sent) or not at_ns:
                continue
            is_new = at_ns != self._last_ns[rank]
            if not is_new and (self._sent[rank] or load.num_running_reqs or load.num_waiting_reqs):
                continue
            # A rank reads its messages before a step and reports after it. So a report is known to include what was
            # sent by the time of the report before.
            as_of_ns = (self._last_ns[rank] or at_ns) if is_new else now_ns
            self._last_ns[rank] = at_ns
            self._set_capacity(rank, load.max_total_num_tokens)
            self._infer(rank, load, as_of_ns, now_ns)
            figures = LoadFigures(
                num_waiting=load.num_waiting_reqs,
                num_running=load.num_running_reqs,
                kv_usage=load.token_usage,
                queued_prefill_tokens=load.num_waiting_uncached_tokens,
                num_tokens=load.num_total_tokens,
            )
            self._router.report(rank, figures, as_of_ns, now_ns)

    def num_in_flight(self, rank: int) -> int:
        """Return the number of requests on one rank, as far as is known."""
        return self._router.num_in_flight_on(rank)

    def _infer(self, rank: int, load: RankLoad, as_of_ns: int, now_ns: int) -> None:
        """End the oldest requests beyond those that the rank reports, and let all but those that wait have begun."""
        known = [name for name, sent_ns in self._sent[rank].items() if sent_ns <= as_of_ns]
        num_left = load.num_running_reqs + load.num_waiting_reqs
        num_ended = max(0, len(known) - num_left)
        for name in known[:num_ended]:
            self._router.ended(name, now_ns)
            del self._sent[rank][name]
        left = known[num_ended:]
        for name in left[: max(0, len(left) - load.num_waiting_reqs)]:
            self._router.first_token(name, now_ns)

    def _set_capacity(self, rank: int, num_tokens: int) -> None:
        if num_tokens != self._capacity[rank]:
            self._capacity[rank] = num_tokens
            self._router.set_spec(rank, EngineSpec(num_blocks=max(1, num_tokens // BLOCK_TOKENS)))
