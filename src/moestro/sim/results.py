"""What became of the requests of one simulation: columns, one row a request, and what can be read from them."""

from __future__ import annotations

from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from moestro.core.timeline import Timelines
from moestro.workload.records import Records

Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]

PENDING, ANSWERED, REFUSED = 0, 1, 2
NOT_YET_NS = -1  # a time that has not come
WINDOW_NS = 10_000_000_000  # of prefill seconds: LMetric's (section 4.2)


class Results:
    """n requests, filled in as the simulation goes. Some 60 bytes a request, so that a million fit anywhere.

    Args:
        num_requests, num_engines: how many.
        tells_prefill: somebody says what time of the engines' steps goes into prompts.

    Attributes:
        arrival_ns, admitted_ns, first_token_ns, last_token_ns: int64[n]; admitted: given KV blocks for the first time.
            A request of no tokens, a scored prompt, may lack a first one.
        num_prompt_tokens, num_tokens, num_hit_tokens: int32[n]; tokens generated; prompt tokens from the prefix cache.
        num_preemptions: int32[n].
        engine: int32[n]; -1: none took it.
        is_best_effort: bool[n].
        status: uint8[n], PENDING, ANSWERED or REFUSED.
        refusals: by stable word, how many and the first one's text.
        prefill_ns: by engine, by window: time of its steps, each counted by the share of its tokens that are prefill.
    """

    def __init__(self, num_requests: int, num_engines: int, *, tells_prefill: bool = True) -> None:
        self.num_engines = num_engines
        self.tells_prefill = tells_prefill
        self.arrival_ns, self.admitted_ns, self.first_token_ns, self.last_token_ns = (
            np.full(num_requests, NOT_YET_NS, np.int64) for _ in range(4)
        )
        self.num_prompt_tokens, self.num_tokens, self.num_hit_tokens, self.num_preemptions = (
            np.zeros(num_requests, np.int32) for _ in range(4)
        )
        self.engine = np.full(num_requests, -1, np.int32)
        self.is_best_effort = np.zeros(num_requests, np.bool_)
        self.status = np.zeros(num_requests, np.uint8)
        self.refusals: dict[str, tuple[int, str]] = {}
        self.prefill_ns: list[dict[int, int]] = [{} for _ in range(num_engines)]

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def refused(self, row: int, word: str, text: str) -> None:
        """Request `row` was not taken."""
        self.status[row] = REFUSED
        count, first = self.refusals.get(word, (0, text))
        self.refusals[word] = (count + 1, first)

    def prefilled(self, engine: int, start_ns: int, duration_ns: int) -> None:
        """`engine` spent so much of a step that began then on prompts."""
        windows, window = self.prefill_ns[engine], start_ns // WINDOW_NS
        windows[window] = windows.get(window, 0) + duration_ns

    @property
    def is_answered(self) -> NDArray[np.bool_]:
        """bool[n], to its end."""
        answered: NDArray[np.bool_] = self.status == ANSWERED
        return answered

    def digest(self) -> str:
        """A hash of every column: two simulations with one digest did the same."""
        digest = blake2b(digest_size=16)
        for column in (
            self.arrival_ns, self.admitted_ns, self.first_token_ns, self.last_token_ns, self.num_prompt_tokens,
            self.num_tokens, self.num_hit_tokens, self.num_preemptions, self.engine, self.is_best_effort, self.status,
        ):  # fmt: skip
            digest.update(column.tobytes())
        digest.update(repr(self.prefill_ns).encode())
        return digest.hexdigest()

    def records(self, num_asked_tokens: Int64s | None = None) -> Records:
        """The same as the load generator's records, for one report of both; nobody is late on virtual time.

        Args:
            num_asked_tokens: int64[n], how long each answer should be; None: as long as it was.
        """
        num_tokens, empty = self.num_tokens.astype(np.int64), np.zeros(0, np.int64)
        return Records(
            timelines=Timelines(self.arrival_ns, self.first_token_ns, self.last_token_ns, num_tokens),
            end_ns=np.maximum(self.last_token_ns, self.arrival_ns),
            is_ok=self.is_answered,
            num_asked_tokens=num_tokens if num_asked_tokens is None else num_asked_tokens,
            num_prompt_tokens=np.where(self.is_answered, self.num_prompt_tokens, 0).astype(np.int64),
            num_cached_tokens=self.num_hit_tokens.astype(np.int64),
            itl_ns=empty,
            failures=self.refusals,
            late_ns=empty,
            stall_ns=empty,
        )

    def request_seconds(self) -> Floats:
        """float64[engines], time that requests spent on each engine, summed: the area under `in_flight`."""
        rows = self.is_answered
        spent_s = (self.last_token_ns[rows] - self.arrival_ns[rows]) / 1e9
        return np.bincount(self.engine[rows], spent_s, self.num_engines).astype(np.float64)

    def in_flight(self, engine: int, at_ns: Int64s) -> Int64s:
        """int64[m], requests of `engine` that had arrived and not ended at each of `at_ns`."""
        rows = self.engine == engine
        return _count(self.arrival_ns[rows], at_ns) - _count(self.last_token_ns[rows], at_ns)

    def queue_depth(self, engine: int, at_ns: Int64s) -> Int64s:
        """int64[m], requests of `engine` that had arrived and not been admitted yet at each of `at_ns`."""
        rows = self.engine == engine
        return _count(self.arrival_ns[rows], at_ns) - _count(self.admitted_ns[rows], at_ns)

    def prefill_seconds(self) -> Floats:
        """float64[engines, windows], seconds of prefill served in each window of WINDOW_NS from time 0."""
        last = max((window for windows in self.prefill_ns for window in windows), default=0)
        seconds = np.zeros((self.num_engines, last + 1))
        for engine, windows in enumerate(self.prefill_ns):
            for window, duration_ns in windows.items():
                seconds[engine, window] = duration_ns / 1e9
        return seconds

    def most_different_engines(self) -> tuple[int, int]:
        """The two engines that served the most and the least prefill."""
        total = self.prefill_seconds().sum(1)
        return int(total.argmax()), int(total.argmin())

    def hit_ratio(self, window_ns: int) -> Floats:
        """float64[windows], of the prompt tokens admitted in each window, those found in the cache; NaN: none came."""
        rows = self.admitted_ns != NOT_YET_NS
        window = self.admitted_ns[rows] // window_ns
        asked = np.bincount(window, self.num_prompt_tokens[rows])
        found = np.bincount(window, self.num_hit_tokens[rows])
        ratio = np.full(len(asked), np.nan)
        np.divide(found, asked, out=ratio, where=asked > 0)
        return ratio


def _count(times_ns: Int64s, at_ns: Int64s) -> Int64s:
    """int64[m], how many of `times_ns`, of those that have come, are not after each of `at_ns`."""
    counts: Int64s = np.searchsorted(np.sort(times_ns[times_ns != NOT_YET_NS]), at_ns, side="right").astype(np.int64)
    return counts
