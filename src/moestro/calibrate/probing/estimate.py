"""Estimates the cost of an engine's steps from durations, by weighted least squares, with 95 % intervals.

Two forms are fitted to the same durations. `LinearSteps` has the constants that people compare: a step, a decoding row,
a token of context, a token of a prompt. `KnotSteps` lets the cost of rows and of prompt tokens bend at the probed
sizes; a cost table is made of it.

A server that does not do what the estimates suppose is refused, with a sentence that says why.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from moestro.calibrate.probing.probes import (
    NoteList,
    ProbeAnswer,
    ProbedServer,
    ProbeLimits,
    ProbeRequest,
    RequestTimes,
    ServerFigures,
)
from moestro.core.rng import student_t_quantile
from moestro.errors import MoestroError

# Reads durations of steps from the times of a probe's tokens.

_CUT = 0.1  # of the gaps, at either end: a busy neighbour can lengthen a step many times
_BUNCHED = 0.1  # of the mean gap: two tokens that are nearer than this were delivered together
LEAST_GAPS = 6  # of one sequence, for a mean
# A chunk's step is clearly longer than decode steps by this share of theirs, and by so many times their range.
_CLEAR, _CLEAR_RANGES = 0.1, 2.0
_SAME_STEP = 0.5  # of a decode step: two tokens within this time come from one step


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTime:
    """Mean duration of a step of decodes.

    Attributes:
        rows: sequences.
        context: tokens of all their contexts together, each with its own new token.
        ns: duration.
    """

    rows: float
    context: float
    ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class FirstTokenTime:
    """Time to the first token of a prompt alone on the server.

    Attributes:
        new, cached: tokens of the prompt that are computed, and those found in the prefix cache.
        ns: time from its sending.
    """

    new: int
    cached: int
    ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedTime:
    """Duration of a step that computes a whole prompt beside one decode.

    Attributes:
        context: tokens of the decode's context.
        new: tokens of the prompt.
        ns: duration.
    """

    context: float
    new: int
    ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class BesideTime:
    """Time to the first token of a prompt that arrives while other sequences decode.

    Attributes:
        rows, context: the other sequences, and the tokens of their contexts together.
        new: tokens of the prompt.
        ns: time from its sending.
    """

    rows: float
    context: float
    new: int
    ns: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkCount:
    """Steps over which a prompt was spread while another sequence decoded.

    Attributes:
        num_steps: their number; None: they do not differ from decode steps.
        first_ns: duration of the first, which computes a full chunk.
        context: tokens of the decode's context.
    """

    num_steps: int | None
    first_ns: float = 0.0
    context: float = 0.0


def mean_gap(gaps: NDArray[np.float64]) -> float:
    """Return the mean without the longest and the shortest tenth. The median of skewed times is below what adds up.

    Where tokens arrive in bunches, as on a busy network, short gaps and long ones belong together, and all count.
    """
    mean = float(gaps.mean())
    if (gaps < _BUNCHED * mean).mean() > _CUT:
        return mean
    cut = int(len(gaps) * _CUT)
    return float(np.sort(gaps)[cut : len(gaps) - cut].mean())


def num_together(answer: ProbeAnswer) -> int:
    """Count the requests that had a token before the first of them ended."""
    answered = [each for each in answer.requests if each.failure is None]
    first_end = min((each.deliveries[-1] for each in answered), default=0)
    return sum(bool(each.deliveries[0] < first_end) for each in answered)


def decode_time(answer: ProbeAnswer) -> DecodeTime | None:
    """Return the mean step while all sequences of a probe decode; None: they hardly did so together."""
    answered = [each for each in answer.requests if each.failure is None]
    begin = max(each.deliveries[0] for each in answered)
    end = min(each.deliveries[-1] for each in answered)
    gaps, context = [], 0.0
    for each in answered:
        inside = np.flatnonzero((each.deliveries >= begin) & (each.deliveries <= end))
        if len(inside) <= LEAST_GAPS:
            return None
        per_event = _tokens_per_event(each)
        gaps.append(np.diff(each.deliveries[inside]) / per_event)
        context += each.num_prompt_tokens + float(inside[1:].mean()) * per_event
    return DecodeTime(rows=len(answered), context=context, ns=mean_gap(np.concatenate(gaps)))


def _tokens_per_event(times: RequestTimes) -> float:
    return (times.num_output_tokens - 1) / max(len(times.deliveries) - 1, 1)


def chunk_count(answer: ProbeAnswer) -> ChunkCount:
    """Count the steps of the second request's prompt by the tokens that the first request got meanwhile.

    The step that ends the prompt brings a token to both. Its first chunk is a full one, so its step is the longest.
    """
    decoding, prompt = answer.requests[0], answer.requests[1]
    times, first = decoding.deliveries, int(prompt.deliveries[0])
    gaps = np.diff(times)
    quiet = gaps[times[1:] < prompt.sent_ns][1:]
    last = int(np.abs(times - first).argmin())
    busy = np.flatnonzero((times[1:] > prompt.sent_ns) & (np.arange(1, len(times)) <= last))
    if len(quiet) < 3 or not len(busy):
        return ChunkCount(num_steps=None)
    usual, longest = float(np.median(quiet)), float(gaps[busy].max())
    least = usual + max(_CLEAR * usual, _CLEAR_RANGES * float(np.ptp(quiet)))
    if longest < least or abs(int(times[last]) - first) > _SAME_STEP * usual:
        return ChunkCount(num_steps=None)
    start = int(busy[np.flatnonzero(gaps[busy] > usual + (longest - usual) / 2)[0]])
    return ChunkCount(
        num_steps=last - start, first_ns=float(gaps[start]), context=decoding.num_prompt_tokens + start + 1
    )


Floats = NDArray[np.float64]
Terms = dict[str, float]

API, API_TOKEN = "api", "api_token"  # time outside the engine, for each request and each token of its prompt
STEP, ROW, CONTEXT, PROMPT, PAIR = "step", "row", "context_token", "prompt_token", "attention_pair"
_TAIL = 0.975  # both tails: 95 % intervals
_MOST_DEGREES = 200  # beyond it Student's t is normal


class StepTerms(Protocol):
    """A linear form of the duration of steps: the factors of its parameters."""

    def step(self, rows: float, context: float, chunk: tuple[int, int] | None) -> Terms:
        """Return the factors of a step.

        Args:
            rows: decoding sequences.
            context: tokens of their contexts together.
            chunk: new and cached tokens of a chunk of a prompt; None: the step has none.
        """
        ...


class LinearSteps:
    """A constant, and a time for each row, token of context, token of a prompt, and pair of tokens in attention."""

    def step(self, rows: float, context: float, chunk: tuple[int, int] | None) -> Terms:
        """Implement `StepTerms.step`."""
        new, cached = chunk or (0, 0)
        pairs = new * cached + new * new / 2
        return {STEP: 1.0, ROW: rows, CONTEXT: context + cached, PROMPT: float(new), PAIR: pairs}


@dataclass(frozen=True, slots=True)
class KnotSteps:
    """Straight lines between knots for rows and for tokens of prompts; both are durations of whole steps.

    Attributes:
        rows, new: ascending knots. Costs are level below the first, as in a cost table.
    """

    rows: tuple[int, ...]
    new: tuple[int, ...]

    def step(self, rows: float, context: float, chunk: tuple[int, int] | None) -> Terms:
        """Implement `StepTerms.step`."""
        terms: Terms = {CONTEXT: context}
        if rows:
            _add(terms, _between("rows", self.rows, rows), 1.0)
        if chunk is None:
            return terms
        new, cached = chunk
        terms[CONTEXT] += cached
        terms[PAIR] = float(new * cached)
        _add(terms, _between("new", self.new, new + rows), 1.0)
        if rows:  # the chunk's tokens come on top of the rows, as `MeasuredCost` prices it
            _add(terms, _between("new", self.new, rows), -1.0)
        return terms


def _add(terms: Terms, more: Terms, factor: float) -> None:
    for name, value in more.items():
        terms[name] = terms.get(name, 0.0) + factor * value


def _between(kind: str, knots: Sequence[int], x: float) -> Terms:
    """Weights of the two knots beside `x`; beyond the last, their line goes on."""
    if len(knots) == 1 or x <= knots[0]:
        return {f"{kind} {knots[0]}": 1.0}
    low, high = next((pair for pair in pairwise(knots) if x <= pair[1]), (knots[-2], knots[-1]))
    share = (x - low) / (high - low)
    return {f"{kind} {low}": 1.0 - share, f"{kind} {high}": share}


def chunks_of(new: int, cached: int, budget: int | None) -> list[tuple[int, int]]:
    """Return the chunks in which an engine computes a prompt alone: (new, cached) of each step.

    Args:
        budget: tokens of a step; None: all in one.
    """
    size = budget or new
    return [(min(size, new - done), cached + done) for done in range(0, new, size)]


def first_token_terms(form: StepTerms, time: FirstTokenTime, budget: int | None) -> Terms:
    """Return the factors of a time to first token: the API's part, and the steps of all chunks."""
    terms: Terms = {API: 1.0, API_TOKEN: float(time.new + time.cached)}
    for new, cached in chunks_of(time.new, time.cached, budget):
        # A last token alone costs what a decode does.
        step = form.step(1, cached + 1, None) if new == 1 else form.step(0, 0, (new, cached))
        _add(terms, step, 1.0)
    return terms


