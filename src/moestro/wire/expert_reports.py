"""Expert load of a rank as a message: a rank sends it only when the API server requests it."""

from __future__ import annotations

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.experts.expert_load import LayerPairs
from moestro.core.experts.source_load import SourceLoad

_INT, _FLOAT, _SHORT = np.dtype("<i8"), np.dtype("<f8"), np.dtype("<i4")


class ReadExperts(msgspec.Struct, frozen=True, tag=True):
    """Ask a rank for an `ExpertReport`.

    Attributes:
        number: Number of the question, which the report repeats.
        with_pairs: Whether the report has pairs of experts too, for which the rank looks through a large table.
        clear: Whether the rank empties its window first.
    """

    number: int
    with_pairs: bool = False
    clear: bool = False


class PairColumns(msgspec.Struct, frozen=True):
    """A `LayerPairs` as bytes: int32 layer, expert and next_expert, float64 count."""

    layer: bytes
    expert: bytes
    next_expert: bytes
    count: bytes


class ExpertReport(msgspec.Struct, frozen=True, tag=True):
    """A `SourceLoad` as bytes: int64 counts, float64 mean, variance and activated, each [layers, experts].

    Attributes:
        number: Number of the question.
        num_layers, num_experts: Shape of the arrays; 0 while the rank has counted nothing.
        weight, num_steps: As in `SourceLoad`.
        pairs: None means that none were requested, or that none were collected.
        error: Why the rank counts no longer; "" means that it does.
    """

    number: int
    num_layers: int = 0
    num_experts: int = 0
    counts: bytes = b""
    mean: bytes = b""
    variance: bytes = b""
    activated: bytes = b""
    weight: float = 0.0
    num_steps: int = 0
    pairs: PairColumns | None = None
    error: str = ""


def report_of(number: int, load: SourceLoad) -> ExpertReport:
    """Make the report that answers question `number`."""
    num_layers, num_experts = load.counts.shape
    return ExpertReport(
        number=number,
        num_layers=num_layers,
        num_experts=num_experts,
        counts=_bytes(load.counts, _INT),
        mean=_bytes(load.mean, _FLOAT),
        variance=_bytes(load.variance, _FLOAT),
        activated=_bytes(load.activated, _FLOAT),
        weight=load.weight,
        num_steps=load.num_steps,
        pairs=None if load.pairs is None else _columns(load.pairs),
    )


def load_of(report: ExpertReport) -> SourceLoad | None:
    """Return the load that a report has; None means that the rank has counted nothing.

    Raises:
        ValueError: The arrays do not have the shape that the report states.
    """
    if not report.num_layers:
        return None
    shape = (report.num_layers, report.num_experts)
    pairs = report.pairs
    return SourceLoad(
        counts=np.frombuffer(report.counts, _INT).reshape(shape),
        mean=np.frombuffer(report.mean, _FLOAT).reshape(shape),
        variance=np.frombuffer(report.variance, _FLOAT).reshape(shape),
        activated=np.frombuffer(report.activated, _FLOAT).reshape(shape),
        weight=report.weight,
        num_steps=report.num_steps,
        pairs=None if pairs is None else _pairs(pairs),
    )


def _columns(pairs: LayerPairs) -> PairColumns:
    return PairColumns(
        layer=_bytes(pairs.layer, _SHORT),
        expert=_bytes(pairs.expert, _SHORT),
        next_expert=_bytes(pairs.next_expert, _SHORT),
        count=_bytes(pairs.count, _FLOAT),
    )


def _pairs(columns: PairColumns) -> LayerPairs:
    return LayerPairs(
        layer=np.frombuffer(columns.layer, _SHORT),
        expert=np.frombuffer(columns.expert, _SHORT),
        next_expert=np.frombuffer(columns.next_expert, _SHORT),
        count=np.frombuffer(columns.count, _FLOAT),
    )


def _bytes(array: NDArray[np.generic], dtype: np.dtype[np.generic]) -> bytes:
    return array.astype(dtype, copy=False).tobytes()
