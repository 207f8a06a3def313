"""Builds the workload that a simulation's settings describe."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moestro.core.clock import NS_PER_S, to_ns
from moestro.errors import ConfigError
from moestro.sim.load.arrivals import Arrivals, AtTimes, ClosedLoop, think_times
from moestro.sim.load.workload_settings import WorkloadSettings
from moestro.workload.generated.arrivals import at_rate, constant, gamma, poisson, replay, weibull
from moestro.workload.generated.length_shapes import draw_shape
from moestro.workload.generated.session_generator import steady_sessions
from moestro.workload.generated.session_shapes import SHAPES
from moestro.workload.generated.sessions import Pace
from moestro.workload.rows import Int64s, Rows, equal_rows, labelled
from moestro.workload.traces.reading import read_trace

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
    times = _times(rows, settings, np.random.default_rng([seed, _ARRIVALS]))
    arrivals = _closed_loop(rows, settings, times) if settings.closed_loop else AtTimes(times)
    return _labelled(rows, settings, seed), arrivals


def describe(settings: WorkloadSettings) -> str:
    """Describe the workload in a few words."""
    if settings.trace is not None:
        source = Path(settings.trace).name
    elif settings.sessions is not None:
        source = f"{settings.sessions} sessions"
    else:
        source = f"requests of {settings.prompt_tokens} and {settings.output_tokens} tokens"
    end_s = None if settings.duration_s is None else settings.start_s + settings.duration_s
    words = [
        source,
        f"{settings.start_s:g} s to {'its end' if end_s is None else f'{end_s:g} s'}" if settings.has_window else "",
        f"{settings.shape} shape" if settings.shape else "",
        "closed loop" if settings.closed_loop else "",
        f"{settings.rate:.4g} requests/s" if settings.rate else "",
    ]
    return ", ".join(word for word in words if word)


def workload_notes(settings: WorkloadSettings, rows: Rows) -> list[str]:
    """Note what of a trace is not in its requests, and that it has fewer requests than the settings ask for."""
    notes = [f"[workload] trace: {note}" for note in rows.notes]
    if settings.num_requests is not None and settings.num_requests > len(rows):
        what = "the part of the trace" if settings.has_window else "the trace"
        notes.append(f"[workload] num_requests = {settings.num_requests:,}, and {what} has {len(rows):,} requests")
    return notes


def _rows(settings: WorkloadSettings, directory: Path) -> Rows:
    if settings.trace is not None:
        reads_all = settings.shape is not None or settings.has_window
        rows = read_trace(directory / settings.trace, None if reads_all else settings.num_requests)
        return _window(rows, settings) if settings.has_window else rows
    assert settings.num_requests is not None, "checked by the settings"
    assert settings.prompt_tokens is not None, "checked by the settings"
    assert settings.output_tokens is not None, "checked by the settings"
    return equal_rows(settings.num_requests, settings.prompt_tokens, settings.output_tokens)


def _window(rows: Rows, settings: WorkloadSettings) -> Rows:
    """Select the part of a trace that the settings name, and its first `num_requests` requests."""
    if rows.timestamp_ns is None:
        raise ConfigError("[workload] start_s and duration_s need a trace with times, and this one has none")
    since_ns = rows.timestamp_ns - rows.timestamp_ns[0]
    begin_ns = to_ns(settings.start_s)
    is_inside = since_ns >= begin_ns
    if settings.duration_s is not None:
        is_inside &= since_ns < begin_ns + to_ns(settings.duration_s)
    inside = np.flatnonzero(is_inside)
    if not len(inside):
        raise ConfigError(
            f"[workload] no request of the trace, which lasts {since_ns[-1] / NS_PER_S:,.1f} s, is in the part from"
            f" start_s = {settings.start_s:g} on"
        )
    return rows.select(inside if settings.shape else inside[: settings.num_requests])


def _closed_loop(rows: Rows, settings: WorkloadSettings, times: Int64s) -> ClosedLoop:
    """Let turns follow answers. Conversations begin at the times of their first turns."""
    if rows.session is None:
        raise ConfigError(
            "[workload] closed_loop needs a trace with conversations (Bailian, BurstGPT with Session ID), and this one"
            " names none"
        )
    if settings.think_s is not None:
        return ClosedLoop(rows.session, times, np.full(len(rows), to_ns(settings.think_s)))
    if rows.timestamp_ns is None:
        raise ConfigError("[workload] closed_loop needs a trace with times, or think_s")
    ended_ns = rows.timestamp_ns + Pace().service_ns(rows.num_output_tokens)
    return ClosedLoop(rows.session, times, think_times(rows.session, rows.timestamp_ns, ended_ns))


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
