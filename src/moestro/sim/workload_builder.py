"""Builds the workload that a simulation's settings describe."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moestro.errors import ConfigError
from moestro.sim.arrivals import Arrivals, AtTimes
from moestro.sim.settings import WorkloadSettings
from moestro.workload.arrivals import at_rate, constant, gamma, poisson, replay, weibull
from moestro.workload.length_shapes import draw_shape
from moestro.workload.rows import Int64s, Rows, equal_rows, labelled
from moestro.workload.session_generator import steady_sessions
from moestro.workload.session_shapes import SHAPES
from moestro.workload.traces import read_trace

_ARRIVALS, _SHAPE = range(2)  # random streams of a seed


def make_workload(settings: WorkloadSettings, directory: Path, seed: int) -> tuple[Rows, Arrivals]:
    """Make the requests and their arrival times.

    Args:
        settings: settings of the workload.
        directory: directory of relative paths.
        seed: random seed.

    Raises:
        ConfigError: a name is unknown, or a file cannot be read.
    """
    if settings.sessions is not None:
        if settings.sessions not in SHAPES:
            raise ConfigError(f"[workload] unknown sessions {settings.sessions!r}; known: {', '.join(SHAPES)}")
        assert settings.num_requests is not None, "checked by the settings"
        assert settings.rate is not None, "checked by the settings"
        sessions = steady_sessions(SHAPES[settings.sessions], settings.num_requests, settings.rate, seed)
        return _labelled(sessions.rows, settings, seed), sessions
    rows = _rows(settings, directory)
    if settings.shape is not None:
        rng = np.random.default_rng([seed, _SHAPE])
        rows = draw_shape(rows, settings.shape, settings.num_requests or len(rows), rng)
    return _labelled(rows, settings, seed), AtTimes(_times(rows, settings, np.random.default_rng([seed, _ARRIVALS])))


def describe(settings: WorkloadSettings) -> str:
    """Describe the workload in a few words."""
    if settings.trace is not None:
        source = Path(settings.trace).name
    elif settings.sessions is not None:
        source = f"{settings.sessions} sessions"
    else:
        source = f"requests of {settings.prompt_tokens} and {settings.output_tokens} tokens"
    words = [
        source,
        f"{settings.shape} shape" if settings.shape else "",
        f"{settings.rate:g} requests/s" if settings.rate else "",
    ]
    return ", ".join(word for word in words if word)


def _rows(settings: WorkloadSettings, directory: Path) -> Rows:
    if settings.trace is not None:
        return read_trace(directory / settings.trace, None if settings.shape else settings.num_requests)
    assert settings.num_requests is not None, "checked by the settings"
    assert settings.prompt_tokens is not None, "checked by the settings"
    assert settings.output_tokens is not None, "checked by the settings"
    return equal_rows(settings.num_requests, settings.prompt_tokens, settings.output_tokens)


def _labelled(rows: Rows, settings: WorkloadSettings, seed: int) -> Rows:
    return rows if settings.ls_share is None else labelled(rows, settings.ls_share, seed)


def _times(rows: Rows, settings: WorkloadSettings, rng: np.random.Generator) -> Int64s:
    pattern, rate, count = settings.arrivals, settings.rate, len(rows)
    if pattern is None:
        pattern = "trace" if rows.timestamp_ns is not None else "poisson"
    if pattern == "trace":
        if rows.timestamp_ns is None:
            raise ConfigError("[workload] the workload has no recorded times: give arrivals = 'poisson' and a rate")
        times = replay(rows.timestamp_ns, rng)
        return times if rate is None else at_rate(times, rate)
    if rate is None:
        raise ConfigError("[workload] the workload has no recorded times: give a rate, in requests a second")
    if pattern == "constant":
        return constant(count, rate)
    if pattern == "gamma":
        return gamma(count, rate, settings.burstiness, rng)
    if pattern == "weibull":
        return weibull(count, rate, settings.burstiness, rng)
    return poisson(count, rate, rng)
