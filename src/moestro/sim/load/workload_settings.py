"""Settings of a simulated workload: its source, the part of it that is used, and when its requests arrive."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

import msgspec

from moestro.core.setting_checks import above, at_least, check_settings
from moestro.errors import ConfigError
from moestro.workload.generated.draws import Shape

Pattern = Literal["trace", "poisson", "gamma", "weibull", "constant"]


class WorkloadSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The workload, from exactly one source: a trace, generated sessions, or requests of one size.

    Attributes:
        trace: file that `workload.traces` reads; a relative path starts at the configuration file.
        start_s, duration_s: part of a trace with times that is used, in seconds of its own time; unset: to its end.
        sessions: shape of `workload.session_shapes`. A turn arrives after the answer to the previous turn has ended.
        prompt_tokens, output_tokens: tokens of each request, for requests of one size.
        num_requests: number of requests; of a trace, the first ones of its part.
        arrivals: arrival pattern. `trace` keeps the recorded times; the others draw or space them at `rate`.
        rate: requests a second. Recorded times are scaled to it.
        load: the rate as a share of the most that the engines answer under the first policy, in place of `rate`.
        burstiness: shape parameter of gamma and Weibull arrivals; below 1, requests come in bursts.
        closed_loop: whether a turn of a trace's conversation arrives a think time after the end of the turn before.
        think_s: think time of every turn, seconds; unset: the recorded gap less the assumed duration of the answer
            (`workload.sessions.Pace`).
        shape: one of Gimbal's five shapes, in which the lengths of a trace are drawn anew.
        ls_share: share of latency-sensitive requests, drawn at random; unset: as in the workload.
        max_tokens: `max_tokens` of every request; unset: the longest answer of the workload.
    """

    PLACE: ClassVar[str] = "[workload] "

    trace: str | None = None
    start_s: Annotated[float, at_least(0)] = 0.0
    duration_s: Annotated[float | None, above(0)] = None
    sessions: str | None = None
    prompt_tokens: Annotated[int | None, at_least(1)] = None
    output_tokens: Annotated[int | None, at_least(1)] = None
    num_requests: Annotated[int | None, at_least(1)] = None
    arrivals: Pattern | None = None
    rate: Annotated[float | None, above(0)] = None
    load: Annotated[float | None, above(0)] = None
    burstiness: Annotated[float, above(0)] = 1.0
    closed_loop: bool = False
    think_s: Annotated[float | None, at_least(0)] = None
    shape: Shape | None = None
    ls_share: float | None = None
    max_tokens: Annotated[int | None, at_least(1)] = None

    def __post_init__(self) -> None:
        check_settings(self)
        given = [self.trace is not None, self.sessions is not None, self.prompt_tokens is not None]
        if sum(given) != 1:
            raise ConfigError("[workload] needs exactly one of trace, sessions, and prompt_tokens with output_tokens")
        if (self.prompt_tokens is None) != (self.output_tokens is None):
            raise ConfigError("[workload] prompt_tokens and output_tokens go together")
        if self.rate is not None and self.load is not None:
            raise ConfigError("[workload] load finds the rate: give rate or load")
        if self.trace is None and (self.num_requests is None or not self.has_rate):
            raise ConfigError("[workload] num_requests and rate (or load) are required: how many requests, how fast")
        self._check_trace_keys()
        self._check_arrivals()

    @property
    def has_rate(self) -> bool:
        """Whether the rate is given, or to be found."""
        return self.rate is not None or self.load is not None

    @property
    def has_window(self) -> bool:
        """Whether only a part of the trace is used."""
        return self.start_s > 0 or self.duration_s is not None

    def _check_trace_keys(self) -> None:
        if self.shape is not None and self.trace is None:
            raise ConfigError("[workload] shape draws the lengths of a trace anew: give a trace, or drop it")
        if self.trace is None and (self.has_window or self.closed_loop):
            raise ConfigError(
                "[workload] start_s, duration_s and closed_loop belong to a trace: give one, or drop them"
            )
        if self.think_s is not None and not self.closed_loop:
            raise ConfigError("[workload] think_s needs closed_loop = true, in which turns wait for answers")
        if self.closed_loop and self.shape is not None:
            raise ConfigError("[workload] shape draws single requests, without conversations: drop it, or closed_loop")

    def _check_arrivals(self) -> None:
        if self.sessions is not None and self.arrivals is not None:
            raise ConfigError("[workload] sessions have arrival times of their own: drop arrivals")
        if self.arrivals not in {None, "trace"} and not self.has_rate:
            raise ConfigError(f"[workload] arrivals = {self.arrivals!r} needs a rate, in requests a second")
        if self.arrivals == "trace" and self.trace is None:
            raise ConfigError("[workload] arrivals = 'trace' needs a trace")
