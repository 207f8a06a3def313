"""Batch and evict policies: the sequences of the next plan, and the one that gives way when KV blocks run out.

The KV of a preempted sequence is copied to host memory or computed again later.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from moestro.core.views import BE, BatchLimits, BatchView, EvictView, Victim, column_sum
from moestro.engine.registry import BATCH_POLICIES, EVICT_POLICIES
from moestro.errors import ConfigError

Rows = NDArray[np.int64]


def _in_turn(view: BatchView, limits: BatchLimits, rows: Rows, *, ls_first: bool = False) -> NDArray[np.int32]:
    """Give tokens to `rows` in this order until the token budget is spent; the other rows get none.

    With several clients, what each may claim comes first, and the rest of the budget follows in this order.

    Args:
        ls_first: whether best effort has no claim beside latency-sensitive sequences; `rows` then begin with these.
    """
    given = np.zeros(len(view.num_left), np.int32)
    requested = np.minimum(view.num_left[rows], limits.max_chunk)
    claimed = _cut(_claims(view, limits, rows, ls_first=ls_first), limits.token_budget)
    given[rows] = claimed + _cut(requested - claimed, limits.token_budget - column_sum(claimed))
    return given


def _cut(requested: NDArray[np.int32], budget: int) -> NDArray[np.int32]:
    """Return the tokens that each row gets if they get what they ask for in turn, until the budget is spent."""
    before = np.cumsum(requested) - requested
    given: NDArray[np.int32] = np.clip(budget - before, 0, requested)
    return given


def _num_tokens(view: BatchView, limits: BatchLimits, rows: NDArray[np.bool_]) -> int:
    """Return the tokens that `rows` want, regardless of the budget; of each client, those that it may claim."""
    if view.client is not None:
        return column_sum(_claims(view, limits, np.flatnonzero(rows)))
    return column_sum(np.minimum(view.num_left[rows], limits.max_chunk))


def _claims(view: BatchView, limits: BatchLimits, rows: Rows, *, ls_first: bool = False) -> NDArray[np.int32]:
    """Return the tokens of `rows` that their clients may claim, in this order; without several clients, all.

    A decode is never cut.

    Args:
        ls_first: as in `_in_turn`.
    """
    requested = np.minimum(view.num_left[rows], limits.max_chunk)
    if view.client is None:
        return requested
    claims = np.maximum(_up_to_parts(view, rows, requested, limits.token_budget), view.is_decode[rows])
    classes = view.service_class[rows]
    if ls_first and (classes != BE).any():
        claims[(classes == BE) & ~view.is_decode[rows]] = 0
    return claims


def _up_to_parts(view: BatchView, rows: Rows, amounts: NDArray[np.int32], total: int) -> NDArray[np.int32]:
    """Return what is left of `amounts` if each client has its part of `total` at most; its first rows come first."""
    assert view.client is not None
    assert view.part is not None
    clients = view.client[rows]
    by_client = np.argsort(clients, kind="stable")
    clients, sorted_amounts = clients[by_client], amounts[by_client]
    before = np.cumsum(sorted_amounts) - sorted_amounts
    before -= before[np.searchsorted(clients, clients)]  # of the client's own rows
    most = np.ceil(view.part[clients] * total).astype(np.int64)
    left = np.empty_like(amounts)
    left[by_client] = np.clip(most - before, 0, sorted_amounts)
    return left


@BATCH_POLICIES.register(
    "decode_first",
    "Every decode, then prompts in chunks.",
    source="Sarathi-Serve, OSDI 2024, Algorithm 3; vLLM v1",
)
class DecodeFirst:
    """Plans every decode, then prefill chunks in order until the token budget is spent.

    A long prompt never delays decodes, because its chunks use the remaining budget.

    Source: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024, Alg. 3.
    """

    def room(self, view: BatchView, limits: BatchLimits) -> int:
        """Return the tokens that running sequences leave of the budget."""
        if view.client is not None:
            return limits.token_budget - column_sum(_claims(view, limits, np.arange(len(view.num_left))))
        total = column_sum(view.num_left)
        if total > limits.max_chunk:
            total = column_sum(np.minimum(view.num_left, limits.max_chunk))
        return limits.token_budget - total

    def plan(self, view: BatchView, limits: BatchLimits) -> NDArray[np.int32]:
        """Plan decodes, then prefill chunks."""
        total = column_sum(view.num_left)
        if total <= limits.token_budget and total <= limits.max_chunk:
            return view.num_left  # no row is cut, as in most steps
        want = np.minimum(view.num_left, limits.max_chunk)
        if column_sum(want) <= limits.token_budget:
            return want
        return _in_turn(view, limits, np.argsort(~view.is_decode, kind="stable"))


@BATCH_POLICIES.register(
    "run_to_completion",
    "A batch is admitted at once and runs until all of its sequences have ended.",
    source="static batches of Orca, OSDI 2022, section 3",
)
class RunToCompletion(DecodeFirst):
    """Admits a batch at once, and runs it until all of its sequences have ended; none joins a running batch.

    The token budget bounds the prompts of one batch, because one step admits them all.

    Source: the static batches that Orca (OSDI 2022, section 3) and QLLM (section 2.4) compare with.
    """

    def room(self, view: BatchView, limits: BatchLimits) -> int:
        """Return the whole budget if no sequence runs, and 0 otherwise."""
        return 0 if len(view.num_left) or view.num_in_flight else limits.token_budget


@BATCH_POLICIES.register(
    "prefill_first",
    "Prompts before decodes, never in one step.",
    source="vLLM v0",
)
class PrefillFirst:
    """Plans prefill chunks in order until the token budget is spent, and decodes only in steps without prefill.

    The wait for the first token is short, but every arrival pauses all decodes.

    Source: vLLM's first scheduler (v0, without chunked prefill), which never splits a prompt. This policy splits one
    that is longer than the budget or a chunk.
    """

    def room(self, view: BatchView, limits: BatchLimits) -> int:
        """Return the tokens that running prompts leave of the budget; decodes wait."""
        return limits.token_budget - _num_tokens(view, limits, ~view.is_decode)

    def plan(self, view: BatchView, limits: BatchLimits) -> NDArray[np.int32]:
        """Plan prefill chunks, or decodes where no prompt runs."""
        prefill = np.flatnonzero(~view.is_decode)
        return _in_turn(view, limits, prefill if len(prefill) else np.arange(len(view.num_left)))


@BATCH_POLICIES.register(
    "qllm",
    "Latency-sensitive requests first, in batches of prompts or of decodes.",
    source="QLLM, Algorithm 1, as its authors' code has it",
)
class QllmBatches:
    """Forms batches from QLLM's four first-come-first-served queues: LS and BE, prefill and decode.

    A batch is all prefill or all decode. The first rule that applies decides, where B is `max_batch`:

    1. B or more LS sequences decode: a batch of LS decodes.
    2. An LS prompt waits: a prefill batch, LS first, filled up with BE.
    3. An LS sequence decodes: a decode batch, LS first, filled up with BE.
    4. Otherwise BE alone, decode before prefill.

    BE starves while LS fills the batches, as the paper admits; `ordering.ageing.QllmOrder` prevents this. LS decodes
    wait while LS prompts arrive, until B of them decode.

    Args:
        max_batch: maximum sequences of a batch, 32 in the paper. Further sequences that hold KV wait in the decode
            queues.

    Source: QLLM, Algorithm 1, as the text of section 3.2 and the authors' code implement it.
    """

    def __init__(self, *, max_batch: float = 32) -> None:
        if max_batch < 1 or not float(max_batch).is_integer():
            raise ConfigError(f"max_batch must be a whole number, 1 or more, got {max_batch:g}")
        self._max_batch = int(max_batch)

    def room(self, view: BatchView, limits: BatchLimits) -> int:
        """Return the tokens that running LS prompts leave, or 0 if LS decodes fill the batch. BE prompts yield."""
        if self._ls_fill_it(view):
            return 0
        return limits.token_budget - _num_tokens(view, limits, ~view.is_decode & (view.service_class != BE))

    def plan(self, view: BatchView, limits: BatchLimits) -> NDArray[np.int32]:
        """Plan the first `max_batch` sequences of the queues that the algorithm chooses."""
        return _in_turn(view, limits, _first_rows(view, self._pick(view), self._max_batch), ls_first=True)

    def _ls_fill_it(self, view: BatchView) -> bool:
        """Whether LS sequences decode that fill a batch; of each client, no more than its part counts."""
        rows = np.flatnonzero(view.is_decode & (view.service_class != BE))
        if view.client is None or len(rows) < self._max_batch:
            return len(rows) >= self._max_batch
        ones = np.ones(len(rows), np.int32)
        return column_sum(_up_to_parts(view, rows, ones, self._max_batch)) >= self._max_batch

    def _pick(self, view: BatchView) -> Rows:
        ls_prefill, ls_decode, be_prefill, be_decode = _queues(view)
        if self._ls_fill_it(view):
            return ls_decode
        if len(ls_prefill):
            return np.concatenate([ls_prefill, be_prefill])
        if len(ls_decode):
            return np.concatenate([ls_decode, be_decode])
        return be_decode if len(be_decode) else be_prefill


@BATCH_POLICIES.register(
    "qllm_mixed",
    "Latency-sensitive requests first, with prompts and decodes in one step.",
    source="QLLM, Algorithm 1, read as filling one batch from several queues",
)
class QllmMixed(QllmBatches):
    """Fills one batch from several of QLLM's queues, so that prefill and decode share a step.

    The text of Algorithm 1 allows this reading: "filling the batch first with LS jobs at the decode stage", then "LS
    jobs in the prefill stage", then "some BE jobs to fill the batch". Without LS prompts, LS decodes are filled up with
    BE decodes. Without LS, BE decodes come before BE prompts.
    """

    def room(self, view: BatchView, limits: BatchLimits) -> int:
        """Return the tokens that running LS sequences leave, or 0 if LS decodes fill the batch."""
        if self._ls_fill_it(view):
            return 0
        return limits.token_budget - _num_tokens(view, limits, view.service_class != BE)

    def _pick(self, view: BatchView) -> Rows:
        ls_prefill, ls_decode, be_prefill, be_decode = _queues(view)
        if self._ls_fill_it(view):
            return ls_decode
        if len(ls_prefill):
            return np.concatenate([ls_decode, ls_prefill, be_decode, be_prefill])
        if len(ls_decode):
            return np.concatenate([ls_decode, be_decode])
        return np.concatenate([be_decode, be_prefill])


def _queues(view: BatchView) -> tuple[Rows, Rows, Rows, Rows]:
    """Return rows of LS prefill, LS decode, BE prefill and BE decode, each in order of arrival."""
    stage = view.service_class * 2 + view.is_decode
    ls_prefill, ls_decode, be_prefill, be_decode = (np.flatnonzero(stage == queue) for queue in range(4))
    return ls_prefill, ls_decode, be_prefill, be_decode


def _first_rows(view: BatchView, rows: Rows, most: int) -> Rows:
    """Return the first `most` of `rows`; with several clients, those that each may claim come before the others."""
    if view.client is None or len(rows) <= most:
        return rows[:most]
    is_claimed = _up_to_parts(view, rows, np.ones(len(rows), np.int32), most) > 0
    classes = view.service_class[rows]
    is_claimed &= classes == classes.min()  # best effort has no claim beside latency-sensitive requests
    return np.concatenate((rows[is_claimed], rows[~is_claimed]))[:most]


@EVICT_POLICIES.register(
    "last_in_order",
    "The sequence that the scheduling policy would admit last.",
    source="vLLM v1, which preempts the latest arrival",
)
@dataclass(frozen=True, slots=True)
class LastInOrder:
    """Evicts the sequence that the order policy would admit last; under `fcfs`, the latest arrival (vLLM's choice).

    The first sequence in order is never evicted, so one sequence always ends and livelock is impossible. Fields that
    the order policy ignores, such as `priority` under `fcfs`, have no effect.
    """

    makes_way = False

    def __call__(self, view: EvictView) -> Victim:
        """Choose the last sequence in order."""
        return Victim(int(view.order_rank.argmax()))


@EVICT_POLICIES.register(
    "least_computed_be_first",
    "The best-effort sequence with the fewest computed tokens; it makes way for waiting latency-sensitive requests.",
    source="QLLM, section 3.3, which preempts best effort; the choice within best effort is ours",
)
@dataclass(frozen=True, slots=True)
class LeastComputedBeFirst:
    """Evicts the best-effort sequence with the fewest computed tokens; without best effort, the last in order.

    This choice discards the least computed work. The sequence that needed the block gains a token, which no eviction
    takes back, so one sequence always ends.

    Source: QLLM preempts best effort for latency-sensitive jobs and keeps its KV. The choice where KV blocks run out is
    ours.
    """

    makes_way = True

    def __call__(self, view: EvictView) -> Victim:
        """Choose the best-effort sequence with the fewest computed tokens."""
        rows = np.flatnonzero(view.service_class == BE)
        if len(rows) == 0:
            return LastInOrder()(view)
        return Victim(int(rows[np.lexsort((-view.order_rank[rows], view.num_computed_tokens[rows]))[0]]))
