"""What a simulation leaves behind: the figures of each policy, as JSON and side by side."""

from __future__ import annotations

import msgspec
import numpy as np

from moestro import __version__
from moestro.sim.results import WINDOW_NS, Results
from moestro.workload.report import Report, Spread, make_report, spread_of
from moestro.workload.slos import Slos

_NUM_LOOKS = 512  # moments at which pictures show the load of engines


class PrefillSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of prefill served in a window of `window_s`, of the two engines that served the most and the least.

    As LMetric compares engines (section 4.2). Means over the windows in which any engine served some.
    """

    window_s: float
    most_engine: int
    most_s: float
    least_engine: int
    least_s: float


class PolicyOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """One policy's run.

    Attributes:
        title: of the policy.
        report: as the load generator makes it.
        ls_ttft_ms, be_ttft_ms: of latency-sensitive and best-effort requests; None where there are not both.
        num_preemptions: of all requests.
        num_refused: requests that no engine took.
        load_imbalance: largest over mean, at least 1: of the time that requests spent on each engine, which is the area
            under the number of requests in flight there; so stretches in which nobody is there do not count.
        max_queue_depth: of any engine at a time.
        prefill: see there; None: nobody told it, as of records and in `preemptive` mode.
        digest: of the record; equal digests are equal runs.
    """

    title: str
    report: Report
    ls_ttft_ms: Spread | None
    be_ttft_ms: Spread | None
    num_preemptions: int
    num_refused: int
    load_imbalance: float
    max_queue_depth: int
    prefill: PrefillSplit | None
    digest: str


class SimReport(msgspec.Struct, frozen=True, kw_only=True):
    """All of a simulation.

    Attributes:
        kind: of evidence.
        moestro: version.
        workload: in a few words.
        is_generated: it was drawn by a generator, not recorded.
        settings: as told.
        notes: what a reader has to know of these figures, as that steps were priced beyond a table.
        outcomes: the first is what the others are compared with.
    """

    kind: str = "simulated"
    moestro: str = __version__
    workload: str
    is_generated: bool
    settings: object
    notes: tuple[str, ...] = ()
    outcomes: tuple[PolicyOutcome, ...]


def outcome_of(title: str, results: Results, slos: Slos | None) -> PolicyOutcome:
    """The figures of one run."""
    load = results.request_seconds()
    depth = max(int(results.queue_depth(engine, results.arrival_ns).max()) for engine in range(results.num_engines))
    return PolicyOutcome(
        title=title,
        report=make_report(results.records(), slos),
        ls_ttft_ms=_ttft_of(results, best_effort=False),
        be_ttft_ms=_ttft_of(results, best_effort=True),
        num_preemptions=int(results.num_preemptions.sum()),
        num_refused=sum(count for count, _ in results.refusals.values()),
        load_imbalance=float(load.max() / load.mean()) if load.any() else 1.0,
        max_queue_depth=depth,
        prefill=_prefill_of(results),
        digest=results.digest(),
    )


def _prefill_of(results: Results) -> PrefillSplit | None:
    seconds = results.prefill_seconds()
    seconds = seconds[:, seconds.any(0)]
    if not results.tells_prefill or not seconds.size:
        return None
    most, least = results.most_different_engines()
    return PrefillSplit(
        window_s=WINDOW_NS / 1e9,
        most_engine=most,
        most_s=float(seconds[most].mean()),
        least_engine=least,
        least_s=float(seconds[least].mean()),
    )


def _ttft_of(results: Results, *, best_effort: bool) -> Spread | None:
    """Of one class, where there are both."""
    is_wanted = results.is_best_effort == best_effort
    if is_wanted.all() or not is_wanted.any():
        return None
    rows = is_wanted & results.is_answered & (results.num_tokens > 0)
    return spread_of(results.first_token_ns[rows] - results.arrival_ns[rows])


def looks(results: Results) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """int64[m], moments spread evenly over the run."""
    end_ns = max(int(results.last_token_ns.max()), int(results.arrival_ns.max()))
    return np.linspace(0, end_ns, _NUM_LOOKS).astype(np.int64)
