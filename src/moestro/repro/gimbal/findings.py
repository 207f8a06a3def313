"""The findings of Gimbal's experiment."""

from __future__ import annotations

import msgspec
import numpy as np

from moestro.repro.results import Cell, Findings
from moestro.repro.testbed import Latency


class GimbalCell(Cell, frozen=True, kw_only=True):
    """One run.

    Attributes:
        setting: what the part varies, such as KV blocks of a rank or the skew of experts; "" where it varies nothing.
        num_requests: requests, all of which are counted, as in the paper.
        requests_per_s: requests that end a second, of the middle 80 % of all ends, because the longest answers of
            BurstGPT have 100 times the mean and end long after the others.
        tokens_per_s: output tokens a second, until the last answer ends.
        step_ms: mean time of a step.
        num_plans, moved_gb, stall_ms: plans of placement, weights that they moved, and the steps' wait for them.
        balance: mean over largest load in the windows before all plans but the first; 0 without such a plan.
        branches: decisions by each branch of Algorithm 1; empty for other routers.
        num_aged: requests that waited longer than 5 s for their admission.
        num_preemptions: times that a request gave up its KV.
        is_generated: whether lengths are generated.
        kept_pairs: share of visits to experts of consecutive layers that stay on one device; 0 in runs that are older
            than the figure.
    """

    setting: str = ""
    num_requests: int
    ttft_ms: Latency
    tpot_ms: Latency
    requests_per_s: float
    tokens_per_s: float
    step_ms: float
    num_plans: int
    moved_gb: float
    stall_ms: float
    balance: float
    branches: dict[str, int]
    num_aged: int
    num_preemptions: int
    is_generated: bool
    kept_pairs: float = 0.0


class PrefixCell(msgspec.Struct, frozen=True, kw_only=True):
    """One run of the prefix-hit table.

    Attributes:
        run: number of the run; all have the same requests.
        hit_blocks, queried_blocks: blocks of 16 tokens that were found, and looked up, in the prefix caches.
    """

    load: str
    system: str
    run: int
    num_requests: int
    hit_blocks: int
    queried_blocks: int

    @property
    def hit_rate(self) -> float:
        """Share of the queried blocks that were found."""
        return self.hit_blocks / self.queried_blocks


class GimbalFindings(Findings[GimbalCell], kw_only=True):
    """All runs.

    Attributes:
        prefixes: runs of the prefix-hit table.
        levels: by part and setting, the factor on steps or the rate that the search found.
        about_lengths: by part, the origin of the lengths.
    """

    prefixes: list[PrefixCell] = msgspec.field(default_factory=list)
    levels: dict[str, float] = msgspec.field(default_factory=dict)
    about_lengths: dict[str, str] = msgspec.field(default_factory=dict)

    def of(self, load: str, rate: float, system: str, setting: str = "") -> list[GimbalCell]:
        """The runs of a system, by seed."""
        wanted = (load, rate, system, setting)
        return [cell for cell in self.cells if (cell.load, cell.rate, cell.system, cell.setting) == wanted]

    def settings(self, load: str) -> list[str]:
        """What a part varies, in the order in which it was run."""
        return list(dict.fromkeys(cell.setting for cell in self.cells if cell.load == load))

    def change(self, figure: str, cells: list[GimbalCell], base: list[GimbalCell]) -> float | None:
        """Relative change of the mean of a figure over the seeds that both have; None if they have none.

        Args:
            figure: a name of FIGURES.
        """
        value = FIGURES[figure]
        theirs = {cell.seed: value(cell) for cell in base}
        pairs = [(value(cell), theirs[cell.seed]) for cell in cells if cell.seed in theirs]
        if not pairs:
            return None
        ours, others = np.mean(pairs, axis=0)
        return float(ours / others - 1)


def ttft(cell: GimbalCell) -> float:
    """Mean TTFT, ms."""
    return cell.ttft_ms.mean


def ttft_p99(cell: GimbalCell) -> float:
    """P99 TTFT, ms."""
    return cell.ttft_ms.p99


def tpot(cell: GimbalCell) -> float:
    """Mean TPOT, ms."""
    return cell.tpot_ms.mean


def throughput(cell: GimbalCell) -> float:
    """Requests a second."""
    return cell.requests_per_s


FIGURES = {"TTFT": ttft, "TTFT P99": ttft_p99, "TPOT": tpot, "throughput": throughput}
