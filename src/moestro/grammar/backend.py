"""Token masks of a rank: computed by threads of its process while the device computes the logits.

One thread compiles grammars and another one follows answers, so that a slow grammar delays no mask. The work itself is
done without the interpreter's lock.
"""

from __future__ import annotations

import logging
import os
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from llguidance import LLExecutor
from numpy.typing import NDArray

from moestro.core.grammar import Grammar, MaskRequest, TokenMask
from moestro.core.work import Int32s
from moestro.grammar.compiler import GrammarCompiler, VocabularySource, failure_of

logger = logging.getLogger(__name__)

MAX_COMPILED = 64  # grammars that are kept for later requests
MAX_MASK_THREADS = 8  # threads for the masks of a batch; the device's own threads need the other cores
_WORD_BITS = 32


class AnswerMatcher:
    """Place of one answer in its grammar. The thread that computes masks owns it.

    Attributes:
        compiled: the grammar; each answer takes a copy.
        num_consumed: tokens of the answer that it has read.
        is_over: whether an end token followed a complete text. All tokens are allowed from there on, as in vLLM.
        failure: why no token is allowed any more; None means that the matcher works.
    """

    def __init__(self, compiled: Future[Any], eos_token_ids: frozenset[int]) -> None:
        self.compiled = compiled
        self.num_consumed = 0
        self.is_over = False
        self.failure: str | None = None
        self._eos_token_ids = eos_token_ids
        self._own: Any = None

    def follow(self, generated: Int32s) -> Any:
        """Read the tokens of the answer that are new. Returns the `LLMatcher`, or None without one to ask."""
        if self._own is None and self.failure is None:
            try:
                self._own = self.compiled.result().deep_copy()
            except BaseException as error:  # a GrammarError, or a panic of the library, which is no Exception
                self.failure = str(error)
        new = generated[self.num_consumed :].tolist()
        self.num_consumed = len(generated)
        for token in new:
            if self.is_over or self.failure is not None:
                break
            if token in self._eos_token_ids:  # allowed by masks after a complete text alone
                self.is_over = True
            elif not self._own.consume_token(token):
                self.failure = failure_of(self._own)
        return None if self.is_over or self.failure is not None else self._own

    def note_failure(self) -> bool:
        """Take over an error of the last mask. Returns whether there is one."""
        self.failure = failure_of(self._own)
        return self.failure is not None


class _MaskRow:
    """One row of a batch of masks, which may be in computation; implements `core.grammar.TokenMask`."""

    __slots__ = ("_batch", "_row")

    def __init__(self, batch: Future[NDArray[np.int32]], row: int) -> None:
        self._batch, self._row = batch, row

    def words(self) -> NDArray[np.int32]:
        """Implement `TokenMask.words`."""
        words: NDArray[np.int32] = self._batch.result()[self._row]
        return words


class MaskBackend:
    """Compiles the grammars of a rank's requests and computes their masks; implements `core.grammar.GrammarBackend`.

    Args:
        source: vocabulary of the model.

    Raises:
        GrammarError: llguidance cannot read the tokenizer.
    """

    def __init__(self, source: VocabularySource) -> None:
        self._compiler = GrammarCompiler(source)
        self._num_words = -(-self._compiler.num_tokens // _WORD_BITS)
        self._eos_token_ids = frozenset(source.eos_token_ids)
        self._compiled: WeakValueDictionary[Grammar, Future[Any]] = WeakValueDictionary()
        self._kept: OrderedDict[Grammar, Future[Any]] = OrderedDict()
        self._compile_thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._mask_thread = ThreadPoolExecutor(1, thread_name_prefix="masks")
        self._executor = LLExecutor(num_threads=min(os.cpu_count() or 1, MAX_MASK_THREADS))

    def prepare(self, grammar: Grammar) -> Future[Any]:
        """Start to compile `grammar`, unless it is compiled. Returns what is done when it is.

        A grammar is forgotten when no one holds its result and `MAX_COMPILED` others were asked for since.
        """
        compiled = self._compiled.get(grammar)
        if compiled is None:
            compiled = self._compiled[grammar] = self._compile_thread.submit(self._compiler.compile, grammar)
        self._kept[grammar] = compiled
        self._kept.move_to_end(grammar)
        if len(self._kept) > MAX_COMPILED:
            self._kept.popitem(last=False)
        return compiled

    def matcher(self, grammar: Grammar) -> AnswerMatcher:
        """Implement `GrammarBackend.matcher`."""
        return AnswerMatcher(self.prepare(grammar), self._eos_token_ids)

    def compute(self, requests: Sequence[MaskRequest]) -> list[TokenMask]:
        """Implement `GrammarBackend.compute`. Batches are computed in order, so a matcher has one user at a time."""
        batch = self._mask_thread.submit(self._fill, list(requests))
        return [_MaskRow(batch, row) for row in range(len(requests))]

    def failure(self, matcher: AnswerMatcher) -> str | None:
        """Implement `GrammarBackend.failure`."""
        return matcher.failure

    def close(self) -> None:
        """End the threads."""
        self._compile_thread.shutdown(wait=False, cancel_futures=True)
        self._mask_thread.shutdown(wait=False, cancel_futures=True)

    def _fill(self, requests: list[MaskRequest]) -> NDArray[np.int32]:
        """int32[requests, words], the masks. A failed matcher allows nothing."""
        masks = np.zeros((len(requests), self._num_words), np.int32)
        try:
            asked = [(request.matcher.follow(request.generated), row) for row, request in enumerate(requests)]
            live = [(matcher, row) for matcher, row in asked if matcher is not None]
            if live:
                row_bytes = masks.itemsize * self._num_words
                self._executor.unsafe_compute_mask_ptr(live, masks.ctypes.data, row_bytes, len(masks))
            for _, row in live:
                if requests[row].matcher.note_failure():
                    masks[row] = 0
                else:
                    _exclude(masks[row], requests[row].unwanted)
        except BaseException as error:  # a panic of the library is no Exception; it must not end the rank
            logger.exception("masks could not be computed")
            for request in requests:
                request.matcher.failure = request.matcher.failure or f"internal error: {error}"
            return np.zeros_like(masks)
        for row, request in enumerate(requests):
            if request.matcher.is_over:
                masks[row] = -1
        return masks


def _exclude(words: NDArray[np.int32], token_ids: Int32s) -> None:
    """Exclude tokens from a mask, in place, unless it allows no others: a complete text can only end."""
    if not len(token_ids):
        return
    others = words.view(np.uint32).copy()
    bits = np.left_shift(np.uint32(1), (token_ids % _WORD_BITS).astype(np.uint32))
    np.bitwise_and.at(others, token_ids // _WORD_BITS, ~bits)
    if others.any():
        words[:] = others.view(np.int32)
