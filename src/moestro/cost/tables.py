"""Cost models from measurements: tables of `moestro calibrate`, and the stage times of QLLM's and AMoE's papers.

A table's file is JSON (`Table` below). It holds times of single steps on one machine with one checkpoint, for prefill
chunks over (new, cached) tokens and decodes over (sequences, context), and the scheduler's.

    step = decode(D, C / D) + tokens(n) - tokens(D) + sum over chunks of [own(q) * q + reading(q) * c] + host

`tokens` is the cost of n tokens in short chunks. `own(q)` is the extra cost of each token of a long chunk, whose
queries attend to each other. `reading(q)` is a chunk's cost for each token cached before it. Between measured points,
and beyond the last, these are straight lines. `largest` says how far the measurements reach, and `beyond` what exceeded
that.

QLLM's and AMoE's steps are far from a roofline: a stage of a layer costs a constant and a part for each token, much of
it the engines' own code. The papers publish totals, and their split into stages is an assumption, stated beside each
constant. For AMoE's design with other code than its prototype's, `Roofline` prices kernels, and `HostOverhead` adds the
host.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import msgspec
import numpy as np

from moestro.cost.gpus import A100, Gpu
from moestro.cost.model import (
    AMOE_RATE,
    Batch,
    CostModel,
    Floats,
    Int64s,
    Ints,
    even_gating,
    exponential_popularity,
    zipf_popularity,
)
from moestro.cost.networks import NetworkShape, network_named
from moestro.cost.roofline import Kernels
from moestro.errors import ConfigError
from moestro.files.text_files import read_text

FORMAT = "moestro-cost-table-1"
PS_PER_NS = 1000
# What a point may hold. Beyond a few hours a step, extrapolated prices would overflow a clock of integers.
_Number = Annotated[int, msgspec.Meta(ge=1)]
_Tokens = Annotated[int, msgspec.Meta(ge=0)]
_StepNs = Annotated[float, msgspec.Meta(gt=0, le=1e13)]
_PartNs = Annotated[float, msgspec.Meta(ge=0, le=1e13)]


class PrefillPoint(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk of `new` tokens after `cached` tokens, alone in a step."""

    new: _Number
    cached: _Tokens
    ns: _StepNs  # mean of the repeats
    spread: float  # interquartile range over the median


class ShortChunksPoint(msgspec.Struct, frozen=True, kw_only=True):
    """Several chunks of `chunk` tokens in a step, `tokens` in all, with nothing cached."""

    tokens: _Number
    chunk: _Number
    ns: _StepNs
    spread: float


class DecodePoint(msgspec.Struct, frozen=True, kw_only=True):
    """A step of `sequences` decodes that attend to `context` tokens on average."""

    sequences: _Number
    context: _Tokens
    ns: _StepNs
    spread: float


class HostTimes(msgspec.Struct, frozen=True, kw_only=True):
    """Time that the rank adds to the device's, for each step, sequence and chunk: scheduling, results, outputs.

    That of a chunk includes what the next step takes longer.
    """

    step_ns: _PartNs
    sequence_ns: _PartNs
    chunk_ns: _PartNs = 0.0


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
        _refuse_twice("prefill", [(point.new, point.cached) for point in table.prefill])
        _refuse_twice("short_chunks", [(point.tokens, point.chunk) for point in table.short_chunks])
        _refuse_twice("decode", [(point.sequences, point.context) for point in table.decode])
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


