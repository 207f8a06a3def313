"""Holds a rank's requests back until their grammars are compiled, so that neither a step nor the loop waits for one."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

from moestro.config.launch_spec import LaunchSpec
from moestro.core.model_info import ModelInfo
from moestro.engine.rank import Rank
from moestro.grammar.backend import MaskBackend
from moestro.grammar.compiler import GrammarError, VocabularySource
from moestro.wire.messages import Abort, Add, FromRank, ToRank
from moestro.worker.rank_loop import RankInbox

logger = logging.getLogger(__name__)

_LOOK_AGAIN_S = 1e-3  # while a grammar compiles, which takes milliseconds


class GrammarInbox:
    """Passes messages on; a request whose grammar is not compiled comes when it is. Implements `RankInbox`.

    Args:
        inbox: source of the messages.
        backend: compiles the grammars.
    """

    def __init__(self, inbox: RankInbox, backend: MaskBackend) -> None:
        self._inbox, self._backend = inbox, backend
        self._held: dict[str, tuple[Add, Future[Any]]] = {}  # by request id
        self._taken: list[Future[Any]] = []  # of requests that the loop is adding, so that the backend keeps them

    @property
    def num_steps(self) -> int:
        """Implement `RankInbox.num_steps`."""
        return self._inbox.num_steps

    @num_steps.setter
    def num_steps(self, num_steps: int) -> None:
        self._inbox.num_steps = num_steps

    @property
    def owes(self) -> bool:
        """Implement `RankInbox.owes`."""
        return self._inbox.owes

    @owes.setter
    def owes(self, owes: bool) -> None:
        self._inbox.owes = owes

    def receive(self, wait_s: float | None) -> list[ToRank]:
        """Implement `RankInbox.receive`. While requests are held back it may return nothing earlier than asked."""
        self._taken.clear()
        if not self._held:
            return self._sift(self._inbox.receive(wait_s))
        released = self._released()
        if released:
            wait_s = 0
        elif wait_s is None or wait_s > _LOOK_AGAIN_S:
            wait_s = _LOOK_AGAIN_S
        return [*released, *self._sift(self._inbox.receive(wait_s))]

    def has_messages(self) -> bool:
        """Implement `RankInbox.has_messages`."""
        return self._inbox.has_messages() or any(compiled.done() for _, compiled in self._held.values())

    def send(self, message: FromRank) -> None:
        """Implement `RankInbox.send`."""
        self._inbox.send(message)

    def _released(self) -> list[ToRank]:
        """Take the requests whose grammars are compiled, or cannot be: the rank ends those with an error."""
        ready = [request_id for request_id, (_, compiled) in self._held.items() if compiled.done()]
        found = [self._held.pop(request_id) for request_id in ready]
        self._taken += [compiled for _, compiled in found]
        return [message for message, _ in found]

    def _sift(self, messages: Sequence[ToRank]) -> list[ToRank]:
        """Hold requests back, and drop those of them that are aborted."""
        passed: list[ToRank] = []
        for message in messages:
            match message:
                case Add(request) if request.sampling.grammar is not None:
                    compiled = self._backend.prepare(request.sampling.grammar)
                    if not compiled.done():
                        self._held[request.request_id] = message, compiled
                        continue
                case Abort(request_ids):
                    for request_id in request_ids:
                        self._held.pop(request_id, None)
            passed.append(message)
        return passed


def follow_grammars(spec: LaunchSpec, rank: Rank, info: ModelInfo, inbox: RankInbox) -> RankInbox:
    """Let the answers of `rank` follow grammars, if it computes logits.

    Returns:
        The inbox that the rank's loop should read.
    """
    if not info.has_logits:
        return inbox
    tokenizer = spec.model.tokenizer or Path(spec.model.model)
    try:
        backend = MaskBackend(VocabularySource(tokenizer, info.vocab_size, info.eos_token_ids))
    except GrammarError as error:
        logger.warning("structured output is refused: %s", error)
        return inbox
    rank.scheduler.use_grammars(backend)
    return GrammarInbox(inbox, backend)
