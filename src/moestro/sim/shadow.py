"""What a shadow's policy would change: the recorded requests on their recorded engines, and under the policy."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.rng import Draws
from moestro.errors import ConfigError
from moestro.routing.policy_contract import Choice, RouteView
from moestro.routing.scoring import Stateless
from moestro.sim.figures.intervals import block_half_width
from moestro.sim.figures.outcome import PolicyChange, SimReport, TrafficGroup, outcome_of
from moestro.sim.figures.results import Results
from moestro.sim.load.recorded_engines import (
    WhatIfSettings,
    assumed_engines_note,
    recorded_engines,
    recorded_policy,
)
from moestro.sim.load.shadow_record import CountedGain, ShadowRecord
from moestro.sim.replay import MOST_OFF, recorded_scenario, run_shown
from moestro.sim.scenario import affinity_notes

IN_USE = "router in use (simulated)"
_HOUR_NS = 3_600_000_000_000
_MOST_BLOCKS, _FEWEST_BLOCKS, _BLOCK_REQUESTS = 20, 4, 10
_NO_TENANT = "without a tenant"

Floats = NDArray[np.float64]
Rows = NDArray[np.bool_]


class RecordedChoices(Stateless):
    """Sends each request of a record to the engine that it had.

    Args:
        engines: engine of each row of the record.
    """

    def __init__(self, engines: NDArray[np.int32]) -> None:
        self._engines = engines

    def decide(self, view: RouteView, draws: Draws) -> Choice:
        """Choose the recorded engine."""
        engine = int(self._engines[int(view.request.request_id.removeprefix("row-"))])
        return Choice(engine, 0.0, "as recorded")


@dataclass(frozen=True, slots=True, eq=False)
class ShadowAnswer:
    """What a policy would change.

    Attributes:
        report: figures of both simulations, with the changes in all groups of requests.
        runs: title and results of each simulation.
    """

    report: SimReport
    runs: list[tuple[str, Results]]

    def sentences(self) -> list[str]:
        """Describe the changes of all requests in sentences."""
        sentences = []
        for title, groups in self.report.changes.items():
            whole = groups[0]
            words = [f"{whole.moved:.1%} of the requests would have gone to another engine"]
            for name, change, unit in (("hits", whole.hit_ratio, "%"), ("mean TTFT", whole.ttft_ms, "ms")):
                if change is not None:
                    scale, was, now = (100 if unit == "%" else 1), *change.shown
                    words.append(f"{name} {was * scale:.1f} -> {now * scale:.1f} {unit}")
            sentences.append(f"Under {title}: {', '.join(words)}.")
        return sentences

    def warnings(self) -> list[str]:
        """Name what the simulation of the router in use is too far from."""
        whole = next(iter(self.report.changes.values()))[0].ttft_ms
        if whole is None or whole.measured is None:
            return []
        pair = whole.measured, whole.simulated_before
        if max(pair) <= MOST_OFF * min(pair):
            return []
        text = (
            f"The mean TTFT was {pair[0]:.1f} ms, and its simulation has {pair[1]:.1f}, over {MOST_OFF:g} times apart:"
            " the predicted change is doubtful. Give --cost and --engines what `moestro calibrate --server` writes."
        )
        return [text]


def shadow_what_if(shadow: ShadowRecord, settings: WhatIfSettings) -> ShadowAnswer:
    """Simulate a shadow's record under the recorded choices and under other policies, and compare the two.

    Errors of the model are in both simulations and mostly cancel, so that the change is what is predicted. Measured
    means with the change are the predicted means.

    Raises:
        ConfigError: step durations are unknown, or a policy does not exist.
    """
    record = shadow.record
    if settings.is_closed_loop and not record.session.any():
        raise ConfigError("--closed-loop needs sessions, and no request of the record names one (session_id)")
    own = record.header.route_policy
    engines = recorded_engines(record, settings, record.num_engines)
    scenario = recorded_scenario(record, engines, settings, 0)
    chosen = np.array([each.engine for each in record.requests], np.int32)
    fixed = replace(scenario, route_policy=lambda: RecordedChoices(chosen))
    in_use = recorded_policy(record, "round_robin", IN_USE)
    policies = [recorded_policy(record, name, f"{name} (simulated)") for name in settings.policies or (own,)]
    runs = [(IN_USE, run_shown(fixed, in_use))]
    runs += [(policy.title, run_shown(scenario, policy)) for policy in policies]
    assumed = assumed_engines_note(record.header, engines, scenario.bounds.num_blocks)
    report = SimReport(
        workload=f"{len(record):,} requests of the router in use",
        is_generated=False,
        settings={"headers": msgspec.to_builtins(record.headers), "engines": msgspec.to_builtins(engines)},
        notes=(
            *scenario.prices.notes(),
            *record.notes,
            *([assumed] if assumed else []),
            *affinity_notes(policies, scenario.named),
        ),
        outcomes=tuple(outcome_of(title, results, None) for title, results in runs),
        changes={title: tuple(_groups(shadow, runs[0][1], results)) for title, results in runs[1:]},
    )
    return ShadowAnswer(report, runs)


def _groups(shadow: ShadowRecord, before: Results, after: Results) -> Iterator[TrafficGroup]:
    """Yield the changes of all requests, then of each hour, then of each tenant."""
    rows = before.is_answered & after.is_answered
    yield _group(shadow, "all", rows, before, after, shadow.gain())
    hours = shadow.wall_ns // _HOUR_NS
    if len(np.unique(hours)) > 1:
        for hour in np.unique(hours).tolist():
            begin_ns = hour * _HOUR_NS
            name = datetime.fromtimestamp(begin_ns / 1e9, UTC).strftime("%Y-%m-%d %H:00 UTC")
            gain = shadow.gain(begin_ns, begin_ns + _HOUR_NS)
            yield _group(shadow, name, rows & (hours == hour), before, after, gain)
    tenants = np.array([each.tenant for each in shadow.record.requests])
    if tenants.astype(bool).any():
        for tenant in sorted(set(tenants.tolist())):
            name = f"tenant {tenant}" if tenant else _NO_TENANT
            yield _group(shadow, name, rows & (tenants == tenant), before, after, None)


def _group(
    shadow: ShadowRecord, name: str, rows: Rows, before: Results, after: Results, gain: CountedGain | None
) -> TrafficGroup:
    """Return the changes of the requests in `rows`. Engines do not count by tenant, so those have no `gain`."""
    has_token = rows & (before.num_tokens > 0)
    ttft = np.stack([_ttft_ms(before)[has_token], _ttft_ms(after)[has_token]], axis=1)
    hits = np.stack([before.num_hit_tokens[rows], after.num_hit_tokens[rows], before.num_prompt_tokens[rows]], axis=1)
    logged = _logged_ttft_ms(shadow)[has_token]
    by_log = float(np.nanmean(logged)) if len(logged) and not np.isnan(logged).any() else None
    return TrafficGroup(
        name=name,
        num_requests=int(rows.sum()),
        moved=float((before.engine != after.engine)[rows].mean()) if rows.any() else 0.0,
        hit_ratio=_change(hits.astype(np.float64), _hit_ratios, _difference, None if gain is None else gain.hit_ratio),
        ttft_ms=_change(ttft, _means, _ratio, by_log if by_log is not None or gain is None else gain.ttft_ms),
    )


def _ttft_ms(results: Results) -> Floats:
    times: Floats = (results.first_token_ns - results.arrival_ns) / 1e6
    return times


def _logged_ttft_ms(shadow: ShadowRecord) -> Floats:
    """Return the TTFT that the access log has of each request, ms; NaN where it has none."""
    times = [(each.first_token_ns - each.arrival_ns) / 1e6 for each in shadow.record.requests]
    has_first = np.array([each.first_token_ns > 0 for each in shadow.record.requests])
    return np.where(has_first, times, np.nan)


def _means(sums: Floats, count: int) -> tuple[float, float]:
    return float(sums[0]) / count, float(sums[1]) / count


def _hit_ratios(sums: Floats, count: int) -> tuple[float, float]:
    return float(sums[0] / sums[2]), float(sums[1] / sums[2])


def _ratio(before: float, after: float) -> float:
    return after / before - 1


def _difference(before: float, after: float) -> float:
    return after - before


def _change(
    values: Floats,
    figures: Callable[[Floats, int], tuple[float, float]],
    compare: Callable[[float, float], float],
    measured: float | None,
) -> PolicyChange | None:
    """Return the change of a figure, with the interval that blocks of consecutive requests give; None without requests.

    Args:
        values: [n, k], what each request adds to the sums.
        figures: the figure before and after, from sums over requests and their number.
        compare: the change from the two.
    """
    if not len(values):
        return None
    sums = values.sum(0)
    before, after = figures(sums, len(values))
    if compare is _ratio and not before:
        return None
    num_blocks = min(_MOST_BLOCKS, len(values) // _BLOCK_REQUESTS)
    half_width = None
    if num_blocks >= _FEWEST_BLOCKS:
        blocks = np.array_split(values, num_blocks)
        without = [compare(*figures(sums - each.sum(0), len(values) - len(each))) for each in blocks]
        half_width = block_half_width(without)
    change = compare(before, after)
    predicted = None
    if measured is not None:
        predicted = measured * (1 + change) if compare is _ratio else min(max(measured + change, 0.0), 1.0)
    return PolicyChange(
        measured=measured,
        predicted=predicted,
        simulated_before=before,
        simulated_after=after,
        change=change,
        half_width=half_width,
    )