def _refuse_twice(name: str, shapes: list[tuple[int, int]]) -> None:
    """Refuse two times for one shape, between which no line runs."""
    twice = next((shape for shape, number in Counter(shapes).items() if number > 1), None)
    if twice is not None:
        raise ConfigError(f"the cost table has two points of {name} for {twice[0]} and {twice[1]}: leave one of them")


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
        table = msgspec.json.decode(read_text(path), type=Table)
        MeasuredCost(table)  # It refuses points that it cannot price, here with the name of their file.
        return table
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None
    except OSError as error:
        raise ConfigError(f"the cost table {path} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ConfigError(f"{path} is no cost table of `moestro calibrate`: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Times of one layer's stages.

    Attributes:
        attention_ns, attention_token_ns: one attention stage, and each token in it.
        expert_ns, expert_row_ns: one call of one expert, and each of its rows.
        expert_read_ns: reading the weights of an expert, which the arithmetic of its rows hides or is hidden by.
        has_own_expert_devices: whether each expert has its own device, so that all run at once.
        zipf: exponent of the experts' popularity, which decides how many are called.
    """

    attention_ns: float
    attention_token_ns: float
    expert_ns: float
    expert_row_ns: float
    expert_read_ns: float = 0.0
    has_own_expert_devices: bool
    zipf: float = 0.3


# QLLM (section 2.4): 300 to 400 ms for each decode iteration of Mixtral in 4 bits on an A100, with Hugging Face's loop
# over experts. Assumed split: 8 calls a layer, each about 1.2 ms to dequantise and launch and 2.3 us a row (an expert's
# arithmetic at half of the A100's peak), and 1.5 ms of attention. One call is the unit of preemption.
QLLM = StageTimes(
    attention_ns=1_500_000,
    attention_token_ns=0,
    expert_ns=1_200_000,
    expert_row_ns=2_300,
    has_own_expert_devices=False,
)

# AMoE (figure 13, a step of figure 9b's run): an attention step of 2.7 ms and an expert step of 0.8 ms on A100 80 GB,
# for token counts that the paper does not print. Assumptions:
#  - An attention step has 1,000 tokens. Figure 11's load of 250 requests a second, 80 % of the most, is 37,500 tokens a
#    second, so a GPU's share in a second of steps of 2.7 ms is 810 tokens a step, or 1,010 at the most.
#  - 0.45 ms of it do not depend on tokens. The rest is 2.25 us a token, mostly page table and post-processing.
#  - An expert step is mostly kernel: 0.12 ms to schedule and launch, then 1.53 us a row, which is 230 TFLOP/s of
#    Mixtral's expert, or reading its weights if that takes longer. 0.8 ms is then 444 rows.
# Contexts add nothing: 1,000 contexts of 250 tokens take 0.09 ms to read with multi-query attention.
AMOE = StageTimes(
    attention_ns=450_000,
    attention_token_ns=2_250,
    expert_ns=120_000,
    expert_row_ns=1_530,
    expert_read_ns=228_000,
    has_own_expert_devices=True,
)


class StagedEngine:
    """Prices stages, and steps as the sum of their stages.

    Contexts are free here, because they are small beside the constants.

    Args:
        times: times of the stages.
        network: network whose sizes give the numbers of layers and experts.
        gpu: GPU of the head and of copies to the host.
        popularity: float64[num_experts], popularity of experts; None means zipf with the times' exponent.

    Attributes:
        network, popularity: as in `StageCostModel`.
    """

    def __init__(
        self, times: StageTimes, network: NetworkShape, gpu: Gpu = A100, popularity: Floats | None = None
    ) -> None:
        assert network.experts is not None, "the staged engines run Mixture-of-Experts networks"
        self.network = network
        self.popularity = zipf_popularity(network.experts.num_experts, times.zipf) if popularity is None else popularity
        self._times, self._num_layers, self._experts = times, network.num_layers, network.experts
        self._gating = even_gating(self.popularity, network.experts.top_k)
        self._gpu, self._head = gpu, Kernels(network, gpu, num_ep_ranks=1)
        self._step_of: dict[tuple[int, int], int] = {}

    def step_ns(self, batch: Batch) -> int:
        """Price a step: all layers, one after the other."""
        key = (int(batch.num_tokens.sum()), len(batch.start))
        step = self._step_of.get(key)
        if step is None:
            num_tokens, num_sequences = key
            layer_ns = self._attention_ns(num_tokens) + self._experts_ns(num_tokens)
            step = self._step_of[key] = round(self._num_layers * layer_ns) + self.sample_ns(num_sequences)
        return step

    def decode_steps_ns(self, start: Ints, num_steps: int) -> Int64s:
        """Implement `CostModel.decode_steps_ns`."""
        return np.full(num_steps, self.step_ns(Batch(start, np.ones_like(start))), np.int64)

    def move_ns(self, num_tokens: int) -> int:
        """Price a copy at the peak of the GPU's link to the host."""
        return self._gpu.host_copy_ns(num_tokens * self.network.kv_bytes_per_token)

    def attention_ns(self, layer: int, batch: Batch) -> int:
        """Implement `StageCostModel.attention_ns`."""
        return round(self._attention_ns(int(batch.num_tokens.sum())))

    def expert_ns(self, num_rows: int) -> int:
        """Implement `StageCostModel.expert_ns`."""
        times = self._times
        return round(times.expert_ns + max(times.expert_read_ns, times.expert_row_ns * num_rows))

    def sample_ns(self, num_sequences: int) -> int:
        """Implement `StageCostModel.sample_ns`."""
        return round(self._head.head_ns(num_sequences))

    def _attention_ns(self, num_tokens: int) -> float:
        return self._times.attention_ns + self._times.attention_token_ns * num_tokens

    def _experts_ns(self, num_tokens: int) -> float:
        """Time of a layer's expert calls. On separate devices no call waits for another, so only the mean counts."""
        times, num_copies = self._times, num_tokens * self._experts.top_k
        if times.has_own_expert_devices:
            return self.expert_ns(round(num_copies / self._experts.num_experts))
        num_calls = float(self._gating.activated(num_tokens)[0, 0])
        return num_calls * times.expert_ns + max(num_calls * times.expert_read_ns, times.expert_row_ns * num_copies)


def in_4_bits(network: NetworkShape) -> NetworkShape:
    """Return the network with half a byte for each weight except embedding and head, as QLLM loads it."""
    experts = replace(network.experts, bytes_per_weight=0.5) if network.experts else None
    return replace(network, bytes_per_weight=0.5, experts=experts)


def qllm() -> StagedEngine:
    """QLLM's engine with Mixtral 8x7B."""
    return StagedEngine(QLLM, network_named("mixtral-8x7b"))


def amoe(network: NetworkShape | None = None, gpu: Gpu = A100) -> StagedEngine:
    """AMoE's prototype.

    Args:
        network: a Mixtral of multi-query attention; None means its 8 experts with top-2.
        gpu: an A100 of either memory size, which decides how long reading an expert's weights takes.
    """
    network = network or network_named("mixtral-8x7b-mqa")
    assert network.experts is not None, "AMoE runs Mixture-of-Experts networks"
    times = replace(AMOE, expert_read_ns=Kernels(network, gpu, num_ep_ranks=1).one_expert_ns(1))
    return StagedEngine(times, network, gpu, exponential_popularity(network.experts.num_experts, AMOE_RATE))
