"""Token masks of a rank, computed when the sampler asks for them.

By then the step is launched, so an accelerator computes the logits meanwhile. On a CPU a thread beside the step made
each token slower than masks computed in turn (docs/log.md); one mask takes some 20 microseconds of a step's
milliseconds (`bench/micro/grammar_vocabularies.py`). Grammars are compiled by a thread, because that takes longer.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from weakref import WeakValueDictionary

import numpy as np
from numpy.typing import NDArray

from moestro.core.grammar import Grammar, MaskRequest, TokenMask
from moestro.core.work import Int32s
from moestro.grammar.compiler import GrammarCompiler, VocabularySource, failure_of

logger = logging.getLogger(__name__)

MAX_COMPILED = 64  # grammars that are kept for later requests
_WORD_BITS = 32


class AnswerMatcher:
    """Place of one answer in its grammar.

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


class _Mask:
    """The mask of one request; implements `core.grammar.TokenMask`."""

    __slots__ = ("_request", "_words")

    def __init__(self, request: MaskRequest, num_words: int) -> None:
        self._request: MaskRequest | None = request
        self._words = np.zeros(num_words, np.int32)

    def words(self) -> NDArray[np.int32]:
        """Implement `TokenMask.words`. Computed at the first call; a failed matcher allows nothing."""
        request, self._request = self._request, None
        if request is not None:
            try:
                _fill(self._words, request)
            except (KeyboardInterrupt, SystemExit):
                raise
            except BaseException as error:  # a panic of the library is no Exception; it must not end the rank
                logger.exception("a mask could not be computed")
                request.matcher.failure = f"internal error: {error}"
                self._words[:] = 0
        return self._words


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

    def mask(self, request: MaskRequest) -> TokenMask:
        """Implement `GrammarBackend.mask`."""
        return _Mask(request, self._num_words)

    def failure(self, matcher: AnswerMatcher) -> str | None:
        """Implement `GrammarBackend.failure`."""
        return matcher.failure

    def close(self) -> None:
        """End the thread that compiles."""
        self._compile_thread.shutdown(wait=False, cancel_futures=True)


def _fill(mask: NDArray[np.int32], request: MaskRequest) -> None:
    """Set int32[words], zeros, to the mask of one request."""
    matcher = request.matcher.follow(request.generated)
    if matcher is not None:
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if request.matcher.note_failure():
            mask[:] = 0
        else:
            _exclude(mask, request.unwanted)
    elif request.matcher.is_over:
        mask[:] = -1


def _exclude(words: NDArray[np.int32], token_ids: Int32s) -> None:
    """Exclude tokens from a mask, in place, unless it allows no others: a complete text can only end."""
    if not len(token_ids):
        return
    others = words.view(np.uint32).copy()
    bits = np.left_shift(np.uint32(1), (token_ids % _WORD_BITS).astype(np.uint32))
    np.bitwise_and.at(others, token_ids // _WORD_BITS, ~bits)
    if others.any():
        words[:] = others.view(np.int32)