@dataclass(frozen=True, slots=True)
class FittedSteps:
    """Parameters with half widths of their 95 % intervals; those that no duration determines are missing.

    Attributes:
        values: parameters, ns.
        half_widths: of each.
        num_durations: durations behind them.
    """

    values: dict[str, float]
    half_widths: dict[str, float]
    num_durations: int

    def predicted(self, terms: Terms) -> float:
        """Return the duration of these factors, ns."""
        return sum(self.values.get(name, 0.0) * factor for name, factor in terms.items())


@dataclass(frozen=True, slots=True)
class StepDurations:
    """All durations of an experiment.

    Attributes:
        decodes, firsts, mixed, beside: as their classes say.
        budget: tokens of a step; None: no prompt of `firsts` is longer.
    """

    decodes: Sequence[DecodeTime]
    firsts: Sequence[FirstTokenTime]
    mixed: Sequence[MixedTime]
    beside: Sequence[BesideTime]
    budget: int | None

    def terms(self, form: StepTerms) -> list[tuple[Terms, float]]:
        """Return the factors and the duration of each."""
        found = [(form.step(each.rows, each.context, None), each.ns) for each in self.decodes]
        found += [(first_token_terms(form, each, self.budget), each.ns) for each in self.firsts]
        found += [(form.step(1, each.context, (each.new, 0)), each.ns) for each in self.mixed]
        for each in self.beside:
            # It waits for half of a step on average, then its own step computes the other rows, too.
            waited = form.step(each.rows, each.context, None) if each.rows else {}
            terms = {API: 1.0, API_TOKEN: float(each.new)}
            _add(terms, waited, 0.5 * min(each.rows, 1.0))
            _add(terms, form.step(each.rows, each.context, (each.new, 0)), 1.0)
            found.append((terms, each.ns))
        if len({each.new for each in self.mixed}) < 2:  # then the API's part of a token is inseparable from the step's
            for terms, _ in found:
                terms.pop(API_TOKEN, None)
        return found


