"""What an experiment found: estimates with intervals, a cost table, and the description of an engine."""

from __future__ import annotations

import math
from dataclasses import dataclass

import msgspec
import numpy as np

from moestro.calibrate.probing.design import Bounds, Observed
from moestro.calibrate.probing.estimate import (
    API,
    API_TOKEN,
    CONTEXT,
    PAIR,
    PROMPT,
    ROW,
    STEP,
    DecodeTime,
    FittedSteps,
    KnotSteps,
    LinearSteps,
    StepTerms,
    chunks_of,
    fit,
)
from moestro.calibrate.probing.probes import ProbedServer, ServerFigures
from moestro.cost.model import Batch
from moestro.cost.tables import FORMAT, DecodePoint, HostTimes, MeasuredCost, PrefillPoint, Table
from moestro.errors import MoestroError

_LEAST_KNOT, _NEXT_KNOT = 8, 64  # tokens of a prompt, from which its cost may bend: few tokens visit few experts
_CONTEXTS = (16, 4096)  # tokens at which the table has decodes; between and beyond them are straight lines
_CACHED = 4096
_ASSUMED_BUDGET, _ASSUMED_BLOCK, _ASSUMED_SEQS = 2048, 16, 256
_MISSED = 0.25  # mean error on other sizes, from which the operator is warned

_AT_LIMIT = "at its lower limit, because the durations alone would make it negative"

# Name, unit, and nanoseconds (or the number itself) of one unit.
_COSTS = (
    (STEP, "constant of a step", "ms", 1e6),
    (ROW, "a decoding sequence", "us", 1e3),
    (CONTEXT, "a token of context", "us", 1e3),
    (PROMPT, "a token of a prompt", "us", 1e3),
    (PAIR, "a pair of tokens in attention", "ns", 1.0),
    (API, "API, each request", "ms", 1e6),
    (API_TOKEN, "API, each token of its prompt", "us", 1e3),
)


class Estimate(msgspec.Struct, frozen=True, kw_only=True):
    """A quantity of the server.

    Attributes:
        name: stable word.
        title: words for people.
        unit: unit of the numbers; empty for a count.
        value: the estimate. None: not identified.
        low, high: its 95 % interval, or what bounds a count. None: no such bound.
        why: reason for what is missing, or the source of the number if that is not a probe.
    """

    name: str
    title: str
    unit: str
    value: float | None
    low: float | None
    high: float | None
    why: str = ""

    @property
    def words(self) -> str:
        """The number with its interval, or what is missing."""
        if self.value is None:
            least = f"at least {self.low:,.0f}; " if self.low is not None else ""
            return f"{least}not identified: {self.why}" if self.why else f"{least}not identified"
        number = ",.4g" if self.unit else ",.0f"
        words = f"{self.value:{number}} {self.unit}".rstrip()
        if self.low == self.high:
            return f"{words} ({self.why})" if self.why else words
        return f"{words} ({self.low:{number}} to {self.high:{number}})"


@dataclass(frozen=True, slots=True)
class EngineSize:
    """A number of the engine's description, and where it comes from."""

    value: int
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFindings:
    """All results.

    Attributes:
        estimates: in the order in which they are shown.
        table: prices of steps.
        sizes: `[engines]` of the description, by field.
        api_us, api_token_us: time outside the engine, for each request and each token of its prompt, us.
        caches_prefixes: whether prefixes are cached.
        errors: relative errors of the prices on sizes to which nothing was fitted.
        notes: sentences for the operator.
    """

    estimates: tuple[Estimate, ...]
    table: Table
    sizes: dict[str, EngineSize]
    api_us: float
    api_token_us: float
    caches_prefixes: bool | None
    errors: tuple[float, ...]
    notes: tuple[str, ...]


