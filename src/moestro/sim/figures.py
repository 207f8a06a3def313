"""Figures of each policy's run: outcomes, confidence intervals, JSON, and tables on the terminal.

Intervals are over seeds, or over blocks of one series of requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev

import msgspec
import numpy as np
from rich.console import Console
from rich.table import Table

from moestro import __version__
from moestro.core.rng import student_t_quantile
from moestro.sim.results import NOT_YET_NS, WINDOW_NS, GroupFigures, PlanFigures, Results
from moestro.sim.scenario import Saturation
from moestro.workload.run_records import Report, Slos, Spread, make_report, spread_of
from moestro.workload.traces.request_record import UNKNOWN

_CONFIDENCE = 0.975  # both tails: 95 % intervals

Figures = Mapping[str, float | None]


class FigureInterval(msgspec.Struct, frozen=True, kw_only=True):
    """A figure over seeds. A half width is that of the 95 % interval, by Student's t; None with a single value.

    Attributes:
        mean, half_width: of the figure.
        ratio, ratio_half_width: of its ratio to the first policy's in the run with the same seed. None means that the
            first policy has no such figure, or 0.
        num_seeds: runs that have the figure.
    """

    mean: float
    half_width: float | None
    ratio: float | None
    ratio_half_width: float | None
    num_seeds: int


def intervals(runs: Sequence[Figures], base: Sequence[Figures]) -> dict[str, FigureInterval]:
    """Compute the intervals of all figures of one policy.

    Args:
        runs: figures of the policy, one run each seed.
        base: those of the first policy, with the same seeds.
    """
    found = {}
    for name in runs[0]:
        values = [value for run in runs if (value := run[name]) is not None]
        if not values:
            continue
        pairs = [(run[name], other.get(name)) for run, other in zip(runs, base, strict=True)]
        ratios = [value / of for value, of in pairs if value is not None and of]
        found[name] = FigureInterval(
            mean=fmean(values),
            half_width=_half_width(values),
            ratio=fmean(ratios) if ratios else None,
            ratio_half_width=_half_width(ratios),
            num_seeds=len(values),
        )
    return found


def block_half_width(without: Sequence[float]) -> float:
    """Return the half width of the 95 % interval of a figure of a series, by the jackknife over blocks.

    Blocks of consecutive requests keep what neighbours have in common, which single requests would not.

    Args:
        without: the figure without each of the blocks; at least 2.
    """
    num, mean = len(without), fmean(without)
    variance = (num - 1) / num * sum((each - mean) ** 2 for each in without)
    return float(student_t_quantile(_CONFIDENCE, num - 1) * variance**0.5)


def _half_width(values: Sequence[float]) -> float | None:
    if len(values) < 2:
        return None
    return float(student_t_quantile(_CONFIDENCE, len(values) - 1) * stdev(values) / len(values) ** 0.5)


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
        num_plans, num_failed = sum(run.num_plans for run in each), sum(run.num_failed_plans for run in each)
        if num_failed and not num_plans:
            notes.append(f"{title}: all {num_failed:,} placement plans failed, as the log says, so no expert moved")
        elif not num_plans:
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


def shown_figures(outcomes: Sequence[PolicyOutcome]) -> list[dict[str, float | None]]:
    """Return the figures of each run. All have the same names, in the order of a table's rows."""
    with_group = any(outcome.group is not None for outcome in outcomes)
    with_plans = any(_plans_of(outcome) is not None for outcome in outcomes)
    return [
        _figures(each)
        | (_group_figures(each) if with_group else {})
        | (_plan_figures(_plans_of(each)) if with_plans else {})
        for each in outcomes
    ]


