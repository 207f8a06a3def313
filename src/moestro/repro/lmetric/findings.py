"""The findings of LMetric's experiment."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from rich.table import Table

from moestro.core.clock import NS_PER_S
from moestro.core.rng import student_t_quantile
from moestro.repro.results import Findings
from moestro.repro.testbed import RoutedCell, ServingFigures, counted_prefill, paired_interval
from moestro.sim.results import WINDOW_NS, Results

# The course of a run: what LMetric's paper draws over time or as a distribution (Fig. 7 to 10, 21 to 24, 26, 27).

Floats = NDArray[np.float64]

PERCENTILES = (*range(0, 100, 2), 99, 100)  # of the curves
_DIGITS = 4  # significant digits of stored series


class Course(msgspec.Struct, frozen=True, kw_only=True):
    """One run at half of the capacity, in windows of `window_s` seconds, without its lead-in.

    Attributes:
        ttft_ms, tpot_ms: latency at each of PERCENTILES.
        hit_ratio: share of the prompt tokens that came from the cache, by window of arrival.
        prefill_s: prefill seconds in each window of two engines, those whose prefill seconds vary most between windows
            (section 4.3).
        prefill_spread: standard deviation of prefill seconds over all engines, divided by their mean, the mean over
            windows.
    """

    load: str
    system: str
    window_s: float
    ttft_ms: tuple[float, ...]
    tpot_ms: tuple[float, ...]
    hit_ratio: tuple[float, ...]
    prefill_s: tuple[tuple[float, ...], tuple[float, ...]]
    prefill_spread: float

    @property
    def mean_prefill_s(self) -> tuple[float, float]:
        """Prefill seconds of a window of the two engines, means over the windows."""
        first, second = self.prefill_s
        return sum(first) / len(first), sum(second) / len(second)


def course_of(load: str, system: str, results: Results, num_lead_in: int) -> Course:
    """The course of a run in which every request was answered.

    Args:
        num_lead_in: first requests left out.
    """
    counted = slice(num_lead_in, None)
    gaps = results.num_tokens[counted].astype(np.int64) - 1
    tpot_ns = (results.last_token_ns - results.first_token_ns)[counted][gaps > 0] / gaps[gaps > 0]
    prefill = counted_prefill(results, num_lead_in)
    unsteady = np.argsort(prefill.std(axis=1))[::-1][:2]
    return Course(
        load=load,
        system=system,
        window_s=WINDOW_NS / NS_PER_S,
        ttft_ms=_curve((results.first_token_ns - results.arrival_ns)[counted]),
        tpot_ms=_curve(tpot_ns),
        hit_ratio=_rounded(_hit_ratios(results, num_lead_in)),
        prefill_s=(_rounded(prefill[unsteady[0]]), _rounded(prefill[unsteady[-1]])),
        prefill_spread=float((prefill.std(axis=0) / np.maximum(prefill.mean(axis=0), 1e-9)).mean()),
    )


def _curve(values_ns: NDArray[np.int64] | Floats) -> tuple[float, ...]:
    return _rounded(np.percentile(values_ns / 1e6, PERCENTILES))


def _hit_ratios(results: Results, num_lead_in: int) -> Floats:
    """The hit ratio of the requests that arrived in each window, float64[windows]; 0 for a window without any."""
    window = results.arrival_ns[num_lead_in:] // WINDOW_NS
    window = window - window[0]
    hits, prompts = (
        np.bincount(window, column[num_lead_in:]) for column in (results.num_hit_tokens, results.num_prompt_tokens)
    )
    ratios: Floats = hits / np.maximum(prompts, 1)
    return ratios


def _rounded(values: Floats) -> tuple[float, ...]:
    return tuple(float(f"{value:.{_DIGITS}g}") for value in values.tolist())


NETWORK, OTHER_NETWORK = "qwen3-30b-a3b", "qwen2-7b"
HALF = 0.5
OUR_POLICY, PAPER_POLICY, BASELINE = "moestro", "lmetric", "vllm-0.26"
RIVALS = (BASELINE, "bailian", "dynamo", "llm-d")  # of the paper's section 6
# Weights of cache hits in Bailian's sum that the paper's Fig. 7 to 10 show: Fig. 6's, the knee on chats, one beyond it.
WEIGHTS = LIGHT, KNEE, HEAVY = 0.4, 0.7, 0.9
FIGURES: dict[str, Callable[[ServingFigures], float]] = {
    "TTFT mean": lambda figures: figures.ttft_ms.mean,
    "TTFT P99": lambda figures: figures.ttft_ms.p99,
    "TPOT mean": lambda figures: figures.tpot_ms.mean,
    "TPOT P99": lambda figures: figures.tpot_ms.p99,
}


class LmetricCell(RoutedCell, frozen=True, kw_only=True):
    """One run on the scored requests.

    Attributes:
        system: routing policy.
        is_generated: whether the load is made of generated sessions rather than of a trace.
        share: rate as a share of the capacity.
        batches: values of each of FIGURES in successive parts of the run, ms.
    """

    is_generated: bool
    network: str
    share: float
    system: str = msgspec.field(name="policy")
    batches: dict[str, tuple[float, ...]]


class Difference(msgspec.Struct, frozen=True):
    """The relative difference of one run to another with equal requests, and its 95 % interval over their batches."""

    mean: float  # negative where the first is lower
    low: float
    high: float

    @property
    def verdict(self) -> Literal["better", "undecided", "worse"]:
        """The side of 0 on which the interval lies. Undecided means that it includes 0, not that both are alike."""
        return "worse" if self.low > 0 else "better" if self.high < 0 else "undecided"

    def __str__(self) -> str:
        return f"{percent(self.mean)} ({percent(self.low)} to {percent(self.high)})"


def percent(ratio: float) -> str:
    """A relative difference in words, with a digit more where it is small."""
    return f"{ratio:+.1%}" if abs(ratio) < 0.1 else f"{ratio:+.0%}"


def difference(ours: LmetricCell, other: LmetricCell, figure: str) -> Difference:
    """The difference of `ours` to `other` in one of FIGURES, negative where `ours` is lower."""
    first, second = list(ours.batches[figure]), list(other.batches[figure])
    return Difference(*paired_interval(first, second, partial(student_t_quantile, 0.975)))


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """`moestro` beside the rival with the lowest figure of a cell."""

    load: str
    share: float
    figure: str
    other: str
    difference: Difference


class Sweep(msgspec.Struct, frozen=True, kw_only=True):
    """A policy at half of the capacity with each value of a parameter, on the requests that are tuned on.

    Attributes:
        parameter: the policy's parameter.
        values: value and figures of each run, ascending.
    """

    policy: str
    parameter: str
    values: list[tuple[float, ServingFigures]]

    @property
    def best(self) -> tuple[float, ServingFigures]:
        """The value with the least product of mean TTFT and mean TPOT, so that both count alike."""
        return min(self.values, key=lambda pair: pair[1].ttft_ms.mean * pair[1].tpot_ms.mean)

    @property
    def is_best_inside(self) -> bool:
        """Whether the best value lies between others, so that a knee is seen."""
        return self.best[0] not in {self.values[0][0], self.values[-1][0]}

    def at(self, value: float) -> ServingFigures:
        """The figures with this value."""
        return dict(self.values)[value]


class Errors(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of predicted TTFT, and figures of the policy that uses the predictions."""

    load: str
    is_tuned: bool
    p50: float
    p90: float
    share_above_20_percent: float
    curve: tuple[float, ...]  # relative error at each percentile
    measured: ServingFigures


