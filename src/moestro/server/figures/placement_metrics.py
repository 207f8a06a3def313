"""Live placement for Prometheus."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from moestro.core.clock import NS_PER_S
from moestro.placement.score import PlaceScore
from moestro.server.experts.placement_control import DecisionOutcome, MigrationOutcome, PlacementControl
from moestro.server.experts.placement_views import found_s, predicted_s


def placement_metrics(
    control: PlacementControl, model_name: str, now_ns: Callable[[], int] = time.monotonic_ns
) -> Iterator[Metric]:
    """Yield the metrics of live placement with their present values."""
    change = None if control.applied is None else control.applied.change
    now = None if control.measured is None else control.measured.score
    text = (
        "Mean load of the workers over the largest under the present placement; ratio_of_sums as vLLM defines it,"
        " mean_of_ratios as SGLang does."
    )
    yield _balance("moestro:placement_balance", text, now, model_name)
    text = "The same, as the last completed plan predicted it."
    yield _balance("moestro:placement_balance_predicted", text, None if change is None else change.after, model_name)
    yield from _payback(control, model_name)
    gauges: dict[str, tuple[str, float]] = {
        "table_version": ("Version of the table of experts that the group serves.", control.migration.table.version),
        "frozen": ("1 while an operator lets no migration start.", control.is_frozen),
        "migrating": ("1 while experts move.", control.migration.progress.is_running),
        "stalled": ("1 while a migration or a planning policy stands still.", bool(control.stall)),
    }
    if control.plan is not None:
        age_s = (now_ns() - control.plan_ns) / NS_PER_S
        gauges["plan_age_seconds"] = ("Age of the last plan of a placement policy.", age_s)
    for name, (text, value) in gauges.items():
        gauge = GaugeMetricFamily(f"moestro:placement_{name}", text, labels=("model_name",))
        gauge.add_metric((model_name,), float(value))
        yield gauge
    for name, text, count in (
        ("moved_bytes", "Bytes of weights that moved.", control.moved_bytes),
        ("stalls", "Times at which a migration or a planning policy began to stand still.", control.num_stalls),
    ):
        counter = CounterMetricFamily(f"moestro:placement_{name}", text, labels=("model_name",))
        counter.add_metric((model_name,), count)
        yield counter
    outcomes = {outcome.value: control.num_migrations[outcome] for outcome in MigrationOutcome}
    yield _by_outcome("moestro:placement_migrations", "Migrations that ended, by outcome.", outcomes, model_name)
    outcomes = {outcome.value: control.num_decisions[outcome] for outcome in DecisionOutcome}
    yield _by_outcome("moestro:placement_decisions", "Decisions about the placement, by outcome.", outcomes, model_name)


def _balance(name: str, text: str, score: PlaceScore | None, model_name: str) -> Metric:
    family = GaugeMetricFamily(name, text, labels=("model_name", "definition"))
    if score is not None:
        family.add_metric((model_name, "ratio_of_sums"), score.balance_of_sums)
        family.add_metric((model_name, "mean_of_ratios"), score.mean_balance)
    return family


def _payback(control: PlacementControl, model_name: str) -> Iterator[Metric]:
    """Yield what the last completed plan saves, and after how many steps its move has paid."""
    labels = ("model_name", "kind")
    saved = GaugeMetricFamily(
        "moestro:placement_saved_seconds_per_step",
        "Seconds per step that the last completed plan saves by the traffic model: predicted when it was made, found"
        " under the load since.",
        labels=labels,
    )
    steps = GaugeMetricFamily(
        "moestro:placement_payback_steps", "Steps after which its move has paid; absent for never.", labels=labels
    )
    for kind, saved_s in (("predicted", predicted_s(control)), ("found", found_s(control))):
        if saved_s is not None and control.applied is not None:
            saved.add_metric((model_name, kind), saved_s)
            if saved_s > 0:
                steps.add_metric((model_name, kind), control.applied.move_s / saved_s)
    yield from (saved, steps)


def _by_outcome(name: str, text: str, counts: Mapping[str, int], model_name: str) -> Metric:
    family = CounterMetricFamily(name, text, labels=("model_name", "outcome"))
    for outcome, count in counts.items():
        family.add_metric((model_name, outcome), count)
    return family
