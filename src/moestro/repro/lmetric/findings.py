"""The findings of LMetric's experiment."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Literal

import msgspec
import numpy as np

from moestro.core.student_t import student_t_quantile
from moestro.repro.lmetric.courses import Course
from moestro.repro.results import Findings
from moestro.repro.testbed import RoutedCell, ServingFigures, paired_interval

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
    """A policy at half of the capacity whose figures of engines come every `period_ms` ms; 0 means with every step."""

    load: str
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
        [found] = [e for e in self.ages if (e.load, e.policy, e.period_ms) == (aged.load, aged.policy, 0)]
        return found.measured

    def shares(self, load: str) -> list[float]:
        """The rates of a load with the first network, as shares of its capacity, ascending."""
        return sorted({cell.share for cell in self.cells if (cell.load, cell.network) == (load, NETWORK)})
