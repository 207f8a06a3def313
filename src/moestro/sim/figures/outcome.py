"""Figures of each policy's run, as JSON and side by side."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from moestro import __version__
from moestro.sim.figures.intervals import FigureInterval
from moestro.sim.figures.results import NOT_YET_NS, WINDOW_NS, Results
from moestro.sim.groups.group_figures import GroupFigures, PlanFigures
from moestro.sim.saturation import Saturation
from moestro.workload.run_records import Report, Slos, Spread, make_report, spread_of
from moestro.workload.traces.request_record import UNKNOWN

_NUM_LOOKS = 512  # times at which pictures show the load of engines


class PrefillSplit(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds of prefill in a window, for the two engines that served the most and the least.

    LMetric compares engines this way (section 4.2). Windows in which no engine served prefill do not count.

    Attributes:
        window_s: length of a window, seconds.
        most_engine, least_engine: the engines that served the most and the least prefill in the run.
        most_s, least_s: their mean prefill in a window, seconds.
    """

    window_s: float
    most_engine: int
    most_s: float
    least_engine: int
    least_s: float


class PolicyOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of one policy's run.

    Attributes:
        title: name of the policy.
        seed: random seed of the run.
        report: report in the load generator's form.
        ls_ttft_ms, be_ttft_ms: TTFT of latency-sensitive and best-effort requests, ms. None unless both classes exist.
        num_preemptions: sequence preemptions of all requests. None means that a record lacks those of some.
        num_refused: requests that every engine refused.
        load_imbalance: largest over mean, at least 1, of the engines' request time. An engine's request time is the
            area under its number of requests in flight, so empty stretches do not count.
        max_queue_depth: longest waiting queue of any engine. None means unknown, as in a router's record.
        prefill: prefill of the busiest and the idlest engine. None for recorded runs and in `preemptive` mode.
        digest: hash of the results; equal digests mean equal runs.
        group: figures of the groups of workers. None where each engine computes alone.
    """

    title: str
    report: Report
    ls_ttft_ms: Spread | None
    be_ttft_ms: Spread | None
    num_preemptions: int | None
    num_refused: int
    load_imbalance: float
    max_queue_depth: int | None
    prefill: PrefillSplit | None
    digest: str
    group: GroupFigures | None = None
    seed: int = 0


class PolicyChange(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy would change in one figure.

    Attributes:
        measured: the figure under the router in use, by engines or by its access log; None means that none says.
        predicted: `measured` with the change; None where nothing was measured.
        simulated_before, simulated_after: the figure in the simulations of the router in use and of the policy.
        change: of a mean, after over before - 1; of a share, after - before. Of the two simulations.
        half_width: half width of the 95 % interval of `change`, from blocks of consecutive requests. It is that of the
            traffic, and knows no error of the model. None means that there are too few requests.
    """

    measured: float | None
    predicted: float | None
    simulated_before: float
    simulated_after: float
    change: float
    half_width: float | None

    @property
    def shown(self) -> tuple[float, float]:
        """The figure before and after: measured and predicted, or both simulated where nothing was measured."""
        if self.measured is None or self.predicted is None:
            return self.simulated_before, self.simulated_after
        return self.measured, self.predicted


class TrafficGroup(msgspec.Struct, frozen=True, kw_only=True):
    """What a policy would change for some of the requests that a shadow saw.

    Attributes:
        name: "all", an hour, or a tenant.
        moved: share of the requests that would have gone to another engine, 0 .. 1.
        hit_ratio: share of prompt tokens found in prefix caches, 0 .. 1; None without requests.
        ttft_ms: mean time to first token, ms; None without requests.
    """

    name: str
    num_requests: int
    moved: float
    hit_ratio: PolicyChange | None
    ttft_ms: PolicyChange | None


class SimReport(msgspec.Struct, frozen=True, kw_only=True):
    """Report of a whole simulation.

    Attributes:
        kind: kind of evidence.
        moestro: version of Moestro.
        workload: short description of the workload.
        is_generated: whether a generator made the workload; otherwise it was recorded.
        settings: settings of the simulation.
        saturation: how the rate was found, where the settings have a load.
        notes: limits of these figures, for instance steps priced beyond a table.
        outcomes: one for each policy and seed, seed by seed; the other policies are compared with the first.
        intervals: mean and 95 % confidence interval of each figure over the seeds, and of its ratio to the first
            policy, by title and figure. Empty with a single seed.
        changes: of a shadow's record, what each policy would change, by its title: all requests, hours, tenants.
    """

    kind: str = "simulated"
    moestro: str = __version__
    workload: str
    is_generated: bool
    settings: object
    saturation: Saturation | None = None
    notes: tuple[str, ...] = ()
    outcomes: tuple[PolicyOutcome, ...]
    intervals: dict[str, dict[str, FigureInterval]] = {}
    changes: dict[str, tuple[TrafficGroup, ...]] = {}


def outcome_of(
    title: str, results: Results, slos: Slos | None, group: GroupFigures | None = None, seed: int = 0
) -> PolicyOutcome:
    """Compute the figures of one run."""
    load = results.request_seconds()
    depth = None
    if (results.admitted_ns != NOT_YET_NS).any():
        depth = max(int(results.queue_depth(engine, results.arrival_ns).max()) for engine in range(results.num_engines))
    return PolicyOutcome(
        title=title,
        report=make_report(results.records(), slos),
        ls_ttft_ms=_ttft_of(results, best_effort=False),
        be_ttft_ms=_ttft_of(results, best_effort=True),
        num_preemptions=None if (results.num_preemptions == UNKNOWN).any() else int(results.num_preemptions.sum()),
        num_refused=sum(count for count, _ in results.refusals.values()),
        load_imbalance=float(load.max() / load.mean()) if load.any() else 1.0,
        max_queue_depth=depth,
        prefill=_prefill_of(results),
        digest=results.digest(),
        group=group,
        seed=seed,
    )


def placement_notes(outcomes: Sequence[PolicyOutcome]) -> list[str]:
    """Say of each policy that plans placements why none of its experts moved."""
    plans: dict[str, list[PlanFigures]] = {}
    for outcome in outcomes:
        if outcome.group is not None and outcome.group.plans is not None:
            plans.setdefault(outcome.title, []).append(outcome.group.plans)
    notes = []
    for title, each in plans.items():
        num_plans = sum(run.num_plans for run in each)
        if not num_plans:
            notes.append(f"{title}: the run ended before its first placement plan was due (place_interval_steps)")
        elif not any(run.num_moving_plans for run in each):
            notes.append(f"{title}: none of {num_plans:,} placement plans paid, so no expert moved")
    return notes


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
    """Return TTFT of one service class, or None where there is only one class."""
    is_wanted = results.is_best_effort == best_effort
    if is_wanted.all() or not is_wanted.any():
        return None
    rows = is_wanted & results.is_answered & (results.num_tokens > 0)
    return spread_of(results.first_token_ns[rows] - results.arrival_ns[rows])


def looks(results: Results) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    """Return times spread evenly over the run, int64[m]."""
    end_ns = max(int(results.last_token_ns.max()), int(results.arrival_ns.max()))
    return np.linspace(0, end_ns, _NUM_LOOKS).astype(np.int64)
