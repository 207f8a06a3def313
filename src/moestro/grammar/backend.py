"""Token masks of a rank, computed in bounded processes beside its steps.

1. A plan requests the masks of its sequences, in one message.
2. A process computes them while the plan's logits are computed.
3. The sampler takes them. A row whose mask is late gets no token in that step, and its sequence sits out until the mask
   is ready; other rows go on.

Light grammars share one process, for whose masks the sampler waits within `WaitAllowance`. Others share a second one
with a low priority, for which nothing waits. A grammar that exceeds the bounds of the first process moves to the
second, and one that exceeds those of the second fails. The process then begins anew, and so do the others' matchers: a
matcher is a function of the grammar and of the tokens.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import partial

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.request import Grammar, MaskRequest
from moestro.core.work import Int32s
from moestro.grammar.compiler import VocabularySource
from moestro.grammar.host import (
    LEAVING,
    LONGEST_WAIT_S,
    QUICK,
    SLOW,
    GrammarHost,
    LaneWork,
    MaskAnswer,
    MaskJob,
    excess,
)

# A rank's end of a process that computes masks. No call waits for that process unless it says so.

_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(MaskAnswer).decode
_HEAD_BYTES = 4  # as in `text.child_process.write_message`
_READ_BYTES = 1 << 20
_MOST_DROPPED = 1024


class MaskLane:
    """Sends jobs to a process and takes its answers. The process is replaced when it ends.

    Args:
        fork: starts a process; returns the socket to it.

    Attributes:
        jobs: matchers of the jobs without an answer, in the order in which the process computes them.
        num_processes: processes started so far.
    """

    def __init__(self, fork: Callable[[], socket.socket]) -> None:
        self._fork = fork
        self._socket: socket.socket | None = None
        self._unsent, self._received = bytearray(), bytearray()
        self._has_begun = False
        self._poll = select.poll()
        self.jobs: OrderedDict[int, None] = OrderedDict()
        self._dropped: list[int] = []  # matchers to be forgotten with the next jobs
        self.num_processes = 0

    def send(self, jobs: Sequence[MaskJob]) -> None:
        """Queue jobs, which the process computes in order."""
        if self._socket is None:
            self._begin()
        self.jobs.update(dict.fromkeys(job.matcher for job in jobs))
        body = _encode(LaneWork(list(jobs), self._dropped))
        self._dropped = []
        self._unsent += len(body).to_bytes(_HEAD_BYTES, "big") + body
        self._flush()

    def drop(self, matcher: int) -> None:
        """Let the process forget a matcher, with the next jobs or before many are to be forgotten."""
        if self._socket is None:
            return
        self._dropped.append(matcher)
        if len(self._dropped) >= _MOST_DROPPED:
            self.send([])

    def receive(self, wait_s: float = 0) -> tuple[list[MaskAnswer], list[int] | None]:
        """Take the answers that are here.

        Args:
            wait_s: longest wait for the first of them, which is rounded up to a millisecond.

        Returns:
            The answers, and the matchers without an answer if the process has ended, the guilty one first. It has none
            where the process left by itself, or did not begin: the first element is then `LEAVING`. None means that
            the process lives.
        """
        if self._socket is None or (not self.jobs and not self._unsent):
            return [], None
        self._flush()
        if wait_s > 0:
            self._poll.poll(1e3 * wait_s)
        is_at_end = self._read()
        answers = self._parse()
        for answer in answers:
            self.jobs.pop(answer.matcher, None)
        has_left = not self._has_begun or (bool(answers) and answers[-1].matcher == LEAVING)
        if not (is_at_end or (has_left and self._has_begun)):
            return answers, None
        lost = [*([LEAVING] if has_left else []), *self.jobs]
        self.close()
        return [answer for answer in answers if answer.matcher != LEAVING], lost

    def close(self) -> None:
        """Close the socket, which ends the process after its present job."""
        if self._socket is not None:
            self._poll.unregister(self._socket)
            self._socket.close()
        self._socket, self._has_begun = None, False
        self._unsent.clear()
        self._received.clear()
        self.jobs.clear()
        self._dropped.clear()  # the next process knows no matcher

    def _begin(self) -> None:
        self._socket = self._fork()
        self._socket.settimeout(0)
        self._poll.register(self._socket, select.POLLIN)
        self.num_processes += 1

    def _flush(self) -> None:
        """Send what the socket takes; a process in a long job reads nothing meanwhile."""
        while self._unsent:
            assert self._socket is not None
            try:
                del self._unsent[: self._socket.send(self._unsent)]
            except BlockingIOError:
                return
            except OSError:  # the process has ended, which `receive` finds
                self._unsent.clear()

    def _read(self) -> bool:
        """Read what is here. Returns whether the process has ended."""
        assert self._socket is not None
        with contextlib.suppress(BlockingIOError):
            while True:
                try:
                    part = self._socket.recv(_READ_BYTES)
                except ConnectionResetError:
                    return True
                if not part:
                    return True
                self._received += part
        return False

    def _parse(self) -> list[MaskAnswer]:
        """Take whole messages."""
        found, at, received = list[MaskAnswer](), 0, self._received
        while len(received) >= at + _HEAD_BYTES:
            start = at + _HEAD_BYTES
            end = start + int.from_bytes(received[at:start], "big")
            if len(received) < end:
                break
            if end == start:  # BEGUN
                self._has_begun = True
            else:
                found.append(_decode(bytes(received[start:end])))
            at = end
        del received[:at]
        return found


# Sequences under slow grammars that may run at once; others wait outside of the rank's queue, and hold no KV.
MAX_SLOW = 8
# Processor time that the masks of one answer may take in the first process: that of a try at its start, and for each
# mask ten times the median of ordinary grammars with a vocabulary of 150,000 tokens.
START_NS, MASK_NS = 30_000_000, 1_000_000
_MOST_DEATHS = 2  # of the second process in the same answer's jobs: the first may have had another cause
_WORD_BITS = 32


class WaitAllowance:
    """Time that a rank may wait for masks: a share of all time, whatever its requests bring.

    Args:
        now_ns: clock.
    """

    SHARE = 0.1
    MOST_NS = 3_000_000  # at once; a step of a small network on a CPU takes as long

    def __init__(self, now_ns: Callable[[], int] = time.monotonic_ns) -> None:
        self._now_ns = now_ns
        self._left_ns, self._at_ns = float(self.MOST_NS), now_ns()

    def left_s(self) -> float:
        """Return how long the caller may wait now."""
        now_ns = self._now_ns()
        self._left_ns = min(self._left_ns + self.SHARE * (now_ns - self._at_ns), self.MOST_NS)
        self._at_ns = now_ns
        return max(self._left_ns, 0) / 1e9

    def spend(self, waited_ns: int) -> None:
        """Take a wait away, which may exceed what was left."""
        self._left_ns -= waited_ns


class AnswerMatcher:
    """Place of one answer in its grammar.

    Attributes:
        number: number of this matcher in the processes.
        grammar: language of the answer.
        is_slow: whether the second process computes its masks.
        generated: int32, tokens of the answer at the last request.
        num_known: tokens that the process has read; -1 means that it has no matcher.
        is_waiting: whether a mask is being computed.
        waits_since_s: since when the second process is to compute it.
        num_requested: number of tokens before that mask.
        mask: number of tokens before the mask that was computed last, and int32[words].
        is_over: whether an end token followed a complete text. All tokens are allowed from there on, as in vLLM.
        failure: why no token is allowed any more; None means that the matcher works.
        cost_ns, num_masks: processor time of its masks, and their number.
        num_deaths: processes that ended in one of its jobs.
    """

    __slots__ = (
        "__weakref__", "cost_ns", "failure", "generated", "grammar", "is_over", "is_slow", "is_waiting", "mask",
        "num_deaths", "num_known", "num_masks", "num_requested", "number", "waits_since_s",
    )  # fmt: skip

    def __init__(self, number: int, grammar: Grammar) -> None:
        self.number, self.grammar, self.is_slow = number, grammar, not grammar.is_light
        self.generated = np.empty(0, np.int32)
        self.num_known, self.num_requested = -1, 0
        self.is_waiting = self.is_over = False
        self.waits_since_s = 0.0
        self.mask: tuple[int, NDArray[np.int32]] | None = None
        self.failure: str | None = None
        self.cost_ns = self.num_masks = self.num_deaths = 0

    @property
    def needs_mask(self) -> bool:
        """Whether the mask after `generated` is neither known nor being computed."""
        if self.is_over or self.is_waiting or self.failure is not None:
            return False
        return self.mask is None or self.mask[0] != len(self.generated)

    def read(self, generated: Int32s, eos_token_ids: frozenset[int]) -> None:
        """Take in the tokens of the answer so far."""
        new = generated[len(self.generated) :].tolist()
        # An end token is allowed after a complete text alone; the processes do not read it.
        self.is_over = self.is_over or not eos_token_ids.isdisjoint(new)
        self.generated = generated

    def job(self) -> MaskJob:
        """Make the job of the mask after `generated`."""
        first = max(self.num_known, 0)
        grammar = self.grammar if self.num_known < 0 else None
        self.is_waiting, self.num_requested = True, len(self.generated)
        return MaskJob(self.number, self.generated[first:].astype(np.int32).tobytes(), grammar)

    def take(self, answer: MaskAnswer) -> None:
        """Take in the mask that was computed."""
        self.is_waiting, self.failure = False, self.failure or answer.failure
        self.num_known = self.num_requested
        self.mask = self.num_requested, np.frombuffer(answer.words, np.int32)
        self.cost_ns += answer.cpu_ns
        self.num_masks += 1

    def move(self) -> None:
        """Let the second process compute the masks from now on."""
        self.is_slow, self.num_known, self.cost_ns = True, -1, 0


class _Mask:
    """Mask of one request; implements `core.request.TokenMask`."""

    __slots__ = ("_backend", "_request", "_words")

    def __init__(self, backend: MaskBackend, request: MaskRequest) -> None:
        self._backend, self._request = backend, request
        self._words: list[NDArray[np.int32] | None] = []

    def words(self) -> NDArray[np.int32] | None:
        """Implement `TokenMask.words`. A failed matcher allows nothing."""
        if not self._words:
            self._words.append(self._take())
        return self._words[0]

    def _take(self) -> NDArray[np.int32] | None:
        matcher, request = self._request.matcher, self._request
        if not self._backend.await_mask(matcher):
            return None
        if matcher.failure is not None:
            return np.zeros(1, np.int32)
        if matcher.is_over:
            return self._backend.all_tokens()
        num_tokens, words = matcher.mask
        if num_tokens != len(request.generated):
            return None
        return _without(words, request.unwanted) if len(request.unwanted) else words


class MaskBackend:
    """Computes the masks of a rank's sequences; implements `core.request.GrammarBackend`.

    Args:
        source: vocabulary of the model.
        allowance: time that the rank may wait for masks.
        now_s: clock.
    """

    def __init__(
        self,
        source: VocabularySource,
        allowance: WaitAllowance | None = None,
        now_s: Callable[[], float] = time.monotonic,
    ) -> None:
        self._now_s = now_s
        # A rank has a session of its own, and what is left of its group when it has ended ends too.
        self._host = GrammarHost(source, has_own_session=False)
        self._eos_token_ids = frozenset(source.eos_token_ids)
        self._every_token = np.full(-(-source.vocab_size // _WORD_BITS), -1, np.int32)
        self._allowance = allowance or WaitAllowance()
        self._matchers: weakref.WeakValueDictionary[int, AnswerMatcher] = weakref.WeakValueDictionary()
        self._num_matchers = 0
        self._quick, self._slow = (MaskLane(partial(self._host.fork, role)) for role in (QUICK, SLOW))
        self._queue: dict[int, AnswerMatcher] = {}  # of the second process, which has one job at a time
        self._served_ns = 0  # cost of the matcher that it served last, from which new ones count

    def start(self) -> None:
        """Load the vocabulary in the background."""
        self._host.start()

    @property
    def is_waiting(self) -> bool:
        """Whether a mask is being computed."""
        return bool(self._quick.jobs or self._slow.jobs or self._queue)

    def has_room(self, grammar: Grammar, num_coming: int = 0) -> bool:
        """Whether a sequence may come whose answer follows `grammar`.

        Args:
            num_coming: other sequences with slow grammars that come now.
        """
        if grammar.is_light:
            return True
        return sum(matcher.is_slow for matcher in self._matchers.values()) + num_coming < MAX_SLOW

    def matcher(self, grammar: Grammar) -> AnswerMatcher:
        """Implement `GrammarBackend.matcher`."""
        matcher = AnswerMatcher(self._num_matchers, grammar)
        self._num_matchers += 1
        self._matchers[matcher.number] = matcher
        weakref.finalize(matcher, self._forget, matcher.number).atexit = False
        return matcher

    def masks(self, requests: Sequence[MaskRequest]) -> list[_Mask]:
        """Implement `GrammarBackend.masks`."""
        for request in requests:
            request.matcher.read(request.generated, self._eos_token_ids)
        self._request(request.matcher for request in requests)
        return [_Mask(self, request) for request in requests]

    def is_ready(self, matcher: AnswerMatcher) -> bool:
        """Implement `GrammarBackend.is_ready`."""
        self._receive()
        return not matcher.is_waiting

    def failure(self, matcher: AnswerMatcher) -> str | None:
        """Implement `GrammarBackend.failure`."""
        return matcher.failure

    def await_mask(self, matcher: AnswerMatcher) -> bool:
        """Wait for the mask of a light grammar, within the allowance. Returns whether it is ready."""
        if matcher.is_waiting:
            self._receive()
        while matcher.is_waiting and not matcher.is_slow and (left_s := self._allowance.left_s()) > 0:
            began_ns = time.monotonic_ns()
            self._receive(left_s)
            self._allowance.spend(time.monotonic_ns() - began_ns)
        return not matcher.is_waiting

    def all_tokens(self) -> NDArray[np.int32]:
        """Return the mask that allows every token."""
        return self._every_token

    def close(self) -> None:
        """End the processes."""
        self._quick.close()
        self._slow.close()
        self._host.close()

    def _request(self, matchers: Iterable[AnswerMatcher]) -> None:
        """Send the jobs of those that need a mask, the cheapest first. A grammar that is not compiled comes last."""
        light = list[AnswerMatcher]()
        for matcher in matchers:
            if not matcher.needs_mask:
                continue
            if matcher.is_slow:
                matcher.cost_ns = max(matcher.cost_ns, self._served_ns)
                self._queue[matcher.number] = matcher
                matcher.is_waiting, matcher.waits_since_s = True, self._now_s()
            else:
                light.append(matcher)
        if light:
            light.sort(key=lambda matcher: (matcher.num_known < 0, matcher.cost_ns / max(matcher.num_masks, 1)))
            self._quick.send([matcher.job() for matcher in light])
        self._send_slow()

    def _send_slow(self) -> None:
        """Give the second process the job of the answer that has cost least, if it has none."""
        if self._slow.jobs or not self._queue:
            return
        matcher = min(self._queue.values(), key=lambda each: each.cost_ns)
        del self._queue[matcher.number]
        self._served_ns = matcher.cost_ns
        self._slow.send([matcher.job()])

    def _receive(self, wait_s: float = 0) -> None:
        """Take the answers of both processes; wait for those of the first alone."""
        for lane, lane_wait_s in ((self._slow, 0.0), (self._quick, wait_s)):
            answers, lost = lane.receive(lane_wait_s)
            for answer in answers:
                matcher = self._matchers.get(answer.matcher)
                if matcher is not None:
                    self._take(matcher, answer)
            if lost is not None:
                self._recover(lane, lost)
        self._give_up()
        self._send_slow()

    def _give_up(self) -> None:
        """Fail the answers whose mask the second process has not computed in time."""
        for number in [*self._slow.jobs, *self._queue]:
            matcher = self._matchers.get(number)
            if matcher is not None and self._now_s() - matcher.waits_since_s > LONGEST_WAIT_S:
                self._queue.pop(number, None)
                matcher.is_waiting = False
                matcher.failure = f"its next mask was not computed within {LONGEST_WAIT_S:g} s"

    def _take(self, matcher: AnswerMatcher, answer: MaskAnswer) -> None:
        matcher.take(answer)
        if not matcher.is_slow and matcher.cost_ns > START_NS + MASK_NS * matcher.num_masks:
            matcher.move()
            self._quick.drop(matcher.number)

    def _recover(self, lane: MaskLane, lost: list[int]) -> None:
        """Begin anew after the end of a process. Its matchers are sent again with their next jobs.

        Args:
            lost: as returned by `MaskLane.receive`.
        """
        is_slow = lane is self._slow
        for matcher in self._matchers.values():
            if matcher.is_slow == is_slow:
                matcher.num_known = -1
        guilty = self._matchers.get(lost[0]) if lost and lost[0] != LEAVING else None
        if guilty is not None:
            self._blame(guilty)
        found = [each for number in lost if (each := self._matchers.get(number)) is not None]
        for each in found:
            each.is_waiting = False
        self._request(found)

    def _blame(self, matcher: AnswerMatcher) -> None:
        if not matcher.is_slow:
            matcher.move()
            return
        matcher.num_deaths += 1
        if matcher.num_deaths >= _MOST_DEATHS:
            matcher.failure = excess(SLOW)

    def _forget(self, number: int) -> None:
        """Let the processes forget an answer that has ended, with the next jobs."""
        self._queue.pop(number, None)
        for lane in (self._quick, self._slow):
            lane.drop(number)


def _without(words: NDArray[np.int32], token_ids: Int32s) -> NDArray[np.int32]:
    """Exclude tokens from a mask, unless it allows no others: a complete text can only end."""
    others = words.view(np.uint32).copy()
    bits = np.left_shift(np.uint32(1), (token_ids % _WORD_BITS).astype(np.uint32))
    np.bitwise_and.at(others, token_ids // _WORD_BITS, ~bits)
    return others.view(np.int32) if others.any() else words