def fit(durations: StepDurations, form: StepTerms) -> FittedSteps:
    """Fit a form by least squares of relative errors; no parameter is negative.

    The covariance is robust (HC3): it does not suppose that all relative errors are alike.
    """
    found = [each for each in durations.terms(form) if each[1] > 0]
    names = sorted({name for terms, _ in found for name in terms})
    ns = np.array([duration for _, duration in found])
    factors = np.array([[terms.get(name, 0.0) for name in names] for terms, _ in found]) / ns[:, None]
    kept, free = list(range(len(names))), None
    while True:
        values, half_widths, is_known = _least_squares(factors[:, kept], len(ns))
        if free is None:
            free = dict(zip(names, zip(values, half_widths, strict=True), strict=True))
        negative = [kept[i] for i in np.flatnonzero((values < 0) & is_known)]
        if not negative:
            break
        kept = [column for column in kept if column not in negative]
    known = {names[column]: i for i, column in enumerate(kept) if is_known[i]}
    result = {name: float(values[i]) for name, i in known.items()}
    widths = {name: float(half_widths[i]) for name, i in known.items()}
    for column in set(range(len(names))) - set(kept):  # at its bound, with what the unbounded fit leaves above it
        value, width = free[names[column]]
        result[names[column]], widths[names[column]] = 0.0, max(float(value + width), 0.0)
    return FittedSteps(result, widths, len(ns))


