"""The findings of QLLM's experiment."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from moestro.repro.results import Cell, Findings
from moestro.repro.testbed import Latency


class ClassFigures(msgspec.Struct, frozen=True, kw_only=True):
    """Figures of the requests of one class; turnaround is the time from arrival to the last token."""

    num_requests: int
    ttft_ms: Latency
    turnaround_ms: Latency


class QllmCell(Cell, frozen=True, kw_only=True):
    """One run, without the first LEAD_IN of its requests. Throughput counts all, from first arrival to last end.

    Attributes:
        system: engine.
        ls: latency-sensitive requests.
        be: best-effort requests.
    """

    system: str = msgspec.field(name="engine")
    ls: ClassFigures
    be: ClassFigures
    requests_per_s: float
    tokens_per_s: float


class QllmFindings(Findings[QllmCell], kw_only=True):
    """All runs. `lengths` says where the requests' lengths come from."""

    lengths: str = ""


Figure = Callable[[QllmCell], float]


def ls_ttft(cell: QllmCell) -> float:
    """Return the mean TTFT of latency-sensitive requests, ms."""
    return cell.ls.ttft_ms.mean


def ls_ttft_p99(cell: QllmCell) -> float:
    """Return the 99th percentile of TTFT of latency-sensitive requests, ms."""
    return cell.ls.ttft_ms.p99


def be_ttft(cell: QllmCell) -> float:
    """Return the mean TTFT of best-effort requests, ms."""
    return cell.be.ttft_ms.mean


def ls_turnaround(cell: QllmCell) -> float:
    """Return the mean turnaround of latency-sensitive requests, ms."""
    return cell.ls.turnaround_ms.mean


def be_turnaround(cell: QllmCell) -> float:
    """Return the mean turnaround of best-effort requests, ms."""
    return cell.be.turnaround_ms.mean


def throughput(cell: QllmCell) -> float:
    """Return the throughput, requests a second."""
    return cell.requests_per_s


def num_answer_tokens(cell: QllmCell) -> float:
    """Return the mean length of the answers, tokens."""
    return cell.tokens_per_s / cell.requests_per_s
