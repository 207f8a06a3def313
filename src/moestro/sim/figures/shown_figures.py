"""Figures of a run that tables show, by their names there."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean

from moestro.sim.figures.outcome import PolicyOutcome
from moestro.sim.groups.group_figures import PlanFigures
from moestro.workload.run_records import Spread


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