def _figures(outcome: PolicyOutcome) -> dict[str, float | None]:
    report = outcome.report
    figures: dict[str, float | None] = {
        "TTFT mean": _of(report.ttft_ms, "mean"),
        "TTFT p50": _of(report.ttft_ms, "p50"),
        "TTFT p99": _of(report.ttft_ms, "p99"),
        "TPOT mean": _of(report.tpot_ms, "mean"),
        "TPOT p50": _of(report.tpot_ms, "p50"),
        "TPOT p99": _of(report.tpot_ms, "p99"),
        "E2E mean": _of(report.e2e_ms, "mean"),
        "E2E p50": _of(report.e2e_ms, "p50"),
        "requests/s": report.requests_per_s,
        "hit ratio": report.cached_share,
        "imbalance": outcome.load_imbalance,
        "max queue": outcome.max_queue_depth,
        "preempted": None if outcome.num_preemptions is None else float(outcome.num_preemptions),
    }
    if outcome.ls_ttft_ms is not None and outcome.be_ttft_ms is not None:
        figures |= {"TTFT mean, LS": outcome.ls_ttft_ms.mean, "TTFT mean, BE": outcome.be_ttft_ms.mean}
    return figures if report.goodput is None else figures | {"goodput": report.goodput.share}


def _group_figures(outcome: PolicyOutcome) -> dict[str, float | None]:
    group = outcome.group
    sent = None if group is None or group.num_bytes is None else group.num_bytes / 1e9
    return {
        "output tokens/s": outcome.report.output_tokens_per_s,
        "bound, same hot ids": None if group is None else group.bound_same,
        "bound, permuted": None if group is None else group.bound_permuted,
        "share of its bound": None if group is None else group.share_of_bound,
        "mean stall": None if group is None else fmean(group.stall_shares),
        "messages": None if group is None or group.num_messages is None else float(group.num_messages),
        "GB sent": sent,
    }


def _plans_of(outcome: PolicyOutcome) -> PlanFigures | None:
    return None if outcome.group is None else outcome.group.plans


def _plan_figures(plans: PlanFigures | None) -> dict[str, float | None]:
    return {
        "placement plans": None if plans is None else float(plans.num_plans),
        "plans with moves": None if plans is None else float(plans.num_moving_plans),
        "copies moved": None if plans is None else float(plans.num_moves),
    }


def _of(spread: Spread | None, name: str) -> float | None:
    return None if spread is None else float(getattr(spread, name))


_CUT = "…"  # where a cell of a table ends, if its column is too narrow
REQUESTS_PER_UPDATE = 256  # of a progress bar: one update costs as much as routing a request


def print_report(console: Console, report: SimReport) -> None:
    """Print a table with a column for each policy, then notes and failures."""
    origin = "generated" if report.is_generated else "recorded"
    first = report.outcomes[0]
    console.print(
        f"simulated: {report.workload} ({origin}), {first.report.num_requests:,} requests",
        highlight=False,
        soft_wrap=True,
    )
    if report.saturation is not None:
        console.print(report.saturation.sentence(first.report.num_requests), highlight=False, soft_wrap=True)
    of_first = [outcome for outcome in report.outcomes if outcome.seed == first.seed]
    if report.intervals:
        _print_fitting(console, len(report.intervals), lambda columns: _interval_table(report, columns))
    else:
        _print_fitting(console, len(of_first), lambda columns: _table([of_first[i] for i in columns]))
    if any(outcome.group is not None for outcome in of_first):
        console.print(_stall_table(of_first))
    for title, groups in report.changes.items():
        console.print(_change_table(title, groups))
    for note in report.notes:
        console.print(f"note: {note}", highlight=False, markup=False, soft_wrap=True)
    for outcome in report.outcomes:
        where = f"{outcome.title}, seed {outcome.seed}" if report.intervals else outcome.title
        for word, failure in outcome.report.failures.items():
            console.print(f"{where}: {failure.count} {word}: {failure.example}", markup=False, soft_wrap=True)


def _print_fitting(console: Console, num_policies: int, table_of: Callable[[Sequence[int]], Table]) -> None:
    """Print a table of all policies, or several where the console is too narrow, each with the first policy.

    Args:
        table_of: makes the table of the policies with these numbers.
    """
    rest = list(range(1, num_policies))
    while True:
        count = next((n for n in range(len(rest), 1, -1) if _fits(console, table_of([0, *rest[:n]]))), 1)
        console.print(table_of([0, *rest[:count]]))
        rest = rest[count:]
        if not rest:
            return


def _fits(console: Console, table: Table) -> bool:
    """Whether no word of the table is cut."""
    return not any(_CUT in segment.text for line in console.render_lines(table) for segment in line)


