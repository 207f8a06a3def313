"""Columns behind an `EngineTable`, one row per engine, and the speeds of engines, learnt from their answers' times.

The router writes the columns, which grow by doubling. Speeds are those of prompts, of answers, and of copies from host
memory.

Prompts are compared that met no queue. With p computed tokens behind c cached ones, of which h came from host memory,
and R requests that decode, one took on engine e

    TTFT = a + f_e (b p + d p (c + p / 2) + r R) + k_e h

A least-squares fit over all engines gives a, b, d, r and the mean of k. The slope f_e is then fitted to the samples of
each engine alone, and shrunk to the fleet's mean, 1, by the errors of the fits:

    f_e = 1 + (raw_e - 1) t / (t + v_e)

v_e is the variance of raw_e as the fit's residuals give it, and t the variance between engines that is left after it
(DerSimonian and Laird, Controlled Clinical Trials 7, 1986). Engines that differ by no more than the errors have t = 0,
so an equal fleet stays equal. k_e is shrunk likewise. The time per token of answers has a fit of its own.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.core.load_figures import ROUTED_FIGURES, LoadFigures
from moestro.core.views import (
    ALONE,
    DEFAULT_COPY_PRICE,
    NEVER_NS,
    OWN_COUNTS,
    TRAITS,
    UNKNOWN_KV_TOKENS,
    EngineTable,
    Figure,
)
from moestro.routing.settings import EngineSpec

Scalar = TypeVar("Scalar", bound=np.generic)

_FIRST_CAPACITY = 16


class RequestCounts(NamedTuple):
    """Columns of `EngineColumns`, for access to single numbers."""

    num_in_flight: memoryview
    num_prefilling: memoryview
    prefill_tokens: memoryview
    context_tokens: memoryview
    num_unseen: memoryview
    reported_prefill_tokens: memoryview


class _Comparison(NamedTuple):
    """Result of `EngineColumns.compared`, and for which calls it holds.

    Attributes:
        routable: bytes of the column `routable`.
        since_ns, until_ns: first and last `since_ns` for which no figure is older or newer than it was.
    """

    routable: bytes
    since_ns: int
    until_ns: int
    table: EngineTable
    lacking: dict[str, NDArray[np.bool_]]


class EngineColumns:
    """Rows of engines, numbered from 0. Rows of removed engines are reused.

    Attributes:
        is_up: bool[n], whether the engine is in rotation, even with a full queue.
        block_tokens: int64[n], tokens of the engine's own KV blocks.
        table: read-only view of the rows for policies, in the same memory.
        no_hits: float64[n], read-only zeros: the cached tokens of a prompt for policies that do not ask for them.
        counts: the columns that change with single requests, in the same memory. NumPy takes twice as long to change a
            single number.
    """

    def __init__(self) -> None:
        self.num_rows = 0
        self._free: list[int] = []
        self._comparison: _Comparison | None = None  # the last one, while it holds
        self._allocate(_FIRST_CAPACITY)

    def add(self) -> int:
        """Return a row for a new engine, not routable yet."""
        if self._free:
            row = self._free.pop()
        else:
            if self.num_rows == self._capacity:
                self._grow()
            row = self.num_rows
            self.num_rows += 1
            self._show()
        return row

    def give_back(self, row: int) -> None:
        """Free the row of a removed engine, which has no request in flight."""
        assert not self.is_up[row]
        assert not self.num_in_flight[row]
        self._free.append(row)

    def report(self, row: int, figures: LoadFigures, as_of_ns: int) -> set[str]:
        """Take in the reported figures that are no older than the known ones, and return their names."""
        taken, comparison = set(), self._comparison
        for at, name in enumerate(ROUTED_FIGURES):
            value = getattr(figures, name)
            if value is not None and as_of_ns >= (before_ns := self._as_of_ns[at, row]):
                if comparison is not None and before_ns < comparison.since_ns:
                    self._comparison = None  # a figure that was missing is known
                self._values[at, row] = value
                self._as_of_ns[at, row] = as_of_ns
                self._newest_ns[at] = max(self._newest_ns[at], as_of_ns)
                taken.add(name)
        return taken

    def compared(self, table: EngineTable, since_ns: int) -> tuple[EngineTable, dict[str, NDArray[np.bool_]]]:
        """Leave out the figures that some routable engines have reported since `since_ns` and others have not.

        An engine without a figure would be compared by the router's own count, which does not see what others send.

        Args:
            table: the table of these columns, or one with fewer routable rows.

        Returns:
            A table that shows these figures as never reported, and for each of them bool[n], the rows that lack it.
        """
        known = self._comparison
        if (
            known is None
            or table is not self.table
            or not known.since_ns <= since_ns <= known.until_ns
            or table.routable.tobytes() != known.routable
        ):
            known = self._compare(table, since_ns)
        return known.table, known.lacking

    def _compare(self, table: EngineTable, since_ns: int) -> _Comparison:
        routable, as_of_ns = table.routable, self._as_of_ns[:, : len(table)]
        is_lacking = (as_of_ns < since_ns) & routable
        num_lacking = np.count_nonzero(is_lacking, axis=1)
        uneven = np.flatnonzero((num_lacking > 0) & (num_lacking < np.count_nonzero(routable)))
        names = tuple(ROUTED_FIGURES[at] for at in uneven)
        found = _Comparison(
            routable=routable.tobytes(),
            since_ns=since_ns,
            until_ns=int(as_of_ns.min(where=(as_of_ns >= since_ns) & routable, initial=np.iinfo(np.int64).max)),
            table=table.unreported(names) if names else table,
            lacking={name: is_lacking[at] for name, at in zip(names, uneven, strict=True)},
        )
        if table is self.table:
            self._comparison = found
        return found

    def set_group(self, row: int, group: int) -> None:
        """Set the group with which an engine steps; ALONE means none."""
        had_groups = self.table.group is not None
        self.group[row] = group
        if had_groups or group != ALONE:
            self._show()

    def speeds_changed(self) -> None:
        """Note that the columns `speed` or `decode_speed` were written. Mostly all of them are 1 before and after."""
        if self.table.has_speeds != self._has_speeds():
            self._show()

    def _has_speeds(self) -> bool:
        n = self.num_rows
        return bool(np.count_nonzero(self.speed[:n] != 1) or np.count_nonzero(self.decode_speed[:n] != 1))

    def forget_figures(self, row: int) -> None:
        """Discard all figures reported for the row."""
        self._comparison = None
        self._values[:, row] = 0
        self._as_of_ns[:, row] = NEVER_NS

    def _allocate(self, capacity: int) -> None:
        self._capacity = capacity
        self.is_up = np.zeros(capacity, np.bool_)
        self.routable = np.zeros(capacity, np.bool_)
        self.num_in_flight = np.zeros(capacity)
        self.num_prefilling = np.zeros(capacity)
        self.prefill_tokens = np.zeros(capacity)
        self.context_tokens = np.zeros(capacity)
        self.num_unseen = np.zeros(capacity)
        self.reported_prefill_tokens = np.full(capacity, np.inf)
        self.num_foreign = np.zeros(capacity, np.int64)
        self.num_kv_tokens = np.full(capacity, float(UNKNOWN_KV_TOKENS))
        self.speed = np.ones(capacity, np.float64)
        self.decode_speed = np.ones(capacity, np.float64)
        self.copy_price = np.full(capacity, DEFAULT_COPY_PRICE)
        self.group = np.full(capacity, ALONE, np.int64)
        self.block_tokens = np.ones(capacity, np.int64)
        self.counts = RequestCounts(
            self.num_in_flight.data,
            self.num_prefilling.data,
            self.prefill_tokens.data,
            self.context_tokens.data,
            self.num_unseen.data,
            self.reported_prefill_tokens.data,
        )
        self._values = np.zeros((len(ROUTED_FIGURES), capacity), np.float64)
        self._as_of_ns = np.full((len(ROUTED_FIGURES), capacity), NEVER_NS, np.int64)
        self._newest_ns = np.full(len(ROUTED_FIGURES), NEVER_NS, np.int64)
        self._show()

    def _grow(self) -> None:
        names = (
            "is_up",
            "routable",
            "reported_prefill_tokens",
            *TRAITS,
            "block_tokens",
            "_values",
            "_as_of_ns",
            *OWN_COUNTS,
        )
        old, num_rows, newest_ns = {name: getattr(self, name) for name in names}, self._capacity, self._newest_ns
        self._allocate(2 * num_rows)
        self._newest_ns[:] = newest_ns
        for name, column in old.items():
            getattr(self, name)[..., :num_rows] = column

    def _show(self) -> None:
        """Rebuild the table over the current rows."""
        self._comparison = None
        n = self.num_rows
        columns: dict[str, Any] = {
            name: Figure(_read_only(values, n), _read_only(as_of_ns, n), newest_ns)
            for name, values, as_of_ns, newest_ns in zip(
                ROUTED_FIGURES, self._values, self._as_of_ns, self._newest_ns.reshape(-1, 1), strict=True
            )
        }
        columns |= {
            name: _read_only(getattr(self, name), n)
            for name in ("routable", "reported_prefill_tokens", *TRAITS, *OWN_COUNTS)
        }
        if not np.count_nonzero(self.group[:n] != ALONE):
            columns["group"] = None  # so that policies need not look
        self.table = EngineTable(**columns, has_speeds=self._has_speeds())
        self.no_hits = _read_only(np.zeros(n), n)


def _read_only(column: NDArray[Scalar], num_rows: int) -> NDArray[Scalar]:
    view = column[:num_rows]
    view.flags.writeable = False
    return view


Floats = NDArray[np.float64]

_HORIZON = 512  # samples of an engine after which older ones fade
_FEWEST = 16  # samples between two fits, and one for each engine
_PART = 16  # of the samples in a fit, one in so many is new at the next; an error shrinks by 3 % in that time
_BURST = 4.0  # samples that count as one: those of one burst share their neighbours, and so their errors
_RIDGE = 1e-6  # relative, against terms that never vary
_SLOWEST = 10.0  # bound of the learnt factors, in both directions
_NS_PER_MS = 1e6
_FEWEST_TOKENS = 4  # of an answer from which anything is learnt
_LEAST_TOKEN_NS = 200_000  # less time per token means an answer that was not streamed, whose first token is its last
_SHORT_PROMPT = 256  # tokens; errors grow with p + 256, so that a few long prompts do not decide
_MOST_COUNTED = 256  # tokens of one answer that count as samples

_CONSTANT, _TOKENS, _CONTEXT, _RUNNING, _COPIED = range(5)


class SentTiming(msgspec.Struct, eq=False, gc=False):
    """What the router knew of a request's engine when it sent the request, and at the first token.

    Attributes:
        is_first: whether no prompt waited or was computed on the engine.
        num_running: requests that had their first token.
        first_ns: time of the first token; 0 means that it has not come.
        sent_tokens: prompt tokens sent to the engine by then.
    """

    is_first: bool
    num_running: float
    first_ns: int = 0
    sent_tokens: float = 0.0


class EngineSpeeds:
    """Learns the columns `speed`, `decode_speed` and `copy_price` of engines for which none is configured.

    Args:
        columns: engine columns to update.
    """

    def __init__(self, columns: EngineColumns) -> None:
        self._columns = columns
        self._traits: list[_Traits] = []
        self._sent_tokens: list[float] = []
        self._prompts = SlopeFit(np.array([False, True, True, True, False]))
        self._answers = SlopeFit(np.array([True, True, True]))
        self._fit_at = 0.0  # new samples with which the speeds are learnt again

    def set_spec(self, engine: int, spec: EngineSpec) -> None:
        """Take over what is configured for `engine`. The rest keeps what was learnt."""
        while len(self._traits) <= engine:
            self._traits.append(_Traits(spec))
            self._sent_tokens.append(0.0)
        self._traits[engine].spec = spec
        self._show(engine)
        self._columns.speeds_changed()

    def forget(self, engine: int) -> None:
        """Discard the samples of an engine, whose number may later name another one."""
        for fit in (self._prompts, self._answers):
            fit.forget(engine)
        self._traits[engine] = _Traits(self._traits[engine].spec)
        self._show(engine)
        self._columns.speeds_changed()

    def sent(self, engine: int, num_tokens: int) -> SentTiming:
        """Note the load of `engine` before it gets a request with `num_tokens` tokens to compute."""
        columns = self._columns
        waiting = columns.counts.num_prefilling[engine]
        reported = columns.counts.reported_prefill_tokens[engine]
        self._sent_tokens[engine] += num_tokens
        is_first = not waiting and reported in (0, math.inf)
        return SentTiming(is_first, columns.counts.num_in_flight[engine] - waiting)

    def first_token(self, engine: int, timing: SentTiming, now_ns: int) -> None:
        """Note the time of a first token."""
        timing.first_ns, timing.sent_tokens = now_ns, self._sent_tokens[engine]

    def ended(self, engine: int, timing: SentTiming, times: ServedAnswer) -> None:
        """Learn from an answer that has ended."""
        if not timing.first_ns or times.num_output_tokens < _FEWEST_TOKENS:
            return
        num_gaps = times.num_output_tokens - 1
        gap_ns = (times.ended_ns - timing.first_ns) / num_gaps
        if gap_ns < _LEAST_TOKEN_NS:
            return
        if timing.is_first:
            new, cached = times.num_new_tokens, times.num_known_tokens - times.num_new_tokens
            terms = (1, new / 1e3, new * (cached + new / 2) / 1e7, timing.num_running / 10, times.num_host_tokens / 1e3)
            ttft_ms = (timing.first_ns - times.sent_ns) / _NS_PER_MS
            self._prompts.add(engine, terms, ttft_ms, (_SHORT_PROMPT / (_SHORT_PROMPT + new)) ** 2)
        counts = self._columns.counts
        running = (timing.num_running + counts.num_in_flight[engine] - counts.num_prefilling[engine]) / 2
        joined = (self._sent_tokens[engine] - timing.sent_tokens) / num_gaps
        gap_terms = (1, running / 10, joined / 1e3)
        self._answers.add(engine, gap_terms, gap_ns / _NS_PER_MS, min(num_gaps, _MOST_COUNTED) / _MOST_COUNTED)
        num_new = self._prompts.num_new + self._answers.num_new
        if num_new >= self._fit_at and num_new >= 2 * max(_FEWEST, len(self._traits)):
            self._learn()

    def _learn(self) -> None:
        num = len(self._traits)
        slow_prompts, slow_answers = self._prompts.slopes(num), self._answers.slopes(num)
        token_ms = slow_prompts * self._prompts.weights[_TOKENS]
        copy_ms = self._prompts.own_weights(_COPIED, slow_prompts)
        has_copied = (copy_ms > 0) & (token_ms > 0)
        price = np.full(num, DEFAULT_COPY_PRICE)
        np.divide(copy_ms, token_ms, out=price, where=has_copied)
        self._fit_at = (self._prompts.num_fitted + self._answers.num_fitted) / _PART
        learnt = zip((1 / slow_prompts).tolist(), (1 / slow_answers).tolist(), price.tolist(), strict=True)
        for engine, (speed, decode_speed, copy_price) in enumerate(learnt):
            traits = self._traits[engine]
            traits.speed, traits.decode_speed, traits.copy_price = speed, decode_speed, min(copy_price, 1.0)
            self._show(engine)
        self._columns.speeds_changed()

    def _show(self, engine: int) -> None:
        traits, columns = self._traits[engine], self._columns
        spec = traits.spec
        columns.speed[engine] = traits.speed if spec.speed is None else spec.speed
        columns.decode_speed[engine] = traits.decode_speed if spec.speed is None else spec.speed
        columns.copy_price[engine] = traits.copy_price if spec.copy_price is None else spec.copy_price


@dataclass(slots=True)
class _Traits:
    """What is configured for an engine, and what was learnt of it."""

    spec: EngineSpec
    speed: float = 1.0
    decode_speed: float = 1.0
    copy_price: float = DEFAULT_COPY_PRICE


class ServedAnswer(msgspec.Struct, frozen=True, gc=False):
    """A request that has ended.

    Attributes:
        num_known_tokens: tokens of the prompt and of a resumed answer.
        num_new_tokens: those of them that the engine computed, at least 1.
        num_host_tokens: those that it copied from host memory.
    """

    sent_ns: int
    ended_ns: int
    num_known_tokens: int
    num_new_tokens: float
    num_host_tokens: float
    num_output_tokens: int


class SlopeFit:
    """Least-squares fit of times over terms that all engines share, with one factor for the slopes of each engine.

    Args:
        scales: bool[k], terms that the factor of an engine multiplies.

    Attributes:
        weights: float64[k], time of each term on an engine with factor 1, none of them negative.
        num_new: samples since the last fit.
        num_fitted: samples in the last fit, older ones less.
    """

    def __init__(self, scales: NDArray[np.bool_]) -> None:
        self._scales, num_terms = scales, len(scales)
        self.weights: Floats = np.zeros(num_terms)
        self.num_new = 0
        self.num_fitted = 0.0
        # A sample comes with each answer and a fit with dozens, so the sums are lists of numbers: a row of an engine
        # has its Gram matrix, its moments, the squares of its times, and its samples, older ones less.
        self._empty = [0.0] * (num_terms * num_terms + num_terms + 2)
        self._sums: list[list[float]] = []
        self._variance = 0.0  # of a sample with weight 1

    def add(self, engine: int, terms: tuple[float, ...], time_ms: float, weight: float) -> None:
        """Take in one sample. Its variance is in inverse proportion to `weight`."""
        while engine >= len(self._sums):
            self._sums.append(self._empty)
        weighted, kept = [term * weight for term in terms], 1 - 1 / _HORIZON
        new = [one * other for one in terms for other in weighted]
        weighted_ms = time_ms * weight
        new += [term * weighted_ms for term in terms]
        new += (time_ms * time_ms * weight, 1.0)
        self._sums[engine] = [old * kept + more for old, more in zip(self._sums[engine], new, strict=True)]
        self.num_new += 1

    def forget(self, engine: int) -> None:
        """Discard the samples of an engine."""
        if engine < len(self._sums):
            self._sums[engine] = self._empty

    def _columns(self, num_engines: int) -> tuple[Floats, Floats, Floats, Floats]:
        """Return the sums of the first engines: Gram matrices, moments, squares of times, and samples."""
        k, sums = len(self._scales), np.array(self._sums[:num_engines]).reshape(-1, len(self._empty))
        return sums[:, : k * k].reshape(-1, k, k), sums[:, k * k : -2], sums[:, -2], sums[:, -1]

    def slopes(self, num_engines: int) -> Floats:
        """Fit again, and return the factor of each engine, float64[num_engines]; 1 without samples."""
        self.num_new = 0
        found = np.ones(num_engines)
        grams, moments, all_squares, num_samples = self._columns(num_engines)
        rows = np.flatnonzero(num_samples > 0)
        self.num_fitted = float(num_samples[rows].sum())
        if not len(rows):
            return found
        gram, moment = grams[rows], moments[rows]
        factor = np.ones(len(rows))
        for _ in range(4):  # in turn the terms of the fleet, and the factors of its engines
            factors = np.where(self._scales, factor[:, None], 1.0)
            shared = (factors[:, :, None] * factors[:, None, :] * gram).sum(axis=0)
            self.weights = _not_negative(shared, (factors * moment).sum(axis=0))
            slope = np.where(self._scales, self.weights, 0.0)
            against = (moment - gram @ (self.weights - slope)) @ slope
            squares = np.einsum("i,nij,j->n", slope, gram, slope)
            raw = np.divide(against, squares, out=np.ones(len(rows)), where=squares > 0)
            mean = float((raw * squares).sum() / squares.sum()) if squares.sum() > 0 else 1.0
            factor = np.clip(raw / mean, 1 / _SLOWEST, _SLOWEST) if mean > 0 else np.ones(len(rows))
        own = np.where(self._scales, factor[:, None], 1.0) * self.weights
        rest = all_squares[rows] - 2 * (own * moment).sum(axis=1) + np.einsum("ni,nij,nj->n", own, gram, own)
        free = max(self.num_fitted - len(rows) - len(self._scales), 1.0)
        self._variance = max(float(rest.sum()) / free, 0.0)
        learnt = shrunk(factor, self._variance, squares)
        scale = float(learnt.mean())  # so that the mean engine has 1, however many samples the fast ones have
        self.weights = np.where(self._scales, self.weights * scale, self.weights)
        found[rows] = np.clip(learnt / scale, 1 / _SLOWEST, _SLOWEST)
        return found

    def own_weights(self, term: int, factors: Floats) -> Floats:
        """Return the time of one term on each engine, shrunk to the fleet's, float64[n]; 0 means no sample has it."""
        found = np.full(len(factors), self.weights[term])
        gram, moment, _, _ = self._columns(len(factors))
        rows = np.flatnonzero(gram[:, term, term] > 0)
        if not len(rows):
            return np.zeros(len(factors))
        own = np.where(self._scales, factors[rows, None], 1.0) * self.weights
        own[:, term] = 0.0
        squares = gram[rows, term, term]
        raw = (moment[rows, term] - (gram[rows, term] * own).sum(axis=1)) / squares
        found[rows] = np.maximum(shrunk(raw, self._variance, squares), 0.0)
        return found