def find(observed: Observed, server: ProbedServer) -> ServerFindings:
    """Estimate everything that the experiment's durations and counts determine.

    Raises:
        MoestroError: they do not determine the constant of a step.
    """
    durations = observed.durations
    if len(durations.decodes) < 3:
        raise MoestroError("fewer than 3 decode steps could be timed: give more --seconds. Nothing was fitted")
    linear = fit(durations, LinearSteps())
    knots = _knots(observed)
    bent = linear if observed.beside else _with_one_token(fit(durations, knots))
    form: StepTerms = LinearSteps() if observed.beside else knots
    if any(name not in bent.values for name in form.step(1, 1, None)):
        raise MoestroError("the durations do not determine the cost of a step: give more --seconds. Nothing was fitted")
    table = _table(bent, form, knots, server)
    api_ns, api_token_ns = (max(bent.values.get(name, 0.0), 0.0) for name in (API, API_TOKEN))
    errors = _errors(observed, MeasuredCost(table), api_ns, api_token_ns)
    notes = list(observed.notes.sentences)
    if len(errors) and float(np.abs(errors).mean()) > _MISSED:
        notes.append(
            f"The prices miss other sizes by {np.abs(errors).mean():.0%} in the mean: the server is not steady, or its"
            " steps are no sum of these costs. Do not rely on them."
        )
    if not errors:
        notes.append("No time was left to check the prices on other sizes.")
    if observed.budget.low is None and not observed.beside:
        notes.append(
            "Prices of prompts beyond 256 tokens are extrapolated, because the token budget is not identified."
        )
    return ServerFindings(
        estimates=(*_costs(linear), *_counts(observed, server.figures)),
        table=table,
        sizes=_sizes(observed, server),
        api_us=api_ns / 1e3,
        api_token_us=api_token_ns / 1e3,
        caches_prefixes=observed.caches_prefixes,
        errors=tuple(errors),
        notes=tuple(notes),
    )


def _knots(observed: Observed) -> KnotSteps:
    rows = sorted({round(each.rows) for each in observed.decodes} | {1})
    budget = observed.budget.value
    alone = [each.new for each in observed.firsts if not each.cached and observed.is_divided_as_known(each.new)]
    new = {each for each in alone if each >= _LEAST_KNOT and (budget is None or each <= budget)}
    if budget is not None and max(alone, default=0) > budget:
        new.add(budget)
    return KnotSteps(tuple(rows), tuple(sorted(new | {1})) if new else (1, _NEXT_KNOT))


def _with_one_token(fitted: FittedSteps) -> FittedSteps:
    """Price a chunk of one token as a decoding row where no prompt beside a decode tells its cost."""
    if "new 1" in fitted.values or "rows 1" not in fitted.values:
        return fitted
    values, widths = fitted.values | {"new 1": fitted.values["rows 1"]}, fitted.half_widths
    return FittedSteps(values, widths | {"new 1": widths["rows 1"]}, fitted.num_durations)


def _costs(linear: FittedSteps) -> list[Estimate]:
    found = []
    for name, title, unit, scale in _COSTS:
        value = linear.values.get(name)
        if value is None:
            why = "no probes differ in it alone"
            found.append(Estimate(name=name, title=title, unit=unit, value=None, low=None, high=None, why=why))
            continue
        width = linear.half_widths[name]
        low, high = max(value - width, 0.0) / scale, (value + width) / scale
        # All of the interval is below 0, where no cost is: what determines it is the limit, and no probe.
        why = _AT_LIMIT if value == width == 0 else ""
        found.append(Estimate(name=name, title=title, unit=unit, value=value / scale, low=low, high=high, why=why))
    return found


def _counts(observed: Observed, figures: ServerFigures | None) -> list[Estimate]:
    shown = figures.num_kv_tokens if figures is not None else None
    capacity = observed.capacity
    block = _block_size(observed, figures)
    found = [
        _count("max_num_batched_tokens", "tokens of a step", observed.budget),
        _count("max_num_seqs", "sequences of a step", observed.max_rows),
        _count("max_requests", "requests at once", observed.max_requests, "no request was refused"),
        _count("block_size", "tokens of a KV block", observed.block_size if block.source == "probed" else Bounds()),
        _count("num_kv_tokens", "tokens of the KV cache", capacity),
    ]
    if block.source == "/metrics":
        found[3] = msgspec.structs.replace(
            found[3], value=block.value, low=block.value, high=block.value, why="/metrics"
        )
    elif block.source != "probed":
        found[3] = msgspec.structs.replace(found[3], why=observed.block_size.why)
    if capacity.high is None and shown is not None:
        found[4] = msgspec.structs.replace(found[4], value=shown, low=shown, high=shown, why="/metrics")
    return found


def _count(name: str, title: str, bounds: Bounds, why: str = "") -> Estimate:
    value = bounds.value
    if value is None and bounds.low is not None and bounds.high is not None:
        value = (bounds.low + bounds.high) // 2
    return Estimate(
        name=name,
        title=title,
        unit="",
        value=value,
        low=bounds.low,
        high=bounds.high,
        why=bounds.why or (why if value is None else ""),
    )


def _block_size(observed: Observed, figures: ServerFigures | None) -> EngineSize:
    if observed.block_size.value is not None:
        return EngineSize(observed.block_size.value, "probed")
    if figures is not None and figures.block_size:
        return EngineSize(figures.block_size, "/metrics")
    return EngineSize(_ASSUMED_BLOCK, "assumed: not identified")


