"""A measured cost model: `moestro calibrate` writes the table, and this module prices by interpolation.

The file is JSON (`Table` below). It holds times of single steps on one machine with one
checkpoint, for prefill chunks over (new, cached) tokens and decodes over (sequences, context), and the scheduler's.

    step = decode(D, C / D) + tokens(n) - tokens(D) + sum over chunks of [own(q) * q + reading(q) * c] + host

`tokens` is the cost of n tokens in short chunks. `own(q)` is the extra cost of each token of a long chunk, whose
queries attend to each other. `reading(q)` is a chunk's cost for each token cached before it. Between measured points,
and beyond the last, these are straight lines. `largest` says how far the measurements reach, and `beyond` what exceeded
that.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from moestro.cost.model import Batch, CostModel, Int64s, Ints
from moestro.errors import ConfigError
from moestro.files.text_files import read_text

FORMAT = "moestro-cost-table-1"
PS_PER_NS = 1000
Floats = NDArray[np.float64]


class PrefillPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk of `new` tokens after `cached` tokens, alone in a step."""

    new: int
    cached: int
    ns: float  # mean of the repeats
    spread: float  # interquartile range over the median


class ShortChunksPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Several chunks of `chunk` tokens in a step, `tokens` in all, with nothing cached."""

    tokens: int
    chunk: int
    ns: float
    spread: float


class DecodePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A step of `sequences` decodes that attend to `context` tokens on average."""

    sequences: int
    context: int
    ns: float
    spread: float


class HostTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Time that the rank adds to the device's, for each step, sequence and chunk: scheduling, results, outputs.

    That of a chunk includes what the next step takes longer.
    """

    step_ns: float
    sequence_ns: float
    chunk_ns: float = 0.0


class HostCopies(msgspec.Struct, frozen=True, kw_only=True):
    """KV between the device and host memory.

    Attributes:
        token_ns: time of the copy of a token's KV, in blocks.
        token_bytes: bytes of a token's KV.
    """

    token_ns: float
    token_bytes: float


class Table(msgspec.Struct, frozen=True, kw_only=True):
    """Content of the file. `copies` of None means that no copy was measured."""

    format: str
    model: str
    device: str
    prefill: tuple[PrefillPoint, ...]
    short_chunks: tuple[ShortChunksPoint, ...]
    decode: tuple[DecodePoint, ...]
    host: HostTimes
    copies: HostCopies | None = None
    about: dict[str, Any] = {}  # for people: machine, versions, date, settings, the check on other shapes


class MeasuredCost:
    """Prices steps by a table.

    Args:
        table: measured points: at least two sizes of prefill, two of them with two cached lengths, and at least two
            numbers of decodes, each at two contexts.

    Attributes:
        largest: extent of the measurements: tokens of a chunk, tokens of a step, decoding sequences, and their mean
            context. Prices continue in a straight line beyond it, and `beyond` reports that.

    Raises:
        ConfigError: points are missing; the text says which.
    """

    def __init__(self, table: Table) -> None:
        if table.format != FORMAT:
            raise ConfigError(f"the cost table is a {table.format!r}, this version reads {FORMAT!r}: calibrate again")
        self._host, self._copies = table.host, table.copies
        self._tokens, self._own, self._reading = _prefill_lines(table)
        self._decode_rows = _decode_rows(table.decode)
        chunk = max(point.new for point in table.prefill)
        self.largest = {
            "chunk": chunk,
            "tokens": max(int(self._tokens.last), chunk),
            "sequences": max(point.sequences for point in table.decode),
            "context": max(point.context for point in table.decode),
        }
        self._priced = dict.fromkeys(self.largest, 0)
        self._longest_context = 0.0
        self._tokens_ps: dict[int, int] = {}
        self._lines: dict[int, _Line] = {}

    def beyond(self) -> dict[str, tuple[int, int]]:
        """By name as in `largest`: the most that was priced, and the most that was measured.

        Only entries that exceed the measurements appear.
        """
        priced = self._priced | {"context": math.ceil(self._longest_context)}
        return {name: (priced[name], most) for name, most in self.largest.items() if priced[name] > most}

    def warning(self) -> str | None:
        """Describe `beyond` for people; None if nothing exceeds the measurements."""
        words = (
            f"{name} of up to {priced:,}, measured up to {most:,}" for name, (priced, most) in self.beyond().items()
        )
        listed = "; ".join(words)
        return f"steps beyond the table were priced by extrapolation: {listed}" if listed else None

    def step_ns(self, batch: Batch) -> int:
        """Implement `CostModel.step_ns`."""
        num, total = len(batch.start), int(batch.num_tokens.sum())
        if num == total:
            return _ns(self._host_ps(num) + self._decode_step_ps(batch.start))
        is_chunk = batch.num_tokens > 1
        chunks = list(zip(batch.start[is_chunk].tolist(), batch.num_tokens[is_chunk].tolist(), strict=True))
        self._priced["chunk"] = max(self._priced["chunk"], *(new for _, new in chunks))
        price = self._host_ps(num) + round(self._host.chunk_ns * len(chunks) * PS_PER_NS) + self._token_part(total)
        price += sum(
            round((self._own.at(new) * new + self._reading.at(new) * cached) * PS_PER_NS) for cached, new in chunks
        )
        decoding = batch.start[~is_chunk]
        if len(decoding):
            price += max(self._decode_step_ps(decoding) - self._token_part(len(decoding)), 0)
        return _ns(price)

    def decode_steps_ns(self, start: Ints, num_steps: int) -> Int64s:
        """Implement `CostModel.decode_steps_ns`."""
        num = len(start)
        contexts = int(start.sum()) + num + num * np.arange(num_steps, dtype=np.int64)
        self._longest_context = max(self._longest_context, float(contexts[-1]) / num)
        device = np.rint(self._line(num).along(contexts / num) * PS_PER_NS).astype(np.int64)
        result: Int64s = (device + self._host_ps(num) + PS_PER_NS // 2) // PS_PER_NS
        return result

    def move_ns(self, num_tokens: int) -> int:
        """Implement `CostModel.move_ns`. A table without copies is given to engines without host memory alone."""
        if not num_tokens:
            return 0
        assert self._copies is not None, "a table without copies is refused with host memory"
        return round(num_tokens * self._copies.token_ns)

    def _host_ps(self, num_sequences: int) -> int:
        return round((self._host.step_ns + self._host.sequence_ns * num_sequences) * PS_PER_NS)

    def _token_part(self, num_tokens: int) -> int:
        part = self._tokens_ps.get(num_tokens)
        if part is None:
            self._priced["tokens"] = max(self._priced["tokens"], num_tokens)
            part = self._tokens_ps[num_tokens] = round(self._tokens.at(num_tokens) * PS_PER_NS)
        return part

    def _decode_step_ps(self, start: Ints) -> int:
        """Time of the device in a step of decodes."""
        num = len(start)
        context = (int(start.sum()) + num) / num
        self._longest_context = max(self._longest_context, context)
        return round(self._line(num).at(context) * PS_PER_NS)

    def _line(self, num_sequences: int) -> _Line:
        """Time over mean context for `num_sequences`, interpolated between the two nearest measured numbers."""
        line = self._lines.get(num_sequences)
        if line is None:
            self._priced["sequences"] = max(self._priced["sequences"], num_sequences)
            counts, contexts, ns = self._decode_rows
            times = np.array([_Line(counts, column).at(num_sequences) for column in ns.T])
            line = self._lines[num_sequences] = _Line(contexts, times)
        return line


class OtherGpuCost:
    """Prices of a table's engine on another GPU: a step is scaled by the ratio of its prices in two models.

    Args:
        measured: prices of the engine as it was measured.
        here, there: the same network in a model of the measured GPU, and of the other one.
    """

    def __init__(self, measured: MeasuredCost, here: CostModel, there: CostModel) -> None:
        self._measured, self._here, self._there = measured, here, there

    def warning(self) -> str | None:
        """Return `MeasuredCost.warning`."""
        return self._measured.warning()

    def step_ns(self, batch: Batch) -> int:
        """Implement `CostModel.step_ns`."""
        return round(self._measured.step_ns(batch) * (self._there.step_ns(batch) / self._here.step_ns(batch)))

    def decode_steps_ns(self, start: Ints, num_steps: int) -> Int64s:
        """Implement `CostModel.decode_steps_ns`."""
        here, there = (model.decode_steps_ns(start, num_steps) for model in (self._here, self._there))
        return np.rint(self._measured.decode_steps_ns(start, num_steps) * (there / here)).astype(np.int64)

    def move_ns(self, num_tokens: int) -> int:
        """Refuse to price copies, as `MeasuredCost` does."""
        return self._measured.move_ns(num_tokens)


class _Line:
    """Piecewise linear between knots, extended beyond the last, flat below the first, and never falling.

    Args:
        x: float64[n], n >= 2, ascending.
        y: float64[n]; falling knots are replaced by their mean, because more work never takes less time.
    """

    def __init__(self, x: Floats, y: Floats) -> None:
        self._x, self._y = np.asarray(x, np.float64), _never_falling(y)
        self._slope = np.diff(self._y) / np.diff(self._x)
        # The same knots as plain floats, for the single look-up of every step.
        knots = zip(self._x.tolist(), self._y.tolist(), self._slope.tolist(), strict=False)
        self._knots: list[tuple[float, float, float]] = list(knots)
        self._inner: list[float] = self._x[1:-1].tolist()

    @property
    def last(self) -> float:
        """The last knot."""
        return float(self._x[-1])

    def at(self, x: float) -> float:
        """The value at one place, exactly equal to that of `along`."""
        knot, y, slope = self._knots[bisect_right(self._inner, x)]
        return y + slope * max(x - knot, 0.0)

    def along(self, x: Floats) -> Floats:
        """float64[k], the value at each place."""
        knot = np.searchsorted(self._x[1:-1], x, side="right")
        result: Floats = self._y[knot] + self._slope[knot] * np.maximum(x - self._x[knot], 0)
        return result


def _never_falling(y: Floats) -> Floats:
    """The values nearest to `y` in the mean square that never fall (isotonic regression)."""
    means: list[float] = []
    counts: list[int] = []
    for value in y.tolist():
        means.append(value)
        counts.append(1)
        while len(means) > 1 and means[-2] > means[-1]:
            mean, count = means.pop(), counts.pop()
            means[-1] = (means[-1] * counts[-1] + mean * count) / (counts[-1] + count)
            counts[-1] += count
    return np.repeat(means, counts)


def _prefill_lines(table: Table) -> tuple[_Line, _Line, _Line]:
    """Lines of a short chunk's cost of tokens, a long chunk's extra cost of a token, and its cost of a cached token."""
    rows: dict[int, list[PrefillPoint]] = {}
    for point in sorted(table.prefill, key=lambda point: (point.new, point.cached)):
        rows.setdefault(point.new, []).append(point)
    with_cached = {new: row for new, row in rows.items() if len(row) > 1}
    if len(rows) < 2 or len(with_cached) < 2 or any(row[0].cached for row in rows.values()):
        raise ConfigError(
            "the cost table needs prefill points of two chunk sizes or more, each with none cached, and two with more"
        )
    reading = _Line(np.array(list(with_cached)), np.array([_slope(row) for row in with_cached.values()]))
    sizes, whole = np.array(list(rows)), np.array([row[0].ns for row in rows.values()])
    longest = min((point.chunk for point in table.short_chunks), default=max(rows))
    short = {new: row[0].ns for new, row in rows.items() if new <= longest}
    short |= {point.tokens: point.ns for point in table.short_chunks if point.tokens > longest}
    tokens = _Line(np.array(sorted(short)), np.array([short[count] for count in sorted(short)]))
    own = np.maximum(whole - tokens.along(sizes.astype(np.float64)), 0) * (sizes > longest)
    return tokens, _Line(sizes, own / sizes), reading


def _slope(row: list[PrefillPoint]) -> float:
    """Nanoseconds for each cached token, by least squares through the row's points; at least 0."""
    cached, ns = np.array([point.cached for point in row], np.float64), np.array([point.ns for point in row])
    centred = cached - cached.mean()
    return max(float((centred * ns).sum() / (centred**2).sum()), 0.0)