class Hotspots(msgspec.Struct, frozen=True, kw_only=True):
    """Alarms of the detector, and figures of its run."""

    load: str
    mitigation: str
    num_first_alarms: int
    num_second_alarms: int
    measured: ServingFigures


class Aged(msgspec.Struct, frozen=True, kw_only=True):
    """A policy whose figures of engines come every `period_ms` ms; 0 means with every step."""

    load: str
    share: float  # rate as a share of the capacity
    policy: str
    period_ms: float
    measured: ServingFigures


class Classes(msgspec.Struct, frozen=True, kw_only=True):
    """For each request of a tracked class: the class's share x of the window, and the share of engines that hold it."""

    class_share: tuple[float, ...]
    holder_share: tuple[float, ...]

    @property
    def benign(self) -> float:
        """The share of these requests that keep equation 2, x / (1 - x) <= |M| / (the other engines)."""
        return float((np.asarray(self.class_share) <= np.asarray(self.holder_share)).mean())


class LmetricFindings(Findings[LmetricCell], kw_only=True):
    """All runs, and what the paper's other figures are made of."""

    num_engines: int = 0
    num_requests: int = 0
    capacity: dict[str, tuple[str, float]] = msgspec.field(default_factory=dict)  # by load: best policy, requests/s
    sweeps: dict[str, dict[str, Sweep]] = msgspec.field(default_factory=dict)  # by load, by policy
    weighed: list[LmetricCell] = msgspec.field(default_factory=list)  # Bailian's sum with each of WEIGHTS
    courses: list[Course] = msgspec.field(default_factory=list)  # of the first network at half of the capacity
    pairs: list[Pair] = msgspec.field(default_factory=list)
    indicators: dict[str, dict[str, ServingFigures]] = msgspec.field(default_factory=dict)  # by load, by score
    errors: list[Errors] = msgspec.field(default_factory=list)
    classes: dict[str, Classes] = msgspec.field(default_factory=dict)  # by load
    hotspots: list[Hotspots] = msgspec.field(default_factory=list)
    ages: list[Aged] = msgspec.field(default_factory=list)  # with every step first

    def by_policy(self, load: str, share: float, network: str = NETWORK) -> dict[str, LmetricCell]:
        """The runs of one load at one rate."""
        return {
            cell.system: cell for cell in self.cells if (cell.load, cell.share, cell.network) == (load, share, network)
        }

    def by_weight(self, load: str) -> dict[float, LmetricCell]:
        """The runs of Bailian's sum with the paper's weights, on the scored requests of one load."""
        cells = [cell for cell in self.weighed if cell.load == load]
        return dict(zip(WEIGHTS, cells, strict=False))

    def course(self, load: str, system: str) -> Course | None:
        """The course of one run, if it was made."""
        return next((each for each in self.courses if (each.load, each.system) == (load, system)), None)

    def fresh(self, aged: Aged) -> ServingFigures:
        """The figures of a run of the sweep whose figures of engines came with every step."""
        key = (aged.load, aged.share, aged.policy, 0)
        [found] = [each for each in self.ages if (each.load, each.share, each.policy, each.period_ms) == key]
        return found.measured

    def shares(self, load: str) -> list[float]:
        """The rates of a load with the first network, as shares of its capacity, ascending."""
        return sorted({cell.share for cell in self.cells if (cell.load, cell.network) == (load, NETWORK)})


