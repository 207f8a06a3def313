"""The findings of LMetric's experiment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import msgspec
import numpy as np

from moestro.repro.results import Findings
from moestro.repro.testbed import RoutedCell, ServingFigures

NETWORK = "qwen3-30b-a3b"
HALF = 0.5
OUR_POLICY, PAPER_POLICY, BASELINE = "moestro", "lmetric", "vllm-0.26"
# Each is the best of some cell at seed 0. In some cells the best is one of seven other policies, with which `moestro`
# is not compared under more seeds (docs/repro.md).
RIVALS = ("lmetric", "llm-d", "dynamo", "bailian", "llm-d-affinity", "miss_ratio")
FIGURES: dict[str, Callable[[ServingFigures], float]] = {
    "TTFT mean": lambda figures: figures.ttft_ms.mean,
    "TTFT P99": lambda figures: figures.ttft_ms.p99,
    "TPOT mean": lambda figures: figures.tpot_ms.mean,
    "TPOT P99": lambda figures: figures.tpot_ms.p99,
}


class LmetricCell(RoutedCell, frozen=True, kw_only=True):
    """One run.

    Attributes:
        system: routing policy.
        is_generated: whether the load is made of generated sessions rather than of a trace.
        share: rate as a share of saturation.
    """

    is_generated: bool
    network: str
    share: float
    system: str = msgspec.field(name="policy")


class Pair(msgspec.Struct, frozen=True, kw_only=True):
    """The relative difference of `moestro` to the best rival of a cell over unseen seeds, and its 95 % interval."""

    load: str
    share: float
    figure: str
    other: str
    mean: float  # negative where `moestro` is lower
    low: float
    high: float

    @property
    def verdict(self) -> Literal["better", "undecided", "worse"]:
        """The side of 0 on which the interval lies. Undecided means that it includes 0, not that both are alike."""
        return "worse" if self.low > 0 else "better" if self.high < 0 else "undecided"


class Errors(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of predicted TTFT, and figures of the policy that uses the predictions."""

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
    saturation: dict[str, float] = msgspec.field(default_factory=dict)
    pairs: list[Pair] = msgspec.field(default_factory=list)
    weights: dict[str, list[tuple[float, ServingFigures]]] = msgspec.field(default_factory=dict)  # by load: lambda
    ranges: dict[str, list[tuple[int, ServingFigures]]] = msgspec.field(default_factory=dict)
    indicators: dict[str, dict[str, ServingFigures]] = msgspec.field(default_factory=dict)  # by load, by score
    errors: list[Errors] = msgspec.field(default_factory=list)
    classes: dict[str, Classes] = msgspec.field(default_factory=dict)  # by load
    hotspots: list[Hotspots] = msgspec.field(default_factory=list)