def _least_squares(factors: Floats, count: int) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Solve factors @ values = 1. Return values, half widths, and which values the rows determine."""
    scale = np.sqrt((factors**2).sum(0))
    scale[scale == 0] = 1.0
    left, singular, right = np.linalg.svd(factors / scale, full_matrices=False)
    good = singular > singular[0] * 1e-9
    inverse = (right[good].T / singular[good]) @ left[:, good].T
    values = inverse.sum(1)
    residuals = 1.0 - (factors / scale) @ values
    leverage = np.minimum((left[:, good] ** 2).sum(1), 1 - 1e-6)
    covariance = (inverse * (residuals / (1 - leverage)) ** 2) @ inverse.T
    degrees = min(max(count - int(good.sum()), 1), _MOST_DEGREES)
    half_widths = student_t_quantile(_TAIL, degrees) * np.sqrt(np.diag(covariance))
    is_known = (right[good] ** 2).sum(0) > 1 - 1e-6
    return values / scale, half_widths / scale, is_known


# Refusals of servers that do not do what the estimates suppose.

_OTHERS_SHARE = 0.05  # of probes that find other requests, and of tokens that are not the probes'
_LEAST_PROBES = 10  # before shares of them count
_UNSTEADY = 0.5  # range of the middle four fifths of steps, each over the median of its kind
_CONTEXTS_PER_OCTAVE = 4  # lengths of context that count as alike
_LEAST_REPEATS = 3  # of a kind of step
_SLACK_TOKENS = 64  # that a server may count for itself
_OVER_CAPACITY = 1.02
_MOST_EVENTS = 1.2  # tokens for each event of a stream, from which their times say less
_SHORT_ANSWER = 4


class Honesty:
    """Compares what a server answers and shows with what the probes requested.

    Args:
        server: what is known of the server.
        limits: bounds of the experiment.
        notes: takes sentences that are no reason to stop.

    Raises:
        MoestroError: the address serves several engines, between which the probes would be divided.
    """

    def __init__(self, server: ProbedServer, limits: ProbeLimits, notes: NoteList) -> None:
        self._limits, self._notes, self._first = limits, notes, server.figures
        self._is_beside = limits.max_added_load is not None
        self._num_probes = self._num_visited = 0
        self._num_own_tokens = self._num_own_shown = 0  # of all answers, and of those until /metrics were last read
        self._taken: list[tuple[int, int]] = []  # requests and tokens of probes of which nothing was refused
        self._last = server.figures
        if server.figures is None:
            notes.add("The server shows no /metrics that are known here: other traffic would not be noticed as such.")
        elif server.figures.num_engines > 1:
            raise MoestroError(
                f"the address serves {server.figures.num_engines} engines, among which the probes would be divided:"
                " start one engine, or give the address of one"
            )
        elif server.figures.is_late:
            notes.add(
                "SGLang's /metrics show the requests of its last logged step: other traffic is seen by its tokens."
            )

    def check(self, kind: str, requests: Sequence[ProbeRequest], answer: ProbeAnswer) -> None:
        """Check one probe.

        Raises:
            MoestroError: the server refused or failed the probe, answered something else, or is busy.
        """
        size = len(requests), sum(each.num_tokens + each.max_tokens for each in requests)
        self._check_failures(kind, answer.requests, size)
        for request, times in zip(requests, answer.requests, strict=True):
            if times.failure is None:
                self._check_answer(request, times)
                self._num_own_tokens += times.num_prompt_tokens + times.num_output_tokens
        self._num_probes += 1
        if self._first is not None and answer.after is None:
            self._notes.add("The server did not always show its /metrics: other traffic may have gone unnoticed.")
        if answer.after is not None:
            self._check_progress(answer.after)
            self._last, self._num_own_shown = answer.after, self._num_own_tokens
        if not self._is_beside:
            self._check_idle(answer)

    def at_end(self, decodes: Sequence[DecodeTime], held_tokens: int | None, block_size: int | None) -> None:
        """Check what only the whole experiment shows.

        Raises:
            MoestroError: the same step took different times, or `/metrics` contradict the probes.
        """
        if not self._is_beside:
            _check_steady(decodes)
        if self._first is None or self._last is None:
            return
        self._check_counts(self._first, self._last)
        shown = self._last.num_kv_tokens
        if shown is not None and held_tokens is not None and held_tokens > shown * _OVER_CAPACITY:
            raise MoestroError(
                f"/metrics show a KV cache of {shown:,} tokens, and the probes found {held_tokens:,} tokens in it:"
                " these metrics are not of this engine. Nothing was fitted"
            )
        if block_size is not None and self._last.block_size not in {None, block_size}:
            self._notes.add(
                f"/metrics show blocks of {self._last.block_size} tokens, and prefixes are found in blocks of"
                f" {block_size}: the probed size is used."
            )

    def _check_failures(self, kind: str, requests: Sequence[RequestTimes], size: tuple[int, int]) -> None:
        failed = [each for each in requests if each.failure is not None]
        refused = [each for each in failed if each.is_refused]
        if len(refused) == len(requests):
            raise MoestroError(
                f"the server refused a probe ({kind}) with {(refused[0].failure or '').removeprefix('http_')}"
                f" ({refused[0].message or 'no message'}): it limits the rate of requests, or is full. Raise the limit"
                " of this key, or stop other traffic. Nothing was fitted"
            )
        others = [each for each in failed if not each.is_refused]
        if refused and any(number >= size[0] and num_tokens >= size[1] for number, num_tokens in self._taken):
            raise MoestroError(
                f"the server refused {len(refused)} of {len(requests)} requests of a probe ({kind}), after it had taken"
                " as many and as long ones at once: it limits their rate, or has other traffic. Nothing was fitted"
            )
        if not failed:
            self._taken.append(size)
        if not others:
            return
        first = others[0]
        if first.failure == "timeout":
            raise MoestroError(
                f"the server is too slow for --seconds {self._limits.seconds:g}: a probe ({kind}) of {len(requests)}"
                " requests had no complete answer in the time that was left. Give more --seconds"
            )
        if first.failure == "http_404":
            raise MoestroError(
                f"the server has no /v1/completions, by which prompts of known tokens are sent ({first.message}): a"
                " server of chats alone cannot be calibrated. Nothing was fitted"
            )
        raise MoestroError(
            f"{len(others)} of {len(requests)} requests of a probe ({kind}) failed, the first with {first.failure}:"
            f" {first.message}. Nothing was fitted"
        )

    def _check_answer(self, request: ProbeRequest, times: RequestTimes) -> None:
        if times.num_output_tokens != request.max_tokens:
            raise MoestroError(
                f"an answer has {times.num_output_tokens} tokens where {request.max_tokens} were requested: the server"
                " does not honour ignore_eos or limits max_tokens, so that batches end at other times than planned."
                " Nothing was fitted"
            )
        if times.num_prompt_tokens != request.num_tokens:
            raise MoestroError(
                f"the server counts {times.num_prompt_tokens:,} tokens in a prompt of {request.num_tokens:,}: it"
                " shortens or extends prompts, or counts them wrongly. Nothing was fitted"
            )
        if request.max_tokens < _SHORT_ANSWER:
            return
        per_event = times.num_output_tokens / len(times.deliveries)
        if len(times.deliveries) < 3:
            raise MoestroError(
                f"{times.num_output_tokens} tokens arrived in {len(times.deliveries)} events: the server or a proxy"
                " before it holds the stream back, so that times of tokens are invisible. Give the engine's own address"
            )
        if per_event > _MOST_EVENTS:
            self._notes.add(
                f"An event of the stream brings {per_event:.1f} tokens: durations are means over them, and the token"
                " budget of a step is not identified reliably."
            )

    def _check_idle(self, answer: ProbeAnswer) -> None:
        """Look for other requests when no request of the probe was there."""
        if answer.after is None:
            return
        found = (answer.after.num_running or 0) + (answer.after.num_waiting or 0)
        self._num_visited += found > (len(answer.requests) if answer.after.is_late else 0)
        if self._num_probes >= _LEAST_PROBES and self._num_visited > _OTHERS_SHARE * self._num_probes + 1:
            raise MoestroError(
                f"the server is busy: {self._num_visited} of {self._num_probes} probes found other requests on it,"
                f" {found:g} at the last. Calibrate it when it is idle, or beside the traffic with"
                " --max-added-load 0.1. Nothing was fitted"
            )

    def _check_progress(self, figures: ServerFigures) -> None:
        """Refuse counts that go back."""
        before, now = (None if each is None else each.num_tokens for each in (self._last, figures))
        if before is not None and now is not None and now < before:
            raise MoestroError(
                f"/metrics count {now:,.0f} tokens after {before:,.0f}: the server was restarted, or several engines"
                " answer at this address in turn. Nothing was fitted"
            )

    def _check_counts(self, first: ServerFigures, last: ServerFigures) -> None:
        if first.num_tokens is None or last.num_tokens is None:
            return
        counted, own = last.num_tokens - first.num_tokens, self._num_own_shown
        if counted < own * (1 - _OTHERS_SHARE) - _SLACK_TOKENS:
            raise MoestroError(
                f"/metrics count {counted:,.0f} tokens during the probes, and the answers alone report {own:,}: these"
                " metrics are not of this engine, or of one of several behind the address. Nothing was fitted"
            )
        if counted > own * (1 + _OTHERS_SHARE) + _SLACK_TOKENS and not self._is_beside:
            raise MoestroError(
                f"the server is busy: /metrics count {counted:,.0f} tokens during the probes, which had {own:,}."
                " Calibrate it when it is idle, or beside the traffic with --max-added-load 0.1. Nothing was fitted"
            )


def _check_steady(decodes: Sequence[DecodeTime]) -> None:
    """Raise MoestroError if steps of equally many sequences in equally long contexts took different times."""
    alike: dict[tuple[int, int], list[float]] = {}
    for each in decodes:
        length = round(_CONTEXTS_PER_OCTAVE * math.log2(max(each.context, 1.0)))
        alike.setdefault((round(each.rows), length), []).append(each.ns)
    repeated = [np.array(times) for times in alike.values() if len(times) >= _LEAST_REPEATS]
    if not repeated:
        return
    # Each time over the median of equal steps, so that steps of all sizes count together.
    ratios = np.concatenate([times / np.median(times) for times in repeated])
    low, high = np.percentile(ratios, [10, 90]).tolist()
    if high - low > _UNSTEADY:
        raise MoestroError(
            f"the server is not steady: the same step took {low:.2f} to {high:.2f} times its median (the middle four"
            f" fifths of {len(ratios)} steps of {len(repeated)} kinds). Other traffic, or other processes on its"
            " machine, would be priced as its own work. Nothing was fitted"
        )
