"""Results of one simulation: columns with one row for each request, and figures derived from them."""

from __future__ import annotations

import re
from hashlib import blake2b

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.clock import Timelines
from moestro.workload.run_records import Records

Int64s = NDArray[np.int64]
Floats = NDArray[np.float64]

PENDING, ANSWERED, REFUSED = 0, 1, 2
NOT_YET_NS = -1  # the event has not happened
WINDOW_NS = 10_000_000_000  # window of prefill seconds: LMetric's (section 4.2)
_FLAG = re.compile(r"--([a-z][a-z-]*)")
_COLUMNS = (
    "arrival_ns", "admitted_ns", "first_token_ns", "last_token_ns", "num_prompt_tokens", "num_tokens", "num_hit_tokens",
    "num_host_tokens", "num_preemptions", "engine", "is_best_effort", "status",
)  # fmt: skip


class PlanFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Placement while serving, in all groups of one policy's run.

    Attributes:
        num_plans: answers of the placement policy.
        num_failed_plans: decisions without an answer that the group can have.
        num_moving_plans: answers that were followed and by which at least one copy moves.
        num_moves: copies that devices received.
    """

    num_plans: int
    num_failed_plans: int = 0
    num_moving_plans: int
    num_moves: int


class GroupFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of all groups of one policy's run.

    Attributes:
        num_attention_workers, num_expert_workers: workers of a group; the former have experts too if the latter are 0.
        stall_shares: share of its group's time, in which the group has requests, for which each worker does not
            compute; all groups one after another, attention workers first.
        num_messages, num_bytes: messages between workers and their bytes. None in lock-step, which has collectives.
        bound_same, bound_permuted: output tokens a second that no mode exceeds with this division of the workers, if
            all layers have the same hot experts and if each layer has others.
        share_of_bound: output tokens a second over the bound that holds for this run.
        plans: figures of placement while serving. None where experts stay.
    """

    num_attention_workers: int
    num_expert_workers: int
    stall_shares: tuple[float, ...]
    num_messages: int | None
    num_bytes: int | None
    bound_same: float
    bound_permuted: float
    share_of_bound: float
    plans: PlanFigures | None = None


