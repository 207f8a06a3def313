"""The findings of AMoE's experiment."""

from __future__ import annotations

import msgspec
import numpy as np

from moestro.repro.results import Cell, Findings


class ItemMeans(msgspec.Struct, frozen=True):
    """Mean tokens and mean time of one item of a kind of worker; the samplers' time is added to attention's."""

    tokens: float
    ms: float


class AmoeCell(Cell, frozen=True, kw_only=True):
    """One run at a rate, while it is observed.

    Attributes:
        tokens_per_s: output tokens a second.
        itl_ms, itl_p99_ms: time between consecutive tokens of a request, mean and 99th percentile.
        requests_per_s: requests that end a second.
        bound: output tokens a second that no scheduler exceeds on these workers.
        stall_shares: share of the time for which each worker computes nothing; of steps, their starts are counted.
        num_first: requests in progress at the start.
        attention_step, expert_step: items of either kind of worker in `async`; None in lock-step.
        ended_per_s: requests that end in each second since the start.
    """

    tokens_per_s: float
    itl_ms: float
    itl_p99_ms: float
    requests_per_s: float
    bound: float
    stall_shares: tuple[float, ...]
    num_first: int
    attention_step: ItemMeans | None = None
    expert_step: ItemMeans | None = None
    ended_per_s: tuple[float, ...] = ()


class ClosedRun(msgspec.Struct, frozen=True, kw_only=True):
    """A run with a constant number of requests.

    Attributes:
        tokens_per_s: output tokens a second.
        num_sensitive: requests that are latency-sensitive. None means that all are alike.
        sensitive_tokens_per_s: their output tokens a second.
    """

    load: str
    system: str
    seed: int
    num_requests: int
    tokens_per_s: float
    num_sensitive: int | None = None
    sensitive_tokens_per_s: float = 0.0

    @property
    def itl_ms(self) -> float:
        """Mean time between tokens by Little's law, of the latency-sensitive requests where there are others."""
        if self.num_sensitive is None:
            return self.num_requests / self.tokens_per_s * 1e3
        return self.num_sensitive / self.sensitive_tokens_per_s * 1e3


class BatchPoint(msgspec.Struct, frozen=True):
    """Throughput of one expert layer at one batch size (figure 3)."""

    num_rows: int
    rows_per_s: float


class AmoeFindings(Findings[AmoeCell], kw_only=True):
    """All runs; `closed` are those with a constant number of requests, `batch_curve` is figure 3 by prices."""

    closed: list[ClosedRun] = msgspec.field(default_factory=list)
    batch_curve: dict[str, list[BatchPoint]] = msgspec.field(default_factory=dict)

    def best(self, load: str, system: str) -> AmoeCell | None:
        """The run of a system with the highest throughput over the rates of a load. None means no run."""
        cells = [cell for cell in self.cells if (cell.load, cell.system) == (load, system)]
        return max(cells, key=lambda cell: cell.tokens_per_s, default=None)

    def capacity(self, load: str, system: str) -> ClosedRun | None:
        """The run of a system with a constant number of requests that has the highest throughput. None means no run."""
        runs = [run for run in self.closed if (run.load, run.system) == (load, system)]
        return max(runs, key=lambda run: run.tokens_per_s, default=None)

    def closed_at(self, load: str, system: str, itl_ms: float) -> float | None:
        """The throughput of a system at a mean ITL, between runs with constant numbers of requests.

        None means that the system has no ITL so low. Above the highest ITL that was measured, the throughput is that
        of the highest.
        """
        runs = [run for run in self.closed if (run.load, run.system) == (load, system)]
        runs.sort(key=lambda run: run.itl_ms)
        if not runs or itl_ms < runs[0].itl_ms:
            return None
        most = np.maximum.accumulate([run.tokens_per_s for run in runs])
        return float(np.interp(itl_ms, [run.itl_ms for run in runs], most))


def throughput(cell: AmoeCell) -> float:
    """Return the output tokens a second."""
    return cell.tokens_per_s


def itl(cell: AmoeCell) -> float:
    """Return the mean ITL, ms."""
    return cell.itl_ms


def itl_p99(cell: AmoeCell) -> float:
    """Return the 99th percentile of ITL, ms."""
    return cell.itl_p99_ms


def requests(cell: AmoeCell) -> float:
    """Return the requests that end a second."""
    return cell.requests_per_s


def of_bound(cell: AmoeCell) -> float:
    """Return the throughput as a share of the bound."""
    return cell.tokens_per_s / cell.bound


def mean_stall(cell: AmoeCell) -> float:
    """Return the mean share of the time for which a worker computes nothing."""
    return sum(cell.stall_shares) / len(cell.stall_shares)


def most_stall(cell: AmoeCell) -> float:
    """Return the largest share of the time for which a worker computes nothing."""
    return max(cell.stall_shares)