# Tables of LMetric's findings for a terminal.

_VERDICTS = {"better": "[green]better[/]", "undecided": "[dim]undecided[/]", "worse": "[red]worse[/]"}


def tables_of(findings: LmetricFindings) -> Iterator[Table]:
    """A table for each load and rate, the tuned parameters, then the comparison of `moestro` with its rivals."""
    groups: dict[tuple[str, str, float], list[LmetricCell]] = {}
    for cell in findings.cells:
        groups.setdefault((cell.load, cell.network, cell.share), []).append(cell)
    for cells in groups.values():
        yield _table(cells)
    if findings.sweeps:
        yield _sweeps(findings)
    if findings.ages:
        yield _ages(findings)
    if findings.pairs:
        yield _pairs(findings)


def _table(cells: Sequence[LmetricCell]) -> Table:
    first = cells[0]
    origin = "generated sessions" if first.is_generated else "trace"
    title = f"{first.load} ({origin}), {first.network}: {first.rate:.1f} requests/s, {first.share:.0%} of the capacity,"
    title += f" {first.measured.num_counted:,} requests counted, which arrived in {first.measured.span_s:,.0f} s"
    columns = ("policy", *(f"{name}, ms" for name in FIGURES), "TTFT P50, ms", "hits", "requests, max/mean")
    table = Table(*columns, title=title, caption="simulated; the least of each column in bold")
    best = {name: min(of(cell.measured) for cell in cells) for name, of in FIGURES.items()}
    for cell in cells:
        figures = cell.measured
        values = {name: of(figures) for name, of in FIGURES.items()}
        shown = [f"[bold]{v:.1f}[/]" if v == best[name] else f"{v:.1f}" for name, v in values.items()]
        spread = (f"{figures.ttft_ms.p50:.1f}", f"{figures.hit_ratio:.3f}", f"{figures.request_imbalance:.2f}")
        table.add_row(cell.system, *shown, *spread)
    return table


def _ages(findings: LmetricFindings) -> Table:
    title = "Figures of engines that come at intervals; change from figures of every step"
    columns = ("load", "share", "policy", "every, ms", "TTFT mean, ms", "", "TPOT mean, ms", "")
    table = Table(*columns, title=title, caption="simulated")
    for aged in findings.ages:
        row = [aged.load, f"{aged.share:.0%}", aged.policy, f"{aged.period_ms:g}"]
        for name in ("TTFT mean", "TPOT mean"):
            value = FIGURES[name](aged.measured)
            row += [f"{value:.1f}", percent(value / FIGURES[name](findings.fresh(aged)) - 1)]
        table.add_row(*row)
    return table


def _pairs(findings: LmetricFindings) -> Table:
    title = "Ours against the best rival of each cell: difference and its 95 % interval (below 0: ours is less)"
    table = Table("load", "share", "figure", "best rival", "difference", "", title=title)
    for pair in findings.pairs:
        cells = (pair.load, f"{pair.share:.0%}", pair.figure, pair.other, str(pair.difference))
        table.add_row(*cells, _VERDICTS[pair.difference.verdict])
    return table


def _sweeps(findings: LmetricFindings) -> Table:
    columns = ("load", "policy", "parameter", "tried", "best", "TTFT mean, ms", "TPOT mean, ms")
    table = Table(*columns, title="Parameters tuned at half of the capacity, on other requests than the scored ones")
    for load, by_policy in findings.sweeps.items():
        for sweep in by_policy.values():
            value, figures = sweep.best
            tried = ", ".join(f"{each:g}" for each, _ in sweep.values)
            latencies = (f"{figures.ttft_ms.mean:.1f}", f"{figures.tpot_ms.mean:.1f}")
            table.add_row(load, sweep.policy, sweep.parameter, tried, f"{value:g}", *latencies)
    return table