def shrunk(raw: Floats, variance: float, squares: Floats) -> Floats:
    """Return the slopes of engines, shrunk to their mean by their errors.

    Args:
        raw: float64[n], slope of each engine by its own samples.
        variance: variance of a sample.
        squares: float64[n], sum of the squares of what the slope multiplies; 0 means no sample.
    """
    precision = squares / max(variance * _BURST, 1e-12)
    total = float(precision.sum())
    if total <= 0:
        return raw
    mean = float((raw * precision).sum()) / total
    spread = total - float((precision * precision).sum()) / total
    excess = float((precision * (raw - mean) ** 2).sum()) - (np.count_nonzero(precision) - 1)
    between = max(excess / spread, 0.0) if spread > 0 else 0.0
    means = _mean_between(raw, precision, between)
    kept: Floats = between * precision / (between * precision + 1)
    return means + (raw - means) * kept


def _mean_between(raw: Floats, precision: Floats, between: float) -> float:
    """Return the mean of engines that differ by the variance `between`, each counted by its precision."""
    worth = precision / (1 + between * precision)
    return float((raw * worth).sum() / worth.sum())


def _not_negative(gram: Floats, moment: Floats) -> Floats:
    """Solve a least-squares problem with weights that are not negative, by leaving out the most negative term."""
    weights, left = np.zeros(len(moment)), np.flatnonzero(gram.diagonal() > 0)
    while len(left):
        part = gram[np.ix_(left, left)]
        found = np.linalg.solve(part + np.diag(part.diagonal() * _RIDGE), moment[left])
        if (found >= 0).all():
            weights[left] = found
            break
        scaled = found * np.sqrt(part.diagonal())
        left = np.delete(left, int(scaled.argmin()))
    return weights
