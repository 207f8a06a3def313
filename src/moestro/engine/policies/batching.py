"""Which sequences enter the next plan, and with how many tokens each."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from moestro.core.views import BE, BatchLimits, BatchView
from moestro.engine.registry import BATCH_POLICIES
from moestro.errors import ConfigError

Rows = NDArray[np.int64]


def _in_turn(view: BatchView, limits: BatchLimits, rows: Rows) -> NDArray[np.int32]:
    """`rows`, in this order, each as much as it wants until the token budget is spent; the others nothing."""
    given = np.zeros(len(view.num_left), np.int32)
    asked = np.minimum(view.num_left[rows], limits.max_chunk)
    before = np.cumsum(asked) - asked
    given[rows] = np.clip(limits.token_budget - before, 0, asked)
    return given


def _num_tokens(view: BatchView, limits: BatchLimits, rows: NDArray[np.bool_]) -> int:
    """What `rows` would take, had they the budget for themselves."""
    return int(np.minimum(view.num_left[rows], limits.max_chunk).sum())


@BATCH_POLICIES.register(
    "decode_first",
    "Every decode, then prompts in chunks.",
    source="Sarathi-Serve, OSDI 2024, Algorithm 3; vLLM v1",
)
class DecodeFirst:
    """Every decode, then prefill chunks in order until the token budget is spent.

    Decodes are never held up by a long prompt, whose chunks take what is left.

    Source: Agrawal et al., "Taming Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve", OSDI 2024, Alg. 3.
    """

    def room(self, view: BatchView, limits: BatchLimits) -> int:
        """What the running ones leave."""
        return limits.token_budget - int(np.minimum(view.num_left, limits.max_chunk).sum())

    def plan(self, view: BatchView, limits: BatchLimits) -> NDArray[np.int32]:
        """Decodes, then chunks."""
        want = np.minimum(view.num_left, limits.max_chunk)
        if int(want.sum()) <= limits.token_budget:
            return want
        return _in_turn(view, limits, np.argsort(~view.is_decode, kind="stable"))


@BATCH_POLICIES.register(
    "run_to_completion",
    "A batch enters at once and runs until all of it has ended.",
    source="static batches of Orca, OSDI 2022, section 3",
)
class RunToCompletion(DecodeFirst):
    """Nobody enters while anybody runs: a batch is admitted at once and runs until all of it has ended.

    The token budget bounds the prompts of one batch, since they are admitted in one step.

    Source: the static batches that Orca (OSDI 2022, section 3) and QLLM (section 2.4) compare with.
    """

    def room(self, view: BatchView, limits: BatchLimits) -> int:
        """The whole budget, if nobody runs."""
        return 0 if len(view.num_left) or view.num_in_flight else limits.token_budget


@BATCH_POLICIES.register(
    "prefill_first",
    "Prompts before decodes, never in one step.",
    source="vLLM v0",
)
class PrefillFirst:
    """Prefill chunks in order until the token budget is spent; decodes only in a step without any prefill.

    Short waits for the first token, and a pause for everybody who decodes whenever somebody comes.

    Source: vLLM's first scheduler (v0, without chunked prefill). There a prompt is never cut; here one that is longer
    than the budget, or than a chunk, is.
    """

    def room(self, view: BatchView, limits: BatchLimits) -> int:
        """What the running prompts leave: decodes wait."""
        return limits.token_budget - _num_tokens(view, limits, ~view.is_decode)

    def plan(self, view: BatchView, limits: BatchLimits) -> NDArray[np.int32]:
        """Chunks, or decodes."""
        prefill = np.flatnonzero(~view.is_decode)
        return _in_turn(view, limits, prefill if len(prefill) else np.arange(len(view.num_left)))


@BATCH_POLICIES.register(
    "qllm",
    "Latency-sensitive requests first, in batches of prompts or of decodes.",
    source="QLLM, Algorithm 1, as its authors' code has it",
)
class QllmBatches:
    """Batches from QLLM's four first-come-first-served queues: LS and BE, prefill and decode.

    With B = `max_batch`: B sequences at the decode stage are LS: a batch of them. Else, any LS at the prefill stage:
    a prefill batch, LS first, filled up with BE. Else, any LS at the decode stage: a decode batch, LS first, filled up
    with BE. Else BE alone, decode before prefill. A batch is all prefill or all decode.

    BE starves while LS fills the batches; the paper says so, and `ordering.ageing.QllmOrder` has the remedy. LS decodes
    wait while LS prompts come, until B of them decode.

    Args:
        max_batch: sequences of one batch, 32 in the paper. More may hold KV: those wait in the decode queues.

    Source: QLLM, Algorithm 1, as its text walks through it (section 3.2) and its authors' code has it.
    """

    def __init__(self, *, max_batch: float = 32) -> None:
        if max_batch < 1 or not float(max_batch).is_integer():
            raise ConfigError(f"max_batch must be a whole number, 1 or more, got {max_batch:g}")
        self._max_batch = int(max_batch)

    def room(self, view: BatchView, limits: BatchLimits) -> int:
        """What running LS prompts leave, unless LS decodes fill the batch: BE yields to an LS newcomer."""
        if self._ls_fill_it(view):
            return 0
        return limits.token_budget - _num_tokens(view, limits, ~view.is_decode & (view.service_class != BE))

    def plan(self, view: BatchView, limits: BatchLimits) -> NDArray[np.int32]:
        """The first `max_batch` of the queues that the algorithm chooses."""
        return _in_turn(view, limits, self._pick(view)[: self._max_batch])

    def _ls_fill_it(self, view: BatchView) -> bool:
        return int(np.count_nonzero(view.is_decode & (view.service_class != BE))) >= self._max_batch

    def _pick(self, view: BatchView) -> Rows:
        ls_prefill, ls_decode, be_prefill, be_decode = _queues(view)
        if len(ls_decode) >= self._max_batch:
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
    """QLLM's Algorithm 1 read as filling one batch from several queues, so that prefill and decode share a step.

    Its text allows it: "filling the batch first with LS jobs at the decode stage", then "LS jobs in the prefill stage",
    then "some BE jobs to fill the batch". No LS at the prefill stage: LS decodes filled up with BE decodes. No LS: BE
    decodes, then BE prefills.
    """

    def room(self, view: BatchView, limits: BatchLimits) -> int:
        """What running LS leaves, unless LS decodes fill the batch."""
        if self._ls_fill_it(view):
            return 0
        return limits.token_budget - _num_tokens(view, limits, view.service_class != BE)

    def _pick(self, view: BatchView) -> Rows:
        ls_prefill, ls_decode, be_prefill, be_decode = _queues(view)
        if len(ls_decode) >= self._max_batch:
            return ls_decode
        if len(ls_prefill):
            return np.concatenate([ls_decode, ls_prefill, be_decode, be_prefill])
        if len(ls_decode):
            return np.concatenate([ls_decode, be_decode])
        return np.concatenate([be_decode, be_prefill])


def _queues(view: BatchView) -> tuple[Rows, Rows, Rows, Rows]:
    """Rows of LS prefill, LS decode, BE prefill and BE decode, each as they came."""
    stage = view.service_class * 2 + view.is_decode
    ls_prefill, ls_decode, be_prefill, be_decode = (np.flatnonzero(stage == queue) for queue in range(4))
    return ls_prefill, ls_decode, be_prefill, be_decode
