"""Shapes of sessions, matched to published figures of traces that are not available."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

from moestro.workload.rows import Int64s

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