def _decode_rows(points: tuple[DecodePoint, ...]) -> tuple[Floats, Floats, Floats]:
    """Numbers of sequences, contexts, and float64[numbers, contexts]; a row's line supplies its missing points."""
    rows: dict[int, list[DecodePoint]] = {}
    for point in sorted(points, key=lambda point: (point.sequences, point.context)):
        rows.setdefault(point.sequences, []).append(point)
    if len(rows) < 2 or any(len(row) < 2 for row in rows.values()):
        raise ConfigError("the cost table needs decode points of two numbers of sequences, each at two contexts")
    contexts = np.array(sorted({point.context for point in points}), np.float64)
    lines = [_Line(np.array([p.context for p in row]), np.array([p.ns for p in row])) for row in rows.values()]
    return np.array(list(rows), np.float64), contexts, np.array([line.along(contexts) for line in lines])


def _ns(picoseconds: int) -> int:
    return (picoseconds + PS_PER_NS // 2) // PS_PER_NS


def load_table(path: Path) -> Table:
    """Read the table in `path`.

    Raises:
        ConfigError: the file cannot be read or is no cost table; the text says why.
    """
    try:
        return msgspec.json.decode(read_text(path), type=Table)
    except OSError as error:
        raise ConfigError(f"the cost table {path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ConfigError(f"{path} is no cost table of `moestro calibrate`: {error}") from error