def _sizes(observed: Observed, server: ProbedServer) -> dict[str, EngineSize]:
    """The numbers of the description; each states its source, also where it is a bound or an assumption."""
    figures, block = server.figures, _block_size(observed, server.figures)
    shown = figures.num_kv_tokens if figures is not None else None
    capacity, rows, budget = observed.capacity, observed.max_rows, observed.budget
    if capacity.low is not None and capacity.high is not None:
        tokens = EngineSize(
            (capacity.low + capacity.high) // 2, f"probed: {capacity.low:,} to {capacity.high:,} tokens"
        )
    elif shown is not None:
        tokens = EngineSize(shown, "/metrics")
    else:
        least = max(capacity.low or 0, 2 * observed.longest, _ASSUMED_BLOCK * _ASSUMED_SEQS)
        tokens = EngineSize(least, "a lower bound: not identified")
    seqs = (
        EngineSize(rows.value, "probed")
        if rows.value is not None
        else EngineSize(rows.low, "a lower bound: not identified")
        if rows.low is not None
        else EngineSize(_ASSUMED_SEQS, "assumed: not identified")
    )
    if budget.low is None:
        step = EngineSize(max(_ASSUMED_BUDGET, seqs.value), "assumed: not identified")
    else:
        step = EngineSize(max(budget.low, seqs.value), _source(budget))
    sizes = {
        "num_blocks": EngineSize(max(tokens.value // block.value, 1), tokens.source),
        "block_size": block,
        "max_num_seqs": seqs,
        "max_num_batched_tokens": step,
    }
    accepted = observed.max_requests.value
    if accepted is not None and accepted > seqs.value:
        sizes["max_num_queued_reqs"] = EngineSize(accepted - seqs.value, "probed")
    held = sizes["num_blocks"].value * block.value
    if server.max_model_len and server.max_model_len <= held:
        sizes["max_model_len"] = EngineSize(server.max_model_len, "/v1/models")
    elif server.max_model_len:
        sizes["max_model_len"] = EngineSize(held, "all of the KV cache, as far as it is identified")
    return sizes


def _source(bounds: Bounds) -> str:
    """Say how a number that has a lower bound was found."""
    if bounds.low is None or bounds.high is None:
        return "a lower bound: not identified"
    return "probed" if bounds.low == bounds.high else f"probed: {bounds.low:,} to {bounds.high:,}"


def _table(fitted: FittedSteps, form: StepTerms, knots: KnotSteps, server: ProbedServer) -> Table:
    def ns(rows: float, context: float, chunk: tuple[int, int] | None = None) -> float:
        return max(fitted.predicted(form.step(rows, context, chunk)), 1.0)

    def spread(terms: dict[str, float]) -> float:
        widths = [fitted.half_widths.get(name, 0.0) * factor for name, factor in terms.items()]
        return round(math.hypot(*widths) / max(fitted.predicted(terms), 1.0), 4)

    counts = knots.rows if len(knots.rows) > 1 else (knots.rows[0], knots.rows[0] + 1)
    return Table(
        format=FORMAT,
        model=server.model,
        device="server",
        prefill=tuple(
            PrefillPoint(
                new=new, cached=cached, ns=ns(0, 0, (new, cached)), spread=spread(form.step(0, 0, (new, cached)))
            )
            for new in knots.new
            for cached in (0, _CACHED)
        ),
        short_chunks=(),
        decode=tuple(
            DecodePoint(
                sequences=rows,
                context=context,
                ns=ns(min(rows, knots.rows[-1]), rows * context),
                spread=spread(form.step(min(rows, knots.rows[-1]), rows * context, None)),
            )
            for rows in counts
            for context in _CONTEXTS
        ),
        host=HostTimes(step_ns=0.0, sequence_ns=0.0),
    )


def _errors(observed: Observed, cost: MeasuredCost, api_ns: float, api_token_ns: float) -> list[float]:
    """Relative errors of the table on durations to which nothing was fitted."""
    errors = [_decode_ns(cost, each) / each.ns - 1 for each in observed.check_decodes]
    firsts = [each for each in observed.check_firsts if observed.is_divided_as_known(each.new)]
    for each in firsts:
        priced = api_ns + api_token_ns * each.new
        for new, cached in chunks_of(each.new, each.cached, observed.budget.value):
            priced += cost.step_ns(Batch(np.array([cached]), np.array([new])))
        errors.append(priced / each.ns - 1)
    return errors


def _decode_ns(cost: MeasuredCost, time: DecodeTime) -> int:
    rows = round(time.rows)
    starts = np.full(rows, max(time.context / rows - 1, 0)).round().astype(np.int64)
    return cost.step_ns(Batch(starts, np.ones(rows, np.int64)))