class Results:
    """Columns of n requests, filled in while the simulation runs.

    A request takes about 60 bytes, so that a million requests fit on any machine.

    Args:
        num_requests, num_engines: numbers of requests and engines.
        tells_prefill: whether the engines report the time that their steps spend on prefill.

    Attributes:
        arrival_ns, admitted_ns, first_token_ns, last_token_ns: times of each request, int64[n]. Admission is the first
            allocation of KV blocks. A scored prompt has no output token and may lack a first-token time.
        num_prompt_tokens, num_tokens, num_hit_tokens: prompt tokens, output tokens, and prompt tokens from the prefix
            cache, int32[n].
        num_host_tokens: of the prompt tokens from the prefix cache, those copied from host memory, int32[n].
        num_preemptions: sequence preemptions, int32[n]. `workload.request_record.UNKNOWN` where a record lacks them.
        engine: engine of each request, int32[n]; -1 means that every engine refused it.
        is_best_effort: service class, bool[n].
        status: PENDING, ANSWERED or REFUSED, uint8[n].
        refusals: number of refusals and text of the first one, by error code.
        prefill_ns: prefill time of each engine by window. A step counts by the share of its tokens that are prefill.
    """

    def __init__(self, num_requests: int, num_engines: int, *, tells_prefill: bool = True) -> None:
        self.num_engines = num_engines
        self.tells_prefill = tells_prefill
        self.arrival_ns, self.admitted_ns, self.first_token_ns, self.last_token_ns = (
            np.full(num_requests, NOT_YET_NS, np.int64) for _ in range(4)
        )
        self.num_prompt_tokens, self.num_tokens, self.num_hit_tokens, self.num_host_tokens, self.num_preemptions = (
            np.zeros(num_requests, np.int32) for _ in range(5)
        )
        self.engine = np.full(num_requests, -1, np.int32)
        self.is_best_effort = np.zeros(num_requests, np.bool_)
        self.status = np.zeros(num_requests, np.uint8)
        self.refusals: dict[str, tuple[int, str]] = {}
        self.prefill_ns: list[dict[int, int]] = [{} for _ in range(num_engines)]

    def __len__(self) -> int:
        return len(self.arrival_ns)

    def refused(self, row: int, word: str, text: str) -> None:
        """Record that request `row` was refused, with the error's code and text.

        The text's flags of `moestro serve` become the settings of a simulation's file.
        """
        text = _FLAG.sub(lambda flag: f"[engines] {flag[1].replace('-', '_')}", text)
        self.status[row] = REFUSED
        count, first = self.refusals.get(word, (0, text))
        self.refusals[word] = (count + 1, first)

    def prefilled(self, engine: int, start_ns: int, duration_ns: int) -> None:
        """Add prefill time to `engine`, in the window of the step that began at `start_ns`."""
        windows, window = self.prefill_ns[engine], start_ns // WINDOW_NS
        windows[window] = windows.get(window, 0) + duration_ns

    def place(self, rows: Int64s, first_engine: int, other: Results) -> None:
        """Take over the results of other engines' requests.

        Args:
            rows: row of each request of `other`, int64[m].
            first_engine: number here of the first engine of `other`.
        """
        for name in _COLUMNS:
            getattr(self, name)[rows] = getattr(other, name)
        self.engine[rows[other.engine >= 0]] += first_engine
        self.prefill_ns[first_engine : first_engine + other.num_engines] = other.prefill_ns
        for word, (count, first) in other.refusals.items():
            known, text = self.refusals.get(word, (0, first))
            self.refusals[word] = (known + count, text)

    @property
    def is_answered(self) -> NDArray[np.bool_]:
        """Requests that were answered to their end, bool[n]."""
        answered: NDArray[np.bool_] = self.status == ANSWERED
        return answered

    def digest(self) -> str:
        """Hash every column: simulations with equal digests are identical."""
        digest = blake2b(digest_size=16)
        for name in _COLUMNS:
            digest.update(getattr(self, name).tobytes())
        digest.update(repr(self.prefill_ns).encode())
        return digest.hexdigest()

    def records(self, num_requested_tokens: Int64s | None = None) -> Records:
        """Convert to the load generator's records, so that one report serves both. No request is sent late.

        Args:
            num_requested_tokens: requested output length, int64[n]. None means the actual length.
        """
        num_tokens, empty = self.num_tokens.astype(np.int64), np.zeros(0, np.int64)
        return Records(
            timelines=Timelines(self.arrival_ns, self.first_token_ns, self.last_token_ns, num_tokens),
            end_ns=np.maximum(self.last_token_ns, self.arrival_ns),
            is_ok=self.is_answered,
            num_requested_tokens=num_tokens if num_requested_tokens is None else num_requested_tokens,
            num_prompt_tokens=np.where(self.is_answered, self.num_prompt_tokens, 0).astype(np.int64),
            num_cached_tokens=self.num_hit_tokens.astype(np.int64),
            itl_ns=empty,
            failures=self.refusals,
            late_ns=empty,
            stall_ns=empty,
        )

    def request_seconds(self) -> Floats:
        """Return the summed time of requests on each engine, float64[engines]: the area under `in_flight`."""
        rows = self.is_answered
        spent_s = (self.last_token_ns[rows] - self.arrival_ns[rows]) / 1e9
        return np.bincount(self.engine[rows], spent_s, self.num_engines).astype(np.float64)

    def in_flight(self, engine: int, at_ns: Int64s) -> Int64s:
        """Return the requests of `engine` that had arrived and not ended at each time in `at_ns`, int64[m]."""
        rows = self.engine == engine
        return _count(self.arrival_ns[rows], at_ns) - _count(self.last_token_ns[rows], at_ns)

    def queue_depth(self, engine: int, at_ns: Int64s) -> Int64s:
        """Return the requests of `engine` that had arrived and were waiting admission at each time, int64[m]."""
        rows = self.engine == engine
        return _count(self.arrival_ns[rows], at_ns) - _count(self.admitted_ns[rows], at_ns)

    def prefill_seconds(self) -> Floats:
        """Return the seconds of prefill in each window of WINDOW_NS from time 0, float64[engines, windows]."""
        last = max((window for windows in self.prefill_ns for window in windows), default=0)
        seconds = np.zeros((self.num_engines, last + 1))
        for engine, windows in enumerate(self.prefill_ns):
            for window, duration_ns in windows.items():
                seconds[engine, window] = duration_ns / 1e9
        return seconds

    def most_different_engines(self) -> tuple[int, int]:
        """Return the engines that served the most and the least prefill."""
        total = self.prefill_seconds().sum(1)
        return int(total.argmax()), int(total.argmin())

    def hit_ratio(self, window_ns: int) -> Floats:
        """Return the cached share of the prompt tokens admitted in each window, float64[windows]; NaN if none was."""
        rows = self.admitted_ns != NOT_YET_NS
        window = self.admitted_ns[rows] // window_ns
        admitted = np.bincount(window, self.num_prompt_tokens[rows])
        found = np.bincount(window, self.num_hit_tokens[rows])
        ratio = np.full(len(admitted), np.nan)
        np.divide(found, admitted, out=ratio, where=admitted > 0)
        return ratio


def _count(times_ns: Int64s, at_ns: Int64s) -> Int64s:
    """Count the past events in `times_ns` that are not after each time in `at_ns`, int64[m]."""
    counts: Int64s = np.searchsorted(np.sort(times_ns[times_ns != NOT_YET_NS]), at_ns, side="right").astype(np.int64)
    return counts
