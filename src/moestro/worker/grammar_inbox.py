"""Holds a rank's requests with slow grammars back while many of them run, and wakes the loop for late masks."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from moestro.config.launch_spec import LaunchSpec
from moestro.core.fair_queue import FairQueue
from moestro.core.model_info import ModelInfo
from moestro.engine.rank import Rank
from moestro.grammar.backend import MaskBackend
from moestro.grammar.compiler import VocabularySource
from moestro.wire.messages import Abort, Add, FromRank, ToRank
from moestro.worker.rank_loop import RankInbox

_LOOK_AGAIN_S = 1e-3  # while a mask is computed, which takes less for most grammars


class GrammarInbox:
    """Passes messages on; a request with a slow grammar comes when few others run. Implements `RankInbox`.

    Args:
        inbox: source of the messages.
        backend: computes the masks.
    """

    def __init__(self, inbox: RankInbox, backend: MaskBackend) -> None:
        self._inbox, self._backend = inbox, backend
        self._held: dict[str, Add] = {}  # by request id
        self._turns = FairQueue[Add]()  # the same, by client

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
        """Implement `RankInbox.receive`. While masks are computed it may return early, with nothing."""
        released = self._released()
        if released:
            wait_s = 0
        elif (self._held or self._backend.is_waiting) and (wait_s is None or wait_s > _LOOK_AGAIN_S):
            wait_s = _LOOK_AGAIN_S
        return [*released, *self._sift(self._inbox.receive(wait_s), len(released))]

    def has_messages(self) -> bool:
        """Implement `RankInbox.has_messages`."""
        return self._inbox.has_messages()

    def send(self, message: FromRank) -> None:
        """Implement `RankInbox.send`."""
        self._inbox.send(message)

    def _released(self) -> list[Add]:
        """Take the requests for which there is room: clients in turn, the oldest request of each first."""
        found: list[Add] = []
        while self._held and self._has_room(next(iter(self._held.values())), len(found)):  # alike for all of them
            message = self._turns.pop()
            del self._held[message.request.request_id]
            found.append(message)
        return found

    def _has_room(self, message: Add, num_coming: int) -> bool:
        grammar = message.request.sampling.grammar
        return grammar is None or self._backend.has_room(grammar, num_coming)

    def _sift(self, messages: Sequence[ToRank], num_coming: int) -> list[ToRank]:
        """Hold requests back, and drop those of them that are aborted.

        Args:
            num_coming: requests with slow grammars that come before these messages.
        """
        passed: list[ToRank] = []
        for message in messages:
            match message:
                case Add(request) if request.sampling.grammar is not None and not request.sampling.grammar.is_light:
                    if self._held or not self._has_room(message, num_coming):
                        self._held[request.request_id] = message
                        self._turns.push(request.client, message)
                        continue
                    num_coming += 1
                case Abort(request_ids):
                    for request_id in request_ids:
                        if (held := self._held.pop(request_id, None)) is not None:
                            self._turns.discard(held.request.client, held)
            passed.append(message)
        return passed


@contextlib.contextmanager
def following_grammars(spec: LaunchSpec, rank: Rank, info: ModelInfo, inbox: RankInbox) -> Iterator[RankInbox]:
    """Let the answers of `rank` follow grammars during the block, if it computes logits.

    The block gets the inbox that the rank's loop should read.
    """
    if not info.has_logits:
        yield inbox
        return
    tokenizer = spec.model.tokenizer_directory
    backend = MaskBackend(VocabularySource(tokenizer, info.vocab_size, info.eos_token_ids))
    backend.start()
    rank.scheduler.use_grammars(backend)
    try:
        yield GrammarInbox(inbox, backend)
    finally:
        backend.close()
