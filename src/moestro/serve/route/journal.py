"""What was decided, and how it came out: the last decisions in memory, all of them in a file if there is one."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from moestro.cluster.router import RouteDecision
from moestro.core.request import Request
from moestro.errors import ConfigError

logger = logging.getLogger(__name__)

FLUSH_S = 1.0
MAX_CANDIDATES = 32  # of one decision that are written down: the best, by their scores
_MAX_PENDING = 100_000  # lines; a disk that cannot keep up loses some, and the log says so


class Candidate(msgspec.Struct):
    """An engine that could have been chosen; `score`: lower is better, None where the policy gives none."""

    engine: str
    score: float | None
    hit_tokens: int


class Attempt(msgspec.Struct, kw_only=True):
    """One decision of a request; there is another when an engine failed before it answered.

    Attributes:
        engine: the one chosen.
        because: why there was a decision at all, if it is not the first.
        candidates: those that could be chosen, the best first, the chosen one among them.
        num_candidates: how many there were; of very many not all are listed.
        margin: the runner-up's score less the chosen one's: what the next best would have cost more. Negative: the
            policy chose against its own score, by a filter say. None: there was no other, or there are no scores.
    """

    engine: str
    score: float
    reason: str
    because: str
    hit_tokens: int
    candidates: list[Candidate]
    num_candidates: int
    margin: float | None


class Story(msgspec.Struct, kw_only=True):
    """All that is known of one request.

    Attributes:
        time: when it came, in seconds since 1970.
        prompt_tokens: as the router counts them: exactly, or by the length of the text.
        status: of the answer; 499: its client left; None: it is still running.
        seconds: until it was over.
        usage: tokens, as the answer told.
    """

    request_id: str
    time: float
    policy: str
    prompt_tokens: int
    attempts: list[Attempt]
    status: int | None
    seconds: float | None
    usage: dict[str, int]


class _Entry:
    """A story as it is kept: nothing is spelt out before somebody reads it."""

    __slots__ = ("attempts", "began_ns", "ended_ns", "num_prompt_tokens", "request_id", "status", "time_s", "usage")

    def __init__(self, request_id: str, num_prompt_tokens: int) -> None:
        self.request_id = request_id
        self.num_prompt_tokens = num_prompt_tokens
        self.time_s = time.time()
        self.began_ns = time.monotonic_ns()
        self.ended_ns = 0
        self.attempts: list[tuple[RouteDecision, str]] = []
        self.status: int | None = None
        self.usage: dict[bytes, int] = {}


class Journal:
    """Keeps the last stories by request id, and hands each that is over to `write`.

    Args:
        remember: how many are kept.
        name_of: the name of a row.
        write: None: there is no file.
    """

    def __init__(
        self, policy: str, remember: int, name_of: Callable[[int], str], write: Callable[[Story], None] | None
    ) -> None:
        self._policy = policy
        self._remember = remember
        self._name_of = name_of
        self._write = write
        self._entries: OrderedDict[str, _Entry] = OrderedDict()

    def routed(self, request: Request, decision: RouteDecision, because: str) -> None:
        """A request was given to an engine; `because`: it is not the first one that it was given to."""
        entry = self._entries.get(request.request_id)
        if entry is None or not because:
            if len(self._entries) >= self._remember:
                self._entries.popitem(last=False)
            entry = self._entries[request.request_id] = _Entry(request.request_id, request.num_prompt_tokens)
        entry.attempts.append((decision, because))

    def ended(self, request_id: str, status: int, usage: dict[bytes, int]) -> None:
        """It is over."""
        entry = self._entries.get(request_id)
        if entry is None:
            return
        entry.status, entry.usage, entry.ended_ns = status, usage, time.monotonic_ns()
        if self._write is not None:
            self._write(self._story(entry))

    def story(self, request_id: str) -> Story | None:
        """What is known of a request; None: nothing, or no more."""
        entry = self._entries.get(request_id)
        return None if entry is None else self._story(entry)

    def _story(self, entry: _Entry) -> Story:
        is_over = entry.status is not None
        return Story(
            request_id=entry.request_id,
            time=entry.time_s,
            policy=self._policy,
            prompt_tokens=entry.num_prompt_tokens,
            attempts=[self._attempt(decision, because) for decision, because in entry.attempts],
            status=entry.status,
            seconds=(entry.ended_ns - entry.began_ns) / 1e9 if is_over else None,
            usage={name.decode(): count for name, count in entry.usage.items()},
        )

    def _attempt(self, decision: RouteDecision, because: str) -> Attempt:
        rows = np.flatnonzero(decision.routable)
        margin = None
        if decision.scores is not None:
            scores = decision.scores[rows]
            rows = rows[np.argsort(scores, kind="stable")]
            others = decision.scores[rows[rows != decision.engine]]
            if len(others) and np.isfinite(others[0]) and np.isfinite(decision.score):
                margin = float(others[0]) - decision.score
        listed = list(rows[:MAX_CANDIDATES])
        if decision.engine not in listed:
            listed.append(decision.engine)
        return Attempt(
            engine=self._name_of(decision.engine),
            score=decision.score,
            reason=decision.reason,
            because=because,
            hit_tokens=decision.hit_tokens,
            candidates=[self._candidate(decision, int(row)) for row in listed],
            num_candidates=len(rows),
            margin=margin,
        )

    def _candidate(self, decision: RouteDecision, row: int) -> Candidate:
        score = None if decision.scores is None else float(decision.scores[row])
        return Candidate(self._name_of(row), score, int(decision.all_hit_tokens[row]))


class RecordFile:
    """Appends stories to a file, a JSON object a line, once a second and off the event loop.

    Raises:
        ConfigError: it cannot be written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._pending: list[Story] = []
        self._num_dropped = 0
        try:
            self._file = path.open("ab")
        except OSError as error:
            raise ConfigError(f"--record {path} cannot be written: {error.strerror}") from None

    def write(self, story: Story) -> None:
        """Soon."""
        if len(self._pending) < _MAX_PENDING:
            self._pending.append(story)
        else:
            self._num_dropped += 1

    async def flush_forever(self) -> None:
        """Once a second, until cancelled."""
        while True:
            await asyncio.sleep(FLUSH_S)
            await self._flush()

    async def _flush(self) -> None:
        stories, self._pending = self._pending, []
        if not stories:
            return
        num_dropped, self._num_dropped = self._num_dropped, 0
        try:
            await asyncio.to_thread(self._append, stories)
        except OSError as error:
            num_dropped += len(stories)
            logger.warning("--record %s: %s", self._path, error)
        if num_dropped:
            logger.warning("--record %s: %d decisions are not in it", self._path, num_dropped)

    def _append(self, stories: list[Story]) -> None:
        self._file.write(msgspec.json.Encoder().encode_lines(stories))
        self._file.flush()

    async def close(self) -> None:
        """Write what is left."""
        await self._flush()
        with contextlib.suppress(OSError):
            self._file.close()
