"""A server's load in a header of its answers, for a router of Moestro's that asks for it.

Polls of `/metrics` are as old as their interval; answers come as often as requests do (LMetric, section 3). The header
that load balancers know, ORCA's `endpoint-load-metrics`, has vLLM's two figures, and a vLLM server collects all of its
metrics to write it. This one has the figures that routers keep, with their age, and other servers ignore the question.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from moestro.core.load_figures import FIGURES, ROUTED_FIGURES, FigureUnit, LoadFigures

# Of a request, with any value: its answer shall have the load. Of an answer: the load.
LOAD_REPORT_HEADER = "x-moestro-load"
_MEAN = frozenset({FigureUnit.FRACTION, FigureUnit.RATIO})
_LARGEST = 2**53  # larger counts are invalid
_MAX_AGE_US = 60_000_000
_MAX_BYTES = 1024  # a report of all figures has 200


class LoadReport(msgspec.Struct, frozen=True):
    """The load of all engines behind a port.

    Attributes:
        age_us: time since the engine with the oldest report last read its inbox, microseconds.
        load: gauges that routers keep, summed over the engines; fractions and ratios are their mean. None where an
            engine does not report the figure.
    """

    age_us: int
    load: LoadFigures


def merged_load(loads: Sequence[LoadFigures]) -> LoadFigures:
    """Return the figures that routers keep of all engines behind a port; `loads` is not empty."""
    merged: dict[str, Any] = {}
    for name in ROUTED_FIGURES:
        values = [getattr(load, name) for load in loads]
        if None not in values:
            merged[name] = sum(values) / len(values) if FIGURES[name].unit in _MEAN else sum(values)
    return LoadFigures(**merged)


def written(report: LoadReport) -> str:
    """Return the value of the header."""
    return msgspec.json.encode(report).decode()


def read(value: bytes) -> LoadReport | None:
    """Read the value of the header. None means that it is no report, or has an impossible figure."""
    if len(value) > _MAX_BYTES:
        return None
    try:
        report = _decoder.decode(value)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None
    figures = [getattr(report.load, name) for name in ROUTED_FIGURES]
    is_possible = all(each is None or (math.isfinite(each) and 0 <= each <= _LARGEST) for each in figures)
    return report if is_possible and 0 <= report.age_us <= _MAX_AGE_US else None


_decoder = msgspec.json.Decoder(LoadReport)
