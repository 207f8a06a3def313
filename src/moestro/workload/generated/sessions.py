"""Conversations: a turn's prompt is the conversation so far plus new input, and follows the answer after a while."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np

from moestro.core.clock import NS_PER_S
from moestro.errors import ConfigError
from moestro.workload.generated.draws import poisson
from moestro.workload.rows import Int64s, Rows, Streams


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """Assumed duration of answers where no engine computes them. Results state this guess.

    Attributes:
        ttft_s: seconds to the first token.
        tpot_s: seconds for each further token.
    """

    ttft_s: float = 0.5
    tpot_s: float = 0.02

    def service_ns(self, num_output_tokens: Int64s) -> Int64s:
        """int64[n], from arrival to the end of the answer."""
        guess: Int64s = np.rint((self.ttft_s + self.tpot_s * num_output_tokens) * NS_PER_S).astype(np.int64)
        return guess


@dataclass(frozen=True, slots=True, eq=False)
class Sessions:
    """s sessions with n turns in all, in closed loop: a turn arrives `think_ns` after the end of the turn before it.

    Attributes:
        rows: the turns, ordered by session and then by turn, without times; `rows.session` numbers from 0.
        start_ns: int64[s], arrival of each first turn, not decreasing.
        think_ns: int64[n], time from the end of the previous turn; 0 for a first turn.
    """

    rows: Rows
    start_ns: Int64s
    think_ns: Int64s

    def __len__(self) -> int:
        return len(self.start_ns)

    @property
    def first_rows(self) -> Int64s:
        """int64[s], the row of each session's first turn."""
        assert self.rows.session is not None, "turns belong to sessions"
        return np.searchsorted(self.rows.session, np.arange(len(self)))

    def next_turn(self, row: int, ended_ns: int) -> tuple[int, int] | None:
        """Row and arrival of the turn after `row`, which ended at `ended_ns`; None after the last turn."""
        session = self.rows.session
        assert session is not None, "turns belong to sessions"
        if row + 1 == len(session) or session[row + 1] != session[row]:
            return None
        return row + 1, ended_ns + int(self.think_ns[row + 1])

    def open_loop(self, pace: Pace) -> Rows:
        """The turns at fixed times, as if every answer lasted as long as `pace` guesses.

        Where answers last longer, turns arrive before their predecessors end, which no user does. Use the closed loop
        wherever the driver supports it.
        """
        arrival_ns = self.arrival_ns(pace)
        timed = replace(self.rows, timestamp_ns=arrival_ns)
        return timed.select(np.argsort(arrival_ns, kind="stable"))

    def arrival_ns(self, pace: Pace) -> Int64s:
        """int64[n], arrival of each turn if every answer lasts as long as `pace` guesses."""
        session = self.rows.session
        assert session is not None, "turns belong to sessions"
        steps = self.think_ns.copy()
        steps[1:] += pace.service_ns(self.rows.num_output_tokens)[:-1]
        steps[self.first_rows] = 0
        since_all = np.cumsum(steps)
        times: Int64s = self.start_ns[session] + since_all - since_all[self.first_rows][session]
        return times

    def window(self, begin: int, end: int, pace: Pace) -> Sessions:
        """Turns `begin` .. `end` - 1 in the order of `arrival_ns(pace)`, still in closed loop, the first at 0.

        A session that the window cuts continues with its first turn inside, at the time that `pace` guesses, and
        without knowledge of its earlier turns.
        """
        arrival_ns, session = self.arrival_ns(pace), self.rows.session
        assert session is not None, "turns belong to sessions"
        kept = np.sort(np.argsort(arrival_ns, kind="stable")[begin:end])
        kept = kept[np.argsort(arrival_ns[kept][_firsts(session[kept])], kind="stable")]
        firsts = _firsts(session[kept]) == np.arange(len(kept))
        think_ns, start_ns = self.think_ns[kept], arrival_ns[kept][firsts]
        think_ns[firsts] = 0
        rows = replace(self.rows.select(kept), session=np.cumsum(firsts) - 1)
        return Sessions(rows, start_ns - start_ns[0], think_ns)


def _firsts(session: Int64s) -> Int64s:
    """int64[n], for each of n turns, ordered by session, the position of its session's first turn."""
    changes = np.append(True, session[1:] != session[:-1])
    places: Int64s = np.flatnonzero(changes)[np.cumsum(changes) - 1]
    return places


def prompt_lengths(
    session: Int64s, num_head_tokens: Int64s, num_new_tokens: Int64s, num_output_tokens: Int64s
) -> Int64s:
    """int64[n], prompt length of each turn: the session's head, and all inputs and answers up to the turn's own input.

    Args:
        session: int64[n], 0, 0, …, 1, …: the session of each turn.
        num_head_tokens: int64[s].
        num_new_tokens, num_output_tokens: int64[n].
    """
    first = np.searchsorted(session, np.arange(len(num_head_tokens)))
    total = np.cumsum(num_new_tokens + num_output_tokens)
    before = (total - num_new_tokens - num_output_tokens)[first]
    return num_head_tokens[session] + total - num_output_tokens - before[session]


# Shapes of sessions, matched to published figures of traces that are not available.