def _table(outcomes: Sequence[PolicyOutcome]) -> Table:
    figures = shown_figures(outcomes)
    table = _empty_table(
        [outcome.title for outcome in outcomes], "Latency in ms; in brackets, the ratio to the first policy"
    )
    for name, base in figures[0].items():
        table.add_row(name, _cell(base), *(_cell(each[name]) + _ratio(each[name], base) for each in figures[1:]))
    return table


def _interval_table(report: SimReport, columns: Sequence[int]) -> Table:
    seeds = sorted({outcome.seed for outcome in report.outcomes})
    title = (
        f"Mean and 95 % interval over {len(seeds)} seeds, {seeds[0]} to {seeds[-1]}; latency in ms; in brackets, the"
        " ratio to the first policy, seed by seed"
    )
    shown = [list(report.intervals.items())[i] for i in columns]
    table = _empty_table([policy for policy, _ in shown], title)
    for name in shown_figures(report.outcomes)[0]:
        found = [figures.get(name) for _, figures in shown]
        table.add_row(name, _interval_cell(found[0], None), *(_interval_cell(each, each) for each in found[1:]))
    return table


def _empty_table(titles: Sequence[str], title: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column("")
    for each in titles:
        table.add_column(each, justify="right")
    return table


def _interval_cell(interval: FigureInterval | None, compared: FigureInterval | None) -> str:
    if interval is None:
        return "-"
    text = _cell(interval.mean) + _half(interval.half_width)
    if compared is None or compared.ratio is None:
        return text
    half = "" if compared.ratio_half_width is None else f" ±{compared.ratio_half_width:.3f}"
    return f"{text} ({compared.ratio:.3f}{half})"


def _half(half_width: float | None) -> str:
    return "" if half_width is None else f" ±{half_width:.2g}" if half_width < 100 else f" ±{half_width:,.0f}"


def _stall_table(outcomes: Sequence[PolicyOutcome]) -> Table:
    table = Table(title="Stall share of each worker; A: attention, E: experts, AE: both", title_justify="left")
    table.add_column("worker")
    with_groups = [(outcome.title, outcome.group) for outcome in outcomes if outcome.group is not None]
    for title, _ in with_groups:
        table.add_column(title, justify="right")
    for worker in range(max(len(group.stall_shares) for _, group in with_groups)):
        table.add_row(str(worker), *(_stall(group, worker) for _, group in with_groups))
    return table


def _stall(group: GroupFigures, worker: int) -> str:
    if not group.num_expert_workers:
        kind = "AE"
    else:
        num_workers = group.num_attention_workers + group.num_expert_workers
        kind = "A" if worker % num_workers < group.num_attention_workers else "E"
    return f"{kind} {group.stall_shares[worker]:.3f}"


def _change_table(title: str, groups: Sequence[TrafficGroup]) -> Table:
    text = f"What {title} would change; ± is the 95 % interval of the traffic, without errors of the model"
    table = Table("", "requests", "moved", "hits", "TTFT, ms", "change", title=text, title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for group in groups:
        hits, ttft = group.hit_ratio, group.ttft_ms
        change = "-" if ttft is None else f"{ttft.change:+.1%}" + _half_share(ttft)
        moved = f"{group.moved:.1%}"
        table.add_row(group.name, f"{group.num_requests:,}", moved, _share(hits), _from_to(ttft), change)
    return table


def _share(change: PolicyChange | None) -> str:
    if change is None:
        return "-"
    was, now = change.shown
    return f"{was:.1%} -> {now:.1%}" + _half_share(change)


def _from_to(change: PolicyChange | None) -> str:
    if change is None:
        return "-"
    was, now = change.shown
    return f"{was:.1f} -> {now:.1f}" + (" (simulated)" if change.measured is None else "")


def _half_share(change: PolicyChange) -> str:
    return "" if change.half_width is None else f" ±{change.half_width:.1%}"


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 or value == int(value) else f"{value:.4g}"


def _ratio(value: float | None, base: float | None) -> str:
    return "" if value is None or not base else f" ({value / base:.3f})"
