"""Sessions drawn from a shape: users, shared system prompts, turns, think times. One seed gives one set of sessions."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from moestro.core.clock import NS_PER_S
from moestro.errors import ConfigError
from moestro.workload.generated.arrivals import poisson
from moestro.workload.generated.session_shapes import SessionShape
from moestro.workload.generated.sessions import Pace, Sessions, prompt_lengths
from moestro.workload.rows import Int64s, Rows, Streams

_MAX_TURNS = 256  # cuts sessions that the beta distribution would continue almost without end
_LEAD_IN, _TAIL = 1.0, 0.1  # shares of the requested number, drawn before and after a steady window and then dropped
_STEADY_AFTER_S = 5_000  # by then the load of every shape is within 3 % of steady
_MORE = 0.2  # share of extra turns, so that chance leaves no gap at the end
_PARTS = 4  # a user's own beginning and an answer each take at most 1 / _PARTS of the context


def generate(shape: SessionShape, num_requests: int, rate: float, seed: int) -> Sessions:
    """Generate `num_requests` turns in sessions that begin at random (Poisson), at `rate` turns a second in the mean.

    The load builds up over the first few think times, until sessions end as often as they begin, and falls at the end.

    Raises:
        ConfigError: fewer than 1 request, or a rate that is not above 0.
    """
    if num_requests < 1:
        raise ConfigError(f"a workload needs at least 1 request, got {num_requests}")
    if not 0 < rate < np.inf:
        raise ConfigError(f"the rate must be above 0 requests a second, got {rate:g}")
    num_sessions = int(num_requests / shape.mean_turns * 1.1) + 16
    rows, think_ns = _draw(shape, num_sessions, np.random.default_rng([seed, num_sessions]))
    while len(rows) < num_requests:
        num_sessions *= 2
        rows, think_ns = _draw(shape, num_sessions, np.random.default_rng([seed, num_sessions]))
    turns_a_session = len(rows) / num_sessions
    rows = rows.select(np.arange(num_requests))
    assert rows.session is not None, "drawn so"
    start_ns = poisson(int(rows.session[-1]) + 1, rate / turns_a_session, np.random.default_rng([seed, 0]))
    return Sessions(rows, start_ns, think_ns[:num_requests])


def steady_rows(shape: SessionShape, num_requests: int, rate: float, seed: int, pace: Pace | None = None) -> Rows:
    """Generate `num_requests` turns at fixed times, from 0, out of the middle of a longer history of sessions.

    The window begins and ends amid sessions, as a recorded trace does, so its load neither builds up nor falls.

    Args:
        rate: mean requests a second; the number in a window varies by chance.
        pace: assumed duration of answers; None means the default guess.
    """
    num_before = int(num_requests * _LEAD_IN)
    history = generate(shape, num_before + num_requests + int(num_requests * _TAIL) + 16, rate, seed)
    rows = history.open_loop(pace or Pace())
    assert rows.timestamp_ns is not None, "made so"
    begin = int(np.searchsorted(rows.timestamp_ns, round(num_before / rate * NS_PER_S)))
    begin = min(begin, len(rows) - num_requests)
    window = rows.select(np.arange(begin, begin + num_requests))
    assert window.timestamp_ns is not None, "made so"
    return replace(window, timestamp_ns=window.timestamp_ns - window.timestamp_ns[0])


def steady_sessions(shape: SessionShape, num_requests: int, rate: float, seed: int) -> Sessions:
    """Generate `num_requests` turns in closed loop, from 0, out of the middle of a longer history of sessions.

    As in `steady_rows`, but a turn whose predecessor is in the window arrives one think time after that answer. The
    load is therefore about `rate` turns a second throughout, whereas `generate` builds up for hours and thins out at
    the end. Earlier turns are missing from the window, and from the caches as well.

    Raises:
        ConfigError: as `generate`.
    """
    num_before = math.ceil(_STEADY_AFTER_S * rate) if 0 < rate < math.inf else 0
    history = generate(shape, num_requests + int((num_before + num_requests) * _MORE) + num_before, rate, seed)
    pace = Pace()
    begin = int(np.count_nonzero(history.arrival_ns(pace) < _STEADY_AFTER_S * NS_PER_S))
    begin = min(begin, len(history.rows) - num_requests)
    return history.window(begin, begin + num_requests, pace)


def _draw(shape: SessionShape, num_sessions: int, rng: np.random.Generator) -> tuple[Rows, Int64s]:
    """Draw all turns of `num_sessions` sessions, and the think time before each turn."""
    counts = _turn_counts(shape, num_sessions, rng)
    session = np.repeat(np.arange(num_sessions), counts)
    first = np.cumsum(counts) - counts
    streams, head, user = _beginnings(shape, num_sessions, rng)
    room = shape.max_model_len // _PARTS
    num_output = np.minimum(shape.output_tokens.draw(rng, len(session)), room)
    num_new = shape.next_tokens.draw(rng, len(session))
    num_new[first] = np.minimum(
        shape.first_tokens.draw(rng, num_sessions), shape.max_model_len - head - num_output[first]
    )
    think_ns = shape.think_s.draw(rng, len(session), NS_PER_S)
    think_ns[first] = 0
    num_prompt = prompt_lengths(session, head, num_new, num_output)
    rows = Rows(
        num_prompt_tokens=num_prompt,
        num_output_tokens=num_output,
        streams=streams,
        stream=len(streams.parent) - num_sessions + session,
        user=user[session],
        session=session,
        is_generated=True,
    )
    fits = np.flatnonzero(num_prompt + num_output <= shape.max_model_len)  # the first turns of each session, at least 1
    return rows.select(fits), think_ns[fits]


def _turn_counts(shape: SessionShape, num_sessions: int, rng: np.random.Generator) -> Int64s:
    """int64[num_sessions], beta-geometric; the share of single turns and the mean determine its two parameters."""
    if shape.mean_turns == 1:
        return np.ones(num_sessions, np.int64)
    odds = 1 / shape.single_share - 1
    b = (shape.mean_turns - 1) / (shape.mean_turns - 1 - odds)
    chance_to_end = rng.beta(b, odds * b, num_sessions)
    return np.minimum(rng.geometric(np.maximum(chance_to_end, 1 / _MAX_TURNS)), _MAX_TURNS)


def _beginnings(shape: SessionShape, num_sessions: int, rng: np.random.Generator) -> tuple[Streams, Int64s, Int64s]:
    """Streams (apps, then each user within each app, then sessions), each session's shared tokens, and its user."""
    num_apps, room = len(shape.apps), shape.max_model_len // _PARTS
    app = rng.choice(num_apps, num_sessions, p=[each.share for each in shape.apps])
    chance = np.arange(1, shape.num_users + 1) ** -shape.user_skew
    user = np.searchsorted(np.cumsum(chance / chance.sum()), rng.random(num_sessions)).clip(max=shape.num_users - 1)
    app_tokens = np.array([each.num_tokens for each in shape.apps], np.int64)
    parent, start = np.full(num_apps, -1), np.zeros(num_apps, np.int64)
    begin, head = app, app_tokens[app]
    if shape.user_tokens is not None:
        own = np.minimum(shape.user_tokens.spread(shape.num_users), room)
        place = app * shape.num_users + user
        parent = np.append(parent, np.repeat(np.arange(num_apps), shape.num_users))
        start = np.append(start, np.repeat(app_tokens, shape.num_users))
        begin, head = num_apps + place, head + own[user]
    return Streams(np.append(parent, begin), np.append(start, head)), head, user