_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Lengths or times with the given median, whose logarithm has the standard deviation `sigma`."""

    median: float
    sigma: float

    def draw(self, rng: np.random.Generator, size: int, unit: float = 1) -> Int64s:
        """int64[size], at least 1, in `unit`s: a median in seconds and a unit of 1e9 give nanoseconds."""
        values: Int64s = np.rint(rng.lognormal(np.log(self.median), self.sigma, size) * unit).astype(np.int64)
        return np.maximum(values, 1)

    def spread(self, size: int) -> Int64s:
        """int64[size], at least 1: quantiles, ordered so that any first few nearly follow the distribution too."""
        quantile = NormalDist().inv_cdf
        ranks = (np.arange(1, size + 1) * _GOLDEN) % 1
        values = self.median * np.exp(self.sigma * np.array([quantile(rank) for rank in ranks.tolist()]))
        return np.maximum(np.rint(values), 1).astype(np.int64)


@dataclass(frozen=True, slots=True)
class Mixture:
    """Times of two kinds: `first` with the chance `share`, otherwise `second`."""

    share: float
    first: LogNormal
    second: LogNormal

    def draw(self, rng: np.random.Generator, size: int, unit: float = 1) -> Int64s:
        """int64[size], as `LogNormal.draw`."""
        is_first = rng.random(size) < self.share
        return np.where(is_first, self.first.draw(rng, size, unit), self.second.draw(rng, size, unit))


@dataclass(frozen=True, slots=True)
class App:
    """A program that users talk to.

    Attributes:
        share: fraction of the sessions; the shares of a shape sum to 1.
        num_tokens: tokens of the system prompt with which all its sessions begin.
    """

    share: float
    num_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionShape:
    """A kind of session.

    Attributes:
        like: the trace that the shape imitates, and the source of that trace's figures.
        single_share: share of sessions with one turn.
        mean_turns: mean over all sessions, at least 1 / `single_share`. The chance of a further turn differs between
            sessions (a beta distribution), so that some sessions are long.
        apps: programs; each session belongs to one.
        num_users, user_skew: the user of rank r starts sessions in proportion to r ** -user_skew.
        user_tokens: common beginning of a user's prompts after the system prompt, such as a template or a repository.
            It is equal for every seed, because results depend strongly on the few most active users. None means none.
        first_tokens, next_tokens: new input of a first turn and of a later one.
        output_tokens: answer length.
        think_s: seconds from the end of an answer to the next turn.
        max_model_len: limit of prompt and answer; a session ends before it would grow beyond.
    """

    like: str
    single_share: float
    mean_turns: float
    apps: tuple[App, ...]
    num_users: int
    user_skew: float
    user_tokens: LogNormal | None
    first_tokens: LogNormal
    next_tokens: LogNormal
    output_tokens: LogNormal
    think_s: LogNormal | Mixture
    max_model_len: int


CHAT = SessionShape(
    like="Qwen chat (Bailian trace A)",
    single_share=0.6,
    mean_turns=1.93,
    apps=(App(0.74, 180), App(0.19, 850), App(0.07, 500)),
    num_users=20_000,
    user_skew=0.5,
    user_tokens=None,
    first_tokens=LogNormal(250, 1.6),
    next_tokens=LogNormal(85, 1.7),
    output_tokens=LogNormal(375, 0.6),
    think_s=LogNormal(110, 1.75),
    max_model_len=32_768,
)
API_AGENT = SessionShape(
    like="Qwen API (Bailian trace B)",
    single_share=1.0,
    mean_turns=1.0,
    apps=(App(1.0, 24),),
    num_users=400,
    user_skew=0.97,
    user_tokens=LogNormal(225, 1.37),
    first_tokens=LogNormal(180, 1.33),
    next_tokens=LogNormal(1, 0),
    output_tokens=LogNormal(39, 1.35),
    think_s=LogNormal(1, 0),
    max_model_len=32_768,
)
CODER = SessionShape(
    like="Qwen coder (Bailian)",
    single_share=0.72,
    mean_turns=1.72,
    apps=(App(0.5, 2250), App(0.3, 1550), App(0.2, 800)),
    num_users=2_000,
    user_skew=0.8,
    user_tokens=LogNormal(700, 0.8),
    first_tokens=LogNormal(1150, 1.0),
    next_tokens=LogNormal(320, 1.0),
    output_tokens=LogNormal(469, 1.08),
    think_s=LogNormal(115, 1.95),
    max_model_len=18_432,
)
TOOL_AGENT = SessionShape(
    like="Kimi tool and agent (Mooncake)",
    single_share=0.79,
    mean_turns=1.465,
    apps=(App(0.463, 4096), App(0.39, 3072), App(0.147, 2048)),
    num_users=4_000,
    user_skew=0.6,
    user_tokens=None,
    first_tokens=LogNormal(1700, 1.5),
    next_tokens=LogNormal(250, 1.3),
    output_tokens=LogNormal(30, 1.9),
    think_s=LogNormal(115, 1.4),
    max_model_len=131_072,
)
CODING_AGENT = SessionShape(
    like="coding agents (TraceLab)",
    single_share=0.05,
    mean_turns=40.0,
    apps=(App(0.5, 14_000), App(0.5, 9_000)),
    num_users=400,
    user_skew=0.5,
    user_tokens=LogNormal(2_000, 0.7),
    first_tokens=LogNormal(1_200, 1.2),
    next_tokens=LogNormal(800, 1.2),
    output_tokens=LogNormal(180, 1.2),
    think_s=Mixture(0.89, LogNormal(1.0, 1.5), LogNormal(150, 1.0)),
    max_model_len=131_072,
)
# The shapes of the traces on which routers were published.
PUBLISHED_SHAPES = ("chat", "api_agent", "coder", "tool_agent")
SHAPES = {"chat": CHAT, "api_agent": API_AGENT, "coder": CODER, "tool_agent": TOOL_AGENT, "coding_agent": CODING_AGENT}


# Sessions drawn from a shape: users, shared system prompts, turns, think times. One seed gives one set of sessions.

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
